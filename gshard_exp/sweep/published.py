"""The paper's own figures, to lay beside those of a report."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from gshard_exp.sweep.charts import COLOURS, NAMES, Axis, Chart, Series
from gshard_exp.sweep.report import written
from gshard_exp.sweep.scores import DELTA, METRIC
from gshard_exp.sweep.tables import Table

FILE = "published.json"


@functools.cache
def figures() -> Mapping[str, Any]:
    """Read the figures and their sources."""
    return json.loads((resources.files("gshard_exp.sweep") / FILE).read_text("utf-8"))


def charts() -> list[Chart]:
    """Draw Table 2, Figure 1 and Figure 6 as published; each names its source."""
    sources = figures()["sources"]
    years = Axis("TPU v3 core-years", log=True)
    title = "Paper: average {} against core-years"
    return [
        Chart(
            "paper_tokens_to_reach",
            "Paper: tokens to reach a loss",
            sources["tokens_to_reach"],
            Axis("cross entropy to reach"),
            Axis("source-side tokens", log=True),
            _series(_reached, line=False),
            "loss",
            beside="tokens_to_reach",
        ),
        *(
            Chart(
                f"paper_{metric}_core_years",
                title.format(NAMES[metric]),
                sources["cost"],
                years,
                Axis(f"{NAMES[metric]}, mean over languages"),
                _series(functools.partial(_by_cost, metric), line=False),
                "quality",
                beside=f"{metric}_core_hours",
            )
            for metric in (METRIC, DELTA)
        ),
        Chart(
            "paper_delta_bleu_by_language",
            "Paper: delta BLEU by language",
            sources["delta_bleu_by_language"],
            Axis("languages, from most to fewest training pairs, %"),
            Axis("delta BLEU"),
            _series(_by_language, line=True),
            "languages",
            beside="delta_bleu_by_language",
        ),
    ]


def _series(points: Callable[[Any], Sequence[tuple[float, float]]], line: bool) -> list[Series]:
    """Make a series of each model that has points; colours stay those of the model."""
    models = figures()["models"].items()
    return [
        Series(name, found, index % COLOURS, index // COLOURS, line=line)
        for index, (name, model) in enumerate(models)
        if (found := points(model))
    ]


def _reached(model: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(float(t), n * 1e9) for t, n in model.get("tokens_to_reach", {}).items()]


def _by_cost(metric: str, model: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(model["core_years"], model[metric])]


def _by_language(model: Mapping[str, Any]) -> list[tuple[float, float]]:
    content = figures()
    return [
        (100 * (index + content["window"] / 2) / content["languages"], value)
        for index, value in enumerate(model.get("delta_bleu_by_language", ()))
    ]


def table() -> Table:
    """Tabulate the paper's models: cost, quality, and billions of tokens to reach a loss."""
    content = figures()
    levels = content["thresholds"]
    keys = ("model", "weights", "core_years", "bleu", "delta_bleu", *levels)
    values: list[tuple[Any, ...]] = []
    for name, model in content["models"].items():
        reached = model.get("tokens_to_reach", {})
        of_levels = [reached.get(level) for level in levels]
        values.append((name, *(model.get(key) for key in keys[1:5]), *of_levels))
    rows = [tuple(written(value, "") for value in row) for row in values]
    about = f"{content['sources']['cost']} {content['sources']['tokens_to_reach']}"
    heads = ("model", "weights", "core-years", "BLEU", "delta BLEU", *(f"to {x}" for x in levels))
    return Table("paper", "The paper's models", heads, keys, rows, values, about)
