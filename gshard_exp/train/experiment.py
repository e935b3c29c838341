"""The experiment: the root of the tree that a gin file assembles."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, Mesh

from gshard_exp import axes
from gshard_exp.data.batches import DataSource
from gshard_exp.errors import SettingError, require_at_least, require_one_of
from gshard_exp.model.contract import Model, Params, abstract_batch, moe_layers
from gshard_exp.model.incremental import Search
from gshard_exp.moe.layer import check_groups
from gshard_exp.paths import parameter_path
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules
from gshard_exp.train.checkpoint import Checkpoints
from gshard_exp.train.optimizer import Adafactor, AdamW, state_names
from gshard_exp.train.parameters import parameters
from gshard_exp.train.state import StatePlan, plan_state
from gshard_exp.train.step import StepFunction, partitioned_train_step


class Evaluator(Protocol):
    """Scores parameters during training. The loop is handed evaluators; it builds none."""

    name: str
    every_steps: int
    at_start: bool
    batch_size: int
    lengths: Mapping[str, int]

    def __call__(
        self, params: Params, *, model: Model, mesh: Mesh, rules: Rules, folder: Path
    ) -> tuple[Mapping[str, float], str]:
        """Return scalars to write, and a text for a person to read.

        Args:
            params: on the mesh.
            model: network and losses.
            mesh: of the run.
            rules: of the run.
            folder: for files of the evaluator's own.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """What to do about a step whose loss or gradient is not finite.

    Such a step never changes the parameters.

    Attributes:
        max_skipped: steps in a row to skip before the run stops; 0 stops at the first.
    """

    max_skipped: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "max_skipped")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that defines a run.

    Attributes:
        model_dir: folder for everything that the run writes; the same folder resumes.
        model: network and losses.
        data: where training batches come from.
        lengths: sizes of a row that the model leaves open; of translation {"inputs": tokens of the
            source, "targets": tokens of the target}.
        batch_size: rows in a batch, over all devices and microbatches.
        train_steps: the step at which the run ends.
        optimizer: and its schedule.
        rules: logical axis -> mesh axis.
        mesh: size of each mesh axis.
        checkpoints: when to save, what to keep.
        evaluators: run in their order when due, at the end, and (`at_start`) before the first step.
        microbatches: parts in which a batch is computed; the result is the same.
        gradient_dtype: `float32`, or `bfloat16` for the matrices of the stacks, whose gradients
            then take half the memory; see `train.step.rounded`. Not in the paper.
        seed: of parameters, dropout and routing (the data has its own).
        log_every_steps: steps between lines of metrics.
        nonfinite: what to do about a loss that is not finite.
        search: how the trained model looks for translations; None: `score.beam.BeamSearch()`.
    """

    model_dir: str
    model: Model
    data: DataSource
    lengths: Mapping[str, int]
    batch_size: int
    train_steps: int
    optimizer: Adafactor | AdamW
    rules: Rules
    checkpoints: Checkpoints
    mesh: MeshSpec = MeshSpec()
    evaluators: tuple[Evaluator, ...] = ()
    microbatches: int = 1
    gradient_dtype: str = "float32"
    seed: int = 0
    log_every_steps: int = 50
    nonfinite: NonFinite = NonFinite()
    search: Search | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "train_steps", "microbatches", "log_every_steps")
        require_one_of(self, ("float32", "bfloat16"), "gradient_dtype")
        if "://" in self.model_dir:
            raise SettingError(
                f"model_dir={self.model_dir!r} is no folder of this machine: runs write to local "
                "(or mounted) folders only.",
                settings=("model_dir",),
            )
        self.model.stack_lengths(self.lengths)  # refuses those that are not the model's
        if self.batch_size % self.microbatches:
            raise SettingError(
                f"batch_size={self.batch_size} does not divide into microbatches="
                f"{self.microbatches}: every part has the same number of rows.",
                settings=("microbatches", "batch_size"),
                hint=f"Set microbatches to a divisor of {self.batch_size}.",
            )

    @property
    def folder(self) -> Path:
        """Where the run writes: `model_dir`."""
        return Path(self.model_dir).expanduser()


def plan_experiment(
    experiment: Experiment, devices: Sequence[jax.Device] | None = None
) -> tuple[StatePlan, StepFunction]:
    """Build the mesh, work out the train state on it and trace the step, compiling nothing.

    Args:
        experiment: the assembled tree.
        devices: those of the mesh, for instance of a described topology; default: this process's.

    Raises:
        SettingError: something does not fit; its settings are paths from the experiment.
    """
    with _blaming("mesh"):
        mesh = experiment.mesh.build(devices)
    check_layout(experiment, mesh)
    return _plan_on(experiment, mesh)


def _plan_on(experiment: Experiment, mesh: Mesh | AbstractMesh) -> tuple[StatePlan, StepFunction]:
    with _blaming("rules"):
        plan = plan_state(experiment.model, experiment.optimizer, mesh, experiment.rules)
        step = partitioned_train_step(
            plan, experiment.rules, experiment.microbatches, experiment.gradient_dtype
        )
        # Tracing meets every constraint on an activation.
        jax.eval_shape(step, plan.abstract, batch_on(experiment, mesh))
    return plan, step


def batch_on(experiment: Experiment, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a training batch with their shardings on a mesh."""
    entries = experiment.model.batch_entries(experiment.batch_size, experiment.lengths)
    return abstract_batch(entries, mesh, experiment.rules)


@contextlib.contextmanager
def _blaming(field: str) -> Iterator[None]:
    """Turn settings of an object below the experiment into paths from the experiment."""
    try:
        yield
    except SettingError as error:
        paths = tuple(f"{field}.{setting}" for setting in error.settings)
        raise SettingError(error.problem, paths, error.hint) from error


def check_layout(experiment: Experiment, mesh: Mesh) -> None:
    """Refuse batches and routing groups that do not lie evenly on the mesh, before any compile.

    Raises:
        SettingError: with what would fit.
    """
    _check_batches(
        experiment,
        mesh,
        batch_size=experiment.batch_size,
        lengths=experiment.lengths,
        microbatches=experiment.microbatches,
        training=True,
        settings=("batch_size", "microbatches"),
    )
    for index, evaluator in enumerate(experiment.evaluators):
        _check_batches(
            experiment,
            mesh,
            batch_size=evaluator.batch_size,
            lengths=evaluator.lengths,
            microbatches=1,
            training=False,
            settings=(f"evaluators[{index}].batch_size",),
        )


def _check_batches(
    experiment: Experiment,
    mesh: Mesh,
    *,
    batch_size: int,
    lengths: Mapping[str, int],
    microbatches: int,
    training: bool,
    settings: tuple[str, ...],
) -> None:
    rows = batch_size // microbatches
    row_parts = experiment.rules.partitions(axes.BATCH, mesh)
    if rows % row_parts:
        parts = f" in microbatches={microbatches}" if microbatches > 1 else ""
        raise SettingError(
            f"batch_size={batch_size}{parts} makes {rows} rows at once, which do not divide over "
            f"the {row_parts} mesh partitions of 'batch'.",
            settings=settings,
            hint=f"Set batch_size to a multiple of {row_parts * microbatches}.",
        )
    for stack, length in experiment.model.stack_lengths(lengths).items():
        for field, layer in moe_layers(experiment.model, stack):
            check_groups(
                layer,
                batch=rows,
                length=length,
                microbatches=microbatches,
                shards=experiment.rules.partitions(axes.GROUP, mesh),
                training=training,
                what=stack,
                settings=(f"model.module.{stack}.{field}.group_size", *settings),
            )


def check_without_devices(experiment: Experiment, *, trace: bool = False) -> None:
    """Refuse what can be known to be wrong without the devices of the mesh, however many.

    Batches, routing groups, parameters and optimizer state have to lie evenly on a mesh of the
    asked size.

    Args:
        experiment: the assembled tree.
        trace: also trace the training step on a mesh without devices, as `plan_experiment` does on
            one with: it meets every constraint on an activation, and takes seconds.

    Raises:
        SettingError: something does not fit; its settings are paths from the experiment.
    """
    mesh = experiment.mesh.abstract()
    check_layout(experiment, mesh)
    with _blaming("rules"):
        _check_state(experiment, mesh)
    if trace:
        _plan_on(experiment, mesh)


def _check_state(experiment: Experiment, mesh: AbstractMesh) -> None:
    """Apply the rules to parameters and optimizer state; the model itself is not traced again."""
    table = parameters(experiment.model)
    for row in table:
        experiment.rules.spec(row.names, shape=row.shape, mesh=mesh, what=row.path)
    # Parameters of equal shape and names have equal state: the first stands for all of them.
    first = {(row.shape, row.names): row for row in reversed(table)}.values()
    shapes = {row.path: jax.ShapeDtypeStruct(row.shape, jnp.float32) for row in first}
    params = unflatten_dict(shapes, sep="/")
    names = unflatten_dict({row.path: row.names for row in first}, sep="/")
    state = jax.eval_shape(experiment.optimizer.make(names).init, params)
    rules = experiment.rules.for_optimizer()

    def check(path, leaf, leaf_names):
        rules.spec(leaf_names, shape=leaf.shape, mesh=mesh, what=parameter_path(path))

    jax.tree_util.tree_map_with_path(check, state, state_names(state, names, params))


def check_vocabularies(experiment: Experiment) -> None:
    """Refuse vocabularies with more pieces than the embeddings have rows.

    Builds corpus and vocabularies, if they are not built yet.

    Raises:
        SettingError: with both sizes.
    """
    sizes = experiment.data.vocab_sizes()
    for key, embedding in (("inputs", "source_embedding"), ("targets", "target_embedding")):
        if key not in sizes:
            continue
        rows = getattr(experiment.model.module, embedding).vocab_size
        if sizes[key] > rows:
            raise SettingError(
                f"the vocabulary of {key} has {sizes[key]} pieces and the {embedding} only {rows} "
                "rows: every piece needs one.",
                settings=(f"model.module.{embedding}.vocab_size",),
                hint=f"Set it to at least {sizes[key]}.",
            )
