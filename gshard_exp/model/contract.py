"""What the runner asks of a model: all that it knows of what is trained."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import flax
import jax
from flax.linen import partitioning
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Key

from gshard_exp.model.transformer import Stack
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.sharding.rules import Names, Rules

Batch = Mapping[str, Array]
Params = Mapping


class Entry(NamedTuple):
    """One array of a batch.

    Attributes:
        shape: global; rows come first.
        dtype: `int32` or `float32`.
        names: logical axis of each dimension.
    """

    shape: tuple[int, ...]
    dtype: str
    names: Names


class Model(Protocol):
    """A network and its losses, for whatever kind of data.

    A dataclass whose first field is `module`, a linen module that has the `stacks` and a `dtype`;
    its other fields have defaults. The arrays of a batch have rows first; the step adds `rows`, the
    index of each row in the whole.
    """

    def __init__(self, module: Any) -> None: ...

    def __hash__(self) -> int: ...

    @property
    def module(self) -> Any:
        """The network, a linen module."""
        ...

    @property
    def stacks(self) -> Mapping[str, Stack]:
        """The stacks of blocks by their name in the module; router health is reported by them."""
        ...

    def init(self, key: Key[Array, ""]) -> tuple[Params, Mapping[str, Names]]:
        """Make parameters and the logical names of their dimensions, trees of equal structure."""
        ...

    def batch_entries(self, batch_size: int, lengths: Mapping[str, int]) -> Mapping[str, Entry]:
        """Describe the arrays of a training batch of `batch_size` rows.

        Raises:
            SettingError: `lengths` are not those that the model has; it blames `lengths`.
        """
        ...

    def stack_lengths(self, lengths: Mapping[str, int]) -> Mapping[str, int]:
        """Return the tokens of a row that pass through each stack."""
        ...

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Return what the losses of a whole batch are divided by: its tokens, or its rows."""
        ...

    def loss(
        self,
        params: Params,
        batch: Batch,
        *,
        key: Key[Array, ""] | None,
        total_weight: Float[Array, ""],
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], dict]:
        """Compute what a part of a batch adds to the loss, and metrics; see `Seq2SeqModel.loss`.

        Metrics: sums under `sums`, means times `share` under `means`, router health of each sparse
        block (`encoder/pattern_1`) under `router`. All of it adds up over parts.
        """
        ...

    def scalars(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Turn `sums` over steps into the metrics that are written; `accuracy` is among them."""
        ...

    def amounts(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Say how much was computed, by unit, for rates; `tokens` are among the units."""
        ...


def abstract_batch(
    entries: Mapping[str, Entry], mesh: Mesh | AbstractMesh, rules: Rules
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a batch as shapes that lie on a mesh, to trace and compile with.

    Raises:
        SettingError: a size does not divide.
    """
    return {
        key: jax.ShapeDtypeStruct(
            entry.shape,
            entry.dtype,
            sharding=rules.sharding(
                entry.names, shape=entry.shape, mesh=mesh, what=f"the batch's {key}"
            ),
        )
        for key, entry in entries.items()
    }


def axis_names(params_axes: Mapping) -> dict:
    """Turn flax's axis metadata into a tree like the parameters, of tuples of names."""
    specs = flax.core.unfreeze(partitioning.get_axis_names(params_axes))
    return jax.tree.map(tuple, specs)


def moe_layers(model: Model, stack: str) -> Iterator[tuple[str, MoeLayer]]:
    """Yield the sparse layers of a stack's pattern with their path below the stack."""
    for index, block in enumerate(model.stacks[stack].pattern):
        if isinstance(block.ffn, MoeLayer):
            yield f"pattern[{index}].ffn", block.ffn
