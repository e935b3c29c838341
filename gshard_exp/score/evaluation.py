"""Score a trained model on a held-out split: translations, their quality, and what drops cost."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from gshard_exp.data.batches import padded_batches, to_mesh
from gshard_exp.model.contract import Params, moe_layers
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.score.evaluate import score_batch
from gshard_exp.score.quality import Baselines, MetricsOf, Scored, quality
from gshard_exp.score.translator import Translator
from gshard_exp.sharding.rules import Rules

AT_ONCE = 1024  # sentences between two lines of progress
Pair = tuple[str, str, str]  # language, text, English


def translate_pairs(translator: Translator, pairs: Sequence[Pair]) -> Iterator[list[Scored]]:
    """Translate sentences whose translation is known, some at a time."""
    for start in range(0, len(pairs), AT_ONCE):
        part = pairs[start : start + AT_ONCE]
        translated = translator.translate([source for _, source, _ in part])
        yield [
            Scored(*pair, translation.text, translation.score)
            for pair, translation in zip(part, translated, strict=True)
        ]


def losses(
    model: Seq2SeqModel,
    params: Params,
    examples: list[tuple[np.ndarray, np.ndarray]],
    *,
    batch_size: int,
    lengths: Mapping[str, int],
    mesh: Mesh,
    rules: Rules,
) -> dict[str, float]:
    """Score references by teacher forcing, and say what dropped tokens cost.

    Args:
        model: network and capacities.
        params: as trained, on the mesh.
        examples: (source ids, target ids), cut to `lengths`.
        batch_size: rows at once.
        lengths: tokens in a row.
        mesh: where.
        rules: how.

    Returns:
        cross_ent_loss (nats per target piece), accuracy, target_tokens. Where evaluation has a
        capacity also dropped_first and dropped_second (fractions of tokens, mean over MoE layers,
        whose choice had no slot), dropless_cross_ent_loss and cost_of_dropping, the difference.
    """

    def sums(of: Seq2SeqModel) -> dict[str, float]:
        total: dict[str, float] = {}
        for _, batch in padded_batches(examples, batch_size=batch_size, lengths=lengths):
            scores = score_batch(params, to_mesh(batch, mesh, rules), of, mesh, rules)
            for key, values in scores.items():
                total[key] = total.get(key, 0.0) + float(np.sum(np.asarray(values)))
        return total

    found = sums(model)
    tokens = max(found["target_tokens"], 1.0)
    result = {
        "cross_ent_loss": found["cross_ent_loss"] / tokens,
        "accuracy": found["correct"] / tokens,
        "target_tokens": found["target_tokens"],
    }
    if has_capacity(model, "eval"):
        routed = max(found["routed_tokens"], 1.0)
        dropless = sums(model.dropless())["cross_ent_loss"] / tokens
        result |= {
            "dropped_first": found["dropped_first"] / routed,
            "dropped_second": found["dropped_second"] / routed,
            "routed_tokens": found["routed_tokens"],
            "dropless_cross_ent_loss": dropless,
            "cost_of_dropping": result["cross_ent_loss"] - dropless,
        }
    return result


def has_capacity(model: Seq2SeqModel, of: str) -> bool:
    """Say whether a MoE layer may drop tokens; `of` is "eval" or "decode"."""
    layers = [layer for stack in model.stacks for _, layer in moe_layers(model, stack)]
    return any(getattr(layer, f"{of}_capacity_factor") is not None for layer in layers)


def decode_cost(results: Sequence[Scored], dropless: Sequence[Scored]) -> dict[str, float]:
    """Compare translations with those of a search that drops nothing.

    Returns:
        score and dropless_score (means over sentences of the best hypothesis' score), and changed,
        the fraction of sentences whose translation is another one.
    """
    count = max(len(results), 1)
    pairs = list(zip(results, dropless, strict=True))
    return {
        "score": sum(result.score for result in results) / count,
        "dropless_score": sum(result.score for result in dropless) / count,
        "changed": sum(one.hypothesis != other.hypothesis for one, other in pairs) / count,
    }


def report(
    results: Sequence[Scored],
    languages: Sequence[str],
    metrics: MetricsOf,
    baselines: Baselines | None,
    teacher_forced: Mapping[str, float],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Put together all that an evaluation found; `about` says of what."""
    return {
        **about,
        **quality(results, languages, metrics, baselines),
        "teacher_forced": dict(teacher_forced),
    }


def losses_text(found: Mapping[str, Any]) -> str:
    """Lay out what `losses`, and `decode_cost` under "decoding", found for a person."""
    lines = [
        f"teacher-forced: cross entropy {found['cross_ent_loss']:.4f} nats per piece, accuracy "
        f"{found['accuracy']:.4f}, {found['target_tokens']:,.0f} pieces"
    ]
    if "cost_of_dropping" in found:
        lines.append(
            f"capacity of evaluation: {found['dropped_first']:.2%} of first and "
            f"{found['dropped_second']:.2%} of second choices dropped "
            f"({found['routed_tokens']:,.0f} tokens x layers); dropless "
            f"{found['dropless_cross_ent_loss']:.4f}, so dropping costs "
            f"{found['cost_of_dropping']:+.4f} nats per piece"
        )
    if "decoding" in found:
        decoding = found["decoding"]
        lines.append(
            f"capacity of decoding: mean score {decoding['score']:.4f}, dropless "
            f"{decoding['dropless_score']:.4f}; {decoding['changed']:.1%} of translations differ"
        )
    return "\n".join(lines) + "\n"


def write(folder: Path, found: Mapping[str, Any], results: Iterable[Scored], text: str) -> None:
    """Write `scores.json`, `translations.jsonl` and `report.txt` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = json.dumps(found, ensure_ascii=False, indent=1)
    (folder / "scores.json").write_text(scores + "\n", "utf-8")
    with (folder / "translations.jsonl").open("w", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n")
    (folder / "report.txt").write_text(text, "utf-8")
