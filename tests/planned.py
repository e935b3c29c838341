"""A tiny experiment to plan, by plain constructors."""

import dataclasses

import models

from gshard_exp.data.batches import RandomData
from gshard_exp.train.checkpoint import Checkpoints
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.optimizer import Adafactor, SqrtDecay


def experiment(seq2seq=None, **fields) -> Experiment:
    """Blocks dense and sparse in turn, 8 experts, 16 rows of 8 and 16 tokens."""
    tiny = Experiment(
        model_dir="runs/planned",
        model=seq2seq or models.model(encoder="ds", decoder="ds", repeats=(1, 1)),
        data=RandomData(source_vocab_size=models.VOCAB, target_vocab_size=models.VOCAB),
        lengths={"inputs": models.SOURCE, "targets": models.TARGET},
        batch_size=models.ROWS,
        train_steps=1,
        optimizer=Adafactor(learning_rate=SqrtDecay()),
        rules=models.RULES,
        checkpoints=Checkpoints(every_steps=1),
    )
    return dataclasses.replace(tiny, **fields)
