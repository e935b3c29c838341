"""The runner knows nothing of text: a few steps of the image classifier, on one device and many."""

import models
import numpy as np
import pytest
import tiny_run

from gshard_exp.config import assemble
from gshard_exp.data.digits import Digits, digits
from gshard_exp.errors import SettingError
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.inspection import inspect
from gshard_exp.train.invariance import OneDevice, Way

FILE = "experiments/vision_moe/vision_moe.gin"
TINY = (
    "EMBED_DIM=16",
    "MLP_DIM=16",
    "EXPERT_MLP_DIM=16",
    "NUM_EXPERTS=4",
    "NUM_HEADS=2",
    "NUM_ENCODER_LAYERS=2",
    "BATCH_SIZE=16",
    "GROUP_SIZE=16",
)


def experiment(folder, *bindings):
    flags = [f"MODEL_DIR={folder}", *TINY, *bindings]
    return assemble(Experiment, [FILE], flags).tree


def test_a_few_steps_train_log_evaluate_and_save(tmp_path):
    tree = experiment(
        tmp_path, "TRAIN_STEPS=4", "LOG_PERIOD=2", "optimizer.WarmupCosine.warmup_steps=1"
    )
    _, said = tiny_run.train(tree)
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_4"]
    records = tiny_run.records(tmp_path)
    assert [record["step"] for record in records] == [2, 4]
    assert {"accuracy", "cross_ent_loss_per_example", "expert_usage"} <= records[-1].keys()
    assert records[-1]["timing/tokens_per_second"] == pytest.approx(
        16 * records[-1]["timing/examples_per_second"]
    )
    assert any("held-out digits: " in line and " of 360 right" in line for line in said)


def test_an_image_split_by_rows_gives_what_one_device_gives(tmp_path):
    tree = experiment(tmp_path)
    batches = tree.data.train_batches(batch_size=16, lengths={})
    reference = OneDevice(tree, next(batches))
    found = reference.compare(Way(MeshSpec(data=1, expert=2, model=2)))
    assert found.worst and found.equal, found


def test_the_stem_exchanges_the_rows_at_the_borders_and_gathers_no_image(tmp_path):
    tree = experiment(tmp_path, "NUM_MODEL_PARTITIONS=2", "NUM_EXPERT_PARTITIONS=2")
    stem = [row for row in inspect(tree).rows if row.causes[0].place == "stem"]
    forward = [row for row in stem if row.when == "forward"]
    assert {row.kind for row in forward} == {"collective-permute"}
    assert {row.axes for row in forward} == {("model",)}
    # A border of the image is one row: 8 images, 8 places, 1 feature; of the features 32.
    assert {row.bytes for row in forward} == {8 * 8 * 4, 8 * 8 * 32 * 4}


def test_batches_hold_every_training_image_once_an_epoch_and_none_that_is_held_out():
    images, labels = digits("train")
    held_out, _ = digits("held_out")
    assert len(images) + len(held_out) == 1797
    assert images.shape[1:] == (8, 8, 1) and images.max() == 1 and images.min() == 0
    seen = {image.tobytes() for image in images}
    assert not seen & {image.tobytes() for image in held_out}
    rows = 479  # 3 * 479 = 1437 training images
    batches = Digits(max_shift=0).train_batches(batch_size=rows, lengths={})
    epoch = np.concatenate([next(batches)["labels"] for _ in range(3)])
    np.testing.assert_array_equal(np.bincount(epoch), np.bincount(labels))


def test_a_stream_goes_on_where_it_was(tmp_path):
    batches = Digits().train_batches(batch_size=8, lengths={})
    next(batches)
    batches.save(tmp_path)
    expected = next(batches)
    again = Digits().train_batches(batch_size=8, lengths={})
    again.restore(tmp_path)
    got = next(again)
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value)
    with pytest.raises(SettingError, match="seed was 0 and is 1"):
        Digits(seed=1).train_batches(batch_size=8, lengths={}).restore(tmp_path)


def test_a_shift_moves_an_image_by_up_to_a_pixel_each_way():
    batches = Digits(max_shift=1).train_batches(batch_size=1, lengths={})
    image = np.zeros((1, 8, 8, 1), np.float32)
    image[0, 4, 4, 0] = 1
    places = set()
    for seed in range(64):
        moved = batches._shifted(image, np.random.default_rng(seed))
        (place,) = np.argwhere(moved[0, :, :, 0] == 1)
        places.add(tuple(int(n) for n in place))
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


def test_lengths_are_refused_by_a_model_that_leaves_none_open(tmp_path):
    with pytest.raises(SettingError, match="has to be empty: image_size=8"):
        models.experiment(model=experiment(tmp_path).model)
