"""The file run.json of a run: what made it, on what, and what it has cost so far.

`config.gin` says how a run is set up; this says with which data, code and machine. It is written
whole each time, under another name first, so that a reader never meets half of it.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from gshard_exp.data.batches import DRAWN
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.flops import useful_flops
from gshard_exp.train.parameters import parameters, totals
from gshard_exp.train.surroundings import surroundings

FILE = "run.json"
SCHEMA = 1
FLOPS_OF = "a source or target token in training, forward and backward (train/flops.py)"
_COUNT, _NUMBER = (int,), (int, float)
# What others read of a record, and of its parts: a kind of JSON value each.
_KINDS = {
    "seed": _COUNT,
    "data": (dict,),
    "data.hash": (str,),
    "params_total": _COUNT,
    "params_active": _COUNT,
    "flops_per_token": (*_NUMBER, type(None)),
    "tokens_per_step": _COUNT,
    "train_steps": _COUNT,
    "starts": (list,),
    "progress": (dict,),
    "progress.step": _COUNT,
    "progress.wall_seconds": _NUMBER,
    "progress.cpu_seconds": _NUMBER,
    "progress.core_seconds": _NUMBER,
    "finished": (bool,),
}
_START_KINDS = {"step": _COUNT, "code": (dict,), "python": (str,)} | dict.fromkeys(
    ("packages", "machine", "mesh"), (dict,)
)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Measures wall and processor time (seconds, over all threads) from when it is made."""

    wall: float = dataclasses.field(default_factory=time.perf_counter)
    processor: float = dataclasses.field(default_factory=time.process_time)

    def spent(self, mesh: Mesh) -> dict[str, float]:
        """Return seconds since then.

        `core_seconds` are what a run is charged: those of accelerator cores, busy or not, as the
        paper counts its core-years; on CPU, where devices are simulated and a machine is shared,
        those of processor cores that were busy.
        """
        wall, processor = time.perf_counter() - self.wall, time.process_time() - self.processor
        cpu = mesh.devices.flat[0].platform == "cpu"
        cores = processor if cpu else wall * mesh.devices.size
        return {"wall_seconds": wall, "cpu_seconds": processor, "core_seconds": cores}


class RunRecord:
    """The run.json of a run that goes on.

    Args:
        path: of the file.
        content: all of it but the progress of this start.
        before: seconds of the starts before, by name.
        clock: of this start.
        mesh: of this start.
    """

    def __init__(
        self,
        path: Path,
        content: dict[str, Any],
        before: Mapping[str, float],
        clock: Clock,
        mesh: Mesh,
    ) -> None:
        self._path, self._content, self._before = path, content, before
        self._clock, self._mesh = clock, mesh

    def save(self, step: int, *, finished: bool = False) -> None:
        """Write the file as of a step that is done."""
        spent = self._clock.spent(self._mesh)
        sums = {name: round(self._before.get(name, 0.0) + spent[name], 3) for name in spent}
        self._content["progress"] = {"step": step, **sums}
        self._content["finished"] = finished
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def start_record(
    experiment: Experiment,
    *,
    mesh: Mesh,
    identity: Mapping[str, Any],
    step: int,
    clock: Clock,
    argv: Sequence[str] | None,
    report: Callable[[str], None],
) -> RunRecord:
    """Begin, or go on with, the record of a run.

    Args:
        experiment: the assembled tree.
        mesh: that it lies on.
        identity: of its stream of batches.
        step: that it starts from.
        clock: made when this start began.
        argv: words of the command line, if there was one.
        report: is told of a file that cannot be read; it is kept under another name.
    """
    path = experiment.folder / FILE
    try:
        before = read_record(path.parent) or {}
    except ValueError as error:
        kept = path.with_name("run_damaged.json")
        path.replace(kept)
        report(f"{error}; it is kept as {kept}, and a new one begins")
        before = {}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    here = {"time": now, "step": step, **surroundings(mesh), "argv": argv and list(argv)}
    content = {
        "schema": SCHEMA,
        "seed": experiment.seed,
        "data": _data(experiment, identity),
        **sizes(experiment),
        "train_steps": experiment.train_steps,
        "starts": [*before.get("starts", ()), here],
    }
    record = RunRecord(path, content, before.get("progress", {}), clock, mesh)
    record.save(step)
    return record


def read_record(model_dir: Path) -> dict[str, Any] | None:
    """Read the run.json of a run; None if it has none.

    What comes back has all that `start_record` writes and others read, of the right types, and at
    least one start.

    Raises:
        ValueError: it is damaged; the message names the file.
    """
    path = Path(model_dir) / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    if content.get("schema") != SCHEMA:
        there = repr(content.get("schema"))
        raise ValueError(f"{path} has schema {there}; this version reads schema {SCHEMA}")
    wrong = _wrong(content, _KINDS)
    if not wrong and not content["starts"]:
        wrong = "'starts' is empty"
    for number, start in enumerate(content["starts"] if not wrong else ()):
        wrong = wrong or _wrong({"starts": start}, {"starts": (dict,)})
        wrong = wrong or _wrong(start, _START_KINDS, f"starts[{number}].")
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}")
    return content


def _wrong(content: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], at: str = "") -> str:
    """Say what is not of its kind (a dot leads into an object); empty if nothing is."""
    for name, kind in kinds.items():
        value: Any = content
        for key in name.split("."):
            if key not in value:
                return f"it has no '{at}{name}'"
            value = value[key]
        # By exact type: in Python, true is an integer; and NaN and Infinity pass for numbers.
        if type(value) not in kind or (isinstance(value, float) and not math.isfinite(value)):
            return f"'{at}{name}' is {value!r:.60}"
    return ""


def sizes(experiment: Experiment) -> dict[str, Any]:
    """Return what a run of an experiment takes: parameters, FLOPs and tokens.

    Tokens are positions of a batch, padding included: those that go through encoder and decoder.
    FLOPs are known of translation models; of others they are None.
    """
    model = experiment.model
    total, active = totals(parameters(model))
    lengths = model.stack_lengths(experiment.lengths)
    tokens = experiment.batch_size * sum(lengths.values())
    flops = None
    if isinstance(model, Seq2SeqModel):
        parts = useful_flops(model, batch_size=experiment.batch_size, lengths=experiment.lengths)
        flops = sum(parts.values()) / tokens
    return {
        "params_total": total,
        "params_active": active,
        "flops_per_token": flops,
        "flops_per_token_of": FLOPS_OF,
        "tokens_per_step": tokens,
        "tokens_per_step_by_stack": {
            stack: experiment.batch_size * length for stack, length in lengths.items()
        },
    }


def _data(experiment: Experiment, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Say which data a run is trained on.

    `hash` is the same for runs on the same data, however they draw from it; `stream_hash` for runs
    that see the same batches in the same order.
    """
    name = identity.get("mixture_or_task_name") or type(experiment.data).__name__
    lasting = {key: value for key, value in identity.items() if key not in DRAWN}
    return {
        "hash": _hash([name, lasting]),
        "stream_hash": _hash([name, dict(identity)]),
        "name": name,
        **identity,
    }


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
