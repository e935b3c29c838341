"""An installed wheel finds its gin files, tasks and experiments from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import made_runs
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build a wheel of the tracked files and unpack it, as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("gshard_exp-*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


def run_elsewhere(site, folder, *arguments):
    """Run Python in another folder, with the unpacked wheel before anything else on the path."""
    environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_wheel_holds_every_gin_file(installed):
    for top in ("gin", "experiments"):
        shipped = {p.relative_to(ROOT / top) for p in (ROOT / top).rglob("*.gin")}
        packed = {
            p.relative_to(installed / "gshard_exp" / top)
            for p in (installed / "gshard_exp" / top).rglob("*.gin")
        }
        assert packed == shipped


def test_an_experiment_of_the_wheel_assembles_from_any_folder(installed, tmp_path):
    done = run_elsewhere(
        installed,
        tmp_path,
        "-m",
        "gshard_exp",
        "train",
        "--gin_file=experiments/quickstart/quickstart.gin",
        "--dry_run",
    )
    assert done.returncode == 0, done.stderr
    assert "Total number of parameters" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_task_modules_and_their_table_come_with_the_wheel(installed, tmp_path):
    program = (
        "import gshard_exp.tasks.m4 as m4, gshard_exp.data.languages as l; "
        "print(m4.__file__); print(len(l.read_table()))"
    )
    done = run_elsewhere(installed, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    file, languages = done.stdout.split()
    assert file.startswith(str(installed))
    assert int(languages) > 100


def test_a_report_from_the_wheel_has_its_script_style_and_published_figures(installed, tmp_path):
    made_runs.make_run(tmp_path / "run")
    done = run_elsewhere(installed, tmp_path, "-m", "gshard_exp", "report", "run", "--published")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    for words in ('"use strict"', "color-scheme", "MoE(2048E,36L)"):
        assert words in page
