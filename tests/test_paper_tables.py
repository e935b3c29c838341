"""The committed tables are what the committed plans give, and its rows can be read."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from gshard_exp.config import reading
from gshard_exp.plan.compile import fit_to
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
def plans():
    return json.loads((RESULTS / "plans.json").read_text())


def test_the_committed_tables_are_those_of_the_committed_plans(scripts, plans):
    published = json.loads((FOLDER / "published.json").read_text())
    command = "python experiments/paper_tables/run.py --programs=/tmp/programs"
    pages = scripts[1].pages(plans, published, command)
    assert "tables.md" in pages
    assert len(pages) >= 9
    for name, text in pages.items():
        assert (RESULTS / name).read_text() == text, name


def test_every_committed_plan_is_that_of_a_row(scripts, plans):
    by_name = {row.name: row for row in scripts[0].ROWS}
    for name, plan in plans.items():
        row = by_name[name]
        assert plan["topology"] == row.topology
        assert plan["row"]["bindings"] == list(row.bindings)
        assert plan["row"]["gin_file"] == row.gin_file


def test_every_row_is_an_experiment_for_its_machine(scripts):
    for row in scripts[0].ROWS:
        subject = reading.read_subject(f"{row.gin_file},{scripts[0].RANDOM}", row.bindings)
        topology = parse_topology(row.topology)
        fitted, _ = fit_to(subject.assembled.tree, topology, tokens_per_core=row.tokens_per_core)
        assert fitted.mesh.count == topology.cores
