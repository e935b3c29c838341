"""Every mistake is one ConfigError with the numbers, the place and what to try."""

import gin_toys
import pytest

from gshard_exp.config import ConfigError, assemble, binding_from_flag, nearest
from gshard_exp.errors import SettingError


def assert_parts(text: str, *parts: str) -> None:
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in:\n{text}"
    assert "In call to configurable" not in text
    assert "Traceback" not in text


def test_a_misspelt_parameter_names_the_nearest_and_the_line(complaint):
    text = complaint("gin_toys.Experiment.train_step = 3")
    assert_parts(text, "gin_toys.Experiment has no parameter 'train_step'", "run.gin:3")
    assert_parts(text, "try: train_steps")


def test_a_misspelt_parameter_in_a_block_names_its_own_line(complaint):
    text = complaint("gin_toys.Experiment:\n  train_steps = 3\n  batchsize = 4\n")
    assert_parts(text, "no parameter 'batchsize'", "run.gin:5", "batch_size")


def test_a_misspelt_class_names_the_nearest(complaint):
    text = complaint("gin_toys.Experiment.model = @gin_toys.Modle()")
    assert_parts(text, "gin_toys has no 'Modle'", "run.gin:3", "try: gin_toys.Model")


def test_a_misspelt_class_at_the_head_of_a_block_is_found(complaint):
    text = complaint("gin_toys.Experimnt:\n  train_steps = 3\n")
    assert_parts(text, "no 'Experimnt'", "run.gin:3", "gin_toys.Experiment")


def test_a_misspelt_alias_names_the_imports_of_the_file(complaint):
    text = complaint("gin_toy.Experiment.train_steps = 3")
    assert_parts(text, "'gin_toy'", "does not import", "run.gin:3", "try: gin_toys")


def test_a_misspelt_module_names_the_nearest(complaint):
    text = complaint("from gshard_exp.config import asemble")
    assert_parts(text, "no module 'gshard_exp.config.asemble'", "run.gin:3")
    assert_parts(text, "gshard_exp.config.assemble")


def test_a_misspelt_top_level_module_names_the_nearest(complaint):
    assert_parts(complaint("import gin_toyss"), "'gin_toyss'", "run.gin:3", "gin_toys")


def test_an_import_that_needs_a_missing_library_names_it(complaint, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = complaint("import needs_more")
    assert_parts(text, "needs_more needs the module 'not_installed_here'", "run.gin:3")


def test_an_import_without_dynamic_registration_says_which_line_to_add(write):
    write("plain.gin", "import gin_toys\n", head="")
    with pytest.raises(ConfigError, match="plain") as caught:
        assemble(gin_toys.Experiment, ["plain.gin"])
    assert_parts(str(caught.value), "plain.gin:1", "from __gin__ import dynamic_registration")


def test_a_value_that_is_neither_class_nor_function_cannot_be_built(complaint):
    text = complaint("gin_toys.Experiment.model = @gin_toys.dataclasses()")
    assert_parts(text, "'gin_toys.dataclasses' is a module", "run.gin:3")


def test_a_misspelt_macro_in_a_flag_names_the_nearest(complaint):
    text = complaint(
        "TRAIN_STEPS = 1\ngin_toys.Experiment.train_steps = %TRAIN_STEPS",
        binding_from_flag("--gin.TRAIN_STEP=5"),
    )
    assert_parts(text, "TRAIN_STEP is set, but nothing reads it")
    assert_parts(text, "command line: --gin.TRAIN_STEP=5", "TRAIN_STEPS")


def test_a_misspelt_class_in_a_flag_names_the_nearest(complaint):
    text = complaint("", "Experimnt.train_steps=5")
    assert_parts(text, "'Experimnt'", "command line: --gin.Experimnt.train_steps=5")
    assert_parts(text, "gin_toys.Experiment")


def test_a_misspelt_parameter_in_a_flag_names_the_nearest(complaint):
    text = complaint("", "Experiment.train_step=5")
    assert_parts(text, "no parameter 'train_step'", "--gin.Experiment.train_step=5", "train_steps")


def test_a_flag_that_means_two_classes_lists_both(complaint, tmp_path, monkeypatch):
    (tmp_path / "other_toys.py").write_text("class Model:\n  def __init__(self, width=1): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    body = """import other_toys
gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = @gin_toys.Model()
gin_toys.Pair.right = @other_toys.Model()
"""
    text = complaint(body, "Model.width=4")
    assert_parts(text, "'Model' means 2 things", "gin_toys.Model or other_toys.Model")


@pytest.mark.parametrize("flag", ["--gin.TRAIN_STEPS", "--gin.=3", "--gin_file=x"])
def test_a_flag_that_sets_nothing_is_refused(flag):
    with pytest.raises(ConfigError, match="sets nothing"):
        binding_from_flag(flag)


def test_a_flag_with_an_open_bracket_is_not_taken_for_a_string(complaint):
    text = complaint("", "Experiment.train_steps=[1, 2")
    assert_parts(text, "Cannot read the value [1, 2", "command line: --gin.Experiment", "bracket")


def test_a_macro_that_nothing_sets_names_its_reader_and_the_nearest(complaint):
    text = complaint("STEPS = 3\nBATCH = %STEPS\ngin_toys.Experiment.train_steps = %STEP")
    assert_parts(text, "%STEP is read, but nothing sets STEP", "run.gin:5")
    assert_parts(text, "--gin.STEP=VALUE", "%STEPS")


def test_a_required_macro_names_its_declaration_its_reader_and_the_flag(complaint):
    text = complaint("TRAIN_STEPS = %gin.REQUIRED\ngin_toys.Experiment.train_steps = %TRAIN_STEPS")
    assert_parts(text, "TRAIN_STEPS has no value yet", "run.gin:3", "read at run.gin:4")
    assert_parts(text, "try: --gin.TRAIN_STEPS=VALUE")


def test_a_misspelt_flag_for_a_required_macro_is_pointed_out(complaint):
    text = complaint(
        "TRAIN_STEPS = %gin.REQUIRED\ngin_toys.Experiment.train_steps = %TRAIN_STEPS",
        "TRAIN_STEP=5",
    )
    assert_parts(text, "TRAIN_STEPS has no value yet", "--gin.TRAIN_STEPS=VALUE")
    assert_parts(text, "TRAIN_STEP, set at command line: --gin.TRAIN_STEP=5, is read by nothing")


def test_a_parameter_that_is_required_directly_names_its_line(complaint):
    text = complaint("gin_toys.Experiment.train_steps = %gin.REQUIRED")
    assert_parts(text, "gin_toys.Experiment.train_steps has no value yet", "run.gin:3")


def test_a_mistake_in_an_imported_module_keeps_its_traceback(build, tmp_path, monkeypatch):
    (tmp_path / "has_a_bug.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError) as caught:
        build("import has_a_bug")
    assert caught.value.__notes__ == ["while importing has_a_bug (run.gin:3)"]


def test_a_missing_argument_names_the_reference_that_builds_the_object(complaint):
    body = """gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = @gin_toys.MoE()
"""
    text = complaint(body)
    assert_parts(text, "gin_toys.MoE is built without num_experts", "run.gin:4")
    assert_parts(text, "gin_toys.MoE.num_experts = ...")


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        ("gin_toys.Experiment.train_steps = [1, 2\n\n", 3, "EOF"),
        ("A = 1\ngin_toys.Experiment.train_steps : 3\n", 4, "newline"),
        ("A = 1\nB = foo\n", 4, "foo"),
        ("A = 1\nB == 2\n", 4, "expected"),
        ("A = 'abc\n", 3, ""),
        ("gin_toys.Experiment:\n  train_steps = 1\n batch_size = 2\n", 5, "indent"),
        ("include 3\n", 3, "string"),
    ],
)
def test_what_is_no_gin_is_reported_with_its_line(complaint, body, line, reason):
    text = complaint(body)
    assert_parts(text, "Cannot read", f"run.gin:{line}", reason)


def test_a_value_error_of_a_constructor_blames_the_fields_it_names(complaint):
    body = """gin_toys.Experiment.model = @gin_toys.Model()
HEADS = 3
gin_toys.Model.heads = %HEADS
gin_toys.Model.width = 8
gin_toys.Model.layers = ()
"""
    text = complaint(body)
    assert_parts(text, "gin_toys.Model: width=8 is no multiple of heads=3.")
    assert_parts(text, "run.gin:4 (heads, %HEADS read at run.gin:5)", "run.gin:6 (width)")
    assert "layers" not in text


def test_a_setting_error_names_where_each_setting_was_set(complaint):
    body = "gin_toys.Experiment.model = @gin_toys.Model()\ngin_toys.Model.width = 16\n"
    text = complaint(body, "Experiment.batch_size=6")
    assert_parts(text, "A batch of 6 rows cannot be dealt to 4 heads.")
    assert_parts(text, "command line: --gin.Experiment.batch_size=6 (batch_size)")
    assert_parts(text, "default (model.heads)", "try: Set it to 4.")


def test_a_setting_error_after_assembly_is_explained_from_the_root(build):
    assembled = build("gin_toys.Experiment.batch_size = 16")
    with pytest.raises(ConfigError) as caught, assembled.explaining():
        raise SettingError("16 is too many.", settings=("batch_size",), hint="8")
    assert str(caught.value) == "16 is too many.\n  set at: run.gin:3 (batch_size)\n  try: 8"


def test_validation_elsewhere_can_say_where_a_number_was_set(build):
    assembled = build("gin_toys.Experiment.batch_size = 16")
    error = assembled.error("16 is too many.", paths=["batch_size", "train_steps"], hint="8")
    assert error.at == ("run.gin:3 (batch_size)", "default (train_steps)")


def test_a_mistake_in_code_keeps_its_traceback(build):
    with pytest.raises(AttributeError, match="a mistake in code") as caught:
        build("gin_toys.Experiment.model = @gin_toys.broken()")
    assert caught.value.__notes__ == ["while building gin_toys.broken (run.gin:3)"]


def test_an_object_that_is_built_from_itself_is_refused(complaint):
    body = """gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = @gin_toys.Pair()
"""
    assert_parts(complaint(body), "Pair is built from itself", "run.gin:4")


def test_a_macro_that_is_made_from_itself_is_refused(complaint):
    text = complaint("A = %B\nB = (%A, 1)\ngin_toys.Experiment.train_steps = %A")
    assert_parts(text, "The macro A is made from itself", "run.gin:4")


def test_the_three_nearest_names_come_best_first():
    known = ["train_steps", "eval_steps", "batch_size", "seed"]
    assert nearest("Trian_Steps", known) == ["train_steps", "eval_steps", "batch_size"]


def test_the_last_parts_of_dotted_names_may_be_alike():
    assert nearest("Modle", ["seq2seq.Model", "mode.x"], count=1) == ["seq2seq.Model"]


def test_an_error_has_four_parts_and_leaves_out_what_is_empty():
    full = ConfigError("3 is odd.", rule="It must be even.", at=["a.gin:1", "a.gin:1"], hint="4")
    assert str(full) == "3 is odd. It must be even.\n  set at: a.gin:1\n  try: 4"
    assert str(ConfigError("3 is odd.")) == "3 is odd."
