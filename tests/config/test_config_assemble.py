"""What assembles to what."""

import subprocess
import sys
import time

import gin_toys
import pytest

import gin
from gshard_exp.config import assemble, binding_from_flag
from gshard_exp.config.search import shipped_root


def test_a_root_that_no_file_mentions_is_built_from_its_defaults():
    assert assemble(gin_toys.Experiment).tree == gin_toys.Experiment()


def test_a_file_binds_parameters_of_the_root(build):
    assert build("gin_toys.Experiment.train_steps = 7").tree.train_steps == 7


def test_a_later_file_wins(write):
    first = write("first.gin", "gin_toys.Experiment.train_steps = 1")
    second = write("second.gin", "gin_toys.Experiment.train_steps = 2")
    assert assemble(gin_toys.Experiment, [first, second]).tree.train_steps == 2
    assert assemble(gin_toys.Experiment, [second, first]).tree.train_steps == 1


def test_a_statement_after_an_include_overrides_it(build, write):
    write("base.gin", "gin_toys.Experiment.train_steps = 1")
    body = "include 'base.gin'\ngin_toys.Experiment.train_steps = 2"
    assert build(body).tree.train_steps == 2


def test_a_flag_wins_over_a_macro_of_an_included_file(build, write):
    write("base.gin", "TRAIN_STEPS = 1", head="")
    body = "include 'base.gin'\ngin_toys.Experiment.train_steps = %TRAIN_STEPS"
    assert build(body, "TRAIN_STEPS=3").tree.train_steps == 3


def test_the_last_of_two_equal_flags_wins(build):
    body = "TRAIN_STEPS = 1\ngin_toys.Experiment.train_steps = %TRAIN_STEPS"
    assert build(body, "TRAIN_STEPS=3", "TRAIN_STEPS=4").tree.train_steps == 4


def test_a_block_binds_several_parameters(build):
    tree = build("gin_toys.Experiment:\n  train_steps = 3\n  batch_size = 16\n").tree
    assert (tree.train_steps, tree.batch_size) == (3, 16)


def test_a_reference_is_built_with_its_own_bindings(build):
    body = "gin_toys.Experiment.model = @gin_toys.Model()\ngin_toys.Model.width = 12"
    assert build(body).tree.model == gin_toys.Model(width=12)


def test_a_scope_adds_its_bindings_over_the_plain_ones(build):
    body = """
gin_toys.Experiment.model = @gin_toys.Model()
gin_toys.Model.layers = (@gin_toys.Mlp(), @wide/gin_toys.Mlp())
gin_toys.Mlp.width = 4
gin_toys.Mlp.dropout_rate = 0.0
wide/gin_toys.Mlp.width = 9
"""
    narrow, wide = gin_toys.Mlp(4, dropout_rate=0.0), gin_toys.Mlp(9, dropout_rate=0.0)
    assert build(body).tree.model.layers == (narrow, wide)


def test_keywords_of_a_function_are_bound_by_any_name(build):
    body = """
gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = @gin_toys.takes_anything()
gin_toys.takes_anything.colour = 'red'
"""
    assert build(body).tree.pair.left == {"colour": "red"}


def test_a_function_without_parentheses_is_passed_on_with_its_arguments_bound(build):
    body = """
gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = @gin_toys.top2
gin_toys.top2.second_policy = 'random'
"""
    gating = build(body).tree.pair.left
    assert gating(1.0) == (1.0, "random", 0.0)
    assert gating(1.0, jitter=0.5) == (1.0, "random", 0.5)
    assert gating == build(body).tree.pair.left
    assert hash(gating) == hash(build(body).tree.pair.left)


def test_a_function_without_bindings_is_passed_on_as_it_is(build):
    body = "gin_toys.Experiment.pair = @gin_toys.Pair()\ngin_toys.Pair.left = @gin_toys.relu"
    assert build(body).tree.pair.left is gin_toys.relu


def test_a_function_with_parentheses_may_build_a_part(build):
    body = "gin_toys.Experiment.model = @gin_toys.small_model()\ngin_toys.small_model.heads = 2"
    assert build(body).tree.model == gin_toys.Model(width=4, heads=2)


def test_macros_are_read_inside_containers_and_through_other_macros(build):
    body = """
LENGTH = 16
LENGTHS = {'inputs': %LENGTH, 'targets': 8}
gin_toys.Experiment.model = @gin_toys.Model()
gin_toys.Model.lengths = %LENGTHS
"""
    assert build(body).tree.model.lengths == {"inputs": 16, "targets": 8}


def test_every_reader_of_a_macro_gets_a_container_of_its_own(build):
    body = """
ITEMS = [1, 2]
gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = %ITEMS
gin_toys.Pair.right = %ITEMS
"""
    pair = build(body).tree.pair
    assert pair.left == pair.right
    assert pair.left is not pair.right


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("MODEL_DIR=/tmp/x", "/tmp/x"),
        ("MODEL_DIR='/tmp/x'", "/tmp/x"),
        ("MODEL_DIR=gs://bucket/a=b", "gs://bucket/a=b"),
        ("MODEL_DIR=2024-01-01", "2024-01-01"),
        ("MODEL_DIR=it's", "it's"),
        ("MODEL_DIR=a # b", "a # b"),
    ],
)
def test_a_flag_that_is_no_gin_value_is_a_string(build, flag, value):
    body = "gin_toys.Experiment.model_dir = %MODEL_DIR"
    assert build(body, binding_from_flag(f"--gin.{flag}")).tree.model_dir == value


@pytest.mark.parametrize(
    "name",
    [
        "Experiment.train_steps",
        "gin_toys.Experiment.train_steps",
    ],
)
def test_a_flag_may_name_a_class_by_the_tail_of_its_name(build, name):
    assert build("", f"{name}=5").tree.train_steps == 5


def test_a_flag_may_build_a_class_that_only_its_module_was_imported_for(build):
    tree = build(
        "", "Experiment.model=@gin_toys.small_model()", "gin_toys.small_model.heads=1"
    ).tree
    assert tree.model == gin_toys.Model(width=2, heads=1)


def test_assembling_leaves_no_trace_in_the_next_config_nor_in_gin(build):
    build("STEPS = 3\ngin_toys.Experiment.train_steps = %STEPS")
    assert assemble(gin_toys.Experiment).tree == gin_toys.Experiment()
    assert gin.config_str() == ""


def test_a_hundred_bindings_take_less_than_50_ms(build):
    layers = ", ".join(f"@l{i}/gin_toys.Mlp()" for i in range(50))
    body = f"gin_toys.Experiment.model = @gin_toys.Model()\ngin_toys.Model.layers = ({layers})\n"
    body += "\n".join(f"l{i}/gin_toys.Mlp.width = {i}" for i in range(50))
    build(body)
    start = time.perf_counter()
    build(body)
    assert time.perf_counter() - start < 0.05


def test_the_room_imports_neither_jax_nor_tensorflow():
    code = (
        "import sys, gshard_exp.config as c; "
        "heavy = {'jax', 'flax', 'tensorflow', 'seqio', 'absl', 'fiddle'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gin_is_the_library_and_not_our_folder_of_gin_files():
    assert not gin.__file__.startswith(str(shipped_root() / "gin"))
