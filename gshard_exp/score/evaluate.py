"""Loss and accuracy on held-out text, by language, from teacher-forced scores."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from gshard_exp.data.batches import padded_batches, to_mesh
from gshard_exp.data.splits import SPLITS
from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.errors import require_at_least, require_one_of
from gshard_exp.model.contract import Params
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.rules import Rules
from gshard_exp.sharding.tables import columns

# Thirds of the languages, ordered by resource. The paper's Figure 6 orders them so and draws no
# border; the thirds are ours.
GROUPS = ("high", "middle", "low")


@dataclass(frozen=True)
class LossByLanguage:
    """Scores a split of every language of a table of tasks.

    Nothing is random and nothing is packed: each example is scored in a row of its own, cut to
    `lengths`. Averages: over tokens (`cross_ent_loss`), over languages (`.../macro`), and by
    resource group, thirds of the languages ordered by training pairs.

    Attributes:
        tasks: whose languages are scored.
        lengths: tokens in a row, {"inputs": ..., "targets": ...}; longer examples are cut.
        batch_size: rows at once, over all devices.
        every_steps: steps between evaluations.
        split: "validation" or "test".
        max_examples_per_language: the first so many of each language; None takes all.
        at_start: also before the first step, to compare with.
        name: folder below `training_eval/`.
    """

    tasks: TranslationTasks
    lengths: Mapping[str, int]
    batch_size: int
    every_steps: int
    split: str = "validation"
    max_examples_per_language: int | None = None
    at_start: bool = True
    name: str = "validation"

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "every_steps", "max_examples_per_language")
        require_one_of(self, SPLITS, "split")

    def __call__(
        self, params: Params, *, model: Seq2SeqModel, mesh: Mesh, rules: Rules, folder: Path
    ) -> tuple[dict[str, float], str]:
        """Score; see `train.experiment.Evaluator`."""
        languages = self.tasks.codes
        examples, owners = self._examples(languages)
        sums = {
            key: np.zeros(len(languages)) for key in ("cross_ent_loss", "correct", "target_tokens")
        }
        pending = []
        for rows, batch in padded_batches(
            examples, batch_size=self.batch_size, lengths=self.lengths
        ):
            placed = to_mesh(batch, mesh, rules)
            scores = score_batch(params, placed, model, mesh, rules)
            pending.append((rows, scores))
        for rows, scores in pending:
            for key, values in sums.items():
                np.add.at(values, owners[rows], np.asarray(scores[key])[: len(rows)])
        scalars = summarise(languages, sums)
        return scalars, _table(languages, scalars, _first(folder))

    def _examples(self, languages: Sequence[str]):
        examples: list[tuple[np.ndarray, np.ndarray]] = []
        owners: list[int] = []
        for index, language in enumerate(languages):
            of_language = self.tasks.token_ids(self.split, language)
            of_language = of_language[: self.max_examples_per_language]
            examples += of_language
            owners += [index] * len(of_language)
        # Rows of similar length together would save nothing: every row has the full length.
        return examples, np.asarray(owners, np.int64)


def summarise(languages: Sequence[str], sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Average sums by language into scalars.

    Args:
        languages: ordered from high to low resource.
        sums: by `cross_ent_loss`, `correct` and `target_tokens`, one number for each language.

    Returns:
        `cross_ent_loss` and `accuracy`: over all tokens, `/macro`, `/high`, `/middle`, `/low`
        (means over languages) and `/<language>`. Languages without examples are left out.
    """
    tokens = np.asarray(sums["target_tokens"])
    has = tokens > 0
    scalars: dict[str, float] = {"target_tokens": float(tokens.sum())}
    groups = np.asarray([group_of(language, languages) for language in languages])
    for name, key in (("cross_ent_loss", "cross_ent_loss"), ("accuracy", "correct")):
        of_language = sums[key] / np.maximum(tokens, 1)
        scalars[name] = float(sums[key].sum() / max(tokens.sum(), 1))
        if has.any():
            scalars[f"{name}/macro"] = float(of_language[has].mean())
        for group in GROUPS:
            members = has & (groups == group)
            if members.any():
                scalars[f"{name}/{group}"] = float(of_language[members].mean())
        for language, value, present in zip(languages, of_language, has, strict=True):
            if present:
                scalars[f"{name}/{language}"] = float(value)
    return scalars


def group_of(language: str, languages: Sequence[str]) -> str:
    """Return the resource group of a language, "unknown" if it is none of them.

    Args:
        language: code.
        languages: ordered from high to low resource.
    """
    if language not in languages:
        return "unknown"
    return GROUPS[list(languages).index(language) * len(GROUPS) // len(languages)]


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def score_batch(
    params: Params, batch: Mapping[str, jax.Array], model: Seq2SeqModel, mesh: Mesh, rules: Rules
) -> dict[str, jax.Array]:
    """Run `Seq2SeqModel.evaluate` on a mesh; compiled once for a shape."""
    with partitioning(mesh, rules):
        return model.evaluate(params, batch)


def _table(languages: Sequence[str], scalars: Mapping[str, float], first: Mapping) -> str:
    """Lay the averages out for a person, beside those of the first evaluation."""
    groups = [("all tokens", "")]
    groups += [(f"{g} resource languages", f"/{g}") for g in GROUPS] + [("all languages", "/macro")]
    rows = [("", "cross entropy", "of step 0", "accuracy")]
    for label, suffix in groups:
        loss = scalars.get(f"cross_ent_loss{suffix}")
        if loss is None:
            continue
        start = first.get(f"cross_ent_loss{suffix}")
        relative = f"{loss / start:.1%}" if start else "-"
        rows.append((label, f"{loss:.3f}", relative, f"{scalars[f'accuracy{suffix}']:.3f}"))
    scored = sum(f"cross_ent_loss/{language}" in scalars for language in languages)
    said = f"{scored} languages, {scalars['target_tokens']:,.0f} target tokens"
    return "\n".join([*columns(rows), said]) + "\n"


def _first(folder: Path) -> Mapping[str, float]:
    """Read the first record that the run's loop wrote for this evaluator."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[0]) if lines else {}
