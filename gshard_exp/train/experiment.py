"""The experiment: the root of the tree that a gin file assembles."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gshard_exp import axes
from gshard_exp.data.batches import RandomData, SeqioData
from gshard_exp.errors import SettingError, require_at_least
from gshard_exp.model.seq2seq import BATCH_KEYS, Params, Seq2SeqModel
from gshard_exp.moe.layer import check_groups
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules
from gshard_exp.train.checkpoint import Checkpoints
from gshard_exp.train.optimizer import Adafactor, AdamW
from gshard_exp.train.parameters import moe_layers, parameters
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
        self, params: Params, *, model: Seq2SeqModel, mesh: Mesh, rules: Rules, folder: Path
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
        lengths: tokens in a row, {"inputs": L of the source, "targets": L of the target}.
        batch_size: rows in a batch, over all devices and microbatches.
        train_steps: the step at which the run ends.
        optimizer: and its schedule.
        rules: logical axis -> mesh axis.
        mesh: size of each mesh axis.
        checkpoints: when to save, what to keep.
        evaluators: run in their order when due, at the end, and (`at_start`) before the first step.
        microbatches: parts in which a batch is computed; the result is the same.
        seed: of parameters, dropout and routing (the data has its own).
        log_every_steps: steps between lines of metrics.
        nonfinite: what to do about a loss that is not finite.
    """

    model_dir: str
    model: Seq2SeqModel
    data: SeqioData | RandomData
    lengths: Mapping[str, int]
    batch_size: int
    train_steps: int
    optimizer: Adafactor | AdamW
    rules: Rules
    checkpoints: Checkpoints
    mesh: MeshSpec = MeshSpec()
    evaluators: tuple[Evaluator, ...] = ()
    microbatches: int = 1
    seed: int = 0
    log_every_steps: int = 50
    nonfinite: NonFinite = NonFinite()

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "train_steps", "microbatches", "log_every_steps")
        if "://" in self.model_dir:
            raise SettingError(
                f"model_dir={self.model_dir!r} is no folder of this machine: runs write to local "
                "(or mounted) folders only.",
                settings=("model_dir",),
            )
        sides = sorted(self.lengths)
        if sides != ["inputs", "targets"] or min(self.lengths.values()) < 1:
            raise SettingError(
                f"lengths={dict(self.lengths)} has to name exactly 'inputs' and 'targets', with at "
                "least 1 token each.",
                settings=("lengths",),
            )
        if self.batch_size % self.microbatches:
            raise SettingError(
                f"batch_size={self.batch_size} does not divide into microbatches="
                f"{self.microbatches}: every part has the same number of rows.",
                settings=("microbatches", "batch_size"),
                hint=f"Set microbatches to a divisor of {self.batch_size}.",
            )


def plan_experiment(experiment: Experiment) -> tuple[StatePlan, StepFunction]:
    """Build the mesh, work out the train state on it and trace the step, compiling nothing.

    Raises:
        SettingError: something does not fit; its settings are paths from the experiment.
    """
    with _blaming("mesh"):
        mesh = experiment.mesh.build()
    check_layout(experiment, mesh)
    with _blaming("rules"):
        plan = plan_state(experiment.model, experiment.optimizer, mesh, experiment.rules)
        step = partitioned_train_step(plan, experiment.rules, experiment.microbatches)
        # Tracing meets every constraint on an activation.
        jax.eval_shape(step, plan.abstract, abstract_batch(experiment))
    return plan, step


def abstract_batch(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch, which is not made."""
    sides = {"encoder": "inputs", "decoder": "targets"}
    return {
        key: jax.ShapeDtypeStruct(
            (experiment.batch_size, experiment.lengths[sides[key.split("_")[0]]]), jnp.int32
        )
        for key in BATCH_KEYS
    }


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
        settings=("batch_size", "microbatches"),
    )
    for index, evaluator in enumerate(experiment.evaluators):
        _check_batches(
            experiment,
            mesh,
            batch_size=evaluator.batch_size,
            lengths=evaluator.lengths,
            microbatches=1,
            settings=(f"evaluators[{index}].batch_size",),
        )


def _check_batches(
    experiment: Experiment,
    mesh: Mesh,
    *,
    batch_size: int,
    lengths: Mapping[str, int],
    microbatches: int,
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
    for stack, key in (("encoder", "inputs"), ("decoder", "targets")):
        for field, layer in moe_layers(experiment.model, stack):
            check_groups(
                layer,
                batch=rows,
                length=lengths[key],
                microbatches=microbatches,
                shards=experiment.rules.partitions(axes.GROUP, mesh),
                what=stack,
                settings=(f"model.module.{stack}.{field}.group_size", *settings),
            )


def check_without_devices(experiment: Experiment) -> None:
    """Refuse what can be known to be wrong without the devices of the mesh, however many.

    Batches, routing groups and parameters have to lie evenly on a mesh of the asked size. Left to
    `plan_experiment`, which needs the devices: optimizer state and constraints on activations.

    Raises:
        SettingError: something does not fit; its settings are paths from the experiment.
    """
    mesh = experiment.mesh.abstract()
    check_layout(experiment, mesh)
    with _blaming("rules"):
        for row in parameters(experiment.model):
            experiment.rules.spec(row.names, shape=row.shape, mesh=mesh, what=row.path)


def check_vocabularies(experiment: Experiment) -> None:
    """Refuse vocabularies with more pieces than the embeddings have rows.

    Builds corpus and vocabularies, if they are not built yet.

    Raises:
        SettingError: with both sizes.
    """
    sizes = experiment.data.vocab_sizes()
    for key, embedding in (("inputs", "source_embedding"), ("targets", "target_embedding")):
        rows = getattr(experiment.model.module, embedding).vocab_size
        if sizes.get(key, 0) > rows:
            raise SettingError(
                f"the vocabulary of {key} has {sizes[key]} pieces and the {embedding} only {rows} "
                "rows: every piece needs one.",
                settings=(f"model.module.{embedding}.vocab_size",),
                hint=f"Set it to at least {sizes[key]}.",
            )
