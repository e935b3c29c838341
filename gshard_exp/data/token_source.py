"""A seqio data source over encoded sentences. Importing it imports seqio and TensorFlow."""

import functools
from collections.abc import Callable

import seqio
import tensorflow as tf

from gshard_exp.data import splits, tokens

do_not_convert = tf.autograph.experimental.do_not_convert  # converting costs more than tracing


class TokenSource(seqio.DataSource):
    """The rows of one language, looked up in flat arrays that all languages share.

    Nothing is tokenised in the pipeline, and no rows wait in a buffer: shuffling draws a
    permutation of the row numbers that is a function of (seed, epoch, position), so the state of
    an iterator is a few numbers per language, whatever the size of the corpus.

    `num_input_examples` is unknown on purpose: seqio would cache a small source in memory, in the
    order of its first epoch, and save that cache with the position.
    """

    def __init__(self, encoded: tokens.Tokens, language: str):
        """Take the rows of a language."""
        super().__init__(
            splits=splits.SPLITS, caching_permitted=False, performs_internal_shuffling=True
        )
        self._encoded = encoded
        self._language = language

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Whether it can be read in any number of shards; seqio shards the examples instead."""
        return False

    def list_shards(self, split: str) -> list[str]:
        """Return the one shard there is."""
        return [split]

    def get_dataset(
        self,
        split: str = splits.TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **unused: object,
    ) -> tf.data.Dataset:
        """Return the examples of a split; each repetition of a shuffled one is another order."""
        rows = self._encoded.rows(split, self._language)
        example = _example_function(self._encoded, split)
        if not shuffle or not rows:
            dataset = tf.data.Dataset.range(rows.start, rows.stop).map(lambda row: example(row))
            return dataset.with_options(_options())
        first, last = tf.constant(rows.start, tf.int64), tf.constant(len(rows) - 1, tf.int64)

        @do_not_convert
        def epoch(number: tf.Tensor) -> tf.data.Dataset:
            def shuffled(position: tf.Tensor) -> dict[str, tf.Tensor]:
                return example(first, position, number, last)

            return tf.data.Dataset.range(len(rows)).map(do_not_convert(shuffled))

        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
        return seeds.flat_map(epoch).with_options(_options())


def _options() -> tf.data.Options:
    """Return options that reach the whole pipeline from here.

    Measured on a mixture of 87 tasks: tuning and graph rewriting cost 1.2 s at the start, 0.6 GB
    and a quarter of the time per row, and there is nothing to tune.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options


@functools.lru_cache(maxsize=16)
def _example_function(encoded: tokens.Tokens, split: str) -> Callable[..., dict[str, tf.Tensor]]:
    """Return the function row -> example, traced once for all languages.

    With a position, the number of an epoch and the last position, the row is the place of the
    position in that epoch's permutation. Languages draw the same numbers; their first rows make
    their orders differ.
    """
    tensors = {}
    for feature in tokens.FEATURES:
        ragged = encoded.load(split, feature)
        tensors[feature] = (tf.constant(ragged.flat), tf.constant(ragged.starts))

    @tf.function(autograph=False)
    def example(
        first: tf.Tensor,
        position: tf.Tensor | None = None,
        number: tf.Tensor | None = None,
        last: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        row = first
        if position is not None:
            key = tf.stack([number, first])
            row += tf.random.experimental.index_shuffle(position, key, last)
        features = {}
        for feature, (flat, starts) in tensors.items():
            start = starts[row]
            features[feature] = tf.slice(flat, [start], [starts[row + 1] - start])
        return features

    return example
