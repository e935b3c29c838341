"""Batches on the mesh: from seqio or random, with a position that a checkpoint can hold."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from gshard_exp import axes
from gshard_exp.data import model_files
from gshard_exp.data.tensorflow_import import load_tensorflow
from gshard_exp.errors import SettingError, require_at_least
from gshard_exp.sharding.rules import Names, Rules

HostBatch = Mapping[str, np.ndarray]
IDENTITY = "identity.json"  # of the data that a saved position belongs to
# Of an identity: how batches are drawn from the data, which are the same data whatever these are.
DRAWN = ("seed", "batch_size", "lengths")


class BatchIterator(Protocol):
    """An endless stream of host batches that knows where it is."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that the stream depends on, as JSON values; `DRAWN` are what draws it from data."""
        ...

    def __next__(self) -> HostBatch:
        """Return the next batch: int32 [rows, length] arrays by key."""
        ...

    def save(self, folder: Path) -> None:
        """Write the position to files in `folder`; the next batch is the next after restoring."""
        ...

    def restore(self, folder: Path) -> None:
        """Go to a position that `save` wrote.

        Raises:
            SettingError: it is a position in other data.
        """
        ...


class DataSource(Protocol):
    """What a config puts in the place of training data."""

    def train_batches(self, *, batch_size: int, lengths: Mapping[str, int]) -> BatchIterator:
        """Open the stream at its start."""
        ...

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return the number of pieces of `inputs` and `targets`, as far as they are known."""
        ...

    def write_model_files(self, model_dir: Path) -> None:
        """Keep with the model what it needs of the data after training (`model_files`)."""
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

    def __post_init__(self) -> None:
        require_at_least(self, 2, "source_vocab_size", "target_vocab_size")

    def train_batches(self, *, batch_size: int, lengths: Mapping[str, int]) -> "RandomBatches":
        """Open the stream at its start."""
        return RandomBatches(self, batch_size, lengths)

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return the sizes that pieces are drawn from."""
        return {"inputs": self.source_vocab_size, "targets": self.target_vocab_size}

    def write_model_files(self, model_dir: Path) -> None:
        """Keep nothing: random pieces stand for no text."""


class RandomBatches:
    """The stream of `RandomData`; its position is the number of batches drawn."""

    def __init__(self, data: RandomData, rows: int, lengths: Mapping[str, int]) -> None:
        self._data, self._rows, self._lengths = data, rows, lengths
        self._drawn = 0
        self.identity = {
            "vocab_sizes": dict(data.vocab_sizes()),
            "seed": data.seed,
            "batch_size": rows,
            "lengths": dict(lengths),
        }

    def __next__(self) -> HostBatch:
        rng = np.random.default_rng((self._data.seed, self._drawn))
        self._drawn += 1
        shape = (self._rows, self._lengths["inputs"])
        inputs = rng.integers(1, self._data.source_vocab_size, shape, dtype=np.int32)
        shape = (self._rows, self._lengths["targets"])
        targets = rng.integers(1, self._data.target_vocab_size, shape, dtype=np.int32)
        return full_rows(inputs, targets)

    def save(self, folder: Path) -> None:
        """Write the count."""
        write_identity(folder, self.identity)
        (folder / "position.json").write_text(json.dumps({"drawn": self._drawn}))

    def restore(self, folder: Path) -> None:
        """Read the count."""
        check_identity(folder, self.identity)
        self._drawn = json.loads((folder / "position.json").read_text())["drawn"]


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
        mixture = seqio.get_mixture_or_task(self._known_name(seqio))
        dataset = mixture.get_dataset(
            dict(lengths),
            split=self.split,
            shuffle=True,
            num_epochs=None,
            seed=self.seed,
            use_cached=False,
            trim_output_features=True,
        )
        dataset = seqio.EncDecFeatureConverter(pack=self.pack)(dataset, dict(lengths))
        dataset = dataset.batch(batch_size, drop_remainder=True)
        options = tf.data.Options()
        options.deterministic = True
        identity = {
            "mixture_or_task_name": self.mixture_or_task_name,
            "content": None if self.tasks is None else self.tasks.content(),
            "seed": self.seed,
            "pack": self.pack,
            "split": self.split,
            "batch_size": batch_size,
            "lengths": dict(lengths),
        }
        return SeqioBatches(dataset.with_options(options).prefetch(2), identity)

    def _known_name(self, seqio: Any) -> str:
        known = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
        if self.mixture_or_task_name not in known:
            nearest = difflib.get_close_matches(self.mixture_or_task_name, known, 3, 0.0)
            raise SettingError(
                f"seqio knows no task or mixture {self.mixture_or_task_name!r}.",
                settings=("data.mixture_or_task_name",),
                hint=f"Nearest: {', '.join(nearest)}.",
            )
        return self.mixture_or_task_name

    def vocab_sizes(self) -> Mapping[str, int]:
        """Return the sizes of our own tasks' vocabularies; of others nothing is known here."""
        return {} if self.tasks is None else self.tasks.vocab_sizes()

    def write_model_files(self, model_dir: Path) -> None:
        """Keep vocabularies, languages and held-out text of our own tasks."""
        if self.tasks is not None:
            model_files.write(self.tasks, model_dir)


class SeqioBatches:
    """The stream of `SeqioData`; its position is tf.data's iterator checkpoint."""

    def __init__(self, dataset: Any, identity: Mapping[str, Any]) -> None:
        self._iterator = iter(dataset)
        self.identity = identity

    def __next__(self) -> HostBatch:
        return {key: value.numpy() for key, value in next(self._iterator).items()}

    def save(self, folder: Path) -> None:
        """Write the iterator's state, shuffle buffers and prefetched batches included."""
        write_identity(folder, self.identity)
        self._checkpoint().write(str(folder / "tf_data"))

    def restore(self, folder: Path) -> None:
        """Read the iterator's state."""
        check_identity(folder, self.identity)
        self._checkpoint().read(str(folder / "tf_data")).assert_consumed()

    def _checkpoint(self) -> Any:
        import tensorflow as tf

        return tf.train.Checkpoint(iterator=self._iterator)


def to_mesh(
    batch: HostBatch,
    mesh: Mesh,
    rules: Rules,
    names: Mapping[str, Names] = MappingProxyType({}),
) -> dict[str, jax.Array]:
    """Place a host batch, split as the rules say.

    Args:
        batch: arrays by key; integers become int32.
        mesh: to place it on.
        rules: of the run.
        names: logical axes of an array's dimensions; what is not named is [rows, positions].

    Raises:
        SettingError: a size does not divide.
    """
    placed = {}
    for key, value in batch.items():
        value = value.astype(np.int32) if np.issubdtype(value.dtype, np.integer) else value
        sharding = rules.sharding(
            names.get(key, (axes.BATCH, axes.LENGTH)),
            shape=value.shape,
            mesh=mesh,
            what=f"the batch's {key}",
        )
        placed[key] = jax.device_put(value, sharding)
    return placed


def write_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write beside a position which data it belongs to."""
    (folder / IDENTITY).write_text(json.dumps(identity, indent=1))


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a position that belongs to other data: it would mean nothing here."""
    path = folder / IDENTITY
    saved = json.loads(path.read_text()) if path.exists() else {}
    now = json.loads(json.dumps(identity))
    differing = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    if differing:
        key = differing[0]
        raise SettingError(
            f"the checkpoint's position is in other data: {key} was {saved.get(key)} and is "
            f"{now.get(key)} ({', '.join(differing)} differ).",
            settings=("model_dir",),
            hint="Use the settings that made it (config.gin beside it), or another MODEL_DIR.",
        )


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
