"""Translation quality of a run: BLEU by language, averages, and delta BLEU."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gshard_exp.score.evaluate import GROUPS
from gshard_exp.score.quality import Baselines

METRIC = "bleu"
DELTA = f"delta_{METRIC}"
MACRO = "macro"
HELD_OUT_LOSS = "cross_ent_loss"  # of evaluations, in training and after


def is_number(row: Mapping[str, Any], key: str) -> bool:
    """Say whether a row has a finite number under a key."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN, and no overflow of a long integer


@dataclasses.dataclass(frozen=True)
class Scores:
    """What one evaluation found.

    Attributes:
        source: the file that says so.
        split: "test" or "validation".
        step: of the parameters.
        search: how translations were looked for.
        signature: of the metric; empty where the file has none.
        languages: code -> {bleu, delta_bleu where known, averaged}, from high to low resource.
        averages: macro, high, middle, low -> {bleu, delta_bleu where known}.
        max_examples: of each language, the first so many; None: all, or not known.
        cross_entropy: of the reference translations, nats per target piece, where known.
    """

    source: str
    split: str
    step: int
    search: str
    signature: str
    languages: Mapping[str, Mapping[str, Any]]
    averages: Mapping[str, Mapping[str, float]]
    max_examples: int | None = None
    cross_entropy: float | None = None

    @property
    def kind(self) -> str:
        """What has to be equal for two averages to be comparable, with signature and languages."""
        part = f", {self.max_examples} sentences of a language" if self.max_examples else ""
        return f"{self.split}, {self.search}{part}"

    def average(self, metric: str, group: str = MACRO) -> float | None:
        """Return the mean over languages; None if it is not known."""
        return self.averages.get(group, {}).get(metric)

    def against(self, baselines: Baselines) -> "Scores | str":
        """Return these with delta BLEU against bilingual models, or why that means nothing."""
        if not self.signature:
            return "no delta BLEU yet: it takes the scores of gshard-exp eval"
        wanted = (METRIC, self.signature, self.split)
        there = (baselines.metric, baselines.signature, baselines.split)
        for what, ours, theirs in zip(("metric", "signature", "split"), wanted, there, strict=True):
            if ours != theirs:
                return (
                    f"no delta BLEU: {self.source} has {what} {ours!r} and the baselines {theirs!r}"
                )
        languages = {
            code: {**row, DELTA: row[METRIC] - baselines.scores[code]}
            if code in baselines.scores
            else _without_delta(row)
            for code, row in self.languages.items()
        }
        averages = {
            group: {**_without_delta(row), **_mean_delta(languages.values(), group)}
            for group, row in self.averages.items()
        }
        return dataclasses.replace(self, languages=languages, averages=averages)


def _without_delta(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != DELTA}


def _mean_delta(rows: Any, group: str) -> dict[str, float]:
    counted = [
        row[DELTA]
        for row in rows
        if row.get("averaged") and DELTA in row and group in (MACRO, row.get("group"))
    ]
    return {DELTA: sum(counted) / len(counted)} if counted else {}


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out a value of a metric that is no finite number."""
    return {
        key: value
        for key, value in row.items()
        if key not in (METRIC, DELTA) or is_number(row, key)
    }


def of_evaluation(content: Mapping[str, Any], source: str, damage: list[str]) -> Scores | None:
    """Read what `gshard-exp eval` wrote; None, and a line in `damage`, if it is something else.

    A language without BLEU (its task has other metrics) is left out.
    """
    if not content:
        return None
    try:
        search, forced = content["search"], content.get("teacher_forced", {})
        languages = {
            code: _finite(row)
            for code, row in content["languages"].items()
            if is_number(row, METRIC)
        }
        if not languages:
            damage.append(
                f"{source} has {METRIC} of no language; score the run with {METRIC} among the "
                "metrics of its tasks (gshard-exp eval)"
            )
            return None
        return Scores(
            source=source,
            split=str(content["split"]),
            step=int(content["step"]),
            search=f"beam of {search['beam_size']}" if search["beam_size"] > 1 else "greedy",
            signature=str(content["metrics"].get(METRIC, "")),
            languages=languages,
            averages={group: _finite(row) for group, row in content["averages"].items()},
            max_examples=content.get("max_examples"),
            cross_entropy=forced[HELD_OUT_LOSS] if is_number(forced, HELD_OUT_LOSS) else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        damage.append(f"{source} is no result of an evaluation: {type(error).__name__} {error}")
        return None


def in_training(lines: Sequence[Mapping[str, Any]]) -> Scores | None:
    """Read the newest line with BLEU of `training_eval/*/metrics.jsonl`; None if there is none."""
    of_bleu = [line for line in lines if any(key.startswith(f"{METRIC}/") for key in line)]
    if not of_bleu:
        return None
    line = of_bleu[-1]
    parts = {
        key.partition("/")[2]: value
        for key, value in line.items()
        if key.startswith(f"{METRIC}/") and is_number(line, key)
    }
    groups = (MACRO, *GROUPS)
    return Scores(
        source="training_eval",
        split="held-out text during training",
        step=line["step"],
        search="greedy",
        signature="",
        languages={code: {METRIC: v} for code, v in parts.items() if code not in groups},
        averages={group: {METRIC: parts[group]} for group in groups if group in parts},
    )
