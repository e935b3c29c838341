"""Compiled programs are kept for the next start, where the user wants them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tiny_run

from gshard_exp import cli
from gshard_exp.compile_cache import keep_compiled_programs

ROOT = Path(__file__).parent.parent


def train(model_dir, cache_home):
    """Train one step in a new process; return what it logs about its cache."""
    argv = [f"--gin_file={tiny_run.TINY}", f"--gin.MODEL_DIR={model_dir}", "--gin.TRAIN_STEPS=1"]
    argv += [f"--gin.{binding}" for binding in tiny_run.SMALL]
    code = f"""
import jax
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_log_compiles", True)
from gshard_exp import compile_cache
compile_cache._WORTH_KEEPING = 0.0
from gshard_exp.cli import main
raise SystemExit(main({["train", *argv]}))
"""
    plain = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=plain | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache_home)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_second_start_finds_its_step_compiled_and_computes_the_same(tmp_path):
    hit = re.compile(r"cache hit for 'jit_step'")
    assert not hit.search(train(tmp_path / "a", tmp_path))
    assert list((tmp_path / "gshard_exp" / "compiled").glob("jit_step-*"))
    assert hit.search(train(tmp_path / "b", tmp_path))
    losses = [tiny_run.records(tmp_path / run)[0]["loss"] for run in ("a", "b")]
    assert losses[0] == losses[1]


@pytest.fixture
def no_folder_of_jax():
    """JAX as a user finds it: no cache; put back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def chosen(*flags):
    """Return the folder that JAX is given for a command line."""
    arguments, _ = cli._parse(["train", "--gin_file=some.gin", *flags])
    cli._keep_compiled_programs(arguments)
    return jax.config.jax_compilation_cache_dir


@pytest.mark.usefixtures("no_folder_of_jax")
def test_programs_are_kept_under_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert chosen() == str(tmp_path / ".cache" / "gshard_exp" / "compiled")


@pytest.mark.usefixtures("no_folder_of_jax")
def test_a_flag_chooses_the_folder(tmp_path):
    assert chosen(f"--compile_cache={tmp_path / 'here'}") == str(tmp_path / "here")


@pytest.mark.usefixtures("no_folder_of_jax")
def test_a_flag_turns_it_off():
    assert chosen("--compile_cache=off") is None


@pytest.mark.usefixtures("no_folder_of_jax")
def test_a_folder_that_jax_was_given_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert chosen(f"--compile_cache={tmp_path / 'other'}") == str(tmp_path / "own")
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("no_folder_of_jax")
def test_a_folder_that_cannot_be_made_is_said_and_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "not kept" in keep_compiled_programs(tmp_path / "file" / "compiled")
    assert jax.config.jax_compilation_cache_dir is None
