"""The verb `plan`, with a compiler that always gives the same module."""

import importlib.util
import json

import pytest
import tiny_run
from test_plan import TPU

from gshard_exp import cli
from gshard_exp.plan import compile as compiling

SCHEMA = {
    *("name", "topology", "cores", "params_total", "params_active", "fits", "memory_bytes"),
    *("flops_per_core", "collectives", "breakdown_seconds", "step_seconds", "steps_per_second"),
    *("tokens_per_second", "mfu", "core_years", "compile_seconds", "versions"),
}


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compiler; return the list of what it was asked for."""
    asked = []

    def compile_step(experiment, topology, report):
        asked.append((experiment, topology.name))
        sizes = {"argument": 150, "output": 100, "alias": 100, "temp": 900, "peak": 1000}
        state = {"parameters": 80, "optimizer": 20}
        return compiling.Program(
            topology.name, {"expert": 2048}, TPU, "", sizes, state, 0.1, 2.0, 1.0, {"jax": "1"}
        )

    monkeypatch.setattr(compiling, "compile_step", compile_step)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return asked


def plan(*flags):
    return cli.main(["plan", f"--gin_file={tiny_run.TINY}", *flags])


def test_two_machines_give_two_plans_and_a_table(compiled, tmp_path, capsys):
    out = tmp_path / "new" / "plans.json"
    assert plan("--topology=v3:2x2", "--topology=v3:4x4", f"--json={out}") == 0
    plans = json.loads(out.read_text())
    assert [row["cores"] for row in plans] == [8, 32]
    assert all(row.keys() >= SCHEMA for row in plans)
    assert plans[0]["memory_bytes"] == {
        "parameters": 80,
        "optimizer": 20,
        "gradients": 80,
        "activations": 770,
        "other": 50,
        "total": 1000,
        "limit": 16 * 2**30,
    }
    assert set(plans[0]["collectives"][0]) >= {"kind", "count", "bytes", "seconds", "axes", "cause"}
    year = 365.25 * 24 * 3600
    steps = 1e12 / (compiled[0][0].batch_size * compiled[0][0].lengths["inputs"])
    expected = steps * plans[0]["step_seconds"] * 8 / year
    assert plans[0]["core_years"] == pytest.approx(expected)
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split()[:2] == ["experiment", "machine"]
    assert [row.split()[1] for row in table[1:]] == ["v3:2x2", "v3:4x4"]


def test_a_compiler_that_fails_on_one_machine_stops_no_other(compiled, monkeypatch, capsys):
    compile_step = compiling.compile_step

    def failing(experiment, topology, report):
        if topology.name == "v3:2x2":
            raise RuntimeError("the compiler ended with status -6:\nF1234 check failed")
        return compile_step(experiment, topology, report)

    monkeypatch.setattr(compiling, "compile_step", failing)
    assert plan("--topology=v3:2x2", "--topology=v3:4x4", "--json=-") == 1
    out, err = capsys.readouterr()
    assert [row["topology"] for row in json.loads(out)] == ["v3:4x4"]
    said = "error: tiny on v3:2x2: the compiler ended with status -6:\nF1234 check failed\n"
    assert said in err and err.count("error:") == 1


def test_modules_are_kept_where_asked(compiled, tmp_path):
    assert plan("--topology=v3:2x2", f"--hlo_dir={tmp_path}") == 0
    (module,) = tmp_path.glob("*.hlo")
    assert module.read_text() == TPU
    assert compiling.load_program(tmp_path, module.stem).memory_bytes["peak"] == 1000


def test_sizes_of_the_command_line_are_not_replaced(compiled, capsys):
    assert plan("--topology=v3:2x2", "--gin.NUM_EXPERT_PARTITIONS=4") == 2
    error = capsys.readouterr().err
    assert "data=1 expert=4 model=1 does not fit v3:2x2, which has 8 cores" in error
    assert "command line" in error
    assert not compiled


def test_an_unknown_machine_ends_with_status_2(compiled, capsys):
    assert plan("--topology=v3:2x2", "--topology=v8:2x2") == 2
    assert "v8:2x2 is no machine known here" in capsys.readouterr().err
    assert not compiled


def test_what_the_compiling_process_refuses_is_blamed_on_the_line_that_set_it(capsys):
    assert plan("--topology=cpu:8") == 2
    error = capsys.readouterr().err
    assert "make 4 groups, which do not divide over 8 mesh partitions" in error
    assert "tests/gin/tiny.gin" in error
    assert "try: Set it to 2, 4, 8." in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((f"--gin_file={tiny_run.TINY}", "--fdl_set=x=1"), "--fdl_set=x=1 sets something"),
        (("--fdl_config=moe_128e_12l", "--gin.BATCH_SIZE=8"), "there is none"),
        ((), "There is no experiment to plan."),
    ],
)
def test_flags_that_change_nothing_and_no_experiment_are_refused(flags, message, command):
    status, _, error = command("plan", "--topology=cpu:8", *flags)
    assert status == 2
    assert message in error


def test_a_mesh_that_takes_what_is_left_has_all_cores(compiled):
    assert plan("--topology=v3:2x2", "--gin.DATA_PARTITIONS=-1", "--gin.GROUP_SIZE=8") == 0
    assert compiled[0][0].mesh.data == 8
