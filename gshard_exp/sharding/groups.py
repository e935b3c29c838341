"""Which devices a collective connects, and over which mesh axes: `replica_groups` in every form.

Numbers are positions in the program's device order, which is that of the flattened mesh.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\{(\{[\d,{} ]*\})?\}")
_TILED = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`; the ids may also be listed.
_NAMED = re.compile(
    r"@?mesh[\[<](?P<axes>[^\]>]*)[\]>]"
    r"(?:(?:, device_ids=)?\((?P<ids>\[[\d,]*\](?:T\([\d,]*\))?|[\d,]*)\))?"
    r" ?\{(?P<used>[^}]*)\}"
)
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_PART = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def read_groups(attributes: str) -> Groups:
    """Read which devices exchange with one another from what stands behind an instruction.

    Understood are lists `{{0,1},{2,3}}`, tiles `[groups,size]<=[dims]T(order)`, named axes (above;
    `'b':(2)4` is the part of axis b of size 4 whose more significant part has size 2), and
    `source_target_pairs`, whose devices are grouped by who reaches whom.
    Source: XLA's hlo/ir/replica_group.cc, tile_assignment.cc and mesh_and_axis.cc.

    Returns:
        The groups, each in ascending order; empty if the text does not say (all devices).

    Raises:
        ValueError: a form that is not understood.
    """
    pairs = re.search(r"\bsource_target_pairs=\{([\d,{} ]*)\}", attributes)
    if pairs:
        return _connected(_lists(pairs.group(1)))
    found = re.search(r"\breplica_groups=", attributes)
    if found is None:
        return ()
    text = attributes[found.end() :]
    if listed := _LISTED.match(text):
        return _sorted(_lists(listed.group(1) or ""))
    if tiled := _TILED.match(text):
        shape, dims, order = map(_integers, tiled.groups())
        return _sorted(_iota(dims, order).reshape(shape).tolist())
    if named := _NAMED.match(text):
        return _sorted(_of_axes(**named.groupdict()))
    raise ValueError(f"replica_groups in an unknown form: {text[:100]!r}")


def mesh_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Name the mesh axes that collectives of these groups run over.

    Args:
        groups: as from `read_groups`; empty: all devices.
        mesh: size of each axis, in the order of the mesh.

    Returns:
        The axes along which members of a group differ, in the order of the mesh; an axis of which a
        group holds only a part is written `data[2 of 4]`.

    Raises:
        ValueError: a device that the mesh does not have.
    """
    sizes = tuple(mesh.values())
    count = math.prod(sizes)
    groups = groups or (tuple(range(count)),)
    if max(map(max, groups)) >= count:
        raise ValueError(f"device {max(map(max, groups))} is not in a mesh of {count} devices")
    spread = np.ones(len(sizes), int)
    for group in groups:
        places = np.stack(np.unravel_index(group, sizes), axis=1)
        spread = np.maximum(spread, [len(set(column)) for column in places.T])
    return tuple(
        axis if part == size else f"{axis}[{part} of {size}]"
        for (axis, size), part in zip(mesh.items(), spread, strict=True)
        if part > 1
    )


def _of_axes(axes: str, ids: str | None, used: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    devices = _device_ids(ids, math.prod(sizes.values())).reshape(tuple(sizes.values()))
    # Each axis in three parts: (more significant, used, less significant).
    parts = {name: (size, 1, 1) for name, size in sizes.items()}
    for name, before, size in _PART.findall(used):
        high = int(before) if before else 1
        middle = int(size) if size else sizes[name]
        parts[name] = (high, middle, sizes[name] // (high * middle))
    split = devices.reshape([n for three in parts.values() for n in three])
    middles = [3 * index + 1 for index in range(len(parts))]
    others = [d for d in range(split.ndim) if d not in middles]
    size = math.prod(split.shape[d] for d in middles)
    return split.transpose(*others, *middles).reshape(-1, size).tolist()


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    if text.startswith("["):
        dims, _, order = text.partition("T")
        return _iota(_integers(dims.strip("[]")), _integers(order.strip("()"))).reshape(-1)
    return np.asarray(_integers(text))


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _lists(text: str) -> list[list[int]]:
    return [list(_integers(inside)) for inside in re.findall(r"\{([\d,]+)\}", text)]


def _sorted(groups: Iterable[Iterable[int]]) -> Groups:
    return tuple(tuple(sorted(group)) for group in groups)


def _connected(pairs: list[list[int]]) -> Groups:
    """Group devices that pairs connect, directly or not."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of |= dict.fromkeys(joined, joined)
    distinct = {min(group): group for group in group_of.values()}
    return _sorted(distinct.values())
