"""run.json: what a run says of its data, code, machine and cost."""

import dataclasses
import json
import math

import jax
import killed_run
import made_runs
import pytest
import tiny_run

from gshard_exp.config import ConfigError, run_diff
from gshard_exp.data.batches import RandomData
from gshard_exp.sweep import state
from gshard_exp.train import flops, loop, parameters, record, surroundings

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps that had a command line, and what its record says."""
    tree = tiny_run.experiment(tmp_path_factory.mktemp("record") / "run", train_steps=2)
    loop.train(tree, report=lambda line: None, argv=["train", "--x"])
    return tree, record.read_record(tree.model_dir)


def test_a_record_counts_what_a_run_takes_as_the_tables_do(finished):
    tree, said = finished
    total, active = parameters.totals(parameters.parameters(tree.model))
    assert (said["params_total"], said["params_active"]) == (total, active)
    assert total > active
    useful = flops.useful_flops(tree.model, batch_size=8, lengths=tree.lengths)
    assert said["tokens_per_step"] == 8 * (8 + 8)
    assert said["flops_per_token"] * said["tokens_per_step"] == sum(useful.values())


def test_a_record_says_where_and_with_what_a_run_took_place(finished):
    _, said = finished
    (start,) = said["starts"]
    assert start["step"] == 0
    assert start["argv"] == ["train", "--x"]
    assert start["packages"]["jax"] == jax.__version__
    assert start["machine"]["platform"] == "cpu"
    assert start["machine"]["devices"] == 1
    assert start["machine"]["memory_bytes"] > 1e8
    assert start["mesh"] == {"data": 1, "expert": 1, "model": 1}
    assert start["time"].endswith("+00:00")


def test_a_finished_run_says_so_and_what_it_cost(finished):
    _, said = finished
    assert said["finished"] is True
    assert said["train_steps"] == said["progress"]["step"] == 2
    assert 0 < said["progress"]["core_seconds"] == said["progress"]["cpu_seconds"]


def test_a_run_that_is_killed_and_goes_on_has_two_starts_and_the_cost_of_both(tmp_path):
    flags = [f"--gin.{binding}" for binding in tiny_run.SMALL]
    command = ["train", f"--gin_file={tiny_run.TINY}", f"--gin.MODEL_DIR={tmp_path}", *flags]
    assert killed_run.run(command, "written 2") == killed_run.SIGKILLED
    killed = record.read_record(tmp_path)
    assert (killed["finished"], killed["progress"]["step"]) == (False, 4)
    assert killed_run.run(command) == 0
    ended = record.read_record(tmp_path)
    assert (ended["finished"], ended["progress"]["step"]) == (True, 12)
    assert [start["step"] for start in ended["starts"]] == [0, 8]
    assert ended["starts"][0] == killed["starts"][0]
    assert ended["progress"]["cpu_seconds"] > killed["progress"]["cpu_seconds"] > 0


def hashes(tmp_path, **fields):
    tree = tiny_run.experiment(tmp_path, **fields)
    batches = tree.data.train_batches(batch_size=tree.batch_size, lengths=tree.lengths)
    data = record._data(tree, batches.identity)
    return data["hash"], data["stream_hash"]


def test_the_hash_of_the_data_does_not_depend_on_how_batches_are_drawn(tmp_path):
    plain = hashes(tmp_path)
    assert hashes(tmp_path) == plain
    for drawn in ({"data": RandomData(40, 30, seed=1)}, {"batch_size": 16}):
        same, other = hashes(tmp_path, **drawn)
        assert same == plain[0]
        assert other != plain[1]
    assert hashes(tmp_path, data=RandomData(40, 29))[0] != plain[0]


def test_a_damaged_record_is_kept_and_a_new_one_begins(tmp_path):
    tree = tiny_run.experiment(tmp_path, train_steps=1)
    (tmp_path / "run.json").write_text('{"schema": 1, "sta')
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        record.read_record(tmp_path)
    _, said = tiny_run.train(tree)
    assert any("run_damaged.json" in line for line in said)
    assert (tmp_path / "run_damaged.json").read_text() == '{"schema": 1, "sta'
    assert len(record.read_record(tmp_path)["starts"]) == 1


def test_a_record_of_another_schema_is_not_taken_for_ours(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"schema": 2}))
    with pytest.raises(ValueError, match="schema 1"):
        record.read_record(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"progress": None}, "'progress' is None"),
        ({"progress": {"step": 3}}, "no 'progress.wall_seconds'"),
        ({"data": "x"}, "'data' is 'x'"),
        ({"data": {}}, "no 'data.hash'"),
        ({"finished": 1}, "'finished' is 1"),
        ({"train_steps": 4.0}, "'train_steps' is 4.0"),
        ({"flops_per_token": math.nan}, "'flops_per_token' is nan"),
        ({"starts": []}, "'starts' is empty"),
        ({"starts": ["x"]}, "'starts' is 'x'"),
        ({"starts": [{"step": 0}]}, r"no 'starts\[0\].code'"),
    ],
)
def test_a_record_with_a_part_that_is_missing_or_of_another_kind_is_damaged(change, said, tmp_path):
    whole = made_runs.record(4, 4, 1000, 10, 0)
    (tmp_path / "run.json").write_text(json.dumps(whole))
    assert record.read_record(tmp_path) == whole
    (tmp_path / "run.json").write_text(json.dumps(whole | change))
    with pytest.raises(ValueError, match=f"is damaged: .*{said}"):
        record.read_record(tmp_path)


@pytest.mark.parametrize("content", ['{"schema": 1}', '{"schema": 1, "finished": true}'])
def test_whoever_reads_a_record_without_its_parts_says_that_it_is_damaged(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    assert "run.json is damaged" in state.status_of(tmp_path).problem
    assert state.finished_steps(tmp_path) == 0
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        run_diff.run_diff(str(tmp_path), str(tmp_path))


def test_accelerator_cores_are_charged_busy_or_not():
    @dataclasses.dataclass
    class Device:
        platform: str

    class Mesh:
        def __init__(self, platform):
            import numpy as np

            self.devices = np.array([Device(platform)] * 4)

    clock = record.Clock(wall=record.time.perf_counter() - 10, processor=0.0)
    tpu, cpu = clock.spent(Mesh("tpu")), clock.spent(Mesh("cpu"))
    assert tpu["core_seconds"] == 4 * tpu["wall_seconds"]
    assert cpu["core_seconds"] == cpu["cpu_seconds"]


def test_code_outside_a_checkout_has_a_version_and_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(surroundings, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    said = surroundings.code()
    assert said["version"]
    assert (said["commit"], said["dirty"]) == (None, None)
