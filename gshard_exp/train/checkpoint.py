"""Checkpoints through orbax: train state and position in the data, committed together."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from gshard_exp.data.batches import BatchIterator
from gshard_exp.errors import SettingError, first_line, require_at_least
from gshard_exp.model.contract import Params
from gshard_exp.paths import parameter_path
from gshard_exp.train.state import TrainState

STATE = "state"
DATA = "data"
PARAMS = "params"
T5X_PARAMS = "target"  # where t5x has the parameters in its STATE, see `t5x_runner.layout`


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """When to save and what to keep.

    Attributes:
        every_steps: steps between checkpoints; the last step is always saved.
        keep: newest checkpoints to keep; None keeps all.
        wait: finish writing before the next step (tests); otherwise writing overlaps training.
    """

    every_steps: int
    keep: int | None = 3
    wait: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "every_steps", "keep")

    def open(self, model_dir: str) -> "CheckpointFolder":
        """Open MODEL_DIR for reading and writing checkpoints."""
        return CheckpointFolder(model_dir, self)


class CheckpointFolder:
    """The `checkpoint_N` folders of a run.

    orbax writes each under a temporary name and renames it when complete: a run that is killed
    leaves whole checkpoints only.
    """

    def __init__(self, model_dir: str, settings: Checkpoints) -> None:
        self._settings = settings
        self._manager = ocp.CheckpointManager(
            epath.Path(model_dir).expanduser().resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=settings.keep,
                step_prefix="checkpoint",
                enable_async_checkpointing=not settings.wait,
                # A killed run may leave temporary folders.
                cleanup_tmp_directories=True,
            ),
            handler_registry=_registry(),
        )

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def due(self, step: int, last_step: int) -> bool:
        """Say whether a checkpoint belongs after `step`."""
        return step % self._settings.every_steps == 0 or step == last_step

    def save(self, step: int, state: TrainState, batches: BatchIterator) -> None:
        """Save; copies are taken before this returns, writing goes on behind."""
        if self._manager.latest_step() == step:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{STATE: ocp.args.StandardSave(state), DATA: SavePosition(batches)}
            ),
        )

    def restore(self, step: int, abstract: TrainState, batches: BatchIterator | None) -> TrainState:
        """Restore a step into the shardings of `abstract`, whatever mesh saved it.

        Raises:
            SettingError: the checkpoint is of another model or optimizer.
        """
        self._check_shapes(step, abstract)
        items: dict[str, Any] = {STATE: ocp.args.StandardRestore(abstract)}
        if batches is not None:
            items[DATA] = RestorePosition(batches)
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return restored[STATE]

    def _check_shapes(self, step: int, abstract: TrainState) -> None:
        name = f"checkpoint_{step}"
        refuse_other_layout(Path(self._manager.directory) / name, t5x=False)
        _refuse_other_shapes(name, self._manager.item_metadata(step)[STATE].tree, abstract)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


class PositionHandler(ocp.CheckpointHandler):
    """Lets a batch iterator write its position inside a checkpoint.

    Not asynchronous: the position has to be that of the step which is being saved, and is small.
    """

    def save(self, directory: epath.Path, args: "SavePosition") -> None:
        """Write the position."""
        args.batches.save(Path(directory))

    def restore(self, directory: epath.Path, args: "RestorePosition") -> None:
        """Go to the position."""
        args.batches.restore(Path(directory))


@dataclasses.dataclass
class SavePosition(ocp.args.CheckpointArgs):
    """Names the iterator to save."""

    batches: BatchIterator


@dataclasses.dataclass
class RestorePosition(ocp.args.CheckpointArgs):
    """Names the iterator to move."""

    batches: BatchIterator


def _refuse_other_shapes(name: str, saved: Any, abstract: Any) -> None:
    saved_shapes, shapes = _shapes(saved), _shapes(abstract)
    differing = [
        f"{path} is {saved_shapes.get(path, 'absent')} there and {shapes.get(path, 'absent')}"
        for path in sorted(saved_shapes.keys() | shapes.keys())
        if saved_shapes.get(path) != shapes.get(path)
    ]
    if differing:
        # Parameters say more than what an optimizer derives from them.
        differing.sort(key=lambda line: not line.startswith("params"))
        raise SettingError(
            f"{name} does not fit this experiment: {differing[0]} here "
            f"({len(differing)} arrays differ).",
            settings=("model_dir",),
            hint="Use the settings that made it (config.gin beside it), or another MODEL_DIR.",
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {parameter_path(path): tuple(leaf.shape) for path, leaf in leaves}


def _registry() -> ocp.handlers.CheckpointHandlerRegistry:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    standard, position = ocp.StandardCheckpointHandler(), PositionHandler()
    registry.add(STATE, ocp.args.StandardSave, standard)
    registry.add(STATE, ocp.args.StandardRestore, standard)
    registry.add(DATA, SavePosition, position)
    registry.add(DATA, RestorePosition, position)
    return registry


def restore_params(model_dir: Path, step: int | None, abstract: Any) -> tuple[int, Any]:
    """Read the parameters of a checkpoint of either runner, and nothing else; writes nothing.

    Args:
        model_dir: folder of a run, which may be going on.
        step: whose checkpoint; None: the newest.
        abstract: parameters as `jax.ShapeDtypeStruct`s with the shardings to restore into,
            whatever mesh saved them.

    Returns:
        The step, and the parameters.

    Raises:
        SettingError: there is no such checkpoint, it is not whole, or of another model.
    """
    folder = epath.Path(Path(model_dir).absolute())  # orbax takes no other
    steps = checkpoint_steps(model_dir)
    if not steps:
        raise SettingError(
            f"{model_dir} holds no checkpoint: there is nothing to read parameters from.",
            settings=("model_dir",),
            hint="Train first, or correct the path; a checkpoint is a folder checkpoint_N.",
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise SettingError(
            f"{model_dir} holds no checkpoint of step {step}; there are "
            f"{', '.join(map(str, steps))}.",
            settings=("step",),
            hint="Name one of them, or none for the newest.",
        )
    place = folder / f"checkpoint_{step}" / STATE
    checkpoint = Path(place).parent
    with readable(checkpoint):
        # Reads of many arrays at once, of which one fails, complain of one another afterwards.
        if not any(place.glob("ocdbt.process_*")):
            raise FileNotFoundError(f"{place} holds no arrays")
        # The handler itself: a Checkpointer would warn of what belongs to the folder above.
        handler = ocp.PyTreeCheckpointHandler()
        refuse_other_params(checkpoint, abstract)
        key = T5X_PARAMS if written_by_t5x(checkpoint) else PARAMS
        restored = handler.restore(
            place,
            args=ocp.args.PyTreeRestore(
                item={key: abstract},
                restore_args=ocp.checkpoint_utils.construct_restore_args({key: abstract}),
                partial_restore=True,
            ),
        )
    return step, restored[key]


@contextlib.contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Turn what orbax raises while it reads a broken folder checkpoint_N into one message.

    Raises:
        SettingError: the checkpoint is not whole.
    """
    try:
        # Told before anything is read: orbax would leave half-done reads behind.
        description = checkpoint / STATE / "_METADATA"
        if not description.exists():
            raise FileNotFoundError(f"{description} is missing")
        yield
    except SettingError:
        raise
    except Exception as error:  # what a broken file raises depends on where it is broken
        raise SettingError(
            f"{checkpoint.name} of {checkpoint.parent} is not whole and cannot be read: "
            f"{first_line(error)[:200]}",
            settings=("step", "model_dir"),
            hint="Use another step, or copy the checkpoint again.",
        ) from error


def checkpoint_steps(model_dir: Path) -> list[int]:
    """List the steps of the complete checkpoints of a run, in order."""
    names = [path.name.removeprefix("checkpoint_") for path in model_dir.glob("checkpoint_*")]
    return sorted(int(name) for name in names if name.isdigit())


def written_by_t5x(checkpoint: Path) -> bool:
    """Say whether a folder checkpoint_N is one of t5x's, not ours."""
    return T5X_PARAMS in _saved(checkpoint)


def refuse_other_layout(checkpoint: Path, *, t5x: bool) -> None:
    """Refuse a checkpoint that the other runner wrote.

    Raises:
        SettingError: it is not t5x's, or not ours, as `t5x` says what is wanted.
    """
    if written_by_t5x(checkpoint) != t5x:
        raise SettingError(
            f"{checkpoint} was written by {'our own runner' if t5x else 't5x'}, whose layout is "
            "another one.",
            settings=("model_dir",),
            hint=f"Go on under that runner, or: gshard-exp convert {checkpoint} --gin_file=... "
            "--gin.MODEL_DIR=NEW",
        )


def refuse_other_params(checkpoint: Path, params: Params) -> None:
    """Refuse a checkpoint of either runner that holds parameters of another model.

    Raises:
        SettingError: with the first that differs.
    """
    saved = _saved(checkpoint)
    found = saved[T5X_PARAMS if T5X_PARAMS in saved else PARAMS]
    _refuse_other_shapes(checkpoint.name, {PARAMS: found}, {PARAMS: params})


def _saved(checkpoint: Path) -> Mapping[str, Any]:
    """Read what arrays a checkpoint of either runner has, with their shapes."""
    with readable(checkpoint):
        place = epath.Path(checkpoint.absolute()) / STATE
        return ocp.PyTreeCheckpointHandler().metadata(place).tree
