"""Meshes, rules, annotations, and state that is born on the mesh."""

import jax
import jax.numpy as jnp
import models
import pytest
from jax.sharding import PartitionSpec

from gshard_exp import axes
from gshard_exp.errors import SettingError
from gshard_exp.sharding.annotate import constrain, partitioning
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules
from gshard_exp.train.state import model_info, plan_state

MESH = MeshSpec(data=2, expert=2, model=2)


def spec(names, shape, rules=models.RULES):
    return rules.spec(names, shape=shape, mesh=MESH.build(), what="encoder/wi")


def test_a_mesh_has_the_sizes_that_were_asked_for():
    assert dict(MeshSpec(data=1, expert=4, model=2).build().shape) == {
        "data": 1,
        "expert": 4,
        "model": 2,
    }


def test_one_size_may_take_what_the_others_leave():
    assert dict(MeshSpec(data=-1, expert=2).build().shape) == {"data": 4, "expert": 2, "model": 1}


def test_devices_that_the_other_sizes_do_not_divide_are_refused():
    with pytest.raises(SettingError, match=r"8 devices cannot be split .* 3 does not divide 8"):
        MeshSpec(data=-1, expert=3).build()


@pytest.mark.parametrize("sizes", [(-1, -1, 1), (0, 1, 1), (1, 1, -2)])
def test_sizes_without_a_meaning_are_refused(sizes):
    with pytest.raises(SettingError, match=r"has no meaning") as caught:
        MeshSpec(*sizes)
    assert caught.value.settings == ("data", "expert", "model")


def test_a_mesh_larger_than_the_devices_is_refused_and_not_shrunk():
    with pytest.raises(SettingError, match=r"needs 16 devices and there are 8"):
        MeshSpec(data=4, expert=4).build()


def test_a_rule_for_an_unknown_logical_axis_is_refused():
    with pytest.raises(SettingError, match=r"'embedd'.* is for no logical axis: known are embed"):
        Rules((*models.table(), ("embedd", None)))


def test_a_logical_axis_without_a_rule_is_refused():
    table = tuple(rule for rule in models.table() if rule[0] != axes.KV)
    with pytest.raises(SettingError, match=r"no rule for the logical axes kv"):
        Rules(table)


@pytest.mark.parametrize("field", ["table", "optimizer"])
def test_two_rules_for_one_logical_axis_are_refused(field):
    twice = ((axes.KV, None), (axes.KV, axes.DATA))
    tables = {"table": models.table(), "optimizer": ()}
    with pytest.raises(SettingError, match=r"'kv' has two rules") as caught:
        Rules(**tables | {field: (*tables[field], *twice)})
    assert caught.value.settings == (field,)


def test_a_rule_that_names_no_mesh_axis_is_refused():
    with pytest.raises(SettingError, match=r"'batch'.*'rows'.*names no mesh axis"):
        Rules(models.table(batch="rows"))


def test_a_rule_may_be_written_as_a_list():
    assert Rules(models.table(batch=["data", "expert"])) == models.RULES


def test_names_become_the_mesh_axes_of_their_rules():
    assert spec((axes.BATCH, None, axes.HEADS), (8, 3, 4)) == PartitionSpec(
        ("data", "expert"), None, "model"
    )


def test_a_name_without_a_rule_is_refused_with_the_parameter():
    with pytest.raises(SettingError, match=r"encoder/wi names the logical axis 'width'"):
        spec(("width",), (8,))


def test_a_mesh_axis_used_twice_in_one_array_is_refused_with_the_parameter():
    with pytest.raises(SettingError, match=r"^encoder/wi .* 'model' twice, by 'heads' and 'mlp'"):
        spec((axes.HEADS, axes.MLP), (8, 8))


def test_a_size_that_does_not_divide_is_refused_with_parameter_size_and_remedy():
    with pytest.raises(
        SettingError, match=r"^encoder/wi has size 6 on 'batch'.* into 4 .*Set a multiple of 4"
    ):
        spec((axes.BATCH,), (6,))


def test_names_that_do_not_match_the_rank_are_refused():
    with pytest.raises(SettingError, match=r"encoder/wi has 2 dimensions and 1 logical axes"):
        spec((axes.EMBED,), (8, 8))


def test_a_model_that_does_not_divide_is_refused_with_the_path_of_its_parameter():
    seq2seq = models.model(sparse={"num_experts": 6})
    mesh = MeshSpec(expert=4, data=2).build()
    with pytest.raises(SettingError, match=r"encoder/pattern_0/ffn/w. has size 6 on 'expert'"):
        plan_state(seq2seq, models.Sgd(), mesh, models.RULES)


def test_rules_that_split_a_parameter_twice_are_refused_with_its_path():
    rules = Rules(models.table(embed="model"))
    with pytest.raises(SettingError, match=r"coder/.*/(attention|ffn)/.* 'model' twice"):
        plan_state(models.model(), models.Sgd(), MESH.build(), rules)


def test_constrain_is_the_identity_outside_a_partitioning_context():
    x = jnp.ones((3, 5))
    assert constrain(x, "anything", "goes") is x


def test_constrain_splits_inside_a_partitioning_context_and_not_after_it():
    mesh = MESH.build()
    with partitioning(mesh, models.RULES):
        y = jax.jit(lambda x: constrain(x, axes.BATCH, None))(jnp.ones((8, 5)))
    assert y.addressable_shards[0].data.shape == (2, 5)
    x = jnp.ones((3, 5))
    assert constrain(x, axes.BATCH, None) is x


def test_constrain_refuses_a_size_that_does_not_divide():
    with (
        partitioning(MESH.build(), models.RULES),
        pytest.raises(SettingError, match=r"an activation .'batch', None. has size 6"),
    ):
        constrain(jnp.ones((6, 5)), axes.BATCH, None)


def test_parameters_and_optimizer_state_are_born_in_their_shardings():
    rules = Rules(models.table(), optimizer=((axes.EMBED, axes.DATA),))
    small = models.model(encoder="s", decoder="d", repeats=(1, 1))
    plan = plan_state(small, models.Sgd(), MESH.build(), rules)
    state = plan.init(0)

    def check(path, leaf, abstract):
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim), path
        assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)

    jax.tree_util.tree_map_with_path(check, state, plan.abstract)
    wi = state.params["encoder"]["pattern_0"]["ffn"]["wi"]
    assert wi.shape == (1, 8, 16, 16)
    assert wi.addressable_shards[0].data.shape == (1, 4, 16, 8)  # expert / 2, expert_mlp / 2
    moment = state.opt_state[0].trace["encoder"]["pattern_0"]["ffn"]["wi"]
    assert moment.addressable_shards[0].data.shape == (1, 4, 8, 8)  # embed / 2 as well


def test_model_info_counts_bytes_per_device():
    info = model_info(plan_state(models.model(), models.Sgd(), MESH.build(), models.RULES))
    # 2 layers x 8 experts x 16 x 16 float32, a quarter of which each device holds.
    (line,) = [line for line in info.splitlines() if "encoder/pattern_0/ffn/wi" in line]
    assert "(layers=2, expert=8, embed=16, expert_mlp=16)" in line
    assert line.endswith(f"bytes per device {2 * 8 * 16 * 16 * 4 // 4}")
    total = sum(int(line.split()[3]) for line in info.splitlines() if line.startswith("Variable"))
    assert f"Total number of parameters: {total}" in info
