"""The verb `plan`: experiments and machines to plans."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshard_exp.config import ConfigError
from gshard_exp.config.reading import FIDDLE
from gshard_exp.errors import FAILED, STOPPED, WRONG_SETTING
from gshard_exp.look import (
    OUTPUT,
    experiments_of,
    make_folder,
    make_folder_of,
    say,
    search_paths,
    write,
)

if TYPE_CHECKING:
    from gshard_exp.config.reading import Subject
    from gshard_exp.plan.plan import Plan
    from gshard_exp.plan.topology import Topology
    from gshard_exp.train.experiment import Experiment

# Bindings of the command line that set sizes of the mesh.
_MESH = re.compile(r"PARTITIONS|MeshSpec|mesh\.")
Tell = Callable[[str], None]


def add_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that are its own."""
    verb.add_argument(
        "--gin_file",
        dest="experiment",
        action="append",
        default=[],
        metavar="F",
        help="an experiment: files joined by commas, or the folder of a run; may be repeated",
    )
    verb.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="T",
        help="v3:32x32, v5e:16x16, cpu:8, ...; may be repeated",
    )
    verb.add_argument("--tokens_per_core", type=int, help="source tokens; default: the gin file's")
    verb.add_argument(
        "--mesh",
        default="",
        metavar="auto|file|DxExM",
        help="sizes of data, expert and model; default: auto, or file if a flag sets mesh sizes",
    )
    verb.add_argument("--tokens", type=float, default=1e12, help="source tokens of a training")
    verb.add_argument(
        "--search", action="store_true", help="try meshes, dispatch and recomputation; rank them"
    )
    verb.add_argument(
        "--json", metavar="OUT", help="also write the plans to a file, or - for the output"
    )
    verb.add_argument("--hlo_dir", metavar="D", help="keep compiled modules there")


def plan_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Compile each experiment for each machine and say what it takes.

    A plan that does not fit is a result, and the exit status is 0 all the same. What cannot be
    compiled for one machine stops no other: its reason is said, and the exit status is 1 (the
    compiler failed, or all candidates of a search) or 2 (a setting that only tracing meets).

    Raises:
        ConfigError, SettingError: any mistake in files or flags, before the first compile.
    """
    from gshard_exp.plan.compile import require_machines

    as_output = arguments.json == OUTPUT
    # What is said goes where it is not mixed with JSON.
    tell = _to_errors if as_output else say
    wanted = _wanted(arguments, bindings)
    require_machines(list({one.topology.name: one.topology for one in wanted}.values()), tell)
    book = _Book("" if as_output else arguments.json or "")
    status = 0
    try:
        for one in wanted:
            if arguments.search:
                status = max(status, _search(one, arguments, tell, book))
            else:
                status = max(status, _attempt(one, arguments, tell, book))
    except KeyboardInterrupt:
        _to_errors(
            "stopped; plans that were made are kept, the same command makes all of them again"
        )
        status = STOPPED
    if as_output:
        say(book.as_json())
    if len(wanted) > 1 and book.plans:
        from gshard_exp.plan.describe import table

        tell(table(book.plans))
    return status


class _Book:
    """What was found out so far; a call that is stopped keeps it in its file.

    Attributes:
        plans: in the order in which they were made.
        rows: what JSON says of them, and of what could not be compiled.
    """

    def __init__(self, file: str) -> None:
        """Keep books in a file; in none if its name is empty."""
        self.plans: list[Plan] = []
        self.rows: list[dict[str, Any]] = []
        self._file = file

    def add(self, plan: Plan) -> None:
        """Note a plan."""
        self.plans.append(plan)
        self._note({**plan.to_json(), "failed": None})

    def refuse(self, name: str, topology: Topology, reason: str) -> None:
        """Note what could not be compiled, and why."""
        self._note(
            {"name": name, "topology": topology.name, "cores": topology.cores, "failed": reason}
        )

    def rank(self, names: Sequence[str], topology: Topology) -> None:
        """Put what a search found on a machine, noted last, in its order, with its rank."""
        of = {row["name"]: row for row in self.rows if row["topology"] == topology.name}
        ranked = [of[name] for name in names]
        self.rows = [row for row in self.rows if row not in ranked]
        for place, row in enumerate(ranked, start=1):
            self._note({**row, "rank": place})

    def as_json(self) -> str:
        """Write all rows as a list."""
        return json.dumps(self.rows, indent=1)

    def _note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._file:
            write(self.as_json(), self._file, quiet=True)


def _attempt(one: _Wanted, arguments: argparse.Namespace, tell: Tell, book: _Book) -> int:
    """Plan an experiment as it is; return the exit status."""
    try:
        with one.subject.assembled.explaining():
            _plan(one, "", one.experiment, arguments, tell, book)
    except (ConfigError, RuntimeError) as error:  # of what only tracing meets, or the compiler's
        reason = str(error).strip()
        _to_errors(f"error: {one.name} on {one.topology.name}: {reason}")
        book.refuse(one.name, one.topology, reason)
        return WRONG_SETTING if isinstance(error, ConfigError) else FAILED
    return 0


def _search(one: _Wanted, arguments: argparse.Namespace, tell: Tell, book: _Book) -> int:
    """Plan the candidates of a search and rank them; return the exit status."""
    from gshard_exp.plan.memory import require_parameters_fit
    from gshard_exp.plan.search import search, summary

    def attempt(change: str, candidate: Experiment) -> Plan:
        require_parameters_fit(candidate, one.topology)
        return _plan(one, change, candidate, arguments, tell, book)

    found = search(one.experiment, attempt)
    for refused in found:
        if refused.plan is None:
            book.refuse(one.named(refused.name), one.topology, refused.reason)
    book.rank([one.named(candidate.name) for candidate in found], one.topology)
    tell("ranked by predicted time:\n" + summary(found))
    return 0 if any(candidate.plan for candidate in found) else FAILED


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """An experiment that has the size of a machine, and a sentence about its mesh and batch."""

    name: str
    subject: Subject
    topology: Topology
    experiment: Experiment
    layout: str

    def named(self, change: str) -> str:
        return f"{self.name} {change}".strip()


def _wanted(arguments: argparse.Namespace, bindings: Sequence[str]) -> list[_Wanted]:
    """Read and fit all experiments to all machines, and check what needs no compiler."""
    from gshard_exp.config import reading
    from gshard_exp.plan.compile import fit_to
    from gshard_exp.plan.topology import parse_topology
    from gshard_exp.train.experiment import check_without_devices

    _check_flags(arguments)
    topologies = [parse_topology(name) for name in arguments.topology]
    names = experiments_of(arguments, bindings)
    if not names:
        raise ConfigError(
            "There is no experiment to plan.",
            at=["command line"],
            hint="--gin_file=gin/paper/moe_2048e_36l.gin, or --fdl_config=BUILDER",
        )
    set_here = any(_MESH.search(words) for words in (*bindings, *arguments.fdl_set))
    wanted = []
    for name, short in zip(names, _short(names), strict=True):
        subject = reading.read_subject(name, bindings, search_paths(arguments), arguments.fdl_set)
        for topology in topologies:
            with subject.assembled.explaining():
                fitted, layout = fit_to(
                    subject.assembled.tree,
                    topology,
                    mesh=arguments.mesh or ("file" if set_here else "auto"),
                    tokens_per_core=arguments.tokens_per_core,
                )
                if not arguments.search:  # which says of each candidate why it is none
                    check_without_devices(fitted)
            wanted.append(_Wanted(short, subject, topology, fitted, layout))
    return wanted


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse what would only show after the first compile."""
    if not 1 <= arguments.tokens < math.inf:
        raise ConfigError(
            f"--tokens={arguments.tokens:g} is no length of a training: at least 1, and finite.",
            at=[f"command line: --tokens={arguments.tokens:g}"],
            hint="--tokens=1e12, as in the paper.",
        )
    if arguments.json and arguments.json != OUTPUT:
        make_folder_of(arguments.json)
    if arguments.hlo_dir:
        make_folder(arguments.hlo_dir)


def _short(names: Sequence[str]) -> list[str]:
    """Call experiments by the last parts of their files' names, unless two would be called alike.

    `gin/paper/moe_2048e_36l.gin` is `moe_2048e_36l`, and `a.gin,b.gin` is `a+b`.
    """

    def last(name: str) -> str:
        if name.startswith(FIDDLE):
            return name.removeprefix(FIDDLE)
        return "+".join(Path(file.strip()).name.removesuffix(".gin") for file in name.split(","))

    found = [last(name) for name in names]
    return [
        short if found.count(short) == 1 else name for short, name in zip(found, names, strict=True)
    ]


def _plan(
    one: _Wanted,
    change: str,
    candidate: Experiment,
    arguments: argparse.Namespace,
    tell: Tell,
    book: _Book,
) -> Plan:
    """Compile a candidate, say what it takes and keep its module if that is asked for."""
    from gshard_exp.plan.compile import compile_step
    from gshard_exp.plan.describe import describe
    from gshard_exp.plan.plan import make_plan

    name, layout = one.named(change), change or one.layout
    tell(f"{name} on {one.topology.name}: {layout}")
    program = compile_step(candidate, one.topology, tell)
    if arguments.hlo_dir:
        file = re.sub(r"[^\w.+=-]+", "_", f"{name} {one.topology.name}")
        program.save(Path(arguments.hlo_dir), file)
    made = make_plan(
        name,
        candidate,
        program,
        layout,
        int(arguments.tokens),
        fiddle=one.subject.name.startswith(FIDDLE),
    )
    book.add(made)
    tell(describe(made))
    return made


def _to_errors(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
