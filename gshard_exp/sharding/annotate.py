"""Sharding annotations on values inside a model: names in, constraints out."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from gshard_exp.sharding.rules import Rules


@dataclasses.dataclass(frozen=True)
class _Active:
    mesh: Mesh
    rules: Rules


_active: contextvars.ContextVar[_Active | None] = contextvars.ContextVar("active", default=None)


@contextlib.contextmanager
def partitioning(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Make `constrain` mean this mesh and these rules while a function is traced.

    Outside such a context `constrain` is the identity: a layer can be tried alone.
    """
    token = _active.set(_Active(mesh, rules))
    try:
        yield
    finally:
        _active.reset(token)


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Annotate a value with the logical name of each dimension.

    The value and its global shape do not change. Source: `split` and `replicate` of section 3.2,
    by name instead of by dimension.

    Args:
        x: any array inside a traced function.
        *names: one logical axis for each dimension; None replicates that dimension.

    Raises:
        SettingError: as `Rules.spec`.
    """
    active = _active.get()
    if active is None:
        return x
    sharding = active.rules.sharding(
        names, shape=x.shape, mesh=active.mesh, what=f"an activation {tuple(names)}"
    )
    return jax.lax.with_sharding_constraint(x, sharding)
