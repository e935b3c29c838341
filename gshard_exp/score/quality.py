"""From sentences and their translations to scores by language, averages and delta BLEU."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.errors import SettingError
from gshard_exp.score.bleu import Metric, scores, signatures
from gshard_exp.score.evaluate import GROUPS, group_of

# A corpus score of fewer sentences says little; such languages are shown and not averaged.
FEWEST = 20
# From the code of a language to the metric functions of its task.
MetricsOf = Callable[[str], Sequence[Metric]]


@dataclasses.dataclass(frozen=True)
class Scored:
    """A sentence of a held-out split and what became of it.

    Attributes:
        language: code.
        source: text.
        reference: English.
        hypothesis: English, by the model.
        score: the search's.
    """

    language: str
    source: str
    reference: str
    hypothesis: str
    score: float


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Scores of bilingual models, to subtract from those of one model for all languages.

    On disk, a JSON object; a sweep over languages writes it, and so may anybody:

        {"metric": "bleu", "signature": "nrefs:1|case:mixed|...", "split": "test",
         "scores": {"de": 31.2, "sw": 18.0}}

    Attributes:
        file: where it was read.
        metric: name of the metric.
        signature: of the metric; scores of another are not comparable.
        split: that was scored.
        scores: by language code.
    """

    file: str
    metric: str
    signature: str
    split: str
    scores: Mapping[str, float]

    @classmethod
    def read(cls, file: str) -> "Baselines":
        """Read a JSON file.

        Raises:
            SettingError: it is not there, or not as described above.
        """
        try:
            content = json.loads(Path(file).expanduser().read_text("utf-8"))
            scores = {str(code): float(score) for code, score in content["scores"].items()}
            metric, signature, split = (
                str(content[key]) for key in ("metric", "signature", "split")
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError(
                f"{file} is no table of baselines: {type(error).__name__}: {error}. It is a JSON "
                'object with "metric", "signature", "split" and "scores" (language: number).',
                settings=("baselines",),
            ) from error
        return cls(file, metric, signature, split, scores)

    def check(self, metrics: Sequence[Metric], split: str) -> None:
        """Refuse to compare what is not comparable.

        Raises:
            SettingError: metric, signature or split differ.
        """
        here = signatures(metrics)
        wanted = {"metric": self.metric, "signature": self.signature, "split": self.split}
        found = {
            "metric": self.metric if self.metric in here else ", ".join(here) or "none",
            "signature": here.get(self.metric, "none"),
            "split": split,
        }
        for key, value in wanted.items():
            if found[key] != value:
                raise SettingError(
                    f"the baselines in {self.file} were scored with {key} {value!r}, and this "
                    f"evaluation has {found[key]!r}: their difference would mean nothing.",
                    settings=("baselines",),
                    hint="Score both alike.",
                )


def quality(
    results: Sequence[Scored],
    languages: Sequence[str],
    metrics: MetricsOf,
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    """Score by language, and average over languages.

    Args:
        results: in any order.
        languages: all codes of the model, from high to low resource; thirds of them are the
            resource groups (`evaluate.GROUPS`).
        metrics: those of each language; each scores the sentences of a language together.
        baselines: what to subtract.

    Returns:
        metrics: {name: signature}, of the metric functions of all languages.
        languages: {code: sentences, group, averaged, one score for each metric, and, where there
            is a baseline, `delta_<metric>`}, ordered as `languages`; unknown ones come last, in
            group `unknown`.
        averages: {macro, high, middle, low: {languages, and a mean for each metric}}, over
            languages with at least 20 sentences.
        sentences: number of results.
        absent_baselines: languages that were scored and have none.
    """
    of_language: dict[str, list[Scored]] = {code: [] for code in languages}
    for result in results:
        of_language.setdefault(result.language, []).append(result)
    table: dict[str, dict[str, Any]] = {}
    used: dict[str, str] = {}
    for code, found in of_language.items():
        if not found:
            continue
        row: dict[str, Any] = {
            "sentences": len(found),
            "group": group_of(code, languages),
            "averaged": len(found) >= FEWEST,
        }
        targets, predictions = [r.reference for r in found], [r.hypothesis for r in found]
        row |= scores(metrics(code), targets, predictions)
        for name, signature in signatures(metrics(code)).items():
            if used.setdefault(name, signature) != signature:
                raise SettingError(
                    f"the metric {name!r} is {signature!r} in the task of {code!r} and "
                    f"{used[name]!r} in that of another language: no average could be taken.",
                    settings=("metric_fns",),
                    hint="Score both alike, or give one of the metrics another name.",
                )
        if baselines is not None and code in baselines.scores and baselines.metric in row:
            row[f"delta_{baselines.metric}"] = row[baselines.metric] - baselines.scores[code]
        table[code] = row
    absent = [] if baselines is None else [c for c in table if c not in baselines.scores]
    return {
        "metrics": used,
        "languages": table,
        "averages": _averages(table.values()),
        "sentences": len(results),
        "absent_baselines": absent,
    }


def _averages(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    counted = [row for row in rows if row["averaged"]]
    averages: dict[str, dict[str, Any]] = {}
    for name in ("macro", *GROUPS):
        members = [row for row in counted if name in ("macro", row["group"])]
        if not members:
            continue
        averages[name] = {"languages": len(members)}
        keys = dict.fromkeys(key for row in members for key in row if is_score(key))
        for key in keys:
            values = [row[key] for row in members if key in row]
            averages[name][key] = sum(values) / len(values)
            if key.startswith("delta_"):
                averages[name][f"languages_with_{key}"] = len(values)
    return averages


def is_score(key: str) -> bool:
    """Tell the scores in a row of `quality` from what else stands there."""
    return key not in ("sentences", "group", "averaged", "languages") and not key.startswith(
        "languages_with_"
    )


def table(found: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Lay out what `quality` found for a person.

    Args:
        found: as `quality` returned it.
        names: of languages, by code.
    """
    keys = dict.fromkeys(k for row in found["languages"].values() for k in row if is_score(k))
    columns = sorted(keys, key=lambda key: key.startswith("delta_"))
    lines = [f"{'language':<26}{'sentences':>10}" + "".join(f"{c:>12}" for c in columns)]

    def line(label: str, count: int, row: Mapping[str, Any]) -> str:
        cells = "".join(f"{row[c]:>12.2f}" if c in row else f"{'-':>12}" for c in columns)
        return f"{label:<26}{count:>10}{cells}"

    for code, row in found["languages"].items():
        few = "" if row["averaged"] else " *"
        lines.append(line(f"{code} {names.get(code, '')}"[:23] + few, row["sentences"], row))
    if any(not row["averaged"] for row in found["languages"].values()):
        lines.append(f"* fewer than {FEWEST} sentences: in no average")
    for name, row in found["averages"].items():
        label = "all languages" if name == "macro" else f"{name} resource"
        lines.append(line(f"mean: {label}"[:25], row["languages"], row))
    lines += [f"{name}: {signature}" for name, signature in found["metrics"].items()]
    if found["absent_baselines"]:
        lines.append(f"no baseline for: {', '.join(found['absent_baselines'])}")
    return "\n".join(lines) + "\n"
