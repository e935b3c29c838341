"""Compiles the paper's models for the paper's machines and lays its cost tables beside ours.

    python experiments/paper_tables/run.py --programs=/tmp/programs --jobs=2

Needs libtpu (pip install '.[tpu-plan,bench]'), no TPU; about two minutes of one processor core a
row. A row whose program is in the folder already is not compiled again. The rows whose compile
times are compared come first, one by one and three times each: leave the machine alone until these
are done.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import plots
import rows
import tables

from gshard_exp.config import reading
from gshard_exp.plan.compile import compile_step, fit_to, load_program
from gshard_exp.plan.plan import make_plan
from gshard_exp.plan.topology import parse_topology

HERE = Path(__file__).parent
TRIES = 3  # of the rows whose compile times are compared


def fitted(row: rows.Row):
    """Return a row's experiment with the size of its machine, the machine, and a sentence."""
    topology = parse_topology(row.topology)
    subject = reading.read_subject(f"{row.gin_file},{rows.RANDOM}", row.bindings)
    tree, layout = fit_to(subject.assembled.tree, topology, tokens_per_core=row.tokens_per_core)
    return tree, topology, layout


def compiled(row: rows.Row, folder: Path) -> None:
    """Compile a row, unless its program is there; of several tries the quickest is kept."""
    made_of, asked = folder / f"{row.name}.row", repr(row)
    if made_of.exists() and made_of.read_text() == asked:
        return
    tree, topology, layout = fitted(row)
    print(f"{row.name}: {layout}", flush=True)
    programs = [
        compile_step(tree, topology, lambda line: print(f"{row.name}: {line}", flush=True))
        for _ in range(TRIES if row.scaling else 1)
    ]
    min(programs, key=lambda program: program.compile_cpu_seconds).save(folder, row.name)
    made_of.write_text(asked)


def plan_of(row: rows.Row, folder: Path) -> dict:
    """Return a row's plan as plain values."""
    tree, _, layout = fitted(row)
    plan = make_plan(row.name, tree, load_program(folder, row.name), layout)
    return {"row": dataclasses.asdict(row), **plan.to_json()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=Path, required=True, help="folder of compiled programs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    arguments = parser.parse_args()
    folder = arguments.programs
    for row in filter(lambda row: row.scaling, rows.ROWS):
        compiled(row, folder)
    with ThreadPoolExecutor(arguments.jobs) as pool:  # each compiler is a process of its own
        list(pool.map(lambda row: compiled(row, folder), rows.ROWS))
    plans = {row.name: plan_of(row, folder) for row in rows.ROWS}
    made_by = shlex.join(["python", *sys.argv])
    published = json.loads((HERE / "published.json").read_text())
    arguments.results.mkdir(parents=True, exist_ok=True)
    kept = json.dumps({"command": made_by, "plans": plans}, indent=1)
    (arguments.results / "plans.json").write_text(kept + "\n")
    for name, text in tables.pages(plans, published, made_by).items():
        (arguments.results / name).write_text(text)
    plots.draw(plans, published, arguments.results)
    print((arguments.results / "tables.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
