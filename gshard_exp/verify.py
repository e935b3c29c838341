"""The verbs that compile an experiment's step to prove something of it: inspect, invariance."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.look import say, subject_of

OVER_TOLERANCE = 1  # exit status


def add_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that both verbs have."""
    verb.add_argument(
        "--devices",
        type=int,
        help="how many to use; CPU devices are simulated; default: those of the mesh",
    )
    verb.add_argument("--json", metavar="OUT", help="also write all that was found to a file")


def inspect_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Print the collectives of the training step."""
    from gshard_exp.train.inspection import inspect
    from gshard_exp.train.layouts import label

    with _experiment(arguments, bindings) as given:
        experiment = _on_devices(given, arguments.devices)
        say(f"The training step on {label(experiment.mesh)}; bytes of one execution on one device")
        census = inspect(experiment)
    say(census.table())
    _write(census.as_json(), arguments.json)
    return 0


def invariance_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Compare one step on all meshes with that on one device."""
    from gshard_exp.sharding.mesh import simulate_cpu_devices
    from gshard_exp.train import invariance

    with _experiment(arguments, bindings) as experiment:
        devices = arguments.devices or experiment.mesh.count
        simulate_cpu_devices(devices)
        found = invariance.compare(experiment, devices, report=lambda one: say(_line(one)))
    failed = invariance.failures(found)
    skipped = sum(bool(one.skipped) for one in found)
    say(
        f"{len(found) - skipped} compared with one device, {len(failed)} over tolerance, "
        f"{skipped} skipped"
    )
    rows = [{**dataclasses.asdict(one), "worst": _worst(one)} for one in found]
    _write(json.dumps(rows, indent=1), arguments.json)
    return OVER_TOLERANCE if failed else 0


@contextlib.contextmanager
def _experiment(arguments: argparse.Namespace, bindings: Sequence[str]) -> Iterator[Any]:
    """Assemble the experiment, and add to setting errors where the settings were made."""
    assembled = subject_of(arguments, bindings).assembled
    with assembled.explaining():
        yield assembled.tree


def _on_devices(experiment: Any, devices: int | None) -> Any:
    from gshard_exp.sharding.mesh import simulate_cpu_devices
    from gshard_exp.train.layouts import spread

    if devices is None:
        return experiment
    simulate_cpu_devices(devices)
    return spread(experiment, devices)


def _line(one: Any) -> str:
    if one.skipped:
        return f"skipped  {one.way}: {one.skipped}"
    worst = "; ".join(
        f"{part} {worst.difference:.1e} ({worst.leaf})" for part, worst in one.worst.items()
    )
    return f"{'ok' if one.equal else 'OVER':7}  {one.way}: {worst}"


def _worst(one: Any) -> dict[str, Any]:
    return {part: worst._asdict() for part, worst in one.worst.items()}


def _write(text: str, file: str | None) -> None:
    if file:
        Path(file).write_text(f"{text}\n", encoding="utf-8")
        say(f"wrote {file}")
