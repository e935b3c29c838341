"""Batches on the mesh: from seqio or random, with a position that a checkpoint can hold."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from gshard_exp.data.tensorflow_import import load_tensorflow

HostBatch = Mapping[str, np.ndarray]


class BatchIterator(Protocol):
    """An endless stream of host batches that knows where it is."""

    def __next__(self) -> HostBatch:
        """Return the next batch: int32 [rows of this process, length] arrays by key."""
        ...

    def save(self, folder: Path) -> None:
        """Write the position to files in `folder`; the next batch is the next after restoring."""
        ...

    def restore(self, folder: Path) -> None:
        """Go to a position that `save` wrote."""
        ...


class DataSource(Protocol):
    """What a config puts in the place of training data."""

    def train_batches(self, *, batch_size: int, lengths: Mapping[str, int]) -> BatchIterator:
        """Open the stream at its start."""
        ...

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return the number of pieces of `inputs` and `targets`, as far as they are known."""
        ...


@dataclasses.dataclass(frozen=True)
class RandomData:
    """Random tokens in fully packed rows, for tests and benchmarks. Needs no data packages.

    Attributes:
        source_vocab_size: pieces are drawn from 1 ... size - 1.
        target_vocab_size: the same for targets.
        seed: batch i depends on (seed, i) alone.
    """

    source_vocab_size: int
    target_vocab_size: int
    seed: int = 0

    def train_batches(self, *, batch_size: int, lengths: Mapping[str, int]) -> "RandomBatches":
        """Open the stream at its start."""
        return RandomBatches(self, batch_size // jax.process_count(), lengths)

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return the sizes that pieces are drawn from."""
        return {"inputs": self.source_vocab_size, "targets": self.target_vocab_size}


class RandomBatches:
    """The stream of `RandomData`; its position is the number of batches drawn."""

    def __init__(self, data: RandomData, rows: int, lengths: Mapping[str, int]) -> None:
        self._data, self._rows, self._lengths = data, rows, lengths
        self._drawn = 0

    def __next__(self) -> HostBatch:
        rng = np.random.default_rng((self._data.seed, jax.process_index(), self._drawn))
        self._drawn += 1
        shape = (self._rows, self._lengths["inputs"])
        inputs = rng.integers(1, self._data.source_vocab_size, shape, dtype=np.int32)
        shape = (self._rows, self._lengths["targets"])
        targets = rng.integers(1, self._data.target_vocab_size, shape, dtype=np.int32)
        return full_rows(inputs, targets)

    def save(self, folder: Path) -> None:
        """Write the count."""
        position = folder / f"random_{jax.process_index()}.json"
        position.write_text(json.dumps({"drawn": self._drawn}))

    def restore(self, folder: Path) -> None:
        """Read the count."""
        position = folder / f"random_{jax.process_index()}.json"
        self._drawn = json.loads(position.read_text())["drawn"]


@dataclasses.dataclass(frozen=True)
class SeqioData:
    """A seqio task or mixture, shuffled, repeated and packed.

    Attributes:
        mixture_or_task_name: as registered by `tasks` (or by anybody else).
        tasks: an object whose `register()` makes the tasks known to seqio, or None if they are.
        seed: of shuffling and of sampling from the mixture.
        pack: several examples in one row, kept apart by segment ids.
        split: which split to train on.
    """

    mixture_or_task_name: str
    tasks: Any = None
    seed: int = 0
    pack: bool = True
    split: str = "train"

    def train_batches(self, *, batch_size: int, lengths: Mapping[str, int]) -> "SeqioBatches":
        """Open the stream at its start, built from the registered tasks."""
        tf = load_tensorflow()
        import seqio

        if self.tasks is not None:
            self.tasks.register()
        shard = seqio.ShardInfo(jax.process_index(), jax.process_count())
        mixture = seqio.get_mixture_or_task(self.mixture_or_task_name)
        dataset = mixture.get_dataset(
            dict(lengths),
            split=self.split,
            shuffle=True,
            num_epochs=None,
            shard_info=shard if jax.process_count() > 1 else None,
            seed=self.seed,
            use_cached=False,
            trim_output_features=True,
        )
        dataset = seqio.EncDecFeatureConverter(pack=self.pack)(dataset, dict(lengths))
        dataset = dataset.batch(batch_size // jax.process_count(), drop_remainder=True)
        options = tf.data.Options()
        options.deterministic = True
        return SeqioBatches(dataset.with_options(options).prefetch(2))

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return the sizes of our own tasks' vocabularies; of others nothing is known here."""
        return {} if self.tasks is None else self.tasks.vocab_sizes()


class SeqioBatches:
    """The stream of `SeqioData`; its position is tf.data's iterator checkpoint."""

    def __init__(self, dataset: Any) -> None:
        self._iterator = iter(dataset)

    def __next__(self) -> HostBatch:
        return {key: value.numpy() for key, value in next(self._iterator).items()}

    def save(self, folder: Path) -> None:
        """Write the iterator's state, shuffle buffers and prefetched batches included."""
        self._checkpoint().write(str(folder / f"tf_data_{jax.process_index()}"))

    def restore(self, folder: Path) -> None:
        """Read the iterator's state."""
        path = str(folder / f"tf_data_{jax.process_index()}")
        self._checkpoint().read(path).assert_consumed()

    def _checkpoint(self) -> Any:
        import tensorflow as tf

        return tf.train.Checkpoint(iterator=self._iterator)


def to_mesh(batch: HostBatch, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Place a host batch; with several processes each brings its own rows."""
    return {
        key: jax.make_array_from_process_local_data(sharding, np.asarray(value, np.int32))
        for key, value in batch.items()
    }


def full_rows(inputs: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """Make a batch of one example a row, from padded tokens (0 is padding), as seqio would."""
    shifted = np.zeros_like(targets)
    shifted[:, 1:] = targets[:, :-1]
    weights = (targets > 0).astype(np.int32)
    return {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": shifted,
        "decoder_target_tokens": targets,
        "decoder_loss_weights": weights,
        "encoder_segment_ids": (inputs > 0).astype(np.int32),
        "decoder_segment_ids": weights,
        "encoder_positions": _positions(inputs),
        "decoder_positions": _positions(targets),
    }


def padded_batches(
    examples: list[tuple[np.ndarray, np.ndarray]], *, batch_size: int, lengths: Mapping[str, int]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Lay examples out one a row, for evaluation.

    Args:
        examples: (source ids, target ids), EOS included; cut to `lengths`.
        batch_size: rows of every batch; the last is filled with empty rows.
        lengths: tokens in a row, by `inputs` and `targets`.

    Yields:
        Indices into `examples` of the rows that are not empty, and the batch.
    """
    for start in range(0, len(examples), batch_size):
        indices = np.arange(start, min(start + batch_size, len(examples)))
        inputs = np.zeros((batch_size, lengths["inputs"]), np.int32)
        targets = np.zeros((batch_size, lengths["targets"]), np.int32)
        for row, index in enumerate(indices):
            source, target = examples[index]
            source, target = source[: lengths["inputs"]], target[: lengths["targets"]]
            inputs[row, : len(source)] = source
            targets[row, : len(target)] = target
        yield indices, full_rows(inputs, targets)


def _positions(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
