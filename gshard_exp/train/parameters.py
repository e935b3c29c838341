"""Tabulates the parameters of a model, and counts those that one token uses."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import jax

from gshard_exp import axes
from gshard_exp.model.contract import Model, moe_layers
from gshard_exp.model.transformer import DecoderBlock, EncoderBlock
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.paths import parameter_path
from gshard_exp.train.state import abstract_params


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a model.

    Attributes:
        path: `encoder/pattern_1/ffn/wi`.
        shape: global shape.
        names: logical axis of each dimension.
        active: elements that one token uses.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    active: int

    @property
    def total(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters(model: Model) -> list[Parameter]:
    """List every parameter of a model; nothing is allocated and no device is asked.

    Active are, of the experts of a layer, the `num_choices` that its gating sends a token to
    (whether or not a slot is left for it there), and all of everything else: the router scores
    every expert, and embeddings count whole, as in the counts of dense models. A layer of one's own
    that is no `MoeLayer` counts whole too.

    Args:
        model: network and losses.

    Returns:
        In the order of the parameter tree.
    """
    sparse = _sparse_layers(model)
    table = []
    for row in _rows(_skeleton(model)):
        stack, layer = row.path.partition("/")[0], sparse.get(row.path.rpartition("/")[0])
        sizes = {axes.LAYERS: model.stacks[stack].repeats if stack in model.stacks else 1}
        if layer is not None:
            sizes |= {axes.EXPERT: layer.num_experts, axes.ROUTER_EXPERT: layer.num_experts}
        shape = tuple(sizes.get(name, n) for name, n in zip(row.names, row.shape, strict=True))
        active = math.prod(shape)
        if layer is not None and axes.EXPERT in row.names:
            choices = min(layer.gating.num_choices, layer.num_experts)
            active = active // layer.num_experts * choices
        table.append(Parameter(row.path, shape, row.names, active))
    return table


def totals(table: Iterable[Parameter]) -> tuple[int, int]:
    """Return the number of all parameters, and of those that one token uses."""
    rows = list(table)
    return sum(row.total for row in rows), sum(row.active for row in rows)


def _skeleton(model: Model) -> Model:
    """Return a model with one repetition of each stack's pattern and one expert a layer.

    Tracing is what takes time, and these sizes are known without it: they are those of the
    dimensions that bear the names `layers`, `expert` and `router_expert`. Recomputation, dtype of
    the activations and losses change no parameter. So models that differ in no more than all these
    are traced once.
    """
    stacks = {
        name: stack.clone(
            num_layers=len(stack.pattern),
            pattern=tuple(map(_with_one_expert, stack.pattern)),
            remat="none",
            unroll=1,
        )
        for name, stack in model.stacks.items()
    }
    return type(model)(model.module.clone(**stacks, dtype="float32"))


def _with_one_expert(block: EncoderBlock | DecoderBlock) -> EncoderBlock | DecoderBlock:
    if isinstance(block.ffn, MoeLayer):
        return block.clone(ffn=block.ffn.clone(num_experts=1))
    return block


@functools.lru_cache(maxsize=16)
def _rows(model: Model) -> tuple[Parameter, ...]:
    """List the parameters of a model as they are, with all of them active."""
    shapes, names = abstract_params(model)
    flat_names = jax.tree.leaves(names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return tuple(
        Parameter(parameter_path(keys), tuple(leaf.shape), tuple(of_leaf), math.prod(leaf.shape))
        for (keys, leaf), of_leaf in zip(
            jax.tree_util.tree_leaves_with_path(shapes), flat_names, strict=True
        )
    )


def _sparse_layers(model: Model) -> Mapping[str, MoeLayer]:
    """Map the path of each sparse layer's parameters to the layer."""
    found = {}
    for stack in model.stacks:
        for field, layer in moe_layers(model, stack):
            below = field.replace("[", "_").replace("].", "/")  # pattern[1].ffn: pattern_1/ffn
            found[f"{stack}/{below}"] = layer
    return found
