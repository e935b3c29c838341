"""Calls t5x's `train` with an assembled experiment. Imports t5x."""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.core import unfreeze
from jax.sharding import Mesh
from t5x import decoding, trainer, utils
from t5x import train as train_lib

from gshard_exp.data.tokens import INPUTS, TARGETS
from gshard_exp.score.beam import BeamSearch
from gshard_exp.t5x_runner.batches import OurBatches
from gshard_exp.t5x_runner.model import GShardModel
from gshard_exp.t5x_runner.optimizer import NamedOptimizer, SkippedSteps
from gshard_exp.t5x_runner.partitioner import MeshPartitioner
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.loop import Evaluations, NonFiniteLossError, Report, write_files
from gshard_exp.train.metrics import Console, JsonLines
from gshard_exp.train.record import Clock, RunRecord, start_record

UPTIME = "timing/uptime"  # of the process: a mean of it says nothing


def drive(
    experiment: Experiment,
    files: Mapping[str, str],
    report: Report,
    argv: Sequence[str] | None,
) -> Any:
    """Train; see `run.train`.

    t5x's own evaluations stay off: the experiment's evaluators run instead, see `Progress`.
    """
    clock = Clock()
    batches = OurBatches(experiment)
    partitioner = MeshPartitioner(experiment.mesh, experiment.rules)
    progress = Progress(experiment, partitioner.mesh, report)
    made: list[trainer.Trainer] = []

    def make_trainer(**how: Any) -> trainer.Trainer:
        # By now t5x has made the state or restored it, and compiled no step.
        state = how["train_state"]
        write_files(experiment, int(state.step), files, report)
        record = start_record(
            experiment,
            mesh=partitioner.mesh,
            identity=batches.identity,
            step=int(state.step),
            clock=clock,
            argv=argv,
            report=report,
        )
        progress.begin(state, record)
        made.append(
            trainer.Trainer(
                learning_rate_fn=experiment.optimizer.learning_rate,
                num_microbatches=None,
                weight_metrics_computer=SkippedSteps(),
                **how,
            )
        )
        return made[0]

    try:
        _, state = train_lib.train(
            model=_model(experiment),
            partitioner=partitioner,
            trainer_cls=make_trainer,
            summarize_config_fn=lambda *_: None,  # `make_trainer` writes config.gin
            get_dataset_fn=lambda *_: batches,
            concurrent_metrics=False,  # or `progress` would not run
            actions={"TRAIN": [progress]},
            verify_matching_vocabs_fn=None,  # `check_vocabularies` has done it
            **_settings(experiment),
        )
    except BaseException:
        # t5x closes its trainer at the end of a run only; one that is left to the garbage collector
        # writes its metrics at any moment, in the middle of a graph of TensorFlow for instance.
        for left in made:
            left.close()
        raise
    progress.end()
    return state


class Progress(trainer.BaseAction):
    """Says how a run goes on, and runs the experiment's evaluators when they are due.

    t5x calls it after every `_window` steps, before it saves a checkpoint of that step.
    """

    def __init__(self, experiment: Experiment, mesh: Mesh, report: Report) -> None:
        self._experiment, self._mesh, self._report = experiment, mesh, report
        self._windows: list[Mapping[str, float]] = []

    def begin(self, train_state: Any, record: RunRecord) -> None:
        """Open the outputs, and run the evaluators of the first step."""
        self._record = record
        step, last = int(train_state.step), self._experiment.train_steps
        self._evaluations = Evaluations(self._experiment, self._mesh, self._report, step)
        path: Path = self._experiment.folder / "train" / "metrics.jsonl"
        self._writers = (JsonLines(path, step), Console(self._report, last))
        if step:
            self._report(f"resuming from {self._experiment.folder / f'checkpoint_{step}'}")
        self._evaluations.run(step, unfreeze(train_state.params))
        if step == last:
            self._report(f"step {step} of {last}: the run is complete")

    def end(self) -> None:
        """Note that all steps are taken and saved."""
        self._record.save(self._experiment.train_steps, finished=True)

    def run(self, train_state: Any, metrics_by_task: Mapping[str, Mapping[str, Any]]) -> bool:
        """Write metrics and evaluate; never ask t5x to stop.

        Raises:
            NonFiniteLossError: as our own loop; t5x saves nothing more then.
        """
        step, last = int(train_state.step), self._experiment.train_steps
        summary = metrics_by_task[train_lib.TRAIN_METRIC_KEY]
        self._windows.append({name: float(value.value) for name, value in summary.items()})
        if step % self._experiment.log_every_steps == 0 or step == last:
            scalars = _means(self._windows)
            for writer in self._writers:
                writer.write_scalars(step, scalars)
            self._windows = []
            self._record.save(step)
        if summary["skipped_steps"].value > 0:
            raise NonFiniteLossError(
                f"a loss or gradient in the steps up to {step} is not finite. What checkpoints "
                "there are stay intact. Try a lower learning rate or gradient clipping "
                "(max_grad_norm)."
            )
        self._evaluations.run(step, unfreeze(train_state.params))
        return False


def _means(windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Put windows of equally many steps together: counts add up, rates go by the time taken."""
    seconds = [1 / window["timing/steps_per_second"] for window in windows]

    def together(name: str) -> float:
        values = [window[name] for window in windows]
        if name == "skipped_steps":
            return float(np.sum(values))
        return float(np.average(values, weights=seconds if name.endswith("_per_second") else None))

    return {name: together(name) for name in windows[0] if name != UPTIME}


def _window(experiment: Experiment) -> int:
    """Return the longest stretch of steps of which every period is a multiple."""
    evaluators = (evaluator.every_steps for evaluator in experiment.evaluators)
    periods = (experiment.log_every_steps, experiment.checkpoints.every_steps, *evaluators)
    return math.gcd(*periods)


def _model(experiment: Experiment) -> GShardModel:
    import seqio

    model: Any = experiment.model
    files = getattr(getattr(experiment.data, "tasks", None), "models", None)
    if files:
        source, target = (
            seqio.SentencePieceVocabulary(str(files[feature]), extra_ids=0)
            for feature in (INPUTS, TARGETS)
        )
    else:  # the sizes of embeddings are all that is known
        source = seqio.PassThroughVocabulary(model.module.source_embedding.vocab_size)
        target = seqio.PassThroughVocabulary(model.module.target_embedding.vocab_size)
    search: Any = experiment.search or BeamSearch()
    return GShardModel(
        model,
        NamedOptimizer(experiment.optimizer),
        source,
        target,
        microbatches=experiment.microbatches,
        decode_fn=functools.partial(decoding.beam_search, alpha=search.alpha),
        num_decodes=search.beam_size,
    )


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Say in the words of t5x's `train` how long, how often, and with what data."""
    save = utils.SaveCheckpointConfig(
        period=experiment.checkpoints.every_steps,
        keep=experiment.checkpoints.keep,
        save_dataset=True,
    )
    return {
        "train_dataset_cfg": _dataset(experiment),
        "train_eval_dataset_cfg": None,
        "infer_eval_dataset_cfg": None,
        "checkpoint_cfg": utils.CheckpointConfig(save=save),
        "model_dir": str(experiment.folder.resolve()),
        "total_steps": experiment.train_steps,
        "eval_steps": 0,
        "eval_period": 0,
        "stats_period": _window(experiment),
        "random_seed": experiment.seed,
    }


def _dataset(experiment: Experiment) -> utils.DatasetConfig:
    """Describe the data; t5x reads its batch size, and `OurBatches` brings the batches."""
    return utils.DatasetConfig(
        mixture_or_task_name=getattr(experiment.data, "mixture_or_task_name", "random"),
        task_feature_lengths=experiment.lengths,
        split=getattr(experiment.data, "split", "train"),
        batch_size=experiment.batch_size,
        shuffle=True,
        seed=getattr(experiment.data, "seed", 0),
        pack=getattr(experiment.data, "pack", True),
    )
