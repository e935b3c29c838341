"""The verb `convert`: a checkpoint of one runner to one of the other. Needs no t5x."""

from collections.abc import Mapping
from pathlib import Path

from gshard_exp.data.batches import BatchIterator
from gshard_exp.errors import SettingError
from gshard_exp.t5x_runner import layout
from gshard_exp.train.checkpoint import (
    DATA,
    checkpoint_steps,
    readable,
    refuse_other_params,
    written_by_t5x,
)
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.loop import Report, write_files
from gshard_exp.train.state import TrainState, model_info, plan_state


def convert(
    experiment: Experiment, checkpoint: Path, files: Mapping[str, str], report: Report
) -> None:
    """Write a checkpoint of the one runner as one of the other, into a folder of its own.

    Whose it is shows in its layout. All of a run of ours is carried over, so that the other runner
    goes on as the first would have: parameters, optimizer state, step, position in the data. Of a
    checkpoint of plain t5x, what the experiment cannot use starts anew, and is said to: the state
    of another optimizer, and a position in data that another stream made.

    Args:
        experiment: whose checkpoint it is; its `model_dir` takes the new one.
        checkpoint: a folder checkpoint_N.
        files: as in `train.loop.train`.
        report: prints a line for a person.

    Raises:
        SettingError: no such checkpoint, one of another model or not whole, or `model_dir` holds
            some already.
    """
    step = _step_of(checkpoint)
    folder = experiment.folder
    if checkpoint_steps(folder):
        raise SettingError(
            f"{folder} holds checkpoints already: a converted one needs a folder of its own.",
            settings=("model_dir",),
            hint="Set another MODEL_DIR.",
        )
    mesh = experiment.mesh.build()
    plan = plan_state(experiment.model, experiment.optimizer, mesh, experiment.rules)
    batches = experiment.data.train_batches(
        batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    from_t5x = written_by_t5x(checkpoint)
    if from_t5x:
        refuse_other_params(checkpoint, plan.abstract.params)
        begin = plan.init(experiment.seed)
        with readable(checkpoint):
            state, known = layout.read_t5x(checkpoint, begin)
        if not known:
            report("the optimizer state is of another optimizer: it starts anew")
        _go_to(batches, checkpoint / layout.DATASET / layout.POSITION, report)
    else:
        state = _ours(experiment, checkpoint, step, plan.abstract)
        _go_to(batches, checkpoint / DATA, report)
    folder.mkdir(parents=True, exist_ok=True)
    if from_t5x:
        opened = experiment.checkpoints.open(str(folder))
        opened.save(step, state, batches)
        opened.close()
    else:
        layout.write_t5x(folder, state, batches)
    write_files(experiment, 0, {"model-info.txt": model_info(plan), **files}, report)
    source, target = ("t5x", "ours") if from_t5x else ("ours", "t5x")
    report(f"{checkpoint} ({source}) -> {folder / checkpoint.name} ({target})")


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint_")
    if not number.isdigit() or not (checkpoint / "state").is_dir():
        raise SettingError(
            f"{checkpoint} is no checkpoint: one is a folder checkpoint_N with `state` in it.",
            hint="Name one of those in the MODEL_DIR of a run.",
        )
    return int(number)


def _ours(experiment: Experiment, checkpoint: Path, step: int, abstract: TrainState) -> TrainState:
    opened = experiment.checkpoints.open(str(checkpoint.parent))
    try:
        with readable(checkpoint):
            return opened.restore(step, abstract, None)
    finally:
        opened.close()


def _go_to(batches: BatchIterator, position: Path, report: Report) -> None:
    if position.is_dir():
        batches.restore(position)
    else:
        report(f"{position} holds no position in this data: training starts at its beginning")
