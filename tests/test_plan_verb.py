"""The verb `plan`, with a compiler that always gives the same module."""

import json

import pytest
import tiny_run
from test_plan import TPU

from gshard_exp import cli, planning
from gshard_exp.errors import SettingError
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
        sizes["generated_code"] = 10
        state = {"parameters": 80, "optimizer": 20}
        return compiling.Program(
            topology.name, {"expert": 2048}, TPU, "", sizes, state, 0.1, 2.0, 1.0, {"jax": "1"}
        )

    monkeypatch.setattr(compiling, "compile_step", compile_step)
    monkeypatch.setattr(compiling, "require_machines", lambda topologies, report: None)
    return asked


# Rows and groups that lie on every machine here.
SPREAD = ("--gin.BATCH_SIZE=32", "--gin.GROUP_SIZE=8")


def plan(*flags, file=tiny_run.TINY, spread=SPREAD):
    return cli.main(["plan", f"--gin_file={file}", *spread, *flags])


def fail_on(monkeypatch, machine, error):
    """Let the compiler fail on one machine."""
    compile_step = compiling.compile_step

    def failing(experiment, topology, report):
        if topology.name == machine:
            raise error
        return compile_step(experiment, topology, report)

    monkeypatch.setattr(compiling, "compile_step", failing)


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
        "other": 50 + 10 + 50,
        "total": 1060,
        "limit": round(15.48 * 2**30),
        "peak": 1000,
    }
    assert set(plans[0]["collectives"][0]) >= {"kind", "count", "bytes", "seconds", "axes", "cause"}
    year = 365.25 * 24 * 3600
    steps = 1e12 / (compiled[0][0].batch_size * compiled[0][0].lengths["inputs"])
    expected = steps * plans[0]["step_seconds"] * 8 / year
    assert plans[0]["core_years"] == pytest.approx(expected)
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split()[:2] == ["experiment", "machine"]
    assert [row.split()[1] for row in table[1:]] == ["v3:2x2", "v3:4x4"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("the compiler ended with status -6:\nF1234 check failed"), 1, "F1234"),
        (SettingError("heads=3 do not divide.", hint="Set 4."), 2, "try: Set 4."),
    ],
)
def test_what_fails_on_one_machine_loses_no_other(
    compiled, monkeypatch, capsys, error, status, said
):
    fail_on(monkeypatch, "v3:4x4", error)
    machines = [f"--topology={name}" for name in ("v3:2x2", "v3:4x4", "v3:8x4")]
    assert plan(*machines, "--json=-", "--gin.BATCH_SIZE=64") == status
    out, err = capsys.readouterr()
    first, failed, last = json.loads(out)
    assert (first["topology"], last["topology"]) == ("v3:2x2", "v3:8x4")
    assert first["failed"] is None and first["step_seconds"] > 0
    assert failed["topology"] == "v3:4x4" and said in failed["failed"]
    assert f"error: tiny on v3:4x4: {error.args[0]}" in err and err.count("error:") == 1


def test_a_call_that_is_stopped_keeps_its_plans(compiled, monkeypatch, capsys, tmp_path):
    fail_on(monkeypatch, "v3:4x4", KeyboardInterrupt())
    machines = ("--topology=v3:2x2", "--topology=v3:4x4")
    assert plan(*machines, "--json=-") == 130
    out, err = capsys.readouterr()
    assert [row["topology"] for row in json.loads(out)] == ["v3:2x2"]
    assert "stopped; plans that were made are kept, the same command makes all of them" in err
    file = tmp_path / "plans.json"
    assert plan(*machines, f"--json={file}") == 130
    assert [row["topology"] for row in json.loads(file.read_text())] == ["v3:2x2"]


def test_a_search_keeps_ranks_and_reasons(compiled, monkeypatch, capsys, tmp_path):
    file = tmp_path / "plans.json"
    monkeypatch.setattr(compiling, "compile_step", refusing(compiling.compile_step))
    assert plan("--topology=v3:2x2", "--search", f"--json={file}") == 0
    rows = json.loads(file.read_text())
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    refused = [row for row in rows if row["failed"]]
    assert refused and refused == rows[-len(refused) :]
    assert all("model=1" not in row["name"] for row in refused)
    assert {row["failed"] for row in refused} == {"INTERNAL: no"}
    times = [row["step_seconds"] for row in rows if not row["failed"]]
    assert times == sorted(times)


def refusing(compile_step, meshes=lambda mesh: mesh.model > 1):
    def compile_some(experiment, topology, report):
        if meshes(experiment.mesh):
            raise RuntimeError("INTERNAL: no")
        return compile_step(experiment, topology, report)

    return compile_some


def test_a_search_that_finds_nothing_has_failed(compiled, monkeypatch, capsys):
    everything = refusing(compiling.compile_step, lambda mesh: True)
    monkeypatch.setattr(compiling, "compile_step", everything)
    assert plan("--topology=v3:2x2", "--search", "--json=-") == 1
    rows = json.loads(capsys.readouterr().out)
    assert rows and {row["failed"] for row in rows} == {"INTERNAL: no"}


@pytest.mark.parametrize("tokens", ["0", "-1", "0.5", "nan", "inf"])
def test_a_training_of_no_tokens_is_refused_before_the_compile(compiled, capsys, tokens):
    assert plan("--topology=v3:2x2", f"--tokens={tokens}") == 2
    assert f"--tokens={tokens} is no length of a training" in capsys.readouterr().err
    assert not compiled


def test_places_that_cannot_be_written_are_refused_before_the_compile(compiled, capsys, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    for flag in (f"--hlo_dir={taken}", f"--json={taken}/x.json", f"--json={tmp_path}"):
        assert plan("--topology=v3:2x2", flag) == 2
        assert "is a folder, not" in (err := capsys.readouterr().err) or "cannot be made" in err
    assert not compiled


def test_experiments_are_told_apart_by_name(compiled, tmp_path):
    names = {}
    for seed, name in enumerate(("lr0.01", "lr0.02")):
        (tmp_path / f"{name}.gin").write_text(f"RANDOM_SEED = {seed}\n")
        names[name] = f"{tiny_run.TINY},{tmp_path / name}.gin"
    folder, file = tmp_path / "hlo", tmp_path / "plans.json"
    second = f"--gin_file={names['lr0.02']}"
    flags = ("--topology=v3:2x2", second, f"--hlo_dir={folder}", f"--json={file}")
    assert plan(*flags, file=names["lr0.01"]) == 0
    named = [row["name"] for row in json.loads(file.read_text())]
    assert named == ["tiny+lr0.01", "tiny+lr0.02"]
    assert len(list(folder.glob("*.hlo"))) == 2


def test_experiments_whose_files_are_called_alike_keep_their_whole_names():
    assert planning._short(["a/x.gin", "b/x.gin", "c/y.gin", "fdl:quick(n=1.5)"]) == [
        *("a/x.gin", "b/x.gin", "y", "quick(n=1.5)")
    ]


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


def test_what_does_not_lie_on_the_mesh_is_blamed_on_the_line_that_set_it(compiled, capsys):
    assert plan("--topology=cpu:8", spread=()) == 2
    error = capsys.readouterr().err
    assert "make 4 groups, which do not divide over 8 mesh partitions" in error
    assert "tests/gin/tiny.gin" in error
    assert "try: Set it to 2, 4, 8." in error
    assert not compiled


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
    assert plan("--topology=v3:2x2", "--gin.DATA_PARTITIONS=-1") == 0
    assert compiled[0][0].mesh.data == 8
