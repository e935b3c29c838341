"""Tiny experiments for the tests of the loop, and what is left of them on disk."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gshard_exp.config import assemble
from gshard_exp.data.batches import RandomBatches, RandomData
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.train import loop
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.state import TrainState, plan_state

GIN = Path(__file__).parent / "gin"
TINY = str(GIN / "tiny.gin")
# One sparse block a stack and AdamW: a third of the default's compile time.
SMALL = (
    "NUM_ENCODER_LAYERS=1",
    "NUM_DECODER_LAYERS=1",
    "ENCODER_PATTERN=(@sparse/transformer.EncoderBlock(),)",
    "DECODER_PATTERN=(@sparse/transformer.DecoderBlock(),)",
    "OPTIMIZER=@optimizer.AdamW()",
    "optimizer.AdamW.learning_rate=@optimizer.SqrtDecay()",
)


def experiment(model_dir: Path, *bindings: str, small: bool = True, **fields) -> Experiment:
    """Assemble `tiny.gin`; `fields` replace those of the tree."""
    flags = [f"MODEL_DIR={model_dir}", *(SMALL if small else ()), *bindings]
    return dataclasses.replace(assemble(Experiment, [TINY], flags).tree, **fields)


def train(experiment: Experiment) -> tuple[TrainState, list[str]]:
    """Train and return the final state and what was said."""
    said: list[str] = []
    return loop.train(experiment, report=said.append), said


def arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Flatten a state into host arrays by path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def saved(experiment: Experiment, step: int | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of a checkpoint (default: the newest) onto one device."""
    plan = plan_state(
        experiment.model,
        experiment.optimizer,
        dataclasses.replace(experiment.mesh, data=1, expert=1, model=1).build(),
        experiment.rules,
    )
    folder = experiment.checkpoints.open(experiment.model_dir)
    try:
        step = folder.latest_step() if step is None else step
        return arrays(folder.restore(step, plan.abstract, None))
    finally:
        folder.close()


def checkpoints(model_dir: Path) -> list[str]:
    """List the checkpoint folders of a run, unfinished ones included."""
    return sorted(path.name for path in Path(model_dir).glob("checkpoint_*"))


def records(model_dir: Path) -> list[dict]:
    """Read the training metrics of a run."""
    return records_of(Path(model_dir) / "train")


def records_of(folder: Path) -> list[dict]:
    """Read the metrics of a folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """Hold two flattened states to equality in every bit."""
    assert one.keys() == other.keys()
    differing = [path for path in one if one[path].tobytes() != other[path].tobytes()]
    assert not differing


POISON = 1  # a target piece that makes the loss of PoisonedModel NaN


@dataclasses.dataclass(frozen=True)
class PoisonedModel(Seq2SeqModel):
    """Its loss is NaN on a batch whose first target is `POISON`."""

    def loss(self, params, batch, **how):
        value, metrics = super().loss(params, batch, **how)
        poisoned = batch["decoder_target_tokens"][0, 0] == POISON
        return value * jnp.where(poisoned, jnp.nan, 1.0), metrics


@dataclasses.dataclass(frozen=True)
class PoisonedData(RandomData):
    """Random batches; those of `steps` (from 1) are poisoned."""

    steps: tuple[int, ...] = ()

    def train_batches(self, *, batch_size, lengths):
        return _PoisonedBatches(self, batch_size, lengths)


class _PoisonedBatches(RandomBatches):
    def __next__(self):
        batch = super().__next__()
        batch["decoder_target_tokens"][0, 0] = POISON if self._drawn in self._data.steps else 2
        return batch


def poisoned(model_dir: Path, steps: tuple[int, ...], *bindings: str, **fields) -> Experiment:
    """Assemble a tiny experiment whose loss is NaN at some steps."""
    tree = experiment(model_dir, *bindings, **fields)
    model = PoisonedModel(
        **{field.name: getattr(tree.model, field.name) for field in dataclasses.fields(tree.model)}
    )
    data = PoisonedData(tree.data.source_vocab_size, tree.data.target_vocab_size, steps=steps)
    return dataclasses.replace(tree, model=model, data=data)
