"""Assembles experiments that are to be looked at, not run.

They may be gin files, run folders or fiddle configs, and leave places of a machine open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config.assemble import Assembled, build
from gshard_exp.config.errors import ConfigError
from gshard_exp.config.parse import Program, parse
from gshard_exp.config.search import find_gin_file, search_roots
from gshard_exp.config.values import REQUIRED

# Macros that name a place on the user's machine. A file may leave them required; to look at an
# experiment their value does not matter. Sizes are not among them: those have to be chosen.
PLACES = ("MODEL_DIR", "TSV_PATH", "CACHE_DIR")
FIDDLE = "fdl:"  # before the name of a fiddle builder, where gin files may stand too


@dataclasses.dataclass(frozen=True)
class Subject:
    """An experiment that is looked at.

    Attributes:
        name: as the user wrote it.
        assembled: the tree and who set what in it.
        placeholders: macros that were required and not set, and now are `<NAME>`.
    """

    name: str
    assembled: Assembled[Any]
    placeholders: tuple[str, ...]

    @property
    def open_places(self) -> tuple[str, ...]:
        """The values that stand for what a run has to choose."""
        return tuple(f"<{name}>" for name in self.placeholders)


def read_subject(
    name: str,
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    assignments: Sequence[str] = (),
) -> Subject:
    """Assemble what a word of the command line names.

    Args:
        name: a gin file, several joined by commas (later ones win), the folder of a run, or
            `fdl:` and what `--fdl_config` takes.
        bindings: `NAME=VALUE`, for gin files; these win over files.
        search_paths: folders in which gin files are looked for.
        assignments: `PATH=VALUE`, for a fiddle config.

    Raises:
        ConfigError: any mistake in the files, or a folder that holds no run.
    """
    if name.startswith(FIDDLE):
        return read_fiddle(name.removeprefix(FIDDLE), assignments)
    files = [gin_file_of(part) for part in name.split(",") if part]
    for file in files:  # `parse` would say that --gin_file asks for it
        find_gin_file(file, search_roots(search_paths), f"command line: {name}")
    return read_files(name, files, bindings, search_paths)


def read_fiddle(expression: str, assignments: Sequence[str] = ()) -> Subject:
    """Assemble a fiddle config, with a placeholder for the folder of the run if nothing sets it.

    Raises:
        ConfigError: any mistake in the flags, or in what the builder set.
    """
    from gshard_exp.config.from_fiddle import assemble_fiddle
    from gshard_exp.train.experiment import Experiment

    place = PLACES[0]
    assembled = assemble_fiddle(Experiment, expression, assignments, model_dir=f"<{place}>")
    filled = (place,) if assembled.tree.model_dir == f"<{place}>" else ()
    return Subject(f"{FIDDLE}{expression}", assembled, filled)


def check_flags(names: Sequence[str], bindings: Sequence[str], assignments: Sequence[str]) -> None:
    """Refuse flags for gin files where there are none, and flags for fiddle where there is none.

    Args:
        names: experiments, as of `read_subject`.
        bindings: `NAME=VALUE` of `--gin.NAME=VALUE`.
        assignments: `PATH=VALUE` of `--fdl_set`.

    Raises:
        ConfigError: a flag would change nothing.
    """
    of_fiddle = [name.startswith(FIDDLE) for name in names]
    if bindings and all(of_fiddle):
        raise ConfigError(
            f"--gin.{bindings[0]} sets something of a gin file, and there is none.",
            rule="A setting that changes nothing is taken for a mistake.",
            at=[f"command line: --gin.{binding}" for binding in bindings],
            hint="--fdl_set=PATH=VALUE sets something of a fiddle config",
        )
    if assignments and not any(of_fiddle):
        raise ConfigError(
            f"--fdl_set={assignments[0]} sets something of a fiddle config, and there is none.",
            rule="A setting that changes nothing is taken for a mistake.",
            at=[f"command line: --fdl_set={assignment}" for assignment in assignments],
            hint="--gin.NAME=VALUE sets something of a gin file; --fdl_config=NAME takes a builder",
        )


def read_files(
    name: str,
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
) -> Subject:
    """Assemble gin files, with a placeholder for each of `PLACES` that is required and not set.

    Raises:
        ConfigError: any mistake in the files or bindings.
    """
    from gshard_exp.train.experiment import Experiment

    program = parse(Experiment, files, bindings, search_paths)
    placeholders = _fill_places(program)
    return Subject(name, build(Experiment, program), placeholders)


def gin_file_of(name: str) -> str:
    """Return the gin file of a run's folder, and any other name as it is.

    Raises:
        ConfigError: a folder without `config.gin`.
    """
    folder = Path(name)
    if not folder.is_dir():
        return name
    if not (folder / "config.gin").is_file():
        raise ConfigError(
            f"The folder '{name}' holds no config.gin.",
            rule="The folder of a run (MODEL_DIR) has one; other experiments are gin files.",
            hint="a folder that gshard-exp train has written, or a gin file",
        )
    return str(folder / "config.gin")


def placeholder_note(placeholders: Sequence[str]) -> str:
    """Say which macros were filled in; empty if none was."""
    if not placeholders:
        return ""
    shown = ", ".join(f"{name}='<{name}>'" for name in placeholders)
    return f"placeholders for what a run has to set: {shown}"


def _fill_places(program: Program) -> tuple[str, ...]:
    """Give each required place a value where it is declared, so that provenance stays true."""
    filled = []
    final = program.final()
    for index, binding in enumerate(program.bindings):
        required = binding.target is None and binding.value == REQUIRED
        if required and binding.name in PLACES and final[binding.key] is binding:
            program.bindings[index] = dataclasses.replace(binding, value=f"<{binding.name}>")
            filled.append(binding.name)
    return tuple(filled)
