"""Compiles one operation with annotated operands, and says what its devices exchange."""

import dataclasses
import math

import jax
import models
import numpy as np

from gshard_exp.sharding import hlo
from gshard_exp.sharding.annotate import partitioning, replicate, shard, split
from gshard_exp.sharding.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a partitioned operation executes on one device.

    `exchanged` leaves out the all-gather of a result that does not divide: JAX has no such arrays
    and replicates them at the border of a program, whatever the operation.
    """

    exchanged: list[tuple[str, int]]  # (kind, bytes)
    groups: set[int]
    flops: int

    @property
    def kinds(self):
        return [kind for kind, _ in self.exchanged]

    @property
    def bytes(self):
        return sum(count for _, count in self.exchanged)


def values(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def annotate(x, how, parts):
    """`how`: the dimension that is cut, (dimension, parts), a device assignment, or None."""
    if how is None:
        return replicate(x)
    if isinstance(how, tuple):
        return split(x, *how)
    return split(x, how, parts) if isinstance(how, int) else shard(x, how)


def run(function, operands, ways, result, *, parts=8, devices=8):
    """Compile for `devices`, compare with one device, and return the outcome."""
    sizes = (devices // parts, parts) if parts < devices else (devices, 1)
    mesh = MeshSpec(data=sizes[0], expert=sizes[1]).build(jax.devices()[:devices])

    def program(*xs):
        pairs = zip(xs, ways, strict=True)
        return annotate(function(*(annotate(x, how, parts) for x, how in pairs)), result, parts)

    with partitioning(mesh):
        placed = [
            annotate(x, None if uneven(x, how, parts) else how, parts)
            for x, how in zip(operands, ways, strict=True)
        ]
        compiled = models.compiled(program, *placed)
    got = compiled(*placed)
    want = models.run(function, *operands)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    module = hlo.parse(compiled.as_text())
    exchanged = [(c.kind, c.bytes) for c in module.collectives()]
    if uneven(got, result, parts):
        assert got.sharding.is_fully_replicated
        exchanged.remove(("all-gather", padded_bytes(got, result, parts)))
    groups = {c.group for c in module.collectives() if c.kind != "collective-permute"}
    return Outcome(exchanged, groups, module.flops())


def uneven(x, how, parts):
    return isinstance(how, int) and x.shape[how] % parts != 0


def padded_bytes(x, dimension, parts):
    size = x.shape[dimension]
    return x.nbytes // size * parts * math.ceil(size / parts)
