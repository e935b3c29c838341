"""The training loop: resume, step, log, evaluate, save."""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gshard_exp.data.batches import BatchIterator, to_mesh
from gshard_exp.model.contract import Params
from gshard_exp.train.checkpoint import CheckpointFolder
from gshard_exp.train.experiment import (
    Evaluator,
    Experiment,
    check_vocabularies,
    plan_experiment,
)
from gshard_exp.train.metrics import Console, Window, Writer, open_writers
from gshard_exp.train.record import Clock, RunRecord, start_record
from gshard_exp.train.state import StatePlan, TrainState, model_info
from gshard_exp.train.step import StepFunction

Report = Callable[[str], None]


class NonFiniteLossError(RuntimeError):
    """Loss or gradient stayed infinite or NaN for longer than the run allows."""


class Interrupted(Exception):
    """The run was asked to stop, and has saved itself."""


@dataclasses.dataclass
class _Run:
    """What the parts of the loop share."""

    experiment: Experiment
    plan: StatePlan
    step_function: StepFunction
    batches: BatchIterator
    checkpoints: CheckpointFolder
    report: Report


def train(
    experiment: Experiment,
    *,
    files: Mapping[str, str] | None = None,
    report: Report = print,
    argv: Sequence[str] | None = None,
) -> TrainState:
    """Train to `train_steps`, from the newest checkpoint if there is one.

    Args:
        experiment: the assembled tree.
        files: further files to put into the model directory, by name (`config.gin`).
        report: prints a line for a person.
        argv: words of the command line, for run.json.

    Returns:
        The final state.

    Raises:
        SettingError: before anything is compiled or written.
        NonFiniteLossError: the last good checkpoint is intact.
        Interrupted: SIGINT or SIGTERM came; a checkpoint of the current step was written.
    """
    clock = Clock()
    plan, step_function = plan_experiment(experiment)
    check_vocabularies(experiment)
    batches = experiment.data.train_batches(
        batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    checkpoints = experiment.checkpoints.open(experiment.model_dir)
    run = _Run(experiment, plan, step_function, batches, checkpoints, report)
    try:
        state, start = _start(run)
        # Only now: what a folder says about its run stays if the new settings do not fit it.
        texts = {"model-info.txt": model_info(plan), **(files or {})}
        write_files(experiment, start, texts, report)
        record = start_record(
            experiment,
            mesh=plan.mesh,
            identity=batches.identity,
            step=start,
            clock=clock,
            argv=argv,
            report=report,
        )
        state = _steps(run, state, start, record)
    finally:
        run.checkpoints.close()
    # Not before the last checkpoint is on disk.
    record.save(max(start, experiment.train_steps), finished=True)
    return state


def write_files(
    experiment: Experiment, start: int, files: Mapping[str, str], report: Report
) -> None:
    """Write files about a run; one that says otherwise about its `start` steps so far is kept."""
    for name, text in files.items():
        path = experiment.folder / name
        before = path.read_text(encoding="utf-8") if path.exists() else text
        if start and _without_comments(before) != _without_comments(text):
            kept = path.with_name(f"{path.stem}_until_{start}{path.suffix}")
            path.replace(kept)
            report(f"settings differ from those of the steps so far, which are in {kept}")
        path.write_text(text, encoding="utf-8")
    experiment.data.write_model_files(experiment.folder)


def _without_comments(text: str) -> list[str]:
    return [line.split("  # ")[0] for line in text.splitlines()]


def _start(run: _Run) -> tuple[TrainState, int]:
    """Restore the newest checkpoint, or make the state of step 0."""
    step = run.checkpoints.latest_step()
    if step is None:
        return run.plan.init(run.experiment.seed), 0
    run.report(f"resuming from {run.experiment.folder / f'checkpoint_{step}'}")
    return run.checkpoints.restore(step, run.plan.abstract, run.batches), step


def _steps(run: _Run, state: TrainState, start: int, record: RunRecord) -> TrainState:
    experiment, last = run.experiment, run.experiment.train_steps
    evaluations = Evaluations(experiment, run.plan.mesh, run.report, start)
    # Also those that a killed run did not come to after its last checkpoint.
    evaluations.run(start, state.params)
    if start >= last:
        run.report(f"step {start} of {last}: the run is complete")
        return state
    console = Console(run.report, last)
    writers = open_writers(run.experiment.folder / "train", start_step=start, console=console)
    window = Window(experiment.model, experiment.optimizer.learning_rate)
    previous: dict | None = None
    entries = experiment.model.batch_entries(experiment.batch_size, experiment.lengths)
    names = {key: entry.names for key, entry in entries.items()}
    with _stop_requested() as stop_requested:
        for step in range(start + 1, last + 1):
            began = time.perf_counter()
            batch = to_mesh(next(run.batches), run.plan.mesh, experiment.rules, names)
            state, metrics = run.step_function(state, batch)
            window.add(metrics)
            # Looking at the step before keeps the device busy while this one is computed.
            _check_finite(run, step - 1, previous)
            previous = metrics
            if step == start + 1:
                jax.block_until_ready(metrics)
                seconds = time.perf_counter() - began
                run.report(f"first step, with its compilation: {seconds:.1f} s")
                window.pause(seconds, steps=1)
            if step % experiment.log_every_steps == 0 or step == last:
                _write(writers, step, window.close())
            stopping = stop_requested()
            if stopping or evaluations.due(step) or run.checkpoints.due(step, last):
                began = time.perf_counter()
                _check_finite(run, step, metrics)
                if stopping or run.checkpoints.due(step, last):
                    run.checkpoints.save(step, state, run.batches)
                    record.save(step)
                if stopping and step < last:
                    raise Interrupted(f"stopped at step {step}; the same command goes on")
                evaluations.run(step, state.params)
                window.pause(time.perf_counter() - began)
    return state


class Evaluations:
    """Runs the evaluators of an experiment when they are due, and writes what they return."""

    def __init__(self, experiment: Experiment, mesh: Mesh, report: Report, start_step: int) -> None:
        self._experiment, self._mesh, self._say = experiment, mesh, report
        self._start_step = start_step
        self._writers = {}
        for evaluator in experiment.evaluators:
            # The report is written last: without it the evaluation of that step runs again.
            done = self._report(evaluator, start_step).exists()
            self._writers[evaluator.name] = open_writers(
                self._folder(evaluator), start_step=start_step if done else start_step - 1
            )

    def due(self, step: int) -> list[Evaluator]:
        """Return the evaluators that a step asks for."""
        evaluators = self._experiment.evaluators
        if step == 0:
            return [e for e in evaluators if e.at_start]
        last = step == self._experiment.train_steps
        return [e for e in evaluators if last or step % e.every_steps == 0]

    def run(self, step: int, params: Params) -> None:
        """Run the evaluators that are due, in their order; those that have run speak again."""
        for evaluator in self.due(step):
            folder = self._folder(evaluator)
            report = self._report(evaluator, step)
            if step and report.exists() and step <= self._start_step:
                self._say(report.read_text(encoding="utf-8").rstrip())
                continue
            began = time.perf_counter()
            scalars, text = evaluator(
                params,
                model=self._experiment.model,
                mesh=self._mesh,
                rules=self._experiment.rules,
                folder=folder,
            )
            _write(self._writers[evaluator.name], step, scalars)
            report.write_text(text, encoding="utf-8")
            seconds = time.perf_counter() - began
            self._say(f"{text.rstrip()}\n({evaluator.name} at step {step}, {seconds:.1f} s)")

    def _report(self, evaluator: Evaluator, step: int) -> Path:
        return self._folder(evaluator) / f"report_{step}.txt"

    def _folder(self, evaluator: Evaluator) -> Path:
        return self._experiment.folder / "training_eval" / evaluator.name


def _check_finite(run: _Run, step: int, metrics: dict | None) -> None:
    if metrics is None or int(metrics["skipped"]) <= run.experiment.nonfinite.max_skipped:
        return
    saved = run.checkpoints.latest_step()
    kept = f"checkpoint_{saved} is intact" if saved is not None else "no checkpoint was written yet"
    raise NonFiniteLossError(
        f"loss {float(metrics['loss'])} (gradient norm {float(metrics['grad_norm'])}) at step "
        f"{step} is not finite, {int(metrics['skipped'])} step(s) in a row; the run allows "
        f"{run.experiment.nonfinite.max_skipped}. {kept}. Try a lower learning rate, gradient "
        "clipping (max_grad_norm), or allow skipping (NonFinite.max_skipped)."
    )


def _write(writers: tuple[Writer, ...], step: int, scalars: Mapping[str, float]) -> None:
    for writer in writers:
        writer.write_scalars(step, scalars)
        writer.flush()


@contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT and the first SIGTERM into a request; the second of one acts as usual.

    One of each is no impatience: under SLURM a run gets SIGTERM like all processes of its job, and
    SIGINT from the launcher of its sweep (sweep/launch.py).
    """
    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number, frame) -> None:
        del frame
        asked.append(number)
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:
        # Signals belong to the main thread; elsewhere the run is stopped by its owner.
        before.clear()
    try:
        yield lambda: bool(asked)
    finally:
        for asked_for, handler in before.items():
            signal.signal(asked_for, handler)
