"""The verbs that look at experiments, or at the devices, without training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gshard_exp.config import ConfigError
from gshard_exp.errors import WRONG_SETTING

if TYPE_CHECKING:
    from gshard_exp.config import reading

OUTPUT = "-"  # instead of the name of a file


def show_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Print, draw or rewrite one experiment."""
    from gshard_exp.config import show

    subject = subject_of(arguments, bindings)
    if arguments.graph:
        write(show.drawn(subject), arguments.graph)
    elif arguments.language:
        say(show.written_as(subject, arguments.language))
    else:
        say(show.show(subject, arguments.params))
    return 0


def diff_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Compare two experiments."""
    from gshard_exp.config import diff, reading, run_diff

    names = experiments_of(arguments, bindings)
    if len(names) != 2:
        raise ConfigError(
            f"There are {len(names)} experiments to compare.",
            rule="There have to be two.",
            at=["command line"],
            hint="gshard-exp diff A B, each a gin file, the folder of a run or fdl:NAME",
        )
    a, b = (
        reading.read_subject(name, bindings, search_paths(arguments), arguments.fdl_set)
        for name in names
    )
    say(diff.diff(a, b))
    recorded = run_diff.run_diff(*names)
    if recorded:
        say(f"\n{recorded}")
    return 0


def check_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Validate experiments; the status says whether all are valid."""
    from gshard_exp.config import validate

    names = experiments_of(arguments, bindings, default=validate.complete_experiments())
    verdicts = [
        validate.validate(
            name, bindings, search_paths(arguments), arguments.fdl_set, trace=arguments.trace
        )
        for name in names
    ]
    say(validate.summary(verdicts))
    return WRONG_SETTING if any(verdict.problem for verdict in verdicts) else 0


def components_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """List what can be assembled."""
    from gshard_exp.config import components

    say(components.listing())
    return 0


def audit_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Compare routing presets with Algorithm 1."""
    from gshard_exp.config import routing

    report = routing.audit_presets(arguments.preset or (), bindings, search_paths(arguments))
    if arguments.json:
        write(json.dumps(report, indent=2), arguments.json)
    if arguments.json != OUTPUT:
        say(routing.table(report))
    return 0


def collectives_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Measure the communication primitives, beside Figure 9 of the paper."""
    from gshard_exp.sharding import primitives_report

    del bindings
    report = primitives_report.measured_report(
        arguments.devices, arguments.sizes, runs=arguments.runs, plot=arguments.plot
    )
    if arguments.json:
        write(json.dumps(report, indent=2), arguments.json)
    else:
        say(primitives_report.table(report))
    return 0


def experiments_of(
    arguments: argparse.Namespace, bindings: Sequence[str], default: Sequence[str] = ()
) -> list[str]:
    """List the experiments of a verb that takes several; refuse flags that change none of them."""
    from gshard_exp.config import reading

    of_fiddle = [f"{reading.FIDDLE}{expression}" for expression in arguments.fdl_config or ()]
    names = [*arguments.experiment, *of_fiddle] or list(default)
    reading.check_flags(names, bindings, arguments.fdl_set)
    return names


def subject_of(arguments: argparse.Namespace, bindings: Sequence[str]) -> reading.Subject:
    """Assemble the experiment of a verb that looks at one, and refuse flags that change none."""
    from gshard_exp.config import reading

    check_flags(arguments, bindings)
    if arguments.fdl_config:
        return reading.read_fiddle(arguments.fdl_config, arguments.fdl_set)
    files = [reading.gin_file_of(name) for name in arguments.gin_file]
    return reading.read_files(", ".join(files), files, bindings, search_paths(arguments))


def check_flags(arguments: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Refuse flags of the front end that a verb with one experiment does not use."""
    from gshard_exp.config import reading

    name = f"{reading.FIDDLE}{arguments.fdl_config}" if arguments.fdl_config else "gin files"
    reading.check_flags([name], bindings, arguments.fdl_set)


def search_paths(arguments: argparse.Namespace) -> list[str]:
    """List the folders of `--gin_search_paths`."""
    return [path for path in arguments.gin_search_paths.split(",") if path]


def write(text: str, file: str, *, quiet: bool = False) -> None:
    """Write a text to a file, in a folder that is made if need be; or to the output, for "-".

    Args:
        text: without the last line's end.
        file: its name, or "-".
        quiet: do not say that it was written.
    """
    if file == OUTPUT:
        say(text)
        return
    make_folder_of(file)
    Path(file).write_text(f"{text}\n", encoding="utf-8")
    if not quiet:
        say(f"wrote {file}")


def make_folder_of(file: str) -> None:
    """Make the folder that a file will stand in: before the work whose result it is.

    Raises:
        ConfigError: it cannot be made, or the file's name is that of a folder.
    """
    make_folder(str(Path(file).parent))
    if Path(file).is_dir():
        raise ConfigError(f"'{file}' is a folder, not a file.", at=[f"command line: {file}"])


def make_folder(folder: str) -> None:
    """Make a folder, and those above it.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder '{folder}' cannot be made: {error.strerror}.",
            at=[f"command line: {folder}"],
        ) from error


def say(text: str) -> None:
    """Print a text for whoever waits."""
    print(text, flush=True)
