"""Scores the trained points of a sweep on held-out text, and makes baselines of bilingual ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard_exp.errors import SettingError
from gshard_exp.score.quality import FEWEST
from gshard_exp.sweep.launch import TAIL, Outcome, Say
from gshard_exp.sweep.scores import METRIC
from gshard_exp.sweep.state import DONE, FAILED, Files, status_of


def score(
    folders: Mapping[str, Path],
    *,
    split: str,
    max_examples: int | None = None,
    again: bool = False,
    report: Say,
) -> list[Outcome]:
    """Run `gshard-exp eval` for each point that is trained, one after the other.

    Args:
        folders: MODEL_DIR by the name of a point.
        split: "test" or "validation".
        max_examples: of each language; None: all.
        again: also score what has scores of its last step, of as many examples.
        report: is told a line for each point.

    Returns:
        How each point was left: done, failed, or the state in which its training is.
    """
    outcomes = []
    for name, folder in folders.items():
        outcome, said = _score(name, folder, split, max_examples, again=again)
        outcomes.append(outcome)
        report(f"{name}: {said} ({len(outcomes)} of {len(folders)})")
    return outcomes


def _score(
    name: str, folder: Path, split: str, max_examples: int | None, *, again: bool
) -> tuple[Outcome, str]:
    status = status_of(folder)
    if status.state != DONE:
        return Outcome(name, status.state), f"{status.state}: only trained points are scored"
    file = scores_file(folder, split, status.step)
    if not again and file.exists():
        try:
            if _read(file).get("max_examples") == max_examples:
                return Outcome(name, DONE), "scored before"
        except SettingError as error:
            return Outcome(name, FAILED, f"{error.problem} {error.hint}"), "failed"
    log = Files(folder).folder / f"eval_{split}.txt"
    log.parent.mkdir(exist_ok=True)  # there is none where something else than `sweep` trained it
    command = [sys.executable, "-m", "gshard_exp", "eval", f"--model_dir={folder}"]
    words = [] if max_examples is None else [f"--max_examples={max_examples}"]
    with log.open("wb") as output:
        ended = subprocess.run(
            [*command, f"--step={status.step}", f"--split={split}", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if ended.returncode:
        lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL:]
        tail = "\n".join(f"    {line}" for line in lines)
        problem = f"exit status {ended.returncode}; the end of {log}:\n{tail}"
        return Outcome(name, FAILED, problem), "failed"
    mean = _read(file)["averages"].get("macro", {}).get(METRIC)
    return Outcome(name, DONE), "scored" if mean is None else f"{METRIC} {mean:.2f}"


def scores_file(folder: Path, split: str, step: int) -> Path:
    """Return where `eval` writes the scores of a step."""
    return folder / "inference_eval" / f"{split}_{step}" / "scores.json"


def baselines(folders: Mapping[str, Path], split: str) -> dict[str, Any]:
    """Collect what `quality.Baselines` reads from points that were trained on one language each.

    A language with fewer than 20 scored sentences gives no baseline, and neither does one whose
    task has no BLEU.

    Raises:
        SettingError: two points score one language, or not alike; or no language has a score.
    """
    found: dict[str, float] = {}
    owners: dict[str, str] = {}
    signatures: dict[str, str] = {}
    for name, folder in folders.items():
        status = status_of(folder)
        file = scores_file(folder, split, status.step)
        if status.state != DONE or not file.exists():
            continue
        content = _read(file)
        rows = {code: row for code, row in content["languages"].items() if METRIC in row}
        if not rows:
            continue
        signatures.setdefault(content["metrics"][METRIC], name)
        for code, row in rows.items():
            if row["sentences"] < FEWEST:
                continue
            if code in owners:
                raise SettingError(
                    f"{code!r} is scored by {owners[code]} and by {name}: a baseline is one model.",
                    settings=("baselines_to",),
                    hint="Choose points with --only.",
                )
            found[code], owners[code] = row[METRIC], name
    if not found:
        raise SettingError(
            f"no language of {len(folders)} points has a {METRIC} score of at least {FEWEST} "
            f"sentences of the {split} split.",
            settings=("baselines_to",),
            hint=f"Train the points, and give their tasks the metric {METRIC}.",
        )
    if len(signatures) != 1:
        kinds = "; ".join(f"{name}: {kind}" for kind, name in signatures.items())
        raise SettingError(
            f"there are {len(signatures)} ways of scoring, and baselines have one. {kinds}",
            settings=("baselines_to",),
            hint="Score all points alike.",
        )
    (signature,) = signatures
    return {"metric": METRIC, "signature": signature, "split": split, "scores": found}


def _read(file: Path) -> dict[str, Any]:
    """Read scores that `eval` wrote; languages, averages and metrics are objects in them."""
    try:
        content = json.loads(file.read_text("utf-8"))
        for part in ("metrics", "languages", "averages"):
            if not isinstance(content[part], dict):
                raise TypeError(f"'{part}' is {content[part]!r:.60}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{file} is damaged: {type(error).__name__} {error}.",
            hint="Score its point again, with --again.",
        ) from error
    return content
