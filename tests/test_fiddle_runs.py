"""fiddle on the command line: runs, their folders, and flags that belong to the other front end."""

import sys
from pathlib import Path

import pytest
import tiny_run

BUILDER = f"""
import fiddle as fdl
from gshard_exp.config.to_fiddle import of_gin
from gshard_exp.train.optimizer import AdamW, SqrtDecay


def small():
    config = of_gin({tiny_run.TINY!r})
    for stack in (config.model.module.encoder, config.model.module.decoder):
        stack.num_layers, stack.pattern = 1, stack.pattern[1:]
    config.optimizer = fdl.Config(AdamW, learning_rate=fdl.Config(SqrtDecay))
    return config
"""
SMALL = [f"--gin.{binding}" for binding in tiny_run.SMALL]


@pytest.fixture
def command(command, tmp_path, monkeypatch):
    """Call the command line in a folder with a builder of `tiny_run.SMALL`."""
    (tmp_path / "trials.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield command
    sys.modules.pop("trials", None)


def arrays_of(folder, steps):
    """Read what a run of `tiny_run.SMALL` saved."""
    return tiny_run.saved(tiny_run.experiment(folder), steps)


def test_a_run_of_fiddle_s_goes_on_by_itself_or_from_its_config_gin_as_one_of_gin_s(command):
    """Two steps, two more by the same command, two by `config.gin`: six of gin's, bit for bit."""
    fiddle = ("train", "--fdl_config=trials:small", "--fdl_set=model_dir=mixed")
    for steps, argv in (
        (2, [*fiddle, "--fdl_set=train_steps=2"]),
        (4, [*fiddle, "--fdl_set=train_steps=4"]),
        (6, ["train", "--gin_file=mixed/config.gin", "--gin.TRAIN_STEPS=6"]),
    ):
        status, out, err = command(*argv)
        assert (status, err) == (0, "")
        assert f"checkpoint_{steps}" in tiny_run.checkpoints("mixed")
        assert ("resuming from" in out) == (steps > 2)
    gin = ["train", f"--gin_file={tiny_run.TINY}", *SMALL, "--gin.TRAIN_STEPS=6"]
    assert command(*gin, "--gin.MODEL_DIR=plain")[0] == 0
    tiny_run.assert_equal(arrays_of(Path("mixed"), 6), arrays_of(Path("plain"), 6))
    names = {path.name for path in Path("plain").iterdir() if "checkpoint" not in path.name}
    assert names <= {path.name for path in Path("mixed").iterdir()}

    status, out, _ = command("diff", "mixed", "plain")
    assert status == 0 and "\n1 setting differs\n" in out  # model_dir


def test_diff_takes_gin_files_fiddle_builders_and_run_folders_in_any_mix(command):
    Path("run").mkdir()
    text = command("show", "--fdl_config=trials:small", "--fdl_set=model_dir=run", "--as=gin")[1]
    (Path("run") / "config.gin").write_text(text)
    Path("small.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from gshard_exp.model import transformer\n"
        "from gshard_exp.train import optimizer\n"
        f"include {tiny_run.TINY!r}\n" + "\n".join(tiny_run.SMALL) + "\nMODEL_DIR = 'run'\n"
    )
    gin, fiddle, run = "small.gin", "fdl:trials:small", "run"
    for a, b in ((gin, fiddle), (fiddle, run), (run, gin)):
        flags = ["--fdl_set=model_dir='run'"] * (fiddle in (a, b))
        status, out, err = command("diff", a, b, *flags)
        assert (status, err) == (0, "")
        assert f"A: {a}\nB: {b}\n" in out and "no settings differ" in out
        counts = [line.split()[-1] for line in out.splitlines() if line[:6] in ("total ", "active")]
        assert counts == ["+0", "+0"]


def test_flags_of_either_front_end_hold_for_its_own_side_of_a_diff(command):
    flags = ("--gin.NUM_EXPERTS=8", "--fdl_set=model.module.encoder.pattern[0].ffn.num_experts=2")
    status, out, _ = command("diff", tiny_run.TINY, "fdl:trials:small", *flags)
    assert status == 0
    assert "A 8  # command line: --gin.NUM_EXPERTS=8" in out
    assert f"B 2  # command line: {flags[1]}" in out


def test_check_takes_builders(command):
    status, out, _ = command("check", tiny_run.TINY, "--fdl_config=trials:small")
    assert status == 0
    assert "ok      fdl:trials:small\n" in out and "2 checked, 0 failed" in out
    status, out, _ = command("check", "fdl:trials:small", "fdl:smal", "--fdl_set=batch_size=5")
    assert status == 2
    assert "FAILED  fdl:smal\n        There is no fiddle builder 'smal'." in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["show", "--fdl_config=quickstart", "--gin.SEED=1"], "--gin.SEED=1 sets something of a"),
        (["train", "--fdl_config=quickstart", "--gin.SEED=1"], "--fdl_set=PATH=VALUE sets"),
        (["show", f"--gin_file={tiny_run.TINY}", "--fdl_set=seed=1"], "and there is none"),
        (["check", tiny_run.TINY, "--fdl_set=seed=1"], "command line: --fdl_set=seed=1"),
        (["diff", "fdl:quickstart"], "There are 1 experiments to compare."),
        (["train", "--fdl_config=quickstat", "--dry_run"], "try: quickstart,"),
        (["tasks", "--fdl_config=quickstart", "--fdl_set=sed=1"], "try: seed,"),
        (["train", "--fdl_config=trials:small"], "is built without model_dir"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_message(command, argv, said):
    status, out, err = command(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("error: ") == 1 and "Traceback" not in err
    assert said in err


def test_an_experiment_is_of_gin_or_of_fiddle(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command("show", f"--gin_file={tiny_run.TINY}", "--fdl_config=quickstart")
    assert stop.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_dry_run_of_a_builder_says_which_line_set_what(command):
    status, out, err = command(
        "train", "--fdl_config=trials:small", "--fdl_set=model_dir=x", "--dry_run"
    )
    assert (status, err) == (0, "")
    assert "num_layers = 1  # trials.py:10\n" in out
    assert "MODEL_DIR = 'x'  # command line: --fdl_set=model_dir=x\n" in out
    assert not Path("x").exists()
