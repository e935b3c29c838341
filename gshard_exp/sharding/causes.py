"""Reads JAX's `op_name` of an instruction: which part of a model asked for it, and when."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

FORWARD, BACKWARD, RECOMPUTE, OUTSIDE = "forward", "backward", "recompute", "outside"

# What JAX's own control flow and flax's lifted scan add to a path.
_MACHINERY = frozenset(
    (
        "body",
        "body_fun",
        "checkpoint",
        "closed_call",
        "cond",
        "cond_fun",
        "core_call",
        "custom_jvp_call",
        "custom_partitioning",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "layers",
        "pjit",
        "remat",
        "remat2",
        "rematted_computation",
        "shard_map",
        "while",
    )
)


@dataclasses.dataclass(frozen=True)
class Cause:
    """What asked for a collective.

    Attributes:
        when: see `pass_of`.
        place: path of the module, `encoder/pattern_1/ffn`; empty where there is none.
        layer: kind of the module there, if the caller of the census said it.
        operation: an einsum or a JAX primitive, behind the method it stands in.
    """

    when: str
    place: str
    layer: str
    operation: str

    def __str__(self) -> str:
        """Write as `forward encoder/pattern_1/ffn/experts (MoeLayer): ERH,EHM->ERM`."""
        layer = f" ({self.layer})" if self.layer else ""
        return f"{self.when} {self.place}{layer}: {self.operation}".replace(" : ", ": ")


def causes(op_name: str, layers: Mapping[str, str] = MappingProxyType({})) -> tuple[Cause, ...]:
    """Read an `op_name`; a collective that XLA combined from several has several causes.

    Args:
        op_name: `jit(step)/jvp(Model)/encoder/ffn/dot_general`, or of several operations that share
            a beginning, `jit(step)/(first/path:second/path)`.
        layers: kind of module by path, for `Cause.layer`; the longest path counts.

    Returns:
        The distinct causes in the order of the text.
    """
    found = (_cause(path, layers) for path in _paths(op_name))
    return tuple(dict.fromkeys(found))


def pass_of(op_name: str) -> str:
    """Return the pass that an operation belongs to.

    Returns:
        `forward`, `backward`, `recompute` (forward again, for the backward pass), or `outside` of a
        gradient: the optimizer, or all of a program that takes no gradient.
    """
    if "rematted_computation" in op_name:
        return RECOMPUTE
    if "transpose(" in op_name:
        return BACKWARD
    return FORWARD if "jvp(" in op_name else OUTSIDE


def _paths(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the components of each path, alternatives in parentheses multiplied out."""
    parts = _split(text, "/")
    for index, part in enumerate(parts):
        if part.startswith("(") and part.endswith(")"):
            head, tail = tuple(parts[:index]), "/".join(parts[index + 1 :])
            for alternative in _split(part[1:-1], ":"):
                rest = f"{alternative}/{tail}" if tail else alternative
                for path in _paths(rest):
                    yield head + path
            return
    yield tuple(parts)


def _split(text: str, separator: str) -> list[str]:
    """Split where no parenthesis is open."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == separator and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _cause(path: tuple[str, ...], layers: Mapping[str, str]) -> Cause:
    place: list[str] = []
    methods: list[str] = []
    root = ""
    for part in path[:-1]:
        function = re.fullmatch(r"(\w+)\((.*)\)", part)
        method = re.fullmatch(r"(\w+)\.(\w+)", part)
        if function:
            inner = re.search(r"(\w*)\)*$", function.group(2))
            if "jvp" in part:
                root = inner.group(1) if inner else ""
            elif part != path[0] and function.group(1) in ("jit", "pjit"):
                methods.append(function.group(2).strip("_<>"))
        elif method:
            owner, name = method.groups()
            if owner != root:
                place += [] if place[-1:] == [owner] else [owner]
                methods.append(name.strip("_"))
        elif part not in _MACHINERY:
            place.append(part)
    # An einsum stands as a scope above its product; it says what the product does not.
    if place and "->" in place[-1]:
        methods.append(place.pop())
    else:
        methods.append(path[-1] or "XLA does not say")
    where = "/".join(place)
    above = [known for known in layers if f"{where}/".startswith(f"{known}/")]
    layer = layers[max(above, key=len)] if above else ""
    return Cause(pass_of("/".join(path)), where, layer, " ".join(methods))
