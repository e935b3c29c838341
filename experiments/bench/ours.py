"""Our training step of an experiment, on random batches, ready to be called again and again."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

import jax

from gshard_exp.config import ConfigError, binding_from_flag
from gshard_exp.config.reading import read_files
from gshard_exp.data.batches import RandomData, to_mesh
from gshard_exp.errors import SettingError
from gshard_exp.train.experiment import Experiment, plan_experiment


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Split gin bindings (`--gin.NAME=VALUE`) from the arguments that the parser knows."""
    words = sys.argv[1:]
    bindings = [binding_from_flag(word) for word in words if word.startswith("--gin.")]
    return parser.parse_args([w for w in words if not w.startswith("--gin.")]), bindings


def main(run: Callable[[], None]) -> None:
    """Call a script's own function; a wrong setting is one message and exit status 2."""
    try:
        run()
    except (ConfigError, SettingError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def as_written(files: Sequence[str], bindings: Sequence[str]) -> Experiment:
    """Assemble an experiment with its own data.

    Places that only a run has to choose (MODEL_DIR) are filled in; nothing is written there.
    """
    return read_files(", ".join(files), files, bindings).assembled.tree


def assembled(files: Sequence[str], bindings: Sequence[str]) -> Experiment:
    """Assemble an experiment whose text, if it has any, is replaced by random tokens."""
    experiment = as_written(files, bindings)
    module = experiment.model.module
    data = RandomData(module.source_embedding.vocab_size, module.target_embedding.vocab_size)
    return dataclasses.replace(experiment, data=data, evaluators=())


class Step:
    """The compiled step with its state; every call is one step, done when it returns.

    Attributes:
        mesh: that it runs on.
        compiled: the program.
        lower_s: seconds to trace the step and hand it to XLA.
        compile_s: seconds that XLA took; less if it was found in the compilation cache.
        last_loss: of the last call.
    """

    def __init__(self, experiment: Experiment) -> None:
        began = time.perf_counter()
        plan, function = plan_experiment(experiment)
        batches = experiment.data.train_batches(
            batch_size=experiment.batch_size, lengths=experiment.lengths
        )
        self.mesh = plan.mesh
        self._batch = to_mesh(next(batches), plan.mesh, experiment.rules)
        lowered = function.lower(plan.abstract, self._batch)
        self.lower_s = time.perf_counter() - began
        began = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - began
        self._state = plan.init(experiment.seed)
        self.last_loss: float | None = None

    def __call__(self) -> None:
        self._state, metrics = self.compiled(self._state, self._batch)
        jax.block_until_ready(self._state)
        self.last_loss = float(metrics["loss"])
