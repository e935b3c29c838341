"""The runner `t5x`: refuses what t5x cannot do, then hands over."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gshard_exp.data.tensorflow_import import load_tensorflow
from gshard_exp.errors import SettingError
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.train.checkpoint import checkpoint_steps, refuse_other_layout
from gshard_exp.train.experiment import Experiment, check_layout, check_vocabularies
from gshard_exp.train.loop import Report

_INSTALL = 'README.md, "Under t5x", lists what to install.'


def train(
    experiment: Experiment,
    *,
    files: Mapping[str, str] | None = None,
    report: Report = print,
    argv: Sequence[str] | None = None,
) -> Any:
    """Train to `train_steps` with t5x's `train` and its plain `Trainer`; see `train.loop.train`.

    What is the experiment's stays: parameters and random numbers of its seed, batches and the
    position in them, loss, optimizer, mesh and rules, periods, evaluators. What is t5x's: the step
    around the loss, the layout of `checkpoint_N` (`layout.py`), TensorBoard files, and that an
    interrupted run goes on from its last checkpoint.

    Returns:
        t5x's final train state.

    Raises:
        SettingError: t5x is not installed, or cannot do what a setting asks for.
        NonFiniteLossError: checkpoints are intact.
    """
    require_t5x()
    _refuse_what_t5x_cannot(experiment)
    # Here: a mesh of simulated devices has to be built before JAX starts.
    check_layout(experiment, experiment.mesh.build())
    check_vocabularies(experiment)
    steps = checkpoint_steps(experiment.folder)
    if steps:
        refuse_other_layout(experiment.folder / f"checkpoint_{steps[-1]}", t5x=True)
    if steps and steps[-1] > experiment.train_steps:
        report(f"step {steps[-1]} of {experiment.train_steps}: the run is complete")
        return None
    return load_drive()(experiment, files or {}, report, argv)


def require_t5x() -> None:
    """Refuse to go on without t5x.

    Raises:
        SettingError: it says what to install.
    """
    if importlib.util.find_spec("t5x") is None:
        raise SettingError(f"--runner=t5x needs t5x, which is not installed. {_INSTALL}")


def load_drive() -> Callable:
    """Import `drive.drive`, and with it t5x.

    Raises:
        SettingError: t5x is there, and something that it imports is not.
    """
    try:
        load_tensorflow()
        from gshard_exp.t5x_runner.drive import drive
    except ImportError as error:
        raise SettingError(
            f"t5x is installed, but what it imports is not all there: {error}. {_INSTALL}"
        ) from error
    return drive


def _refuse_what_t5x_cannot(experiment: Experiment) -> None:
    if not isinstance(experiment.model, Seq2SeqModel):
        raise SettingError(
            f"t5x trains a Seq2SeqModel; this experiment has a {type(experiment.model).__name__}.",
            settings=("model",),
            hint="Train it with our own runner.",
        )
    if experiment.nonfinite.max_skipped:
        raise SettingError(
            f"max_skipped={experiment.nonfinite.max_skipped}: t5x's loop does not count skipped "
            "steps in a row; under it a run stops at the first loss that is not finite.",
            settings=("nonfinite.max_skipped",),
            hint="Set it to 0, or train with our own runner.",
        )
    if experiment.gradient_dtype != "float32":
        raise SettingError(
            f"gradient_dtype={experiment.gradient_dtype!r}: t5x's step takes gradients in float32.",
            settings=("gradient_dtype",),
            hint="Set it to float32, or train with our own runner.",
        )
