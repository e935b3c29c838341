"""t5x's checkpoints, without t5x: what `use_orbax` writes, its default (t5x/checkpoints.py).

    checkpoint_N/state/     target/...            the parameters
                            state/step            int32 scalar
                            state/param_states/   optimizer state, by flax's `to_state_dict`
    checkpoint_N/dataset/   train_ds-000-of-001   position in the data

Ours has `params`, `opt_state` (optax's own tree), `step`, `updates`, `skipped`, `rng`, and `data/`.
t5x makes its key of the seed, as we do, and counts steps only.
"""

from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax.serialization import from_state_dict, to_state_dict
from flax.traverse_util import flatten_dict, unflatten_dict

from gshard_exp.data.batches import BatchIterator
from gshard_exp.train.checkpoint import STATE, T5X_PARAMS, PositionHandler, SavePosition
from gshard_exp.train.state import TrainState

DATASET = "dataset"
POSITION = "train_ds-000-of-001"  # of one process
_STEP = ("state", "step")
_MOMENTS = ("state", "param_states")


def to_t5x(state: TrainState) -> dict:
    """Lay a train state out as t5x does."""
    flat = {(T5X_PARAMS, *path): leaf for path, leaf in flatten_dict(state.params).items()}
    flat |= {(*_MOMENTS, *path): leaf for path, leaf in _moments(state.opt_state).items()}
    flat[_STEP] = state.step
    return unflatten_dict(flat)


def from_t5x(tree: dict, like: TrainState) -> TrainState:
    """Lay t5x's tree out as a train state; steps count as updates.

    Args:
        tree: parameters and step, and optimizer state of this optimizer or none.
        like: the state at step 0. Its optimizer state is kept if the tree has none.
    """
    flat = flatten_dict(tree)
    found = {path[2:]: leaf for path, leaf in flat.items() if path[:2] == _MOMENTS}
    opt_state = like.opt_state
    if found:
        # What is empty in a state (optax's `EmptyState`) stands in no checkpoint of t5x.
        whole = flatten_dict(to_state_dict(like.opt_state), keep_empty_nodes=True)
        opt_state = from_state_dict(like.opt_state, unflatten_dict(whole | found))
    return like.replace(
        step=flat[_STEP], updates=flat[_STEP], params=tree[T5X_PARAMS], opt_state=opt_state
    )


def read_t5x(place: Path, like: TrainState) -> tuple[TrainState, bool]:
    """Read a checkpoint of t5x into the shardings of a state.

    Args:
        place: the folder checkpoint_N.
        like: the state at step 0, whose parameters have the shapes of those to read.

    Returns:
        The state, and whether optimizer state was there that is this optimizer's.
    """
    handler = ocp.PyTreeCheckpointHandler()
    folder = epath.Path(place.absolute()) / STATE
    wanted = jax.tree.map(_abstract, to_t5x(like))
    saved = _shapes(handler.metadata(folder).tree)
    moments = {path: shape for path, shape in saved.items() if path[:2] == _MOMENTS}
    ours = {p: s for p, s in _shapes(wanted).items() if p[:2] == _MOMENTS}
    if moments != ours:
        del wanted["state"]["param_states"]
    restored = handler.restore(
        folder,
        args=ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        ),
    )
    return from_t5x(restored, like), moments == ours


def write_t5x(model_dir: Path, state: TrainState, batches: BatchIterator) -> None:
    """Write a checkpoint of t5x, position in the data included."""
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(STATE, ocp.args.PyTreeSave, ocp.PyTreeCheckpointHandler())
    handlers.add(DATASET, SavePosition, _DatasetHandler())
    with ocp.CheckpointManager(
        epath.Path(model_dir.absolute()), options=options, handler_registry=handlers
    ) as manager:
        manager.save(
            int(state.step),
            args=ocp.args.Composite(
                **{STATE: ocp.args.PyTreeSave(to_t5x(state)), DATASET: SavePosition(batches)}
            ),
        )


class _DatasetHandler(PositionHandler):
    """Writes a position where t5x looks for it, as `batches.OurBatches` does."""

    def save(self, directory: epath.Path, args: SavePosition) -> None:
        folder = Path(directory) / POSITION
        folder.mkdir()
        args.batches.save(folder)


def _moments(opt_state: optax.OptState) -> dict[tuple, Any]:
    return flatten_dict(to_state_dict(opt_state))


def _shapes(tree: Any) -> dict[tuple, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in flatten_dict(tree).items()}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
