"""A tiny experiment to plan, by plain constructors."""

import dataclasses

import models

from gshard_exp.train.experiment import Experiment
from gshard_exp.train.optimizer import Adafactor, AdamW, SqrtDecay


def experiment(seq2seq=None, **fields) -> Experiment:
    """Blocks dense and sparse in turn, 8 experts, 16 rows of 8 and 16 tokens."""
    tiny = models.experiment(
        model=seq2seq or models.model(encoder="ds", decoder="ds", repeats=(1, 1)),
        optimizer=Adafactor(learning_rate=SqrtDecay()),
    )
    return dataclasses.replace(tiny, **fields)


def small() -> Experiment:
    """Two blocks, no dropout, AdamW: little for a TPU's compiler to do."""
    return experiment(
        models.model(encoder="s", decoder="d", repeats=(1, 1), dropout=0.0),
        optimizer=AdamW(learning_rate=SqrtDecay()),
    )
