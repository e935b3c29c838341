"""Checkpoints: their names, what is kept, what a killed run leaves, and other meshes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_run

from gshard_exp.errors import SettingError
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.checkpoint import Checkpoints
from gshard_exp.train.state import plan_state


def test_checkpoints_are_named_by_step_and_the_newest_are_kept(tmp_path):
    tiny_run.train(tiny_run.experiment(tmp_path, "CHECKPOINTS_TO_KEEP=2"))
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_12", "checkpoint_8"]


def test_all_checkpoints_are_kept_if_no_number_is_given(tmp_path):
    tiny_run.train(tiny_run.experiment(tmp_path, "CHECKPOINTS_TO_KEEP=None", train_steps=10))
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_10", "checkpoint_4", "checkpoint_8"]


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"every_steps": 1, "keep": 0}])
def test_a_period_or_a_number_to_keep_below_one_is_refused(wrong):
    with pytest.raises(SettingError, match="at least 1"):
        Checkpoints(**wrong)


def test_a_temporary_folder_that_a_killed_run_left_is_no_checkpoint(tmp_path):
    tree = tiny_run.experiment(tmp_path, train_steps=4)
    tiny_run.train(tree)
    leftover = tmp_path / "checkpoint_8.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    (leftover / "state" / "half").write_text("half")
    state, said = tiny_run.train(dataclasses.replace(tree, train_steps=8))
    assert said[0].endswith("checkpoint_4")
    assert int(state.step) == 8
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_4", "checkpoint_8"]


def test_the_position_in_the_data_is_saved_in_the_same_checkpoint(tmp_path):
    tree = tiny_run.experiment(tmp_path, train_steps=8)
    tiny_run.train(tree)
    for step in (4, 8):
        position = tmp_path / f"checkpoint_{step}" / "data" / "position.json"
        assert json.loads(position.read_text()) == {"drawn": step}
    batches = tree.data.train_batches(batch_size=8, lengths=tree.lengths)
    fifth = [next(batches) for _ in range(5)][-1]
    _restore(tree, 4, MeshSpec(), batches)
    np.testing.assert_equal(dict(next(batches)), dict(fifth))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A run of one step on data=2, expert=2, model=2."""
    spread = ("DATA_PARTITIONS=2", "NUM_EXPERT_PARTITIONS=2", "NUM_MODEL_PARTITIONS=2")
    folder = tmp_path_factory.mktemp("sharded")
    tree = tiny_run.experiment(folder, *spread, train_steps=1)
    state, _ = tiny_run.train(tree)
    return tree, tiny_run.arrays(state)


@pytest.mark.parametrize("sizes", [(1, 4, 1), (8, 1, 1), (1, 2, 2), (1, 1, 1)])
def test_a_checkpoint_restored_on_another_mesh_has_equal_values_in_the_shardings_of_that_mesh(
    sharded, sizes
):
    tree, arrays = sharded
    state, plan = _restore(tree, 1, MeshSpec(*sizes))
    tiny_run.assert_equal(tiny_run.arrays(state), arrays)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(plan.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_training_goes_on_after_a_restore_on_another_mesh(sharded, tmp_path):
    tree, _ = sharded
    here = dataclasses.replace(tree, model_dir=str(tmp_path))
    tiny_run.train(here)
    state, said = tiny_run.train(dataclasses.replace(here, mesh=MeshSpec(1, 4, 1), train_steps=2))
    whole, _ = tiny_run.train(
        dataclasses.replace(tree, model_dir=str(tmp_path / "whole"), train_steps=2)
    )
    assert said[0].endswith("checkpoint_1")
    resumed, whole = tiny_run.arrays(state.params), tiny_run.arrays(whole.params)
    # Sums over devices are taken in another order; AdamW's division by sqrt(v) enlarges that.
    for path, array in whole.items():
        np.testing.assert_allclose(resumed[path], array, atol=1e-4, err_msg=path)


def _restore(tree, step, spec, batches=None):
    plan = plan_state(tree.model, tree.optimizer, spec.build(), tree.rules)
    folder = tree.checkpoints.open(tree.model_dir)
    try:
        return folder.restore(step, plan.abstract, batches), plan
    finally:
        folder.close()
