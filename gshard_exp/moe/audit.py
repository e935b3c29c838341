"""Count what a gating does otherwise than Algorithm 1 on the same logits."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gshard_exp.moe.gating import Top2Gating
from gshard_exp.moe.queues import one_hot
from gshard_exp.moe.routing import Gating


@dataclasses.dataclass(frozen=True)
class Audited:
    """A gating with the capacity factor that goes with it."""

    gating: Gating
    capacity_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """One gating on one batch. Counts are of tokens, and a token counts once in each.

    Attributes:
        gating: its name.
        batch: its name.
        capacity: C of the gating for this batch.
        tokens: all of them.
        routed_differently: tokens that are held by a set of experts other than in Algorithm 1.
        gained: tokens that an expert holds which does not in Algorithm 1.
        lost: tokens that an expert does not hold which does in Algorithm 1.
        left_behind: tokens that no expert holds.
        weighed_differently: tokens held by the same experts with other weights.
        auxiliary_loss: E^2 times line (13) as the gating counts it, mean over groups.
    """

    gating: str
    batch: str
    capacity: int
    tokens: int
    routed_differently: int
    gained: int
    lost: int
    left_behind: int
    weighed_differently: int
    auxiliary_loss: float


@dataclasses.dataclass(frozen=True)
class AuditBatch:
    """Logits of some groups and the coins of their tokens."""

    logits: Float[Array, "G S E"]
    uniform: Float[Array, "G S"]


class _Outcome(NamedTuple):
    """What the layer's output depends on, by expert and not by choice, and what the row tells."""

    held: Bool[Array, "G S E"]
    weight: Float[Array, "G S E"]
    aux_loss: Float[Array, " G"]
    capacity: int


def audit(
    gatings: Mapping[str, Audited], batches: Mapping[str, AuditBatch], tolerance: float = 1e-5
) -> list[AuditRow]:
    """Compare gatings with Algorithm 1 at the paper's capacity, as in training.

    Every gating sees the same logits and the same coins. Where tokens differ is decided by the
    experts that hold them and by the weights; the order of choices and the slots do not count,
    since the layer's output does not depend on them.

    Args:
        gatings: by the names that the rows bear.
        batches: by the names that the rows bear, see `audit_batches`.
        tolerance: weights that differ by less are the same.

    Returns:
        A row for each batch and gating, the batches in order and each gating in order.
    """
    rows = []
    for batch_name, batch in batches.items():
        paper = _outcome(batch, Audited(Top2Gating()))
        for name, audited in gatings.items():
            outcome = _outcome(batch, audited)
            rows.append(_row(name, batch_name, outcome, paper, tolerance))
    return rows


def audit_batches(
    key: jax.Array, groups: int, group_size: int, num_experts: int
) -> dict[str, AuditBatch]:
    """Make batches that bring out the differences.

    Returns:
        Of the same size: "random", normal logits, an even load; "skewed", some experts are liked
        more; "crowded", every first choice is expert 0; "sure", the logits times 8, so that most
        second choices have almost no weight; "equal", all gates the same.
    """
    logits_key, coin_key = jax.random.split(key)
    shape = (groups, group_size, num_experts)
    logits_GSE = jax.random.normal(logits_key, shape)
    uniform_GS = jax.random.uniform(coin_key, shape[:2])
    liked_GSE = jnp.broadcast_to(jnp.linspace(1, 0, num_experts), shape)
    first_GSE = jnp.zeros(shape).at[..., 0].set(9.0)
    made = {
        "random": logits_GSE,
        "skewed": logits_GSE + 2 * liked_GSE,
        "crowded": logits_GSE + first_GSE,
        "sure": 8 * logits_GSE,
        "equal": jnp.zeros(shape),
    }
    return {name: AuditBatch(logits, uniform_GS) for name, logits in made.items()}


def _outcome(batch: AuditBatch, audited: Audited) -> _Outcome:
    _, group_size, num_experts = batch.logits.shape
    gating = audited.gating
    capacity = gating.capacity(group_size, num_experts, audited.capacity_factor)
    valid_GS = jnp.ones(batch.logits.shape[:2], bool)
    routing = jax.jit(gating, static_argnums=2)(batch.logits, valid_GS, capacity, batch.uniform)
    held_GSE = jnp.zeros(batch.logits.shape, bool)
    weight_GSE = jnp.zeros(batch.logits.shape, jnp.float32)
    for choice in range(gating.num_choices):
        hot_GSE = one_hot(routing.expert[..., choice], num_experts)
        held_GSE |= hot_GSE & routing.kept[..., choice, None]
        weight_GSE += jnp.where(hot_GSE, routing.weight[..., choice, None], 0.0)
    return _Outcome(held_GSE, weight_GSE, routing.aux_loss, capacity)


def _row(name: str, batch: str, ours: _Outcome, paper: _Outcome, tolerance: float) -> AuditRow:
    gained_GS = jnp.any(ours.held & ~paper.held, axis=-1)
    lost_GS = jnp.any(paper.held & ~ours.held, axis=-1)
    moved_GS = gained_GS | lost_GS
    other_GS = jnp.any(jnp.abs(ours.weight - paper.weight) > tolerance, axis=-1)
    num_experts = ours.held.shape[-1]
    return AuditRow(
        gating=name,
        batch=batch,
        capacity=ours.capacity,
        tokens=moved_GS.size,
        routed_differently=int(jnp.sum(moved_GS)),
        gained=int(jnp.sum(gained_GS)),
        lost=int(jnp.sum(lost_GS)),
        left_behind=int(jnp.sum(~jnp.any(ours.held, axis=-1))),
        weighed_differently=int(jnp.sum(other_GS & ~moved_GS)),
        auxiliary_loss=num_experts**2 * float(jnp.mean(ours.aux_loss)),
    )
