"""The verb `plan`: gin files and topologies to plans."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gshard_exp.config import reading
from gshard_exp.config.errors import ConfigError
from gshard_exp.errors import SettingError

if TYPE_CHECKING:
    from gshard_exp.plan.plan import Plan
    from gshard_exp.train.experiment import Experiment

# Bindings of the command line that set sizes of the mesh.
_MESH = re.compile(r"PARTITIONS|MeshSpec")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Declare what `plan` reads."""
    for flag, metavar, explanation in (
        ("--gin_file", "F", "an experiment: files joined by commas; may be repeated"),
        ("--topology", "T", "v3:32x32, v5e:16x16, cpu:8, ...; may be repeated"),
    ):
        verb.add_argument(flag, action="append", required=True, metavar=metavar, help=explanation)
    verb.add_argument("--tokens_per_core", type=int, help="source tokens; default: the gin file's")
    verb.add_argument(
        "--mesh",
        default="",
        metavar="auto|file|DxExM",
        help="sizes of data, expert and model; default: auto, or file if --gin sets mesh sizes",
    )
    verb.add_argument("--tokens", type=float, default=1e12, help="source tokens of a training")
    verb.add_argument(
        "--search", action="store_true", help="try meshes, dispatch and recomputation; rank them"
    )
    verb.add_argument("--json", default="", metavar="OUT", help="write the plans")
    verb.add_argument("--hlo_dir", default="", metavar="D", help="keep compiled modules there")


def plan(
    arguments: argparse.Namespace,
    bindings: Sequence[str],
    search_paths: Sequence[str],
    say: Callable[[str], None],
) -> int:
    """Compile each experiment for each machine and say what it takes.

    A plan that does not fit is a result; the exit status is 0 all the same.

    Args:
        arguments: `gin_file`, `topology` (lists), `tokens_per_core`, `mesh`, `tokens`, `json`,
            `hlo_dir` and `search`.
        bindings: `NAME=VALUE`; these win over files.
        search_paths: folders in which gin files are looked for.
        say: prints a line.

    Raises:
        ConfigError: any mistake in files or flags, before the first compile.
    """
    from gshard_exp.plan.compile import compile_step, fit_to
    from gshard_exp.plan.plan import describe, make_plan, table
    from gshard_exp.plan.search import search
    from gshard_exp.plan.topology import parse_topology, require_compiler

    topologies = [parse_topology(name) for name in arguments.topology]
    for topology in topologies:
        require_compiler(topology)
    set_here = any(_MESH.search(binding) for binding in bindings)
    mesh = arguments.mesh or ("file" if set_here else "auto")
    wanted = []
    for name in arguments.gin_file:
        subject = reading.read_subject(name, bindings, search_paths)
        for topology in topologies:
            with _explained(subject):
                fitted, layout = fit_to(
                    subject.assembled.tree,
                    topology,
                    mesh=mesh,
                    tokens_per_core=arguments.tokens_per_core,
                )
            wanted.append((subject, topology, fitted, layout))
    plans: list[Plan] = []
    for subject, topology, fitted, layout in wanted:
        stem = Path(subject.name.split(",")[0]).stem

        def attempt(
            what: str, candidate: Experiment, *, topology=topology, layout=layout, stem=stem
        ) -> Plan:
            label = f"{stem} {what}".strip()
            say(f"{label} on {topology.name}: {what or layout}")
            program = compile_step(candidate, topology, say)
            if arguments.hlo_dir:
                file = re.sub(r"\W+", "_", f"{label} {topology.name}")
                program.save(Path(arguments.hlo_dir), file)
            plans.append(
                make_plan(label, candidate, program, what or layout, int(arguments.tokens))
            )
            say(describe(plans[-1]))
            _write(arguments.json, plans)  # after each: a call that is stopped keeps what it has
            return plans[-1]

        with _explained(subject):
            if arguments.search:
                say("ranked by predicted time:\n" + table(search(fitted, topology, attempt)))
            else:
                attempt("", fitted)
    if len(wanted) > 1:
        say(table(plans))
    return 0


def _write(name: str, plans: Sequence[Plan]) -> None:
    if name:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([plan.to_json() for plan in plans], indent=1) + "\n")


class _explained:
    """Adds to a setting error of a lower room where the settings were made."""

    def __init__(self, subject: reading.Subject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SettingError) and not isinstance(error, ConfigError):
            raise self._subject.assembled.explain(error) from error
