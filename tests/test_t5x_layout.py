"""Checkpoints of t5x, opened and continued here, and ours made its; t5x itself is not needed.

`recorded/t5x_checkpoint.json` lists the arrays that t5x (commit cc342d4) wrote for `tiny.gin`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from gshard_exp.errors import SettingError
from gshard_exp.t5x_runner import run
from gshard_exp.train.checkpoint import restore_params
from gshard_exp.train.state import plan_state

pytestmark = pytest.mark.usefixtures("quick_compilation")
RECORDED = json.loads((Path(__file__).parent / "recorded" / "t5x_checkpoint.json").read_text())
STEP = 8


def argv(folder, *bindings):
    flags = [f"--gin.{binding}" for binding in bindings]
    return [f"--gin_file={tiny_run.TINY}", f"--gin.MODEL_DIR={folder}", *flags]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A checkpoint as t5x lays it out, with numbers of our own; its folder and its arrays."""
    folder = tmp_path_factory.mktemp("t5x") / f"checkpoint_{STEP}"
    rng = np.random.default_rng(0)
    arrays = {
        path: rng.uniform(0.1, 1, shape).astype(dtype) if dtype == "float32" else np.int32(STEP)
        for path, (shape, dtype) in RECORDED.items()
    }
    arrays = {path: np.broadcast_to(x, RECORDED[path][0]) for path, x in arrays.items()}
    tree = unflatten_dict({tuple(path.split("/")): x.copy() for path, x in arrays.items()})
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / "state", ocp.args.PyTreeSave(tree))
    position = folder / "dataset" / "train_ds-000-of-001"
    position.mkdir(parents=True)
    data = {"vocab_sizes": {"inputs": 40, "targets": 30}, "seed": 0, "batch_size": 8}
    data["lengths"] = {"inputs": 8, "targets": 8}
    (position / "identity.json").write_text(json.dumps(data))
    (position / "position.json").write_text(json.dumps({"drawn": STEP}))
    return folder, arrays


def params_of(tree):
    return {"/".join(path): np.asarray(x) for path, x in flatten_dict(tree).items()}


def plan_of(tree):
    return plan_state(tree.model, tree.optimizer, tree.mesh.build(), tree.rules)


def test_its_parameters_are_read_as_they_lie(recorded, tmp_path):
    """As `eval` and `translate` read them."""
    checkpoint, arrays = recorded
    plan = plan_of(tiny_run.experiment(tmp_path, small=False))
    step, params = restore_params(checkpoint.parent, None, plan.abstract.params)
    assert step == STEP
    found = params_of(params)
    assert {f"target/{path}" for path in found} == {p for p in arrays if p.startswith("target/")}
    for path, x in found.items():
        np.testing.assert_array_equal(x, arrays[f"target/{path}"])


@pytest.fixture(scope="module")
def converted(recorded, tmp_path_factory):
    from gshard_exp import cli

    folder = tmp_path_factory.mktemp("converted")
    assert cli.main(["convert", str(recorded[0]), *argv(folder)]) == 0
    return folder


def test_all_of_it_is_carried_over(recorded, converted):
    tree = tiny_run.experiment(converted, small=False)
    found = tiny_run.saved(tree, STEP)
    arrays = recorded[1]
    # Optimizer state has the same arrays under names of optax's classes.
    ours = sorted(x.tobytes() for path, x in found.items() if path.startswith(".opt_state"))
    theirs = [x.tobytes() for path, x in arrays.items() if path.startswith("state/param_states")]
    assert ours == sorted(theirs)
    assert found[".step"] == found[".updates"] == STEP
    one = "encoder/pattern_1/ffn/wi"
    keys = "".join(f"['{key}']" for key in one.split("/"))
    np.testing.assert_array_equal(found[f".params{keys}"], arrays[f"target/{one}"])
    np.testing.assert_array_equal(
        found[
            ".opt_state.inner_states['encoder'].inner_state[0]"
            ".v['encoder']['pattern_1']['ffn']['wi']"
        ],
        arrays[f"state/param_states/inner_states/encoder/inner_state/0/v/{one}"],
    )


def test_the_folder_is_one_of_a_run(converted):
    names = {path.name for path in converted.iterdir()}
    assert names == {f"checkpoint_{STEP}", "config.gin", "model-info.txt"}
    assert f"MODEL_DIR = '{converted}'" in (converted / "config.gin").read_text()


def test_it_goes_on_at_its_place_in_the_data(converted, command):
    status, out, _ = command("train", *argv(converted))
    assert status == 0 and f"resuming from {converted / f'checkpoint_{STEP}'}" in out
    assert [record["step"] for record in tiny_run.records(converted)] == [9, 10, 11, 12]
    position = converted / "checkpoint_12" / "data" / "position.json"
    assert json.loads(position.read_text()) == {"drawn": 12}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    tree = tiny_run.experiment(tmp_path_factory.mktemp("ours"), small=False)
    tiny_run.train(tree)
    return tree


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory):
    """Our checkpoint in t5x's layout."""
    from gshard_exp import cli

    folder = tmp_path_factory.mktemp("theirs")
    checkpoint = Path(ours.model_dir) / f"checkpoint_{STEP}"
    assert cli.main(["convert", str(checkpoint), *argv(folder)]) == 0
    return folder / f"checkpoint_{STEP}"


def test_ours_becomes_what_t5x_writes(theirs):
    saved = ocp.PyTreeCheckpointHandler().metadata(epath.Path(theirs) / "state").tree
    found = {"/".join(path): leaf for path, leaf in flatten_dict(saved).items()}
    assert {p: [list(x.shape), str(x.dtype)] for p, x in found.items()} == RECORDED
    position = theirs / "dataset" / "train_ds-000-of-001" / "position.json"
    assert json.loads(position.read_text()) == {"drawn": STEP}


def test_there_and_back_nothing_is_lost(ours, theirs, tmp_path, command):
    status, out, err = command("convert", theirs, *argv(tmp_path))
    assert (status, err) == (0, "")
    assert f"{theirs} (t5x) -> {tmp_path / theirs.name} (ours)" in out
    back = tiny_run.experiment(tmp_path, small=False)
    tiny_run.assert_equal(tiny_run.saved(back, STEP), tiny_run.saved(ours, STEP))
    tiny_run.train(back)
    tiny_run.assert_equal(tiny_run.saved(back), tiny_run.saved(ours))


def test_state_of_another_optimizer_starts_anew_and_is_said_to(recorded, tmp_path, command):
    other = ("OPTIMIZER=@optimizer.AdamW()", "optimizer.AdamW.learning_rate=%SCHEDULE")
    status, out, _ = command("convert", recorded[0], *argv(tmp_path, *other))
    assert status == 0 and "the optimizer state is of another optimizer: it starts anew" in out
    tree = tiny_run.experiment(tmp_path, *other, small=False)
    found = tiny_run.saved(tree, STEP)
    state = [x for path, x in found.items() if path.startswith(".opt_state")]
    assert state and not any(x.any() for x in state)
    assert any(x.any() for path, x in found.items() if path.startswith(".params"))


def test_a_position_of_a_stream_of_t5x_is_not_ours_and_is_said_to(recorded, tmp_path, command):
    checkpoint = tmp_path / recorded[0].name
    checkpoint.mkdir()
    (checkpoint / "state").symlink_to(recorded[0] / "state")
    status, out, _ = command("convert", checkpoint, *argv(tmp_path / "new"))
    assert status == 0 and "holds no position in this data: training starts at its beginn" in out
    position = tmp_path / "new" / checkpoint.name / "data" / "position.json"
    assert json.loads(position.read_text()) == {"drawn": 0}


@pytest.mark.parametrize(
    ("checkpoint", "bindings", "said"),
    [
        ("nothing", (), "is no checkpoint"),
        (f"checkpoint_{STEP + 1}", (), "is no checkpoint"),
        (f"checkpoint_{STEP}", ("EMBED_DIM=32",), "does not fit this experiment"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    recorded, tmp_path, command, checkpoint, bindings, said
):
    place = recorded[0].parent / checkpoint
    status, _, err = command("convert", place, *argv(tmp_path / "new", *bindings))
    assert status == 2 and said in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("verb", "missing"),
    [("convert", "_METADATA"), ("convert", "ocdbt.process_0"), ("train", "_METADATA")],
)
def test_a_checkpoint_that_is_not_whole_is_refused(recorded, tmp_path, command, verb, missing):
    checkpoint = tmp_path / "broken" / recorded[0].name
    shutil.copytree(recorded[0], checkpoint)
    lost = checkpoint / "state" / missing
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    folder = checkpoint.parent if verb == "train" else tmp_path / "new"
    status, _, err = command(verb, *[checkpoint] * (verb == "convert"), *argv(folder))
    assert status == 2 and f"{checkpoint.name} of {checkpoint.parent} is not whole" in err


def test_a_folder_with_checkpoints_takes_no_other(recorded, ours, command):
    status, _, err = command("convert", recorded[0], *argv(ours.model_dir))
    assert status == 2 and "holds checkpoints already" in err


def test_each_runner_refuses_the_checkpoints_of_the_other(
    recorded, ours, command, monkeypatch, tmp_path
):
    (tmp_path / recorded[0].name).symlink_to(recorded[0])
    status, _, err = command("train", *argv(tmp_path))
    assert status == 2 and "was written by t5x, whose layout is another one" in err
    assert f"gshard-exp convert {tmp_path / recorded[0].name} --gin_file" in err
    monkeypatch.setattr(run, "require_t5x", lambda: None)
    with pytest.raises(SettingError, match="was written by our own runner"):
        run.train(ours)
