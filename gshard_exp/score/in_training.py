"""Translations of held-out sentences during training: BLEU, and a few to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from gshard_exp.data.splits import SPLITS
from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.errors import require_at_least, require_one_of
from gshard_exp.model.contract import Params
from gshard_exp.model.incremental import StepDecoder
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.score.beam import BeamSearch
from gshard_exp.score.bleu import scores
from gshard_exp.score.quality import Scored, is_score, quality
from gshard_exp.score.translator import Translator
from gshard_exp.sharding.rules import Rules

SHORTEST, LONGEST = 3, 9  # words of an English sentence worth showing


@dataclass(frozen=True)
class TranslationQuality:
    """Translates sentences of every language, scores them and shows some.

    Scores are those of the tasks' metric functions (`TranslationTasks.metrics`), over languages as
    `quality` averages them and, of those that all tasks share, over all sentences. Compiled once;
    greedy unless told otherwise.

    Attributes:
        tasks: whose languages, vocabularies and metrics are used.
        lengths: tokens in a row, {"inputs": ..., "targets": ...}.
        batch_size: sentences at once, over all devices.
        every_steps: steps between evaluations.
        search: how to look for translations.
        max_examples_per_language: the first so many of each language; None takes all.
        num_samples: sentences to show, spread from high- to low-resource languages.
        split: "validation" or "test".
        at_start: also before the first step.
        name: folder below `training_eval/`.
    """

    tasks: TranslationTasks
    lengths: Mapping[str, int]
    batch_size: int
    every_steps: int
    search: BeamSearch = BeamSearch(beam_size=1)
    max_examples_per_language: int | None = None
    num_samples: int = 3
    split: str = "validation"
    at_start: bool = False
    name: str = "translations"

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "every_steps", "max_examples_per_language")
        require_at_least(self, 0, "num_samples")
        require_one_of(self, SPLITS, "split")

    def __call__(
        self, params: Params, *, model: Seq2SeqModel, mesh: Mesh, rules: Rules, folder: Path
    ) -> tuple[dict[str, float], str]:
        """Translate and score; see `train.experiment.Evaluator`."""
        del folder
        translator = Translator(
            StepDecoder.of(model, params),
            self.search,
            self.tasks.models,
            self.lengths,
            mesh,
            rules,
            self.batch_size,
        )
        codes = self.tasks.codes
        pairs = [
            (code, *pair)
            for code in codes
            for pair in list(self.tasks.built.pairs(self.split, code))[
                : self.max_examples_per_language
            ]
        ]
        translated = translator.translate([source for _, source, _ in pairs])
        results = [
            Scored(*pair, translation.text, translation.score)
            for pair, translation in zip(pairs, translated, strict=True)
        ]
        scalars = self._scalars(results)
        lines = [
            f"{name} of {len(results)} {self.split} sentences: {value:.2f}"
            for name, value in scalars.items()
            if "/" not in name
        ]
        for sample in samples(results, codes, self.num_samples):
            lines.append(f"[{sample.language}] {sample.source}")
            lines.append(f"  reference: {sample.reference}")
            lines.append(f"  output:    {sample.hypothesis}")
        return scalars, "\n".join(lines or ["no sentence to translate"]) + "\n"

    def _scalars(self, results: Sequence[Scored]) -> dict[str, float]:
        """Return each metric over all sentences, `/macro`, `/high`, ... and `/<language>`."""
        if not results:
            return {}
        found = quality(results, self.tasks.codes, self.tasks.metrics)
        first, *others = (self.tasks.metrics(code) for code in found["languages"])
        shared = [metric for metric in first if all(metric in of_other for of_other in others)]
        targets = [result.reference for result in results]
        predictions = [result.hypothesis for result in results]
        scalars = scores(shared, targets, predictions)
        for kind in ("averages", "languages"):
            for label, row in found[kind].items():
                scalars |= {f"{key}/{label}": row[key] for key in row if is_score(key)}
        return scalars


def samples(results: Sequence[Scored], languages: Sequence[str], count: int) -> list[Scored]:
    """Choose a sentence of fair length from languages spread over the scale, none twice."""
    chosen: list[Scored] = []
    for language in _spread(languages, count):
        seen = {sample.reference for sample in chosen}
        fair = (
            result
            for result in results
            if result.language == language
            and SHORTEST <= len(result.reference.split()) <= LONGEST
            and result.reference not in seen
        )
        chosen += [result for result in [next(fair, None)] if result is not None]
        if len(chosen) == count:
            break
    return chosen[:count]


def _spread(languages: Sequence[str], count: int) -> list[str]:
    """Order languages so that the first `count` lie evenly between the first and the last."""
    last = len(languages) - 1
    first = [languages[i * last // max(count - 1, 1)] for i in range(count)] if languages else []
    # The others follow, from the low-resource end, in case one of the first has no sentence.
    return list(dict.fromkeys([*first, *reversed(languages)]))
