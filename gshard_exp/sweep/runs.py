"""Reads the folder of a run, finished or not, whole or damaged.

Whatever cannot be read is named in `Run.damage`, and all the rest is used. A folder says of a run:

    run.json                      parameters, FLOPs, tokens of a step, cost so far
    config.gin                    settings; counts of parameters and FLOPs where run.json is missing
    train/metrics.jsonl           loss and router health by step
    training_eval/*/metrics.jsonl loss and BLEU of held-out text by step
    inference_eval/*/scores.json  what `gshard-exp eval` found
    data/languages.json           training pairs of each language
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config import ConfigError, reading, show
from gshard_exp.config.flatten import settings as settings_of
from gshard_exp.errors import SettingError, first_line
from gshard_exp.sweep.scores import HELD_OUT_LOSS, Scores, in_training, is_number, of_evaluation
from gshard_exp.train.record import FILE, read_record, sizes

CONFIG, METRICS, INFO = "config.gin", "train/metrics.jsonl", "model-info.txt"
MARKS = (CONFIG, FILE, METRICS, INFO)  # a folder with one of them is, or was, a run
# Of what a training cross entropy is the mean, and its name in metrics: nothing else is added.
CROSS_ENTROPIES = {
    "target piece": "cross_ent_loss_per_all_target_tokens",
    "image": "cross_ent_loss_per_example",
}
RATES = ("timing/tokens_per_second", "timing/steps_per_second")
Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """What a run's settings say of it.

    Attributes:
        settings: path -> value as text; empty where they cannot be read.
        total: parameters.
        active: of these, those that one token uses.
        flops_per_step: useful operations of a training step, forward and backward.
        tokens_per_step: of both sides, padding included.
        train_steps: at which the run ends.
    """

    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    total: int | None = None
    active: int | None = None
    flops_per_step: float | None = None
    tokens_per_step: float | None = None
    train_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of the point, unique within a report.
        folder: its MODEL_DIR.
        axes: what a sweep varies, by name; empty outside one.
        model: sizes and settings.
        record: run.json; empty where there is none.
        lines: of train/metrics.jsonl, by rising step.
        held_out: lines of the evaluator that measures loss by language, by rising step.
        scores: BLEU by language; None: nothing was translated yet.
        pairs: training pairs of each language, where the folder says so.
        damage: what could not be read, a line each.
    """

    name: str
    folder: Path
    axes: Mapping[str, Any]
    model: Model
    record: Mapping[str, Any]
    lines: Sequence[Line]
    held_out: Sequence[Line]
    scores: Scores | None
    pairs: Mapping[str, int]
    damage: tuple[str, ...]

    @property
    def step(self) -> int:
        """The last step that was logged; 0 if none was."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def status(self) -> str:
        """`done`, `step 400 of 1200` or `no step yet`."""
        last = self.model.train_steps
        # A run without a record was not trained here: its steps are all that is known.
        finished = self.record.get("finished", last is not None and self.step >= last)
        if finished:
            return "done"
        if not self.lines:
            return "no step yet"
        return f"step {self.step}" + (f" of {last}" if last is not None else "")

    @property
    def tokens_by_step(self) -> list[tuple[int, float]]:
        """Tokens of both sides, without padding, that the run has seen by each logged step.

        A line of metrics says tokens and steps a second; their quotient is the tokens of a step.
        The paper counts source-side tokens alone (facts A2).
        """
        seen, before, found = 0.0, 0, []
        for line in self.lines:
            each = self.model.tokens_per_step or 0.0
            if all(is_number(line, rate) and line[rate] for rate in RATES):
                each = line[RATES[0]] / line[RATES[1]]
            seen += (line["step"] - before) * each
            before = line["step"]
            found.append((before, seen))
        return found

    @property
    def unit(self) -> str:
        """Of what the training cross entropy is the mean: a key of `CROSS_ENTROPIES`."""
        last = self.lines[-1] if self.lines else {}
        return next((unit for unit, key in CROSS_ENTROPIES.items() if key in last), "target piece")

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Training cross entropy (nats, no loss of the routers) against tokens seen."""
        key = CROSS_ENTROPIES[self.unit]
        return [
            (tokens, line[key])
            for (_, tokens), line in zip(self.tokens_by_step, self.lines, strict=True)
            if tokens and is_number(line, key)
        ]

    @property
    def held_out_curve(self) -> list[tuple[float, float]]:
        """Cross entropy of held-out text (nats per piece) against tokens seen."""
        tokens = {0: 0.0, **dict(self.tokens_by_step)}
        return [
            (tokens[line["step"]], line[HELD_OUT_LOSS])
            for line in self.held_out
            if line["step"] in tokens and is_number(line, HELD_OUT_LOSS)
        ]

    @property
    def tokens(self) -> float | None:
        """Tokens seen so far; None before the first line of metrics."""
        found = self.tokens_by_step
        return found[-1][1] if found and found[-1][1] else None

    @property
    def flops(self) -> float | None:
        """Useful operations so far."""
        each = self.model.flops_per_step
        return each * self.step if each and self.step else None

    @property
    def core_hours(self) -> float | None:
        """Processor cores times hours so far, as the run recorded them."""
        progress = self.record.get("progress") or {}
        seconds = progress["core_seconds"] if is_number(progress, "core_seconds") else 0
        return seconds / 3600 if seconds > 0 else None

    @property
    def step_hours(self) -> float | None:
        """Hours that the logged steps took (evaluation, compilation and saving left out)."""
        key = "timing/seconds"
        total = sum(line[key] for line in self.lines if is_number(line, key))
        return total / 3600 if total else None


def is_run(folder: Path) -> bool:
    """Say whether a folder is, or was, that of a run."""
    return any((folder / mark).is_file() for mark in MARKS) or any(folder.glob("checkpoint_*"))


def read_run(folder: Path, name: str, axes: Mapping[str, Any] | None = None) -> Run:
    """Read a folder; nothing in it is changed.

    Args:
        folder: MODEL_DIR.
        name: for the report.
        axes: of the sweep that it is a point of.
    """
    damage: list[str] = []
    record = _record(folder, damage)
    lines = _lines(folder, METRICS, damage)
    evaluations = [
        _lines(folder, str(path.relative_to(folder)), damage)
        for path in sorted(folder.glob("training_eval/*/metrics.jsonl"))
    ]
    held_out = next((e for e in evaluations if any(HELD_OUT_LOSS in line for line in e)), [])
    scores = _newest_scores(folder, damage) or next(
        filter(None, map(in_training, evaluations)), None
    )
    if not (folder / METRICS).exists() and any(folder.glob("checkpoint_*")):
        damage.append(f"{METRICS} is not there, though there are checkpoints")
    return Run(
        name=name,
        folder=folder,
        axes=dict(axes or {}),
        model=_model(folder, record, damage),
        record=record,
        lines=lines,
        held_out=held_out,
        scores=scores,
        pairs=_pairs(folder, damage),
        damage=tuple(damage),
    )


def _json(text: str) -> Any:
    """Parse JSON; a number that is not finite, which JSON has no word for, becomes None."""

    def finite(digits: str) -> float | None:
        return number if math.isfinite(number := float(digits)) else None

    return json.loads(text, parse_float=finite, parse_constant=finite)


def _json_object(folder: Path, name: str, damage: list[str]) -> dict[str, Any]:
    """Read a JSON object of a run; {} if it is not there, or damaged, which is noted."""
    try:
        found = _json((folder / name).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        damage.append(f"{name} cannot be read: {first_line(error)}")
        return {}
    if not isinstance(found, dict):
        damage.append(f"{name} holds a {type(found).__name__}, not an object")
        return {}
    return found


def _record(folder: Path, damage: list[str]) -> dict[str, Any]:
    try:
        return read_record(folder) or {}
    except ValueError as error:
        damage.append(first_line(error).removeprefix(f"{folder}{os.sep}"))
        return {}


def _lines(folder: Path, name: str, damage: list[str]) -> list[Line]:
    """Read the whole lines of a metrics file, by rising step; note the others."""
    try:
        texts = (folder / name).read_bytes().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        damage.append(f"{name} cannot be read: {first_line(error)}")
        return []
    by_step: dict[int, Line] = {}
    bad: list[int] = []
    for number, text in enumerate(texts, start=1):
        line = _parsed(text)
        if line is not None:
            by_step[line["step"]] = line
        elif text.strip():
            bad.append(number)
    if bad:
        what = "the last line is cut off" if bad == [len(texts)] else _which(bad)
        damage.append(f"{name}: {what}; {len(by_step)} whole lines are used")
    return [by_step[step] for step in sorted(by_step)]


def _parsed(text: str) -> Line | None:
    try:
        line = _json(text)
    except ValueError:
        return None
    fine = isinstance(line, dict) and type(line.get("step")) is int
    return line if fine else None


def _which(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"{len(numbers)} line(s) are no record with a step (line {shown})"


def _newest_scores(folder: Path, damage: list[str]) -> Scores | None:
    """Return the evaluation of the test split at the highest step, or else of validation."""
    found = []
    for path in sorted(folder.glob("inference_eval/*/scores.json")):
        name = str(path.relative_to(folder))
        scores = of_evaluation(_json_object(folder, name, damage), name, damage)
        if scores is not None:
            found.append(scores)
    return max(found, key=lambda s: (s.split == "test", s.step), default=None)


def _pairs(folder: Path, damage: list[str]) -> dict[str, int]:
    name = "data/languages.json"
    try:
        languages = _json_object(folder, name, damage).get("languages", [])
        return {language["code"]: int(language["train"]) for language in languages}
    except (KeyError, TypeError, ValueError) as error:
        damage.append(f"{name}: {type(error).__name__} {error}; training pairs are unknown")
        return {}


def _model(folder: Path, record: Mapping[str, Any], damage: list[str]) -> Model:
    """Take from run.json what it has, and work out the rest from the settings."""
    known = _sizes(record)
    if is_number(record, "train_steps"):
        known["train_steps"] = record["train_steps"]
    model = dataclasses.replace(_configured(folder, damage), **known)
    return model if model.total else dataclasses.replace(model, total=_counted(folder))


def _configured(folder: Path, damage: list[str]) -> Model:
    if not (folder / CONFIG).is_file():
        damage.append(f"{CONFIG} is not there: settings and sizes are unknown")
        return Model()
    try:
        tree = reading.read_subject(str(folder)).assembled.tree
    except (ConfigError, SettingError, UnicodeDecodeError) as error:
        damage.append(f"{CONFIG} does not assemble: {first_line(error)}")
        return Model()
    settings = {path: show.value_text(value) for path, value in settings_of(tree).items()}
    said = _sizes(sizes(tree))
    return Model(settings=settings, train_steps=tree.train_steps, **said)


def _sizes(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of a `Model` that `record.sizes`, or a run.json, knows."""
    found = {
        ours: said[theirs]
        for ours, theirs in (
            ("total", "params_total"),
            ("active", "params_active"),
            ("tokens_per_step", "tokens_per_step"),
        )
        if is_number(said, theirs)
    }
    if is_number(said, "flops_per_token") and "tokens_per_step" in found:
        found["flops_per_step"] = said["flops_per_token"] * found["tokens_per_step"]
    return found


def _counted(folder: Path) -> int | None:
    """Read the number of parameters off model-info.txt."""
    path = folder / INFO
    text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
    found = re.search(r"^Total number of parameters: (\d+)$", text, re.M)
    return int(found[1]) if found else None


def differing_settings(runs: Sequence[Run]) -> list[tuple[list[str], list[str | None]]]:
    """List what the runs' settings do not agree in.

    Only runs whose settings are known take part. Where a run has no such setting its value is None.

    Returns:
        Paths that differ alike (the first tells best: parameters of a model come before those of
        its evaluators), and the value in each run.
    """
    known = [run for run in runs if run.model.settings]
    paths = dict.fromkeys(itertools.chain.from_iterable(run.model.settings for run in known))
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for path in paths:
        if path == "model_dir":
            continue
        if len({run.model.settings.get(path) for run in known}) > 1:
            values = tuple(run.model.settings.get(path) for run in runs)
            alike.setdefault(values, []).append(path)
    return [(paths_alike, list(values)) for values, paths_alike in alike.items()]
