"""Compiles the paper's models for the paper's machines and lays its cost tables beside ours.

    python experiments/paper_tables/run.py --programs=/tmp/programs

Needs libtpu (pip install '.[tpu-plan,bench]'), no TPU; about two minutes of one processor core a
row. A row whose program is in the folder already is not compiled again.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import plots
import rows
import tables

from gshard_exp.config import reading
from gshard_exp.plan.compile import compile_step, fit_to, load_program
from gshard_exp.plan.plan import make_plan
from gshard_exp.plan.topology import parse_topology

HERE = Path(__file__).parent
COMMAND = "python experiments/paper_tables/run.py --programs=/tmp/programs"


def plan_of(row: rows.Row, folder: Path, *, compiles: bool) -> dict | None:
    """Return a row's plan as plain values; None if it is not there and not to be compiled."""
    topology = parse_topology(row.topology)
    subject = reading.read_subject(f"{row.gin_file},{rows.RANDOM}", row.bindings)
    fitted, layout = fit_to(subject.assembled.tree, topology, tokens_per_core=row.tokens_per_core)
    if not (folder / f"{row.name}.json").exists():
        if not compiles:
            return None
        print(f"{row.name}: {layout}", flush=True)
        compile_step(fitted, topology, print).save(folder, row.name)
    plan = make_plan(row.name, fitted, load_program(folder, row.name), layout)
    return {"row": dataclasses.asdict(row), **plan.to_json()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=Path, required=True, help="folder of compiled programs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--no_compile", action="store_true", help="only rows that are there")
    arguments = parser.parse_args()
    plans = {}
    for row in rows.ROWS:
        plan = plan_of(row, arguments.programs, compiles=not arguments.no_compile)
        if plan is not None:
            plans[row.name] = plan
    published = json.loads((HERE / "published.json").read_text())
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "plans.json").write_text(json.dumps(plans, indent=1) + "\n")
    for name, text in tables.pages(plans, published, COMMAND).items():
        (arguments.results / name).write_text(text)
    plots.draw(plans, published, arguments.results)
    print((arguments.results / "tables.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
