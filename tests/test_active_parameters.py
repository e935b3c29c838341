"""Total and active parameters, counted by hand and against the model itself."""

import jax
import pytest
import tiny_run

from gshard_exp.config import reading
from gshard_exp.config.validate import complete_experiments
from gshard_exp.train.parameters import parameters, totals
from gshard_exp.train.state import abstract_params, num_params

TINY = tiny_run.TINY
LARGE, DENSE = "gin/paper/moe_2048e_36l.gin", "gin/paper/dense_96l.gin"
TINY_TOTAL, TINY_ACTIVE = 17_824, 13_728  # by hand, see below


def model(name):
    return reading.read_subject(name).assembled.tree.model


def test_total_and_active_parameters_of_a_tiny_model_by_hand():
    # tests/gin/tiny.gin: M=16, H=32, 2 heads of 8, 4 experts, top-2; 2 + 2 layers, one sparse each.
    attention = 4 * 16 * (2 * 8)
    ffn = 2 * 16 * 32
    norms = (2 * 2 + 2 * 3 + 2) * 16
    embeddings = (40 + 30) * 16
    shared = (2 + 2 * 2) * attention + 2 * ffn + 2 * 16 * 4 + norms + embeddings
    assert shared + 2 * 4 * ffn == TINY_TOTAL
    assert shared + 2 * 2 * ffn == TINY_ACTIVE
    assert totals(parameters(model(TINY))) == (TINY_TOTAL, TINY_ACTIVE)


def test_a_gating_with_one_choice_uses_one_expert():
    # One expert of 2 * 16 * 32 less in each of the two sparse layers.
    active = totals(parameters(model(f"{TINY},gin/moe/switch.gin")))[1]
    assert active == TINY_ACTIVE - 2 * 1024


def test_a_dense_model_uses_all_of_its_parameters():
    total, active = totals(parameters(model(DENSE)))
    assert total == active == 2_313_144_320


def test_a_layer_with_one_expert_uses_it_once():
    subject = reading.read_subject(TINY, ["NUM_EXPERTS=1"])
    total, active = totals(parameters(subject.assembled.tree.model))
    assert total == active


def test_active_parameters_of_the_largest_model_of_table_1_by_hand():
    # 18 + 18 layers of M=1024, H=8192, 16 heads of 128; 9 + 9 sparse with 2 of 2048 experts.
    attention, ffn = 4 * 1024 * 16 * 128, 2 * 1024 * 8192
    blocks = 3 * 18 * attention + 18 * ffn + 18 * (2 * ffn + 1024 * 2048)
    rest = (5 * 18 + 2) * 1024 + 96_000 * 1024
    assert totals(parameters(model(LARGE)))[1] == blocks + rest


@pytest.mark.parametrize("name", [*complete_experiments(), TINY])
def test_the_table_has_shape_and_names_of_every_parameter_of_the_model(name):
    """The table is made from a model of one period and one expert; this is the model itself."""
    shapes, names = abstract_params(model(name))
    table = parameters(model(name))
    assert [row.shape for row in table] == [leaf.shape for leaf in jax.tree.leaves(shapes)]
    is_names = {"is_leaf": lambda leaf: isinstance(leaf, tuple)}
    assert [row.names for row in table] == jax.tree.leaves(names, **is_names)
    assert totals(table)[0] == num_params(shapes)
