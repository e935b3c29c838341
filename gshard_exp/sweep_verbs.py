"""The verbs of sweeps: plan, run, eval, status, commands."""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshard_exp.config import ConfigError, nearest
from gshard_exp.config.errors import one_of
from gshard_exp.errors import FAILED, STOPPED
from gshard_exp.look import OUTPUT, make_folder_of, say, search_paths, write

if TYPE_CHECKING:
    from gshard_exp.sweep.prepare import Prepared, SweepFile

_QUIET = 60  # seconds between lines of progress where they cannot replace each other


def add_verbs(sweep: argparse.ArgumentParser, common: Any) -> None:
    """Declare the verbs below `sweep`.

    Args:
        sweep: the parser of the verb.
        common: adds the flags that every verb has: (subparsers, name, function, summary) -> parser.
    """
    verbs = sweep.add_subparsers(required=True, metavar="VERB")
    plan = common(verbs, "plan", plan_verb, "tabulate what each point takes, before anything runs")
    run = common(verbs, "run", run_verb, "train the points that are not done")
    score = common(verbs, "eval", eval_verb, "score the trained points on held-out text")
    status = common(verbs, "status", status_verb, "tell how far each point is")
    commands = common(verbs, "commands", commands_verb, "print the command of each point")
    for verb in (plan, run, score, status, commands):
        verb.add_argument(
            "sweep", nargs="?", metavar="F", help="a gin file of a grid.Sweep, or fdl:BUILDER"
        )
        verb.add_argument("--fdl_config", metavar="BUILDER", help="instead of F: of fiddle")
        verb.add_argument(
            "--fdl_set", action="append", default=[], metavar="PATH=VALUE", help="of the sweep"
        )
        verb.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="set something of the experiment of every point; may be repeated",
        )
        verb.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="PATTERN",
            help="points with such a name ('l12-*'); may be repeated",
        )
    for verb in (plan, status):
        verb.add_argument(
            "--json", nargs="?", const=OUTPUT, metavar="OUT", help="to a file or the output"
        )
    plan.add_argument(
        "--topology",
        action="append",
        default=[],
        metavar="T",
        help="also predict the time on v3:4x4, ... (compiles every point); may be repeated",
    )
    plan.add_argument(
        "--no-measure", dest="measure", action="store_false", help="take no steps on this machine"
    )
    _add_scoring(score)
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="points at once; default: 1")
    run.add_argument(
        "--launcher",
        default="local",
        choices=("local", "slurm", "submitit-local"),
        help="processes of this machine (default); jobs of a SLURM cluster; or such jobs as "
        "processes of this machine, to try them",
    )
    run.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of submitit: timeout_min=240, slurm_partition=P; may be repeated",
    )


def _add_scoring(score: argparse.ArgumentParser) -> None:
    score.add_argument("--split", default="test", help="test (default) or validation")
    score.add_argument("--max_examples", type=int, help="of each language; default: all")
    score.add_argument("--again", action="store_true", help="also what was scored before")
    score.add_argument(
        "--baselines_to",
        metavar="FILE",
        help="write the scores of bilingual points for `report --baselines` and `eval --baselines`",
    )


def run_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Train the points that are not done; the status says whether one failed or was stopped."""
    from gshard_exp.sweep.launch import Crew
    from gshard_exp.sweep.prepare import write_sweep

    if arguments.jobs < 1:
        raise ConfigError(f"--jobs={arguments.jobs} has to be at least 1.", at=["command line"])
    if arguments.slurm and arguments.launcher == "local":
        raise ConfigError(
            f"--slurm={arguments.slurm[0]} changes nothing.",
            rule="It is for jobs of a cluster.",
            at=["command line"],
            hint="add --launcher=slurm, or leave it out",
        )
    file, points = _prepared(arguments, bindings)
    write_sweep(file)
    if arguments.launcher != "local":
        return _submit(arguments, file, points)
    line = _Line()
    crew = Crew(points, jobs=arguments.jobs, report=line.say, progress=line.show)
    return _report(crew.run(), stopped=crew.stopped)


def _submit(arguments: argparse.Namespace, file: SweepFile, points: Sequence[Prepared]) -> int:
    """Hand a job for each point to a cluster, and leave it there."""
    from gshard_exp.sweep import cluster

    words = _without(arguments.argv, ("--only", "--launcher", "--slurm", "--jobs"))
    commands = {
        point.name: [*words, "--launcher=local", "--jobs=1", f"--only={point.name}"]
        for point in points
    }
    options = cluster.options_of(arguments.slurm)
    name = arguments.launcher.removeprefix("submitit-")
    jobs = cluster.submit(commands, file.folder, jobs=arguments.jobs, options=options, cluster=name)
    for point, job in zip(points, jobs, strict=True):
        say(f"{point.name}: job {job.job_id}")
    say(f"{len(jobs)} jobs submitted; gshard-exp sweep status {file.folder} follows them")
    return 0


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Drop flags that take one value, written as one word or as two."""
    kept, skip = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        if not skip and flag not in flags:
            kept.append(word)
        skip = not skip and flag in flags and not equals
    return kept


def _report(outcomes: Sequence[Any], *, stopped: bool) -> int:
    """Say at the end what failed, and what is left."""
    counts = {state: sum(o.state == state for o in outcomes) for state in _states()}
    for outcome in outcomes:
        if outcome.problem:
            print(f"\n{outcome.name} failed: {outcome.problem}", file=sys.stderr)
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    say(said or "nothing was started")
    if stopped:
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED
    return FAILED if counts["failed"] or counts["interrupted"] else 0


def eval_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Score the trained points; the status says whether one could not be scored."""
    from gshard_exp.sweep import scoring

    if arguments.set:
        raise ConfigError(
            f"--set={arguments.set[0]} changes nothing.",
            rule="Trained points are scored with the settings of their runs.",
            at=["command line"],
            hint="gshard-exp eval --model_dir=FOLDER --gin.NAME=VALUE scores one run otherwise",
        )
    folder, names = _folder(arguments, bindings)
    folders = {name: folder / name for name in names}
    if arguments.baselines_to:
        make_folder_of(arguments.baselines_to)
    outcomes = scoring.score(
        folders,
        split=arguments.split,
        max_examples=arguments.max_examples,
        again=arguments.again,
        report=say,
    )
    status = _report(outcomes, stopped=False)
    if arguments.baselines_to:
        table = scoring.baselines(folders, arguments.split)
        write(json.dumps(table, indent=1), arguments.baselines_to)
    return status


def status_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Tell how far each point is."""
    from gshard_exp.sweep.follow import rows, table

    folder, names = _folder(arguments, bindings)
    found = rows(folder, names)
    if arguments.json:
        write(json.dumps(found, indent=1), arguments.json)
    else:
        say(table(found))
    return 0


def commands_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Print the command of each point, for any scheduler."""
    from gshard_exp.sweep.launch import shown_command

    for prepared in _prepared(arguments, bindings)[1]:
        say(shown_command(prepared))
    return 0


def plan_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Tabulate what each point takes."""
    from gshard_exp.sweep import estimate

    _, points = _prepared(arguments, bindings)
    # What is being done goes where it is not mixed with JSON.
    found = estimate.estimate(
        points,
        measure=arguments.measure,
        topologies=arguments.topology,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if arguments.json:
        write(json.dumps(estimate.as_json(found), indent=1), arguments.json)
    if arguments.json != OUTPUT:
        say(estimate.table(found))
    return 0


def _prepared(
    arguments: argparse.Namespace, bindings: Sequence[str]
) -> tuple[SweepFile, list[Prepared]]:
    """Assemble the points that are asked for, all of them before anything is done."""
    from gshard_exp.sweep.prepare import prepare

    file = _sweep(arguments, bindings)
    names = _matching([point.name for point in file.points], arguments.only)
    return file, prepare(file, [point for point in file.points if point.name in names])


def _sweep(arguments: argparse.Namespace, bindings: Sequence[str]) -> SweepFile:
    from gshard_exp.config import reading
    from gshard_exp.sweep.prepare import read_sweep

    names = [arguments.sweep] if arguments.sweep else []
    names += [f"{reading.FIDDLE}{arguments.fdl_config}"] if arguments.fdl_config else []
    if len(names) != 1:
        raise ConfigError(
            f"There are {len(names)} sweeps.",
            rule="There has to be one.",
            at=["command line"],
            hint="gshard-exp sweep run F, with a gin file of a grid.Sweep, or --fdl_config=BUILDER",
        )
    reading.check_flags(names, bindings, arguments.fdl_set)
    return read_sweep(
        names[0],
        bindings,
        search_paths(arguments),
        assignments=arguments.fdl_set,
        flags=arguments.set,
    )


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"--only={pattern} matches none of {len(names)} points.",
                at=[f"command line: --only={pattern}"],
                hint=one_of([f"--only={name}" for name in nearest(pattern, names)]),
            )
    return [n for n in names if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)]


def _folder(arguments: argparse.Namespace, bindings: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder of a sweep and its points, from its file or from the folder itself."""
    from gshard_exp.sweep.prepare import read_folder

    if arguments.sweep and Path(arguments.sweep).is_dir():
        folder = Path(arguments.sweep)
        if unread := [*bindings, *arguments.set, *arguments.fdl_set]:
            raise ConfigError(
                f"{unread[0]} changes nothing.",
                rule="A folder has the settings that it was made with.",
                at=["command line"],
                hint="name the sweep's file instead of its folder, or leave the setting out",
            )
        names = [point["name"] for point in read_folder(folder)["points"]]
    else:
        file = _sweep(arguments, bindings)
        folder, names = file.folder, [point.name for point in file.points]
    return folder, _matching(names, arguments.only)


def _states() -> Sequence[str]:
    from gshard_exp.sweep.state import STATES

    return STATES


class _Line:
    """Lines for a person; on a terminal the last one is replaced as things move on."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._shown = 0
        self._last = 0.0

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._clear()
        say(text)

    def show(self, text: str) -> None:
        """Show how things stand; where lines cannot be replaced, no more than once a minute."""
        if self._terminal:
            self._clear()
            text = text[: shutil.get_terminal_size().columns - 1]
            print(text, end="", flush=True)
            self._shown = len(text)
        elif time.monotonic() - self._last > _QUIET:
            self._last = time.monotonic()
            say(text)

    def _clear(self) -> None:
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="")
            self._shown = 0
