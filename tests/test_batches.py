"""Batches: random ones, padded ones, those of seqio, and positions that can be saved."""

import json

import models
import numpy as np
import pytest

from gshard_exp.data.batches import RandomData, SeqioData, full_rows, padded_batches, to_mesh
from gshard_exp.errors import SettingError
from gshard_exp.model.seq2seq import BATCH_KEYS
from gshard_exp.sharding.mesh import MeshSpec

LENGTHS = {"inputs": 6, "targets": 4}
DATA = RandomData(source_vocab_size=20, target_vocab_size=10)


def assert_batches_equal(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_equal(dict(one), dict(other))


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_random_batches_have_the_keys_shapes_and_pieces_that_a_model_expects():
    (batch,) = take(DATA.train_batches(batch_size=3, lengths=LENGTHS), 1)
    assert sorted(batch) == sorted(BATCH_KEYS)
    for key, array in batch.items():
        length = LENGTHS["inputs" if key.startswith("encoder") else "targets"]
        assert array.shape == (3, length), key
        assert array.dtype == np.int32, key
    assert set(np.unique(batch["encoder_input_tokens"])) <= set(range(1, 20))
    assert set(np.unique(batch["decoder_target_tokens"])) <= set(range(1, 10))


def test_random_batches_are_a_function_of_the_seed_and_their_number():
    one, other = (DATA.train_batches(batch_size=3, lengths=LENGTHS) for _ in range(2))
    assert_batches_equal(take(one, 3), take(other, 3))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_batches_differ_from_each_other_and_between_seeds(seed):
    first, second = take(RandomData(20, 10, seed).train_batches(batch_size=3, lengths=LENGTHS), 2)
    (other,) = take(RandomData(20, 10, 2).train_batches(batch_size=3, lengths=LENGTHS), 1)
    for batch in (second, other):
        assert (batch["encoder_input_tokens"] != first["encoder_input_tokens"]).any()


def test_random_batches_go_on_after_the_position_that_was_saved(tmp_path):
    batches = DATA.train_batches(batch_size=3, lengths=LENGTHS)
    take(batches, 2)
    batches.save(tmp_path)
    following = take(batches, 2)
    restored = DATA.train_batches(batch_size=3, lengths=LENGTHS)
    restored.restore(tmp_path)
    assert_batches_equal(take(restored, 2), following)


def test_targets_are_shifted_right_by_one_and_padding_has_no_weight():
    batch = full_rows(np.array([[5, 6, 1, 0]], np.int32), np.array([[7, 8, 1, 0]], np.int32))
    assert batch["decoder_target_tokens"].tolist() == [[7, 8, 1, 0]]
    assert batch["decoder_input_tokens"].tolist() == [[0, 7, 8, 1]]
    assert batch["decoder_loss_weights"].tolist() == [[1, 1, 1, 0]]
    assert batch["encoder_segment_ids"].tolist() == [[1, 1, 1, 0]]
    assert batch["decoder_segment_ids"].tolist() == [[1, 1, 1, 0]]
    assert batch["encoder_positions"].tolist() == [[0, 1, 2, 3]]


def test_examples_are_laid_out_one_a_row_and_cut_to_the_length():
    examples = [(np.array([3, 1]), np.array([4, 5, 6, 7, 1])), (np.arange(1, 9), np.array([1]))]
    ((rows, batch),) = padded_batches(examples, batch_size=2, lengths=LENGTHS)
    assert rows.tolist() == [0, 1]
    assert batch["encoder_input_tokens"].tolist() == [[3, 1, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch["decoder_target_tokens"].tolist() == [[4, 5, 6, 7], [1, 0, 0, 0]]


def test_the_last_padded_batch_is_filled_with_empty_rows():
    examples = [(np.array([n]), np.array([n])) for n in range(1, 6)]
    batches = list(padded_batches(examples, batch_size=2, lengths=LENGTHS))
    assert [rows.tolist() for rows, _ in batches] == [[0, 1], [2, 3], [4]]
    last = batches[-1][1]
    assert last["decoder_target_tokens"].tolist() == [[5, 0, 0, 0], [0, 0, 0, 0]]
    assert last["decoder_loss_weights"].sum() == 1


def test_no_examples_make_no_batch():
    assert list(padded_batches([], batch_size=2, lengths=LENGTHS)) == []


def test_rows_of_a_batch_are_split_over_the_mesh():
    mesh = MeshSpec(data=2, expert=2).build()
    batch = full_rows(np.ones((8, 4), np.int32), np.arange(32, dtype=np.int32).reshape(8, 4))
    placed = to_mesh(batch, mesh, models.RULES)
    targets = placed["decoder_target_tokens"]
    assert [shard.data.shape for shard in targets.addressable_shards] == [(2, 4)] * 4
    np.testing.assert_array_equal(targets, batch["decoder_target_tokens"])


def test_rows_that_do_not_divide_over_the_mesh_are_refused_by_the_batch_s_key():
    mesh = MeshSpec(data=2, expert=2).build()
    batch = full_rows(np.ones((6, 4), np.int32), np.ones((6, 4), np.int32))
    with pytest.raises(SettingError, match=r"encoder_input_tokens has size 6"):
        to_mesh(batch, mesh, models.RULES)


def test_a_position_in_other_data_is_refused_with_what_differs(tmp_path):
    def batches(seed, rows):
        return RandomData(9, 9, seed=seed).train_batches(batch_size=rows, lengths=LENGTHS)

    batches(seed=0, rows=4).save(tmp_path)
    batches(seed=0, rows=4).restore(tmp_path)
    with pytest.raises(SettingError, match=r"batch_size was 4 and is 8"):
        batches(seed=0, rows=8).restore(tmp_path)
    with pytest.raises(SettingError, match=r"seed was 0 and is 1"):
        batches(seed=1, rows=4).restore(tmp_path)


@pytest.fixture(scope="module")
def mixture():
    """Two tasks of short sequences of numbers: task 1 has odd pieces only, task 2 even ones."""
    from gshard_exp.data.tensorflow_import import load_tensorflow

    tf = load_tensorflow()
    import seqio

    features = {
        key: seqio.Feature(seqio.PassThroughVocabulary(200), add_eos=False)
        for key in ("inputs", "targets")
    }

    def dataset(remainder):
        def function(split, shuffle_files, seed=None):
            rows = [[2 * n + remainder] * (1 + n % 4) for n in range(1, 41)]
            data = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(rows, dtype=tf.int32))
            return data.map(lambda row: {"inputs": row, "targets": row})

        return function

    names = ["batches_test_even", "batches_test_odd"]
    for remainder, name in enumerate(names):
        seqio.TaskRegistry.add(
            name,
            source=seqio.FunctionDataSource(dataset(remainder), splits=["train"]),
            preprocessors=[],
            output_features=features,
        )
    seqio.MixtureRegistry.add("batches_test", [(name, 1) for name in names])
    yield "batches_test"
    seqio.MixtureRegistry.remove("batches_test")
    for name in names:
        seqio.TaskRegistry.remove(name)


TEXT_LENGTHS = {"inputs": 16, "targets": 16}


def open_text(name, **how):
    return SeqioData(name, **how).train_batches(batch_size=4, lengths=TEXT_LENGTHS)


def test_seqio_batches_are_packed_shuffled_and_mixed(mixture):
    batches = take(open_text(mixture), 4)
    assert all(sorted(batch) == sorted(BATCH_KEYS) for batch in batches)
    tokens = np.concatenate([batch["encoder_input_tokens"].ravel() for batch in batches])
    tokens = tokens[tokens > 0]
    assert {0, 1} == set(tokens % 2)  # mixed
    assert (np.diff(tokens) < 0).any()  # shuffled: each task's pieces grow
    assert all(batch["encoder_segment_ids"].max() > 1 for batch in batches)  # packed


def test_a_name_that_seqio_does_not_know_is_answered_with_the_nearest(mixture):
    with pytest.raises(SettingError, match=f"(?s){mixture}x.*Nearest: .*{mixture}"):
        open_text(f"{mixture}x")


def test_seqio_batches_may_be_left_unpacked(mixture):
    (batch,) = take(open_text(mixture, pack=False), 1)
    assert all(len(set(row[row > 0])) == 1 for row in batch["encoder_input_tokens"])


def test_seqio_batches_are_a_function_of_the_seed(mixture):
    one, other, another = (take(open_text(mixture, seed=seed), 3) for seed in (0, 0, 1))
    assert_batches_equal(one, other)
    with pytest.raises(AssertionError):
        assert_batches_equal(one, another)


@pytest.mark.parametrize("drawn", [0, 1, 15])
def test_seqio_batches_go_on_after_the_position_that_was_saved(mixture, tmp_path, drawn):
    """15 batches are more than one epoch of either task."""
    batches = open_text(mixture)
    take(batches, drawn)
    batches.save(tmp_path)
    following = take(batches, 12)
    restored = open_text(mixture)
    restored.restore(tmp_path)
    assert_batches_equal(take(restored, 12), following)


def test_the_position_of_seqio_batches_is_not_the_start(mixture, tmp_path):
    """The equality above can fail."""
    batches = open_text(mixture)
    take(batches, 3)
    with pytest.raises(AssertionError):
        assert_batches_equal(take(batches, 2), take(open_text(mixture), 2))


def test_a_random_position_is_readable(tmp_path):
    batches = DATA.train_batches(batch_size=3, lengths=LENGTHS)
    take(batches, 2)
    batches.save(tmp_path)
    assert json.loads((tmp_path / "position.json").read_text()) == {"drawn": 2}
