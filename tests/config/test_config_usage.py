"""Which settings count as used."""

import gin_toys
import pytest

from gshard_exp.config import ConfigError, assemble

PRESET = """
NUM_EXPERTS = 4
MODEL = @gin_toys.Pair()
gin_toys.Pair.left = @gin_toys.MoE()
gin_toys.MoE.num_experts = %NUM_EXPERTS
gin_toys.MoE.gating = @gin_toys.top2
gin_toys.top2.jitter = 0.1
gin_toys.Experiment.pair = %MODEL
"""


def test_a_macro_in_a_file_that_no_statement_reads_is_an_error(complaint):
    text = complaint("STEP = 3\nSTEPS = 4\ngin_toys.Experiment.train_steps = %STEPS")
    assert "STEP is set, but nothing reads it." in text
    assert "set at: run.gin:3" in text
    assert "for STEP: STEPS" in text


def test_bindings_of_a_class_that_nothing_builds_are_an_error(complaint):
    text = complaint("gin_toys.Model.width = 16\ngin_toys.Model.heads = 8")
    assert "gin_toys.Model.width, gin_toys.Model.heads are set, but nothing reads them." in text
    assert "run.gin:3" in text
    assert "run.gin:4" in text
    assert text.endswith("try: build it with @gin_toys.Model() where it belongs")


def test_a_binding_in_a_scope_that_no_reference_opens_is_an_error(complaint):
    body = """gin_toys.Experiment.model = @gin_toys.Model()
gin_toys.Model.width = 16
deocder/gin_toys.Model.width = 8
"""
    text = complaint(body)
    assert "deocder/gin_toys.Model.width is set" in text
    assert "run.gin:5" in text
    assert "scope" in text


def test_a_preset_may_be_replaced_in_part(build):
    assert build(PRESET + "MODEL = None\n").tree.pair is None
    tree = build(PRESET + "gin_toys.MoE.gating = @gin_toys.relu\n").tree
    assert tree.pair.left == gin_toys.MoE(4, gin_toys.relu)


def test_a_preset_may_be_replaced_by_a_flag(build):
    assert build(PRESET, "MODEL=None").tree.pair is None


def test_what_a_replaced_statement_did_not_build_is_still_an_error(complaint):
    text = complaint(PRESET + "MODEL = None\ngin_toys.Model.width = 4\n")
    assert "gin_toys.Model.width is set" in text
    assert "MoE" not in text.split("try:")[0]


def test_a_flag_for_a_macro_whose_reader_is_replaced_is_an_error(complaint):
    text = complaint(PRESET + "MODEL = None\n", "NUM_EXPERTS=64")
    assert "NUM_EXPERTS is set, but nothing reads it." in text
    assert "command line: --gin.NUM_EXPERTS=64" in text
    assert "its reader run.gin:7 is overridden" in text


def test_a_flag_for_a_class_that_is_not_built_is_an_error(complaint):
    text = complaint(PRESET + "MODEL = None\n", "MoE.num_experts=64")
    assert "MoE.num_experts is set" in text


def test_a_flag_that_every_scope_hides_is_an_error(complaint):
    body = """
gin_toys.Experiment.model = @big/gin_toys.Model()
big/gin_toys.Model.width = 16
"""
    assert "gin_toys.Model.width is set" in complaint(body, "gin_toys.Model.width=4")


def test_an_overridden_statement_may_read_a_macro_that_nothing_sets(build):
    body = "gin_toys.Experiment.train_steps = %NOWHERE\ngin_toys.Experiment.train_steps = 2"
    assert build(body).tree.train_steps == 2


def test_a_macro_defined_in_two_files_counts_once(write):
    first = write("first.gin", "S = 1\ngin_toys.Experiment.train_steps = %S")
    second = write("second.gin", "S = 2", head="")
    assert assemble(gin_toys.Experiment, [first, second]).tree.train_steps == 2


def test_all_unused_settings_are_reported_at_once(complaint):
    text = complaint("A = 1\nB = 2\n", "C=3")
    assert "A, B, C are set" in text
    for place in ("run.gin:3", "run.gin:4", "command line: --gin.C=3"):
        assert place in text


def test_an_error_of_use_is_a_config_error(build):
    with pytest.raises(ConfigError):
        build("A = 1")
