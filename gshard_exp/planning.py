"""The verb `plan`: experiments and machines to plans."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gshard_exp.config import ConfigError
from gshard_exp.errors import FAILED
from gshard_exp.look import OUTPUT, experiments_of, make_folder_of, say, search_paths, write

if TYPE_CHECKING:
    from gshard_exp.config.reading import Subject
    from gshard_exp.plan.plan import Plan
    from gshard_exp.plan.topology import Topology
    from gshard_exp.train.experiment import Experiment

# Bindings of the command line that set sizes of the mesh.
_MESH = re.compile(r"PARTITIONS|MeshSpec|mesh\.")


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

    A plan that does not fit is a result, and the exit status is 0 all the same; it is 1 if the
    compiler failed on a machine, which stops no other.

    Raises:
        ConfigError, SettingError: any mistake in files or flags, before the first compile.
    """
    from gshard_exp.plan.plan import table
    from gshard_exp.plan.search import search, summary

    wanted = _wanted(arguments, bindings)
    as_output = arguments.json == OUTPUT
    # What is said goes where it is not mixed with JSON.
    tell = _to_errors if as_output else say
    if arguments.json:
        make_folder_of(arguments.json)
    plans: list[Plan] = []
    failed = 0
    for one in wanted:

        def attempt(change: str, candidate: Experiment, *, one: _Wanted = one) -> Plan:
            plans.append(_plan(one, change, candidate, arguments, tell))
            if arguments.json and not as_output:  # each time: a call that is stopped keeps them
                write(_as_json(plans), arguments.json, quiet=True)
            return plans[-1]

        with one.subject.assembled.explaining():
            if arguments.search:
                tell("ranked by predicted time:\n" + summary(search(one.experiment, attempt)))
                continue
            try:
                attempt("", one.experiment)
            except RuntimeError as error:  # the compiler's
                failed += 1
                _to_errors(f"error: {one.name} on {one.topology.name}: {str(error).strip()}")
    if as_output:
        say(_as_json(plans))
    if len(wanted) > 1 and plans:
        tell(table(plans))
    return FAILED if failed else 0


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """An experiment that has the size of a machine, and a sentence about its mesh and batch."""

    subject: Subject
    topology: Topology
    experiment: Experiment
    layout: str

    @property
    def name(self) -> str:
        return Path(self.subject.name.split(",")[0]).stem


def _wanted(arguments: argparse.Namespace, bindings: Sequence[str]) -> list[_Wanted]:
    """Read and fit all experiments to all machines."""
    from gshard_exp.config import reading
    from gshard_exp.plan.compile import fit_to
    from gshard_exp.plan.topology import parse_topology, require_compiler

    topologies = [parse_topology(name) for name in arguments.topology]
    for topology in topologies:
        require_compiler(topology)
    names = experiments_of(arguments, bindings)
    if not names:
        raise ConfigError(
            "There is no experiment to plan.",
            at=["command line"],
            hint="--gin_file=gin/paper/moe_2048e_36l.gin, or --fdl_config=BUILDER",
        )
    set_here = any(_MESH.search(words) for words in (*bindings, *arguments.fdl_set))
    wanted = []
    for name in names:
        subject = reading.read_subject(name, bindings, search_paths(arguments), arguments.fdl_set)
        for topology in topologies:
            with subject.assembled.explaining():
                fitted, layout = fit_to(
                    subject.assembled.tree,
                    topology,
                    mesh=arguments.mesh or ("file" if set_here else "auto"),
                    tokens_per_core=arguments.tokens_per_core,
                )
            wanted.append(_Wanted(subject, topology, fitted, layout))
    return wanted


def _plan(
    one: _Wanted,
    change: str,
    candidate: Experiment,
    arguments: argparse.Namespace,
    tell: Callable[[str], None],
) -> Plan:
    """Compile a candidate, say what it takes and keep its module if that is asked for."""
    from gshard_exp.plan.compile import compile_step
    from gshard_exp.plan.plan import describe, make_plan

    name, layout = f"{one.name} {change}".strip(), change or one.layout
    tell(f"{name} on {one.topology.name}: {layout}")
    program = compile_step(candidate, one.topology, tell)
    if arguments.hlo_dir:
        file = re.sub(r"\W+", "_", f"{name} {one.topology.name}")
        program.save(Path(arguments.hlo_dir), file)
    made = make_plan(name, candidate, program, layout, int(arguments.tokens))
    tell(describe(made))
    return made


def _as_json(plans: Sequence[Plan]) -> str:
    return json.dumps([plan.to_json() for plan in plans], indent=1)


def _to_errors(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
