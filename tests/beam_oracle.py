"""Beam search as plain as it can be: no cache, no batch, whole sentences scored anew each time."""

import math

import jax
import jax.numpy as jnp
import models
import numpy as np

END = 1


class Scorer:
    """Log probabilities of the next piece, from the whole Transformer run on the whole prefix."""

    def __init__(self, model, params, longest):
        self.longest = longest

        def run(source, shifted, position):
            ones = jnp.ones_like(shifted)
            logits = model.module.apply(
                {"params": params}, source, shifted, ones, enable_dropout=False
            )
            return jax.nn.log_softmax(logits[0, position])

        self.run = models.quick(run)

    def __call__(self, source, prefix):
        shifted = np.zeros((1, self.longest), np.int32)
        shifted[0, 1 : len(prefix) + 1] = prefix[: self.longest - 1]
        return np.asarray(self.run(np.asarray([source], np.int32), shifted, len(prefix)))


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def beam_search(scorer, source, *, beams, alpha, longest):
    """Return [(score, log probability, pieces, ended)], the best first, at most `beams`."""
    live, done = [(0.0, ())], []
    for _ in range(longest):
        candidates = []
        for log_prob, pieces in live:
            following = scorer(source, pieces)
            candidates += [
                (log_prob + float(following[piece]), (*pieces, piece))
                for piece in range(1, len(following))
            ]
        candidates.sort(reverse=True)
        candidates = candidates[: 1 if beams == 1 else 2 * beams]
        for log_prob, pieces in candidates:
            if pieces[-1] == END:
                done.append((log_prob / penalty(len(pieces), alpha), log_prob, pieces, True))
        done = sorted(done, reverse=True)[:beams]
        live = [c for c in candidates if c[1][-1] != END][:beams]
        best = live[0][0] / penalty(longest, alpha) if live else -math.inf
        if len(done) == beams and done[-1][0] >= best:
            live = []
        if not live:
            break
    cut = [(lp / penalty(longest, alpha), lp, pieces, False) for lp, pieces in live]
    return (done + cut)[:beams]
