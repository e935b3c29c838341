"""What two runs recorded of themselves, compared."""

import json
import re
import shutil

import pytest
import tiny_run

from gshard_exp import cli
from gshard_exp.train.record import read_record


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in seed and data, the second on another machine, it says."""
    folder = tmp_path_factory.mktemp("runs")
    small = [f"--gin.{binding}" for binding in (*tiny_run.SMALL, "TRAIN_STEPS=1")]
    for name, flags in (("a", []), ("b", ["--gin.RANDOM_SEED=7", "--gin.TARGET_VOCAB_SIZE=29"])):
        where = f"--gin.MODEL_DIR={folder / name}"
        assert cli.main(["train", f"--gin_file={tiny_run.TINY}", where, *small, *flags]) == 0
    record = read_record(folder / "b")
    record["starts"][-1]["machine"]["cpu"] = "another"
    record["starts"][-1]["packages"]["jax"] = "0.0.1"
    (folder / "b" / "run.json").write_text(json.dumps(record))
    return folder / "a", folder / "b"


def test_a_diff_of_two_runs_says_what_differs_in_data_versions_and_machine(runs, command):
    status, out, err = command("diff", *runs)
    assert (status, err) == (0, "")
    settings, recorded = out.split("settings differ\n")
    assert "\nseed\n  A 0" in settings
    assert "data.vocab_sizes.targets\n  A 30\n  B 29\n" in recorded
    assert "data.hash\n" in recorded
    assert "seed\n  A 0\n  B 7\n" in recorded
    assert "machine.cpu\n" in recorded
    assert "  B another\n" in recorded
    assert "packages.jax\n" in recorded
    assert "packages.numpy" not in recorded
    assert "mesh." not in recorded


def test_a_diff_says_what_differs_in_parameters_and_predicted_cost(runs, command):
    _, out, _ = command("diff", *runs)
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    rows = {name: values for name, *values in lines}
    one, other = (read_record(folder) for folder in runs)
    assert rows["total"][:2] == [f"{one['params_total']:,}", f"{other['params_total']:,}"]
    assert rows["useful FLOPs a token"][0] == f"{round(one['flops_per_token']):,}"
    assert other["flops_per_token"] < one["flops_per_token"]
    assert rows["tokens a step"] == ["128", "128", "+0"]
    assert "core-hours" in out


def test_a_run_does_not_differ_from_itself(runs, command):
    _, out, _ = command("diff", runs[0], runs[0])
    assert "no settings differ" in out
    assert "no difference in data, seed, code, packages, machine or mesh" in out


def test_a_run_whose_code_changed_between_its_starts_says_so(runs, tmp_path, command):
    folder = shutil.copytree(runs[0], tmp_path / "a")
    record = read_record(folder)
    before = record["starts"][0] | {"code": record["starts"][0]["code"] | {"commit": "0" * 40}}
    record["starts"].insert(0, before)
    (folder / "run.json").write_text(json.dumps(record))
    _, out, _ = command("diff", runs[0], folder)
    assert "B was started 2 times; code changed" in out
    assert "A was started" not in out


def test_a_run_without_a_record_is_compared_by_its_settings(runs, command, tmp_path):
    (tmp_path / "config.gin").write_text((runs[0] / "config.gin").read_text())
    status, out, _ = command("diff", runs[0], tmp_path)
    assert status == 0
    assert f"{tmp_path} has no run.json: data, code and machine are not known" in out


def test_a_damaged_record_is_named(runs, command, tmp_path):
    (tmp_path / "config.gin").write_text((runs[0] / "config.gin").read_text())
    (tmp_path / "run.json").write_text("{")
    status, _, err = command("diff", runs[0], tmp_path)
    assert status == 2
    assert f"{tmp_path / 'run.json'} cannot be read" in err


def test_a_gin_file_has_no_record_to_compare(runs, command):
    _, out, _ = command("diff", runs[0], tiny_run.TINY)
    assert "useful FLOPs of the training" in out
    assert "spent so far" not in out
