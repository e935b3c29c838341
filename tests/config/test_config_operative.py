"""`config.gin` assembles to the same tree and says who set what."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import gin_toys
import pytest

from gshard_exp.config import assemble, flatten, operative_config

EVERYTHING = """
LENGTH = 16
LENGTHS = {'inputs': %LENGTH, 'targets': 8}
MODEL = @gin_toys.Model()
gin_toys.Experiment:
    model = %MODEL
    train_steps = %TRAIN_STEPS
    typed = @gin_toys.Typed()
    pair = @gin_toys.Pair()
gin_toys.Model.lengths = %LENGTHS
gin_toys.Model.layers = (
    @a/gin_toys.Mlp(), @gin_toys.MoE(),
    (@b/gin_toys.Mlp(),))
gin_toys.Mlp.width = 4
b/gin_toys.Mlp.width = 5
gin_toys.MoE.num_experts = 2
gin_toys.MoE.gating = @gin_toys.top2
gin_toys.top2.second_policy = 'random'
gin_toys.Typed.names = ['it\\'s', "a \\"b\\", c", 'line\\nbreak', '# no comment', 'long' 'er']
gin_toys.Typed.shape = (1,)
gin_toys.Typed.rate = -1e-05
gin_toys.Pair.left = {'a': [@gin_toys.relu, None, (), {}]}
gin_toys.Pair.right = @plain/gin_toys.top2
"""


def test_the_text_assembles_to_an_equal_tree_from_any_folder(build, tmp_path, monkeypatch):
    assembled = build(EVERYTHING, "TRAIN_STEPS=100", "Experiment.model_dir=/tmp/x y#z")
    path = tmp_path / "run" / "config.gin"
    path.parent.mkdir()
    path.write_text(operative_config(assembled))
    monkeypatch.chdir(path.parent)
    again = assemble(gin_toys.Experiment, ["config.gin"])
    assert again.tree == assembled.tree
    assert flatten(again.tree) == flatten(assembled.tree)


def test_the_text_of_the_text_has_the_same_settings(build, tmp_path):
    def settings(text: str) -> list[str]:
        return [line.partition("  #")[0] for line in text.splitlines() if not line.startswith("#")]

    text = operative_config(build(EVERYTHING, "TRAIN_STEPS=100"))
    (tmp_path / "config.gin").write_text(text)
    again = assemble(gin_toys.Experiment, [str(tmp_path / "config.gin")])
    assert settings(operative_config(again)) == settings(text)


def test_a_line_says_who_set_it(build):
    text = operative_config(build("gin_toys.Experiment.train_steps = 3", "Experiment.model_dir=/x"))
    assert "gin_toys.Experiment.train_steps = 3  # run.gin:3\n" in text
    assert (
        "gin_toys.Experiment.model_dir = '/x'  # command line: --gin.Experiment.model_dir=/x\n"
        in text
    )
    assert "gin_toys.Experiment.batch_size = 8  # default\n" in text
    assert "gin_toys.Model.heads = 4  # default\n" in text


def test_a_macro_of_plain_values_stays_a_macro(build, tmp_path):
    body = "TRAIN_STEPS = 1\ngin_toys.Experiment.train_steps = %TRAIN_STEPS"
    text = operative_config(build(body, "TRAIN_STEPS=5"))
    assert "TRAIN_STEPS = 5  # command line: --gin.TRAIN_STEPS=5\n" in text
    assert "gin_toys.Experiment.train_steps = %TRAIN_STEPS  # run.gin:4\n" in text
    (tmp_path / "config.gin").write_text(text)
    config = str(tmp_path / "config.gin")
    assert assemble(gin_toys.Experiment, [config], ["TRAIN_STEPS=9"]).tree.train_steps == 9


def test_a_macro_that_builds_an_object_is_written_where_it_is_read(build):
    text = operative_config(build(EVERYTHING, "TRAIN_STEPS=100"))
    line = "gin_toys.Experiment.model = @gin_toys.Model()  # run.gin:6 (%MODEL read at run.gin:8)\n"
    assert line in text
    assert "\nMODEL =" not in text


def test_a_long_container_has_one_item_a_line_whatever_its_strings_hold(build, tmp_path):
    items = ["it's", 'a "b", c', "[(", "back\\", "line\nbreak", ("x,", ["y"])] + ["filler" * 3] * 4
    body = f"gin_toys.Experiment.pair = @gin_toys.Pair()\ngin_toys.Pair.left = {items!r}\n"
    assembled = build(body)
    text = operative_config(assembled)
    assert assembled.tree.pair.left == items
    assert (
        "# run.gin:4\ngin_toys.Pair.left = [\n    \"it's\",\n    'a \"b\", c',\n    '[('," in text
    )
    (tmp_path / "config.gin").write_text(text)
    assert assemble(gin_toys.Experiment, ["config.gin"]).tree == assembled.tree


def test_a_default_that_gin_cannot_write_is_a_comment(build):
    text = operative_config(build(""))
    assert "# gin_toys.Experiment.limit = inf  # default, which gin cannot write\n" in text


def test_modules_of_one_name_get_different_aliases(build, tmp_path, monkeypatch):
    for package in ("one_room", "other_room"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "layers.py").write_text(
            "import dataclasses\n@dataclasses.dataclass\nclass Layer:\n    width: int = 1\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    body = """
from one_room import layers
from other_room import layers as layers2
gin_toys.Experiment.pair = @gin_toys.Pair()
gin_toys.Pair.left = @layers.Layer()
gin_toys.Pair.right = @layers2.Layer()
layers2.Layer.width = 2
"""
    assembled = build(body)
    text = operative_config(assembled)
    assert "from one_room import layers\n" in text
    assert "from other_room import layers as other_room_layers\n" in text
    (tmp_path / "config.gin").write_text(text)
    assert assemble(gin_toys.Experiment, ["config.gin"]).tree == assembled.tree


SCOPES = """
TRAIN_STEPS = 3
PAIR = @gin_toys.Pair()
gin_toys.Experiment.pair = @outer/gin_toys.Pair()
gin_toys.Experiment.train_steps = %TRAIN_STEPS
outer/gin_toys.Pair.left = [@gin_toys.Mlp(), @inner/gin_toys.Mlp(), @outer/inner/gin_toys.Mlp()]
outer/gin_toys.Pair.right = %PAIR
PAIR/gin_toys.Pair.left = @gin_toys.Mlp()
gin_toys.Mlp.width = 1
outer/gin_toys.Mlp.width = 2
inner/gin_toys.Mlp.width = 3
outer/gin_toys.Mlp.dropout_rate = 0.2
outer/inner/gin_toys.Mlp.width = 4
PAIR/gin_toys.Mlp.width = 5
"""


@pytest.mark.parametrize("body", [EVERYTHING, SCOPES], ids=["everything", "scopes"])
def test_gin_itself_builds_the_same_tree_from_the_files_and_from_the_text(build, tmp_path, body):
    """The oracle is gin-config, in a process of its own because its registry is global."""
    body = body.replace("gin_toys.top2.second_policy = 'random'\n", "")
    assembled = build(body, "TRAIN_STEPS=100")
    (tmp_path / "config.gin").write_text(operative_config(assembled))
    code = """
import gin, gin_toys, sys
for files, flags in ((["run.gin"], ["TRAIN_STEPS=100"]), (["config.gin"], [])):
    gin.clear_config()
    gin.parse_config_files_and_bindings(files, flags)
    sys.stdout.write(repr(gin.get_configurable(gin_toys.Experiment)()) + "\\n")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(gin_toys.__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    from_files, from_text = (_without_addresses(line) for line in run.stdout.splitlines())
    assert from_files == from_text == _without_addresses(repr(assembled.tree))


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_leaves_are_listed_by_path(build):
    leaves = flatten(build(EVERYTHING, "TRAIN_STEPS=100").tree)
    assert leaves["model.lengths['inputs']"] == 16
    assert leaves["model.layers[2][0].width"] == 5
    assert leaves["model.layers[1].gating"] is gin_toys.top2
    assert leaves["model.layers[1].gating.second_policy"] == "random"
    assert leaves["pair.left['a'][2]"] == ()
    assert "model" not in leaves


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("train_steps", "command line: --gin.TRAIN_STEPS=100 (%TRAIN_STEPS read at run.gin:9)"),
        ("model.lengths['inputs']", "run.gin:4 (%LENGTHS, %LENGTH read at run.gin:12)"),
        ("model.lengths['targets']", "run.gin:5 (%LENGTHS read at run.gin:12)"),
        ("model.layers[2][0].width", "run.gin:17"),
        ("model.layers[0].width", "run.gin:16"),
        ("model.layers[1].gating.second_policy", "run.gin:20"),
        ("model.layers[1].expert.width", "default"),
        ("model", "run.gin:6 (%MODEL read at run.gin:8)"),
        ("batch_size", "default"),
    ],
)
def test_where_names_the_statement_that_wrote_a_leaf(build, path, place):
    assert str(build(EVERYTHING, "TRAIN_STEPS=100").where(path)) == place


def test_every_leaf_has_a_place(build):
    assembled = build(EVERYTHING, "TRAIN_STEPS=100")
    assert all(str(assembled.where(path)) for path in flatten(assembled.tree))


def test_where_refuses_a_path_that_the_tree_does_not_have(build):
    with pytest.raises(KeyError, match="batchsize"):
        build("").where("batchsize")


def test_bound_functions_differ_where_their_arguments_differ():
    from gshard_exp.config.flatten import Bound

    assert Bound(gin_toys.top2, jitter=0.1) != Bound(gin_toys.top2, jitter=0.2)
    assert Bound(gin_toys.top2, jitter=0.1) == functools.partial(gin_toys.top2, jitter=0.1)
