"""The points of a sweep before anything runs: assembled, checked, and who is to blame."""

import json

import pytest
import tiny_run

from gshard_exp import cli
from gshard_exp.config import ConfigError
from gshard_exp.sweep import prepare

SWEEP, DIR = str(tiny_run.GIN / "sweep.gin"), "--gin.SWEEP_DIR=x"
HEAD = """\
from __gin__ import dynamic_registration

from gshard_exp.sweep import grid

grid.Sweep:
  name = "mine"
  folder = "runs/mine"
  base = ["tests/gin/tiny.gin"]
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Assemble a sweep and its points from the lines that follow the head."""
    monkeypatch.chdir(tmp_path)

    def run(text, **how):
        (tmp_path / "mine.gin").write_text(HEAD + text)
        file = prepare.read_sweep("mine.gin", **how)
        return prepare.prepare(file)

    return run


def mistake(read, text, **how):
    with pytest.raises(ConfigError) as caught:
        read(text, **how)
    return str(caught.value)


ONE_AXIS = "  axes = [@grid.Axis()]\n"


def test_a_point_is_the_base_with_what_its_axes_set_in_a_folder_of_its_own(read):
    one, other = read(
        ONE_AXIS + 'grid.Axis.name = "experts"\n'
        'grid.Axis.sets = "NUM_EXPERTS"\ngrid.Axis.values = [2, 8]\n'
    )
    trees = [point.assembled.tree for point in (one, other)]
    experts = [tree.model.module.encoder.pattern[1].ffn.num_experts for tree in trees]
    assert experts == [2, 8]
    assert [tree.model_dir for tree in trees] == ["runs/mine/e2", "runs/mine/e8"]


def test_an_axis_that_names_nothing_is_refused_with_the_nearest_names_and_its_line(read):
    said = mistake(
        read,
        ONE_AXIS + 'grid.Axis.name = "experts"\ngrid.Axis.sets = "NUM_EXPRTS"\n'
        "grid.Axis.values = [2, 8]\n",
    )
    assert "The point e2: NUM_EXPRTS is set, but nothing reads it." in said
    assert "set at: mine.gin:12 (axes[0].values of the sweep: NUM_EXPRTS=2)" in said
    assert "for NUM_EXPRTS: NUM_EXPERTS" in said
    assert "2 of 2 points are wrong; also e8" in said


def test_a_value_of_the_wrong_type_is_blamed_on_the_axis(read):
    said = mistake(
        read,
        ONE_AXIS + 'grid.Axis.name = "experts"\ngrid.Axis.sets = "NUM_EXPERTS"\n'
        "grid.Axis.values = [2, 2.5]\n",
    )
    assert said.startswith("The point e2.5: layer.MoeLayer.num_experts is 2.5, of type float.")
    assert "mine.gin:12 (axes[0].values of the sweep: NUM_EXPERTS=2.5)" in said


def test_sizes_that_do_not_fit_are_found_before_anything_runs(read):
    said = mistake(
        read,
        ONE_AXIS + '  settings = ["DATA_PARTITIONS=4"]\n'
        'grid.Axis.name = "batch"\ngrid.Axis.sets = "BATCH_SIZE"\ngrid.Axis.values = [8, 6]\n',
    )
    assert "The point b6: batch_size=6 makes 6 rows at once" in said
    assert "mine.gin:13 (axes[0].values of the sweep: BATCH_SIZE=6)" in said


def test_a_missing_file_of_a_value_is_blamed_on_the_axis(read):
    said = mistake(
        read,
        ONE_AXIS + 'grid.Axis.name = "routing"\n'
        'grid.Axis.values = {"gshard": ["gin/moe/gshart.gin"]}\n',
    )
    assert "The point gshard: There is no gin file 'gin/moe/gshart.gin'." in said
    assert "mine.gin:11 (axes[0].values of the sweep: gin/moe/gshart.gin)" in said
    assert "try: gin/moe/gshard.gin" in said


def test_a_routing_preset_and_a_dense_model_can_be_values_of_an_axis(read):
    gshard, switch, dense = read(
        ONE_AXIS + 'grid.Axis.name = "model"\n'
        'grid.Axis.values = {"gshard": [], "switch": ["gin/moe/switch.gin"], "dense": ['
        '"ENCODER_PATTERN=(@dense/transformer.EncoderBlock(),)",'
        '"DECODER_PATTERN=(@dense/transformer.DecoderBlock(),)"]}\n'
    )
    patterns = [p.assembled.tree.model.module.encoder.pattern for p in (gshard, switch, dense)]
    gatings = [type(pattern[1].ffn.gating).__name__ for pattern in patterns[:2]]
    assert gatings == ["Top2Gating", "Top1Gating"]
    assert not hasattr(patterns[2][0].ffn, "gating")


def test_two_axes_that_set_the_same_are_refused(read):
    said = mistake(
        read,
        "  axes = [@a/grid.Axis(), @b/grid.Axis()]\n"
        'grid.Axis.sets = "NUM_EXPERTS"\ngrid.Axis.values = [2]\n'
        'a/grid.Axis.name = "a"\nb/grid.Axis.name = "b"\n',
    )
    assert "NUM_EXPERTS is set twice for the point a2-b2" in said
    assert all(f"mine.gin:11 (axes[{index}].values" in said for index in (0, 1))


@pytest.mark.parametrize("flag", ["MODEL_DIR=x", "NUM_EXPERTS=4", "NUM_EXPRTS=4"])
def test_a_flag_for_all_points_that_cannot_take_effect_is_refused(read, flag):
    axis = 'grid.Axis.name = "experts"\ngrid.Axis.sets = "NUM_EXPERTS"\ngrid.Axis.values = [2]\n'
    said = mistake(read, ONE_AXIS + axis, flags=(flag,))
    assert f"command line: --set={flag}" in said


def test_a_flag_wins_over_settings_of_the_sweep_and_an_axis_over_both(read):
    (point,) = read(
        '  settings = ["TRAIN_STEPS=7", "BATCH_SIZE=4", "NUM_EXPERTS=8"]\n'
        + ONE_AXIS
        + 'grid.Axis.name = "experts"\ngrid.Axis.sets = "NUM_EXPERTS"\ngrid.Axis.values = [2]\n',
        flags=("TRAIN_STEPS=9",),
    )
    tree = point.assembled.tree
    assert (tree.train_steps, tree.batch_size) == (9, 4)
    assert tree.model.module.encoder.pattern[1].ffn.num_experts == 2


def test_points_of_a_fiddle_builder_are_set_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_sweep.py").write_text(
        "import fiddle as fdl\nfrom gshard_exp.sweep import grid\n"
        "def depths():\n"
        "    axis = fdl.Config(grid.Axis, name='layers', values=[2, 4],\n"
        "        sets=['model.module.encoder.num_layers'])\n"
        "    return fdl.Config(grid.Sweep, name='d', folder='runs/d', fiddle='quickstart',\n"
        "        axes=[axis], settings=['train_steps=3'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    points = prepare.prepare(prepare.read_sweep("fdl:my_sweep:depths"))
    assert [p.assembled.tree.model.module.encoder.num_layers for p in points] == [2, 4]
    assert points[1].words == (
        "train",
        "--fdl_config=quickstart",
        "--fdl_set=train_steps=3",
        "--fdl_set=model.module.encoder.num_layers=4",
        "--fdl_set=model_dir=runs/d/l4",
    )
    with pytest.raises(ConfigError, match=r"The point l2: .* has no 'train_stps'") as caught:
        file = prepare.read_sweep("fdl:my_sweep:depths", flags=("train_stps=3",))
        prepare.prepare(file)
    assert "train_steps" in caught.value.hint


def test_the_folder_of_a_sweep_says_what_lies_in_it(tmp_path):
    file = prepare.read_sweep(SWEEP, [f"SWEEP_DIR={tmp_path}"])
    prepare.write_sweep(file)
    said = json.loads((tmp_path / "sweep.json").read_text())
    assert (said["schema"], said["name"], said["base"]) == (1, "tiny", ["tests/gin/tiny.gin"])
    assert [point["name"] for point in said["points"]] == ["l1-e2", "l1-e4", "l2-e2", "l2-e4"]
    assert said["points"][3]["axes"] == {"layers": 2, "experts": 4}
    assert said["points"][3]["dir"] == "l2-e4"
    assert said["points"][3]["bindings"][-1] == "NUM_EXPERTS=4"


def test_the_folder_of_another_sweep_is_left_alone(tmp_path):
    (tmp_path / "sweep.json").write_text('{"schema": 1, "name": "other", "points": []}')
    file = prepare.read_sweep(SWEEP, [f"SWEEP_DIR={tmp_path}"])
    with pytest.raises(ConfigError, match="is the folder of the sweep 'other', and this is 'tiny'"):
        prepare.write_sweep(file)
    assert "other" in (tmp_path / "sweep.json").read_text()


POINT = {"name": "a", "dir": "a", "axes": {}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": None}, "is damaged: 'name' is None"),
        ({"points": {}}, "is damaged: 'points' is {}"),
        ({"points": [POINT, {}]}, "is damaged: points[1] is {}, without 'name'"),
        ({"points": ["a"]}, "is damaged: points[0] is 'a', without 'name'"),
        ({"points": [POINT | {"axes": []}]}, "without 'axes'"),
        ({"schema": 2}, "has schema 2; this version reads schema 1"),
    ],
)
def test_a_damaged_file_in_the_folder_of_a_sweep_is_named(change, said, tmp_path, command):
    whole = {"schema": 1, "name": "tiny", "points": [POINT]}
    (tmp_path / "sweep.json").write_text(json.dumps(whole))
    assert prepare.read_folder(tmp_path) == whole
    (tmp_path / "sweep.json").write_text(json.dumps(whole | change))
    status, _, err = command("sweep", "status", tmp_path)
    assert status == 2 and said in err
    file = prepare.read_sweep(SWEEP, [f"SWEEP_DIR={tmp_path}"])
    with pytest.raises(ConfigError):
        prepare.write_sweep(file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "There are 0 sweeps."),
        (["plan", SWEEP], "SWEEP_DIR has no value yet."),
        (["plan", "tests/gin/sweeep.gin"], "There is no gin file 'tests/gin/sweeep.gin'."),
        (["plan", tiny_run.TINY], "grid.Sweep is built without name and folder."),
        (
            ["run", SWEEP, "--gin.SWEEP_DIR=x", "--only=l9-*"],
            "--only=l9-* matches none of 4 points.",
        ),
        (["run", SWEEP, "--gin.SWEEP_DIR=x", "--jobs=0"], "--jobs=0 has to be at least 1."),
        (["run", SWEEP, "--gin.SWEEP_DIR=x", "--set=NUM_EXPRTS=2"], "NUM_EXPRTS is set, but"),
        (["status", "."], "The folder '.' holds no sweep.json."),
        (["status", ".", "--gin.SWEEP_DIR=x"], "SWEEP_DIR=x changes nothing."),
        (["eval", SWEEP, "--set=BEAM_SIZE=4"], "--set=BEAM_SIZE=4 changes nothing."),
        (["run", SWEEP, "--slurm=timeout_min=5"], "--slurm=timeout_min=5 changes nothing."),
    ],
)
def test_a_mistake_ends_with_one_message_and_nothing_is_written(
    arguments, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert not list(tmp_path.iterdir())
