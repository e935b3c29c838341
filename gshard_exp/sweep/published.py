"""The paper's own figures, to lay beside those of a report."""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from gshard_exp.sweep.charts import COLOURS, Axis, Chart, Series
from gshard_exp.sweep.report import written
from gshard_exp.sweep.tables import Table

FILE = "published.json"


@functools.cache
def figures() -> Mapping[str, Any]:
    """Read the figures and their sources."""
    return json.loads((resources.files("gshard_exp.sweep") / FILE).read_text("utf-8"))


def charts() -> list[Chart]:
    """Draw Table 2, Figure 1 and Figure 6 as published; each names its source."""
    content = figures()
    names = list(content["models"])
    look = {name: (i % COLOURS, 0) for i, name in enumerate(names)}
    reach: list[Series] = []
    cost: list[Series] = []
    quality: list[Series] = []
    languages: list[Series] = []
    for name, model in content["models"].items():
        points = [(float(t), n * 1e9) for t, n in model.get("tokens_to_reach", {}).items()]
        if points:
            reach.append(Series(name, points, *look[name], line=False))
        for series, key in ((cost, "bleu"), (quality, "delta_bleu")):
            points = [(model["core_years"], model[key])]
            series.append(Series(name, points, *look[name], line=False))
        curve = [
            (100 * (i + content["window"] / 2) / content["languages"], value)
            for i, value in enumerate(model.get("delta_bleu_by_language", ()))
        ]
        if curve:
            languages.append(Series(name, curve, *look[name]))
    sources = content["sources"]
    years = Axis("TPU v3 core-years", log=True)
    return [
        Chart(
            "paper_tokens_to_reach",
            "Paper: tokens to reach a loss",
            sources["tokens_to_reach"],
            Axis("cross entropy to reach, nats per target piece"),
            Axis("source-side tokens", log=True),
            reach,
            "loss",
        ),
        Chart(
            "paper_bleu_core_years",
            "Paper: average BLEU against core-years",
            sources["cost"],
            years,
            Axis("BLEU, mean over languages"),
            cost,
            "quality",
        ),
        Chart(
            "paper_delta_bleu_core_years",
            "Paper: average delta BLEU against core-years",
            sources["cost"],
            years,
            Axis("delta BLEU, mean over languages"),
            quality,
            "quality",
        ),
        Chart(
            "paper_delta_bleu_by_language",
            "Paper: delta BLEU by language",
            sources["delta_bleu_by_language"],
            Axis("languages, from most to fewest training pairs, %"),
            Axis("delta BLEU"),
            languages,
            "languages",
        ),
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
