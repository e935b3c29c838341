"""What the points of a sweep take, as `sweep plan` tells it."""

import json

import jax
import pytest
import tiny_run

from gshard_exp.plan import compile as compiling
from gshard_exp.sweep import estimate
from gshard_exp.train import flops, parameters

SWEEP = str(tiny_run.GIN / "sweep.gin")


@pytest.fixture
def plan(command, tmp_path):
    """Plan the sweep; return the output."""

    def run(*flags):
        arguments = ("sweep", "plan", SWEEP, f"--gin.SWEEP_DIR={tmp_path / 'runs'}", *flags)
        status, out, err = command(*arguments)
        assert status == 0, err
        assert not (tmp_path / "runs").exists()
        return out

    return run


def test_a_plan_counts_parameters_flops_and_tokens_as_the_tables_do(plan, tmp_path):
    small, _, large = json.loads(plan("--no-measure", "--json", "--only=l[12]-e[24]"))[:3]
    assert (small["name"], small["axes"]) == ("l1-e2", {"layers": 1, "experts": 2})
    tree = tiny_run.experiment(tmp_path, "NUM_EXPERTS=2")
    total, active = parameters.totals(parameters.parameters(tree.model))
    assert (small["params_total"], small["params_active"]) == (total, active)
    useful = sum(flops.useful_flops(tree.model, batch_size=8, lengths=tree.lengths).values())
    assert small["flops_per_token"] == useful / (8 * 16)
    assert small["tokens"] == 8 * 16 * 4
    assert small["times"] == {}
    assert large["params_total"] > total


def test_the_time_here_is_that_of_measured_steps(plan):
    (row,) = json.loads(plan("--json", "--only=l1-e2", "--set=TRAIN_STEPS=100"))
    here = row["times"]["here"]
    assert 0 < here["step_seconds"] < 60
    assert here["seconds"] == pytest.approx(100 * here["step_seconds"])


def test_a_point_that_this_machine_cannot_hold_has_a_note_in_place_of_a_time(plan):
    assert len(jax.devices()) == 8  # JAX has started, and makes no more of them
    sizes = ("DATA_PARTITIONS=64", "BATCH_SIZE=64", "GROUP_SIZE=8")
    out = plan("--only=l1-e2", *(f"--set={size}" for size in sizes))
    assert "l1-e2 on here: the mesh data=64 x expert=1 x model=1 needs 64 devices" in out


def test_a_table_sums_times_and_says_what_they_are(monkeypatch, plan):
    monkeypatch.setattr(estimate, "step_seconds", lambda experiment: 90.0)
    rows = [line.split() for line in plan("--only=l1-*").splitlines()]
    assert rows[0][-2:] == ["tokens", "here"]
    assert rows[1][:3] == ["l1-e2", "1", "2"]
    assert [row[-1] for row in rows[1:4]] == ["6:00", "6:00", "12:00"]
    assert rows[4][:4] == ["here:", "the", "median", "of"]


def test_what_the_compiler_refuses_is_a_note_and_the_sum_says_that_it_lacks_a_time(
    monkeypatch, plan
):
    failure = RuntimeError("\nRESOURCE_EXHAUSTED: out of memory\nand more")
    times = iter((failure, 90.0))
    monkeypatch.setattr(estimate, "step_seconds", lambda _: raising_or(next(times)))
    monkeypatch.setattr(compiling, "compile_step", lambda *_: raising_or(failure))
    out = plan("--only=l1-*", "--topology=cpu:1")
    rows = [line.split() for line in out.splitlines()]
    assert [row[-2:] for row in rows[1:3]] == [["-", "-"], ["6:00", "-"]]
    assert rows[3][-3:] == ["over", "6:00", "-"]
    assert "l1-e2 on here: RESOURCE_EXHAUSTED: out of memory\n" in out
    assert "l1-e4 on cpu:1: RESOURCE_EXHAUSTED: out of memory" in out


def raising_or(value):
    if isinstance(value, Exception):
        raise value
    return value


def test_a_topology_adds_a_column_with_the_predicted_time(monkeypatch, plan):
    monkeypatch.setattr(
        estimate, "_predicted", lambda experiment, topology, report: estimate.Time.of(0.5, 4)
    )
    rows = [line.split() for line in plan("--no-measure", "--topology=cpu:1").splitlines()]
    assert rows[0][-1] == "cpu:1"
    assert rows[1][-1] == "0:02"


def test_a_compiled_point_on_cpus_has_no_predicted_time(plan):
    out = plan("--no-measure", "--topology=cpu:1", "--only=l1-e2")
    assert "l1-e2 on cpu:1: no times are predicted for CPUs" in out
