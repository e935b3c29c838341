"""Count what gatings do otherwise than Algorithm 1 on the same logits and the same coins."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from gshard_exp.moe.gating import Top2Gating
from gshard_exp.moe.routing import Gating


@dataclasses.dataclass(frozen=True)
class Audited:
    """A gating with the capacity factor that goes with it; None is dropless."""

    gating: Gating
    capacity_factor: float | None = 1.0

    def capacity(self, group_size: int, num_experts: int) -> int | None:
        """Return C, or None without a capacity."""
        if self.capacity_factor is None:
            return None
        return self.gating.capacity(group_size, num_experts, self.capacity_factor)


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """One gating on one batch. Counts are of tokens, and a token counts once in each.

    Attributes:
        gating: its name.
        batch: its name.
        capacity: C of the gating for this batch; None without a capacity.
        tokens: all of them.
        routed_differently: tokens that are held by a set of experts other than in Algorithm 1.
        gained: tokens that an expert holds which does not in Algorithm 1.
        lost: tokens that an expert does not hold which does in Algorithm 1.
        overflowed: tokens that an expert had no slot for.
        left_behind: tokens that no expert holds.
        weighed_differently: tokens held by the same experts with other weights.
        auxiliary_loss: E^2 times `Routing.aux_loss`, mean over groups.
    """

    gating: str
    batch: str
    capacity: int | None
    tokens: int
    routed_differently: int
    gained: int
    lost: int
    overflowed: int
    left_behind: int
    weighed_differently: int
    auxiliary_loss: float


@dataclasses.dataclass(frozen=True)
class AuditBatch:
    """Logits of some groups, and random numbers of their tokens for each expert.

    A gating that asks for one number a token, a coin, gets that of expert 0.
    """

    logits: Float[Array, "G S E"]
    uniform: Float[Array, "G S E"]


class _Outcome(NamedTuple):
    """What the layer's output depends on, by expert and not by choice, and what the row tells."""

    held: Bool[np.ndarray, "G S E"]
    weight: Float[np.ndarray, "G S E"]
    overflowed: Bool[np.ndarray, "G S"]
    aux_loss: Float[np.ndarray, " G"]
    capacity: int | None


def audit(
    gatings: Mapping[str, Audited], batches: Mapping[str, AuditBatch], tolerance: float = 1e-5
) -> list[AuditRow]:
    """Compare gatings with Algorithm 1 at the paper's capacity, as in training.

    Where tokens differ is decided by the experts that hold them and by the weights; the order of
    choices and the slots do not count, since the layer's output does not depend on them.

    Args:
        gatings: by the names that the rows bear.
        batches: by the names that the rows bear, of one shape; see `audit_batches`.
        tolerance: weights that differ by less are the same.

    Returns:
        A row for each batch and gating, the batches in order and each gating in order.
    """
    outcomes = {
        audited: dict(_outcomes(batches, audited))
        for audited in {Audited(Top2Gating()): None} | dict.fromkeys(gatings.values())
    }
    return [
        _row(
            name, batch, outcomes[audited][batch], outcomes[Audited(Top2Gating())][batch], tolerance
        )
        for batch in batches
        for name, audited in gatings.items()
    ]


def audit_batches(
    seed: int, groups: int, group_size: int, num_experts: int
) -> dict[str, AuditBatch]:
    """Make batches that bring out the differences.

    Returns:
        Of the same size: "random", normal logits, an even load; "skewed", some experts are liked
        more; "crowded", every first choice is expert 0; "sure", the logits times 8, so that most
        second choices have almost no weight; "equal", all gates the same.
    """
    rng = np.random.default_rng(seed)
    shape = (groups, group_size, num_experts)
    logits_GSE = rng.normal(size=shape).astype(np.float32)
    uniform_GSE = rng.random(shape, np.float32)
    first_GSE = np.zeros(shape, np.float32)
    first_GSE[..., 0] = 9
    made = {
        "random": logits_GSE,
        "skewed": logits_GSE + np.linspace(2, 0, num_experts, dtype=np.float32),
        "crowded": logits_GSE + first_GSE,
        "sure": 8 * logits_GSE,
        "equal": np.zeros(shape, np.float32),
    }
    return {name: AuditBatch(jnp.asarray(x), jnp.asarray(uniform_GSE)) for name, x in made.items()}


def _outcomes(
    batches: Mapping[str, AuditBatch], audited: Audited
) -> Iterator[tuple[str, _Outcome]]:
    """Route all batches at once.

    Not compiled as a whole: single operations are compiled once for all gatings.
    """
    gating, (num_groups, group_size, num_experts) = audited.gating, _shape(batches)
    capacity = audited.capacity(group_size, num_experts)
    logits_GSE = jnp.concatenate([batch.logits for batch in batches.values()])
    uniform = jnp.concatenate([batch.uniform for batch in batches.values()])
    shape = gating.noise_shape(num_experts)
    if shape is None:
        uniform = None
    elif shape == ():
        uniform = uniform[..., 0]
    valid_GS = jnp.ones(logits_GSE.shape[:2], bool)
    routing = jax.device_get(gating(logits_GSE, valid_GS, capacity or group_size, uniform))

    # Every token names an expert once.
    held_GSE = np.zeros(logits_GSE.shape, bool)
    weight_GSE = np.zeros(logits_GSE.shape, np.float32)
    np.put_along_axis(held_GSE, routing.expert, routing.kept, axis=-1)
    np.put_along_axis(weight_GSE, routing.expert, routing.weight, axis=-1)
    overflowed_GS = np.any(routing.attempted & ~routing.kept, axis=-1)
    for index, name in enumerate(batches):
        part = slice(index * num_groups, (index + 1) * num_groups)
        yield (
            name,
            _Outcome(
                held_GSE[part],
                weight_GSE[part],
                overflowed_GS[part],
                routing.aux_loss[part],
                capacity,
            ),
        )


def _shape(batches: Mapping[str, AuditBatch]) -> tuple[int, ...]:
    (shape,) = {batch.logits.shape for batch in batches.values()}
    return shape


def _row(name: str, batch: str, ours: _Outcome, paper: _Outcome, tolerance: float) -> AuditRow:
    gained_GS = np.any(ours.held & ~paper.held, axis=-1)
    lost_GS = np.any(paper.held & ~ours.held, axis=-1)
    moved_GS = gained_GS | lost_GS
    other_GS = np.any(np.abs(ours.weight - paper.weight) > tolerance, axis=-1)
    num_experts = ours.held.shape[-1]
    return AuditRow(
        gating=name,
        batch=batch,
        capacity=ours.capacity,
        tokens=moved_GS.size,
        routed_differently=int(np.sum(moved_GS)),
        gained=int(np.sum(gained_GS)),
        lost=int(np.sum(lost_GS)),
        overflowed=int(np.sum(ours.overflowed)),
        left_behind=int(np.sum(~np.any(ours.held, axis=-1))),
        weighed_differently=int(np.sum(other_GS & ~moved_GS)),
        auxiliary_loss=num_experts**2 * float(np.mean(ours.aux_loss)),
    )
