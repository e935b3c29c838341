"""The census: every collective of a compiled program, and why it is there.

    found = census.take(jax.jit(step), state, batch, mesh=mesh)
    print(found.table())

Of each kind of collective: how often it runs (loops multiplied), bytes on a device, the mesh axes
it runs over and the operation in the model that asked for it; and values that the partitioner
replicated though nobody asked. Nothing here depends on the platform that the program is for.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard_exp.sharding import hlo
from gshard_exp.sharding.causes import BACKWARD, FORWARD, OUTSIDE, RECOMPUTE, Cause, causes
from gshard_exp.sharding.groups import mesh_axes
from gshard_exp.sharding.tables import columns

_ORDER = (FORWARD, RECOMPUTE, BACKWARD, OUTSIDE)
# Element type as HLO writes it, and the dimensions larger than 1, in order.
Key = tuple[str, tuple[int, ...]]
_HLO_TYPES = {
    "bool": ("pred",),
    "bfloat16": ("bf16", "f32"),  # CPUs compute in float32
    "float16": ("f16", "f32"),
    **{f"float{n}": (f"f{n}",) for n in (32, 64)},
    **{f"int{n}": (f"s{n}",) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (f"u{n}",) for n in (8, 16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that are alike.

    Attributes:
        kind: `all-to-all`, ...; asynchronous forms count as these.
        count: executions in one run of the program.
        bytes: on one device in one execution: of operands or results, whichever are more.
        group: number of devices that exchange with one another.
        axes: mesh axes over which they do, see `groups.mesh_axes`.
        shapes: of the results on one device, as HLO writes them.
        causes: the operations that asked for it; several where XLA combined collectives.
    """

    kind: str
    count: int
    bytes: int
    group: int
    axes: tuple[str, ...]
    shapes: tuple[str, ...]
    causes: tuple[Cause, ...]

    @property
    def when(self) -> str:
        """The pass that it belongs to: that of the first cause within a gradient."""
        return next((c.when for c in self.causes if c.when != OUTSIDE), OUTSIDE)


@dataclasses.dataclass(frozen=True)
class Replication:
    """A value that every device gathers whole though nothing says that it is to be replicated.

    Attributes:
        shape: global shape, with dtype.
        bytes: on every device.
        count: executions.
        axes: mesh axes over which it was split until then.
        cause: the operation that wanted it.
        missing: which annotation would have kept it split.
    """

    shape: str
    bytes: int
    count: int
    axes: tuple[str, ...]
    cause: Cause
    missing: str


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of the arrays of one shape in a traced program.

    Attributes:
        split: how an annotation, an input or an output of this shape is split; empty if none is.
        whole: whether one is replicated on purpose.
        names: inputs of this shape.
    """

    split: str = ""
    whole: bool = False
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Census:
    """What a program sends.

    Attributes:
        mesh: size of each axis.
        rows: in order of the passes; the most bytes first within each.
        replications: largest first.
        unknown_loops: loops whose collectives count once, because trips are not known.
    """

    mesh: Mapping[str, int]
    rows: tuple[Row, ...]
    replications: tuple[Replication, ...]
    unknown_loops: tuple[str, ...]

    def count(self, kind: str, when: str | None = None) -> int:
        """Count executions of a kind, in all or of one pass."""
        return sum(row.count for row in self.rows if row.kind == kind and when in (None, row.when))

    def as_json(self) -> str:
        """Write everything as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def table(self) -> str:
        """Write a table for a terminal, sums by kind and axes, and the warnings."""
        lines = columns(
            [
                ("count", "kind", "bytes/device", "over", "devices", "for"),
                *(
                    (
                        f"{row.count}",
                        row.kind,
                        f"{row.bytes:,}",
                        " x ".join(row.axes),
                        f"{row.group}",
                        _summary(row.causes),
                    )
                    for row in self.rows
                ),
            ],
            right=(0, 2, 4),
        )
        sums: collections.Counter[tuple[str, str]] = collections.Counter()
        times: collections.Counter[tuple[str, str]] = collections.Counter()
        for row in self.rows:
            sums[row.kind, " x ".join(row.axes)] += row.count * row.bytes
            times[row.kind, " x ".join(row.axes)] += row.count
        lines.append("")
        lines += columns(
            [
                ("count", "kind", "bytes/device", "over"),
                *(
                    (f"{times[key]}", key[0], f"{total:,}", key[1])
                    for key, total in sums.most_common()
                ),
            ],
            right=(0, 2),
        )
        lines += [f"warning: {_warning(found)}" for found in self.replications]
        lines += [
            f"warning: the loop {name} is counted once: its number of trips is not known"
            for name in self.unknown_loops
        ]
        return "\n".join(lines)


def take(
    function: Any,
    *arguments: Any,
    mesh: Mesh,
    layers: Mapping[str, str] = MappingProxyType({}),
    compiler_options: Mapping[str, Any] | None = None,
) -> Census:
    """Compile a function for arguments and read what it sends; nothing runs.

    Args:
        function: jitted, or to be jitted.
        *arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        mesh: that the arguments and annotations name.
        layers: kind of module by its path, for the causes.
        compiler_options: of XLA.
    """
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    traced = jitted.trace(*arguments)
    compiled = traced.lower().compile(compiler_options)
    values = known_values(traced.jaxpr, arguments, compiled)
    return read(compiled.as_text(), mesh, values=values, layers=layers)


def read(
    text: str,
    mesh: Mesh | AbstractMesh,
    *,
    values: Mapping[Key, Value] = MappingProxyType({}),
    layers: Mapping[str, str] = MappingProxyType({}),
) -> Census:
    """Read the text of a compiled module.

    A replication is an all-gather of the model (not of the optimizer's update) whose result has the
    type and global shape of a value of the traced program, where no annotation, input or output of
    that shape is replicated. What it cannot see: a gather over some of the axes that split a value;
    a value that was transposed or reshaped on the way; one whose shape coincides with that of a
    value that is replicated on purpose. And it names a gathered part of an array that happens to
    have the shape of a whole one.

    Args:
        text: of the optimised module.
        mesh: whose flattened order is the program's device order.
        values: as from `known_values`; without them no replication is found.
        layers: kind of module by its path.
    """
    module = hlo.parse(text)
    shape = dict(mesh.shape)
    merged: collections.Counter[Row] = collections.Counter()
    replications: collections.Counter[Replication] = collections.Counter()
    for sent in module.collectives():
        axes = mesh_axes(sent.groups, shape)
        why = causes(sent.op_name, layers)
        row = Row(
            kind=sent.kind,
            count=0,
            bytes=sent.bytes,
            group=sent.group or math.prod(shape.values()),
            axes=axes,
            shapes=tuple(f"{s.dtype}{list(s.dims)}" for s in sent.shapes),
            causes=why,
        )
        merged[row] += sent.times
        if sent.kind == "all-gather":
            for found in _replications(sent, axes, why, values):
                replications[found] += sent.times
    rows = [dataclasses.replace(row, count=times) for row, times in merged.items() if row.group > 1]
    rows.sort(key=lambda row: (_ORDER.index(row.when), -row.count * row.bytes))
    counted = [dataclasses.replace(one, count=times) for one, times in replications.items()]
    counted.sort(key=lambda one: -one.bytes)
    return Census(shape, tuple(rows), tuple(counted), tuple(module.unknown_loops()))


def known_values(jaxpr: ClosedJaxpr, arguments: Sequence[Any], compiled: Any) -> dict[Key, Value]:
    """Collect what annotations, inputs and outputs say of the shapes in a traced program.

    Args:
        jaxpr: of the function.
        arguments: that it was traced with, for their names.
        compiled: for the shardings of inputs and outputs.

    Returns:
        Facts by element type and shape.
    """
    values: dict[Key, Value] = {}

    def note(array: Any, sharding: Any = None, name: str = "") -> None:
        for dtype in _HLO_TYPES.get(str(array.dtype), ()):
            key = _key(dtype, array.shape)
            values[key] = _noted(values.get(key, Value()), sharding, name)

    for equation in _equations(jaxpr.jaxpr):
        constraint = equation.primitive.name == "sharding_constraint"
        for variable in equation.outvars:
            note(variable.aval, equation.params["sharding"] if constraint else None)
    given = jax.tree_util.tree_leaves_with_path(tuple(arguments))
    shardings = jax.tree.leaves(compiled.input_shardings[0])
    if len(given) != len(shardings):  # some are not used and left out there: what they say of it
        own = (getattr(leaf, "sharding", None) for _, leaf in given)
        shardings = [one if isinstance(one, NamedSharding) else None for one in own]
    for (path, leaf), sharding in zip(given, shardings, strict=True):
        if hasattr(leaf, "dtype"):  # else it is a number of Python's, or static
            note(leaf, sharding, jax.tree_util.keystr(path[1:], simple=True, separator="/"))
    for variable, sharding in zip(
        jaxpr.jaxpr.outvars, jax.tree.leaves(compiled.output_shardings), strict=True
    ):
        note(variable.aval, sharding)
    return values


def _noted(value: Value, sharding: Any, name: str) -> Value:
    if sharding is not None and sharding.is_fully_replicated:
        value = dataclasses.replace(value, whole=True)
    elif isinstance(sharding, NamedSharding):
        value = dataclasses.replace(value, split=f"{tuple(sharding.spec)}")
    return dataclasses.replace(value, names=(*value.names, name)) if name else value


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for below in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(below, ClosedJaxpr):
                yield from _equations(below.jaxpr)
            elif isinstance(below, Jaxpr):
                yield from _equations(below)


def _replications(
    sent: hlo.Collective,
    axes: tuple[str, ...],
    why: tuple[Cause, ...],
    values: Mapping[Key, Value],
) -> Iterator[Replication]:
    asked = [cause for cause in why if cause.when != OUTSIDE] or (
        # A program without a gradient is outside of one as a whole.
        [] if any(cause.when != OUTSIDE for cause in why) else list(why)
    )
    for shape in sent.shapes:
        value = values.get(_key(shape.dtype, shape.dims))
        if value is None or value.whole or not asked:
            continue
        yield Replication(
            shape=f"{shape.dtype}{list(shape.dims)}",
            bytes=shape.bytes,
            count=0,
            axes=axes,
            cause=asked[0],
            missing=_missing(value, asked[0]),
        )


def _missing(value: Value, cause: Cause) -> str:
    where = f"the operands and the result of {cause.operation}"
    where += f" in {cause.place}" if cause.place else ""
    if value.names:
        names = ", ".join(value.names[:3])
        split = f", split {value.split}" if value.split else ""
        return f"it has the size of {names}{split}: annotate {where}"
    if value.split:
        return f"a value of this shape is annotated {value.split} elsewhere: annotate {where}"
    return f"no value of this shape is annotated: annotate {where}"


def _key(dtype: str, dims: Iterable[int]) -> Key:
    return dtype, tuple(size for size in dims if size > 1)


def _summary(why: tuple[Cause, ...]) -> str:
    more = f" (+{len(why) - 1} more)" if len(why) > 1 else ""
    return f"{why[0]}{more}"


def _warning(found: Replication) -> str:
    return (
        f"{found.shape} ({found.bytes:,} bytes) becomes whole on every device, {found.count} "
        f"time(s), for {found.cause}; {found.missing}"
    )
