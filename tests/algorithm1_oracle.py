"""Algorithm 1 of the GShard paper and Switch's top-1 as loops over tokens, in numpy.

Shares nothing with the code under test and never looks at more than one token at a time. Rules the
paper does not give: padding tokens are skipped and not counted in S; among equal gates the lowest
expert index wins; with one expert there is no second choice.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Routed:
    """Arrays [G, S, K], [G, S, E] and [G]; slot is -1 where the choice has none."""

    expert: np.ndarray
    slot: np.ndarray
    kept: np.ndarray
    weight: np.ndarray
    attempted: np.ndarray
    probs: np.ndarray
    aux_loss: np.ndarray


def softmax(row):
    top = max(row)
    exps = [math.exp(value - top) for value in row]
    return [value / sum(exps) for value in exps]


def best(gates, but=None):
    """Index of the largest gate, the first of equals."""
    found = None
    for e, gate in enumerate(gates):
        if e != but and (found is None or gate > gates[found]):
            found = e
    return found


def empty(G, S, E, K):
    return Routed(
        expert=np.full((G, S, K), -1),
        slot=np.full((G, S, K), -1),
        kept=np.zeros((G, S, K), bool),
        weight=np.zeros((G, S, K)),
        attempted=np.zeros((G, S, K), bool),
        probs=np.zeros((G, S, E)),
        aux_loss=np.zeros(G),
    )


def place(out, where, expert, weight, count, capacity):
    """Give a slot if there is one (Algorithm 1 lines 8-10 and 19-21, without the coin)."""
    out.attempted[where] = True
    if count < capacity:
        out.slot[where] = count
        out.kept[where] = True
        out.weight[where] = weight


def group_gates(out, group, logits, valid):
    tokens = [s for s in range(len(valid)) if valid[s]]
    num_experts = logits.shape[-1]
    for s in tokens:
        out.probs[group, s] = softmax([float(value) for value in logits[s]])  # (2)
    mean = [sum(out.probs[group, s, e] for s in tokens) for e in range(num_experts)]
    return tokens, [total / max(len(tokens), 1) for total in mean]  # (3)


def auxiliary(count, mean, num_tokens):
    if num_tokens == 0:
        return 0.0
    return sum(c / num_tokens * m for c, m in zip(count, mean, strict=True)) / len(count)  # (13)


def by_first_gate(out, group, tokens):
    return sorted(tokens, key=lambda s: -max(out.probs[group, s]))  # equals stay in token order


def top2(
    logits,
    valid,
    capacity,
    uniform=None,
    *,
    second_choice="random",
    second_threshold=0.5,
    rejected_choice="queues",
    second_queue="attempted",
    normalize="before_drops",
    aux_counts="first",
    order="position",
):
    G, S, E = logits.shape
    out = empty(G, S, E, 2)
    for g in range(G):
        count = [0] * E  # (1)
        tokens, mean = group_gates(out, g, logits[g], valid[g])
        turns = by_first_gate(out, g, tokens) if order == "gate" else tokens
        for s in turns:  # (4)
            gates = out.probs[g, s]
            e1 = best(gates)
            e2 = best(gates, but=e1)
            g1, g2 = gates[e1], 0.0 if e2 is None else gates[e2]  # (5)
            if normalize == "before_drops":
                g1 = g1 / (g1 + g2)  # (6)
            out.expert[g, s, 0] = e1
            place(out, (g, s, 0), e1, g1, count[e1], capacity)  # (7)-(10)
            count[e1] += 1  # (11)
        counted = list(count)
        if second_queue == "kept":
            count = [min(c, capacity) for c in count]
        for s in turns:  # (14)
            gates = out.probs[g, s]
            e1 = best(gates)
            e2 = best(gates, but=e1)
            if e2 is None:
                continue
            g2 = gates[e2]  # (15)
            if normalize == "before_drops":
                g2 = g2 / (gates[e1] + g2)  # (16)
            rnd = 0.0 if uniform is None else uniform[g, s]  # (17)
            out.expert[g, s, 1] = e2
            taken = second_choice == "all" or g2 > second_threshold * rnd
            if taken:
                place(out, (g, s, 1), e2, g2, count[e2], capacity)  # (18)-(21)
            if taken or rejected_choice == "queues":
                count[e2] += 1  # (22)
            if aux_counts == "all":
                counted[e2] += 1
        out.aux_loss[g] = auxiliary(counted, mean, len(tokens))  # of the counts before line (14)
        if normalize == "after_drops":
            for s in tokens:
                out.weight[g, s] /= sum(out.weight[g, s]) or 1.0
    return out


def top1(logits, valid, capacity, uniform=None):
    del uniform
    G, S, E = logits.shape
    out = empty(G, S, E, 1)
    for g in range(G):
        count = [0] * E
        tokens, mean = group_gates(out, g, logits[g], valid[g])
        for s in tokens:
            e1 = best(out.probs[g, s])
            out.expert[g, s, 0] = e1
            place(out, (g, s, 0), e1, out.probs[g, s, e1], count[e1], capacity)
            count[e1] += 1
        out.aux_loss[g] = auxiliary(count, mean, len(tokens))
    return out
