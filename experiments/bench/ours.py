"""Our training step of an experiment, on random batches, ready to be called again and again."""

import dataclasses
from collections.abc import Sequence

import jax

from gshard_exp.config import assemble
from gshard_exp.data.batches import RandomData, to_mesh
from gshard_exp.train.experiment import Experiment, plan_experiment


def assembled(files: Sequence[str], bindings: Sequence[str]) -> Experiment:
    """Assemble an experiment whose text, if it has any, is replaced by random tokens."""
    experiment = assemble(Experiment, list(files), list(bindings)).tree
    module = experiment.model.module
    data = RandomData(module.source_embedding.vocab_size, module.target_embedding.vocab_size)
    return dataclasses.replace(experiment, data=data, evaluators=())


class Step:
    """The compiled step with its state; every call is one step, done when it returns."""

    def __init__(self, experiment: Experiment) -> None:
        plan, function = plan_experiment(experiment)
        batches = experiment.data.train_batches(
            batch_size=experiment.batch_size, lengths=experiment.lengths
        )
        self._batch = to_mesh(next(batches), plan.mesh, experiment.rules)
        self._state = plan.init(experiment.seed)
        self.compiled = function.lower(self._state, self._batch).compile()

    def __call__(self) -> float:
        self._state, metrics = self.compiled(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])
