"""The committed tables are what the committed plans give, and its rows can be read."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from gshard_exp import axes
from gshard_exp.config import reading
from gshard_exp.plan.compile import Program, fit_to
from gshard_exp.plan.plan import make_plan
from gshard_exp.plan.topology import parse_topology

FOLDER = Path(__file__).parent.parent / "experiments" / "paper_tables"
RESULTS = FOLDER / "results"
MODULES = ("rows", "tables")


@pytest.fixture(scope="module")
def scripts():
    """The experiment's modules, which are scripts of a folder and no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield [importlib.import_module(name) for name in MODULES]
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def kept():
    return json.loads((RESULTS / "plans.json").read_text())


def test_the_committed_tables_are_those_of_the_committed_plans(scripts, kept):
    published = json.loads((FOLDER / "published.json").read_text())
    pages = scripts[1].pages(kept["plans"], published, kept["command"])
    assert "tables.md" in pages
    assert len(pages) >= 9
    for name, text in pages.items():
        assert (RESULTS / name).read_text() == text, name


def test_every_row_has_a_committed_plan(scripts, kept):
    rows = {row.name: json.loads(json.dumps(dataclasses.asdict(row))) for row in scripts[0].ROWS}
    assert {name: plan["row"] for name, plan in kept["plans"].items()} == rows
    for plan in kept["plans"].values():
        assert plan["topology"] == plan["row"]["topology"]


@pytest.mark.parametrize("name", ["moe_2048e_60l", "dense_96l"])
def test_what_a_committed_plan_says_without_the_compiler_is_what_is_said_today(scripts, kept, name):
    """Parameters, experts, useful operations and gradients depend on no compiled program."""
    (row,) = (row for row in scripts[0].ROWS if row.name == name)
    subject = reading.read_subject(f"{row.gin_file},{scripts[0].RANDOM}", row.bindings)
    topology = parse_topology(row.topology)
    tree, layout = fit_to(subject.assembled.tree, topology)
    plan = kept["plans"][name]
    memory = plan["memory_bytes"]
    state = {part: memory[part] for part in ("parameters", "optimizer")}
    held = sum(state.values())
    sizes = {"argument": held, "output": 0, "alias": 0, "temp": memory["peak"] - held}
    sizes |= {"generated_code": 0, "peak": memory["peak"]}
    mesh = dict(zip(axes.MESH_AXES, dataclasses.astuple(tree.mesh), strict=True))
    program = Program(topology.name, mesh, "", "", sizes, state, 0.0, 0.0, 0.0, {})
    today = make_plan(name, tree, program, layout).to_json()
    for field in ("params_total", "params_active", "experts_total", "layout", "cores"):
        assert plan[field] == today[field]
    assert memory["gradients"] == today["memory_bytes"]["gradients"]
    assert memory["limit"] == today["memory_bytes"]["limit"]
    assert plan["flops_per_core"]["useful"] == today["flops_per_core"]["useful"]


def test_every_row_is_an_experiment_for_its_machine(scripts):
    for row in scripts[0].ROWS:
        subject = reading.read_subject(f"{row.gin_file},{scripts[0].RANDOM}", row.bindings)
        topology = parse_topology(row.topology)
        fitted, _ = fit_to(subject.assembled.tree, topology, tokens_per_core=row.tokens_per_core)
        assert fitted.mesh.count == topology.cores
