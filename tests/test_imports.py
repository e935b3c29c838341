"""What an import costs, and what runs without the packages of the extras."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

HERE = Path(__file__).parent
HEAVY = ("jax", "tensorflow", "seqio", "sentencepiece", "tensorboard", "flax")
DATA = ("tensorflow", "seqio", "sentencepiece", "tensorboard")


def python(code: str, *, core: bool = False) -> str:
    """Run code in a new process; return what it printed."""
    line = [sys.executable, str(HERE / "core_install.py"), code] if core else None
    done = subprocess.run(
        line or [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str, names: tuple[str, ...]) -> set[str]:
    """Return which of some packages a piece of code has loaded."""
    found = python(
        f"{code}\nimport sys\nprint('loaded', *(n for n in {names} if n in sys.modules))"
    )
    return set(found.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("module", ["gshard_exp", "gshard_exp.cli", "gshard_exp.axes"])
def test_it_is_cheap_to_import_(module):
    assert loaded(f"import {module}", HEAVY) == set()


def test_help_needs_no_jax():
    code = (
        "from gshard_exp.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass"
    )
    assert loaded(code, HEAVY) == set()


def test_no_module_loads_the_data_packages_when_imported():
    modules = (
        "gshard_exp.train.loop",
        "gshard_exp.score.evaluate",
        "gshard_exp.score.in_training",
        "gshard_exp.use.loading",
        "gshard_exp.use.verbs",
        "gshard_exp.data.batches",
        "gshard_exp.data.tasks",
        "gshard_exp.tasks.m4",
    )
    assert loaded("\n".join(f"import {module}" for module in modules), DATA) == set()


def test_a_dry_run_on_text_loads_no_data_package(tmp_path):
    argv = [
        "train",
        f"--gin_file={HERE / 'gin' / 'tiny_text.gin'}",
        f"--gin.MODEL_DIR={tmp_path}",
        "--gin.TSV_PATH=none.tsv",
        f"--gin.CACHE_DIR={tmp_path}",
        "--dry_run",
    ]
    code = f"from gshard_exp.cli import main\nassert main({argv}) == 0"
    assert loaded(code, DATA) == set()


def test_the_core_install_trains_on_random_tokens(tmp_path):
    argv = ["train", f"--gin_file={tiny_run.TINY}", f"--gin.MODEL_DIR={tmp_path}"]
    argv.append("--gin.TRAIN_STEPS=2")
    code = f"""
import importlib.util
assert not importlib.util.find_spec("tensorflow")
from gshard_exp.cli import main
raise SystemExit(main({argv}))
"""
    assert "step      2/2  loss" in python(code, core=True)
    assert [record["step"] for record in tiny_run.records(tmp_path)] == [1, 2]
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_2"]
