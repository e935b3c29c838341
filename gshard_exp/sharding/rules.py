"""Logical-axis rules: which mesh axis, if any, splits a dimension of a given meaning."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard_exp import axes
from gshard_exp.errors import SettingError

Names = Sequence[str | None]
MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """One rule for each logical axis, and the exceptions for optimizer state.

    Attributes:
        table: (logical axis, mesh axis or axes or None) pairs. Each logical axis of `axes.py`
            stands in it exactly once; None replicates, and has to be said.
        optimizer: pairs that replace those of `table` for optimizer state only. `(("embed",
            "data"),)` splits state over `data` that would be replicated (ZeRO stage 1).
    """

    table: tuple[tuple[str, str | tuple[str, ...] | None], ...]
    optimizer: tuple[tuple[str, str | tuple[str, ...] | None], ...] = ()

    def __post_init__(self) -> None:
        # Config files write lists as easily as tuples; as tuples, rules can be hashed.
        for field in ("table", "optimizer"):
            pairs = tuple((name, _plain(entry)) for name, entry in getattr(self, field))
            object.__setattr__(self, field, pairs)
        _check_table("table", self.table)
        _check_table("optimizer", self.optimizer)
        missing = sorted(set(axes.LOGICAL_AXES) - {name for name, _ in self.table})
        if missing:
            raise SettingError(
                f"no rule for the logical axes {', '.join(missing)}: each has exactly one. "
                f'Add ("{missing[0]}", None) to replicate it',
                settings=("table",),
            )

    def for_optimizer(self) -> "Rules":
        """Return the rules that hold for optimizer state."""
        return Rules(tuple((dict(self.table) | dict(self.optimizer)).items()))

    def spec(self, names: Names, *, shape: Sequence[int], mesh: Mesh, what: str) -> PartitionSpec:
        """Translate the logical names of an array's dimensions.

        Args:
            names: one logical name (or None: replicated) for each dimension.
            shape: global shape; a dimension has to divide by the mesh axes that split it.
            mesh: the mesh whose sizes count.
            what: path of the parameter, or words for the activation, for the error.

        Returns:
            A spec of the same rank; mesh axes of size 1 are kept in it.

        Raises:
            SettingError: unknown name, mesh axis used twice, or a size that does not divide.
        """
        if len(names) != len(shape):
            raise SettingError(
                f"{what} has {len(shape)} dimensions and {len(names)} logical axes "
                f"{tuple(names)}: they have to match. Name each dimension once"
            )
        entries: list[MeshAxes] = []
        taken: dict[str, str] = {}
        for name, size in zip(names, shape, strict=True):
            entry = None if name is None else self._lookup(name, what)
            for mesh_axis in _as_tuple(entry):
                if mesh_axis in taken:
                    raise SettingError(
                        f"{what} {tuple(names)} is split over the mesh axis {mesh_axis!r} twice, "
                        f"by {taken[mesh_axis]!r} and {name!r}: an axis splits one dimension of "
                        "an array. Set one of the two rules to None",
                        settings=("table", "optimizer"),
                    )
                taken[mesh_axis] = str(name)
            parts = math.prod(mesh.shape[a] for a in _as_tuple(entry))
            if size % parts:
                raise SettingError(
                    f"{what} has size {size} on {name!r}, which the mesh splits into {parts} "
                    f"({' x '.join(_as_tuple(entry))}): it has to divide. Set a multiple of "
                    f"{parts}, or the rule of {name!r} to None",
                    settings=("table", "optimizer"),
                )
            entries.append(entry)
        return PartitionSpec(*entries)

    def partitions(self, name: str, mesh: Mesh) -> int:
        """Return the number of parts that a mesh splits a logical axis into."""
        return math.prod(mesh.shape[axis] for axis in _as_tuple(dict(self.table)[name]))

    def mesh_axes(self, names: Names) -> tuple[str, ...]:
        """List the mesh axes that split dimensions of these names."""
        table = dict(self.table)
        return tuple(axis for name in names if name for axis in _as_tuple(table[name]))

    def _lookup(self, name: str, what: str) -> MeshAxes:
        table: Mapping[str, MeshAxes] = dict(self.table)
        if name not in table:
            raise SettingError(
                f"{what} names the logical axis {name!r}, for which there is no rule. "
                f'Add ("{name}", None) to the rules to replicate it',
                settings=("table",),
            )
        return table[name]

    def sharding(
        self, names: Names, *, shape: Sequence[int], mesh: Mesh, what: str
    ) -> NamedSharding:
        """Return `spec` on a mesh."""
        return NamedSharding(mesh, self.spec(names, shape=shape, mesh=mesh, what=what))


def shard_shape(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """Return the shape that one device holds."""
    return tuple(sharding.shard_shape(tuple(shape)))


def shard_bytes(tree: Any) -> int:
    """Return the bytes that one device holds of a tree of laid out arrays, abstract or not."""
    return sum(
        math.prod(shard_shape(leaf.shape, leaf.sharding)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _as_tuple(entry: MeshAxes) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _plain(entry: MeshAxes) -> MeshAxes:
    return entry if entry is None or isinstance(entry, str) else tuple(entry)


def _check_table(field: str, table: Sequence[tuple[str, MeshAxes]]) -> None:
    seen: set[str] = set()
    for name, entry in table:
        if name not in axes.LOGICAL_AXES:
            raise SettingError(
                f"the rule ({name!r}, {entry!r}) is for no logical axis: known are "
                f"{', '.join(axes.LOGICAL_AXES)}. Correct the name",
                settings=(field,),
            )
        if name in seen:
            raise SettingError(
                f"the logical axis {name!r} has two rules: each has exactly one. Remove one",
                settings=(field,),
            )
        seen.add(name)
        for mesh_axis in _as_tuple(entry):
            if mesh_axis not in axes.MESH_AXES:
                raise SettingError(
                    f"the rule ({name!r}, {entry!r}) names no mesh axis: known are "
                    f"{', '.join(axes.MESH_AXES)}. Correct it, or use None to replicate",
                    settings=(field,),
                )
