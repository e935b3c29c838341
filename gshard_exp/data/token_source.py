"""A seqio data source over encoded sentences. Importing it imports seqio and TensorFlow."""

import functools

import seqio
import tensorflow as tf

from gshard_exp.data import splits, tokens


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
        lookup = _lookup(self._encoded, split)
        if not shuffle or not rows:
            return tf.data.Dataset.range(rows.start, rows.stop).map(lookup)
        last = tf.constant(len(rows) - 1, tf.int64)

        def epoch(number: tf.Tensor) -> tf.data.Dataset:
            # All languages draw the same numbers; the first row makes their orders differ.
            key = tf.stack([number, tf.constant(rows.start, tf.int64)])

            def example(position: tf.Tensor) -> dict[str, tf.Tensor]:
                row = tf.random.experimental.index_shuffle(position, key, last)
                return lookup(rows.start + row)

            return tf.data.Dataset.range(len(rows)).map(example)

        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
        return seeds.flat_map(epoch)


@functools.lru_cache(maxsize=16)
def _lookup(encoded: tokens.Tokens, split: str):  # type: ignore[no-untyped-def]
    """Return a function row -> example; the arrays are tensors shared by all languages."""
    tensors = {}
    for feature in tokens.FEATURES:
        ragged = encoded.load(split, feature)
        tensors[feature] = (tf.constant(ragged.flat), tf.constant(ragged.starts))

    def lookup(row: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            feature: flat[starts[row] : starts[row + 1]]
            for feature, (flat, starts) in tensors.items()
        }

    return lookup
