"""From a corpus and two vocabularies to one seqio Task per language and a Mixture of them."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gshard_exp.data import splits, tokens
from gshard_exp.data.corpus import BuiltCorpus, Corpus, CorpusError
from gshard_exp.data.tensorflow_import import load_tensorflow
from gshard_exp.data.vocabulary import SOURCE, TARGET, SentencePieceVocabulary

if TYPE_CHECKING:
    import seqio

# What stands under a name in seqio's registry; registering the same again is no error.
_REGISTERED: dict[str, str] = {}
MetricFn = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class TranslationTasks:
    """Translation from every language of a corpus into English.

    As in the paper, the source carries no tag: the target language is always English, and which
    language the source is in the model has to see.

    Attributes:
      prefix: name of the mixture; a task is `<prefix>_<language>_en`, with `sr@latin` spelt
        `sr_latin` as seqio's names allow no `@`.
      corpus: what is translated.
      source_vocabulary: one for all languages.
      target_vocabulary: English.
      temperature: T of the mixture; a language with n training pairs is drawn in proportion to
        n^(1/T). 1 = as often as it stands in the corpus, large = all alike.
      languages: codes of the corpus to make tasks of; None takes all. The vocabularies are those
        of the whole corpus either way.
      metric_fns: seqio metric functions of every task, (targets, predictions) -> {name: score}.
      progress: show progress on standard error while something is built.
    """

    prefix: str
    corpus: Corpus
    source_vocabulary: SentencePieceVocabulary = field(default_factory=SentencePieceVocabulary)
    target_vocabulary: SentencePieceVocabulary = field(default_factory=SentencePieceVocabulary)
    temperature: float = 1.0
    languages: Sequence[str] | None = None
    metric_fns: Sequence[MetricFn] = ()
    progress: bool = True

    @cached_property
    def built(self) -> BuiltCorpus:
        """The corpus on disk, built on first use."""
        return self.corpus.build(self.progress)

    @cached_property
    def models(self) -> dict[str, Path]:
        """The SentencePiece models of `inputs` and `targets`, trained on first use."""
        return {
            tokens.INPUTS: self.source_vocabulary.path(self.built, SOURCE, self.progress),
            tokens.TARGETS: self.target_vocabulary.path(self.built, TARGET, self.progress),
        }

    @cached_property
    def tokens(self) -> tokens.Tokens:
        """The token ids of the corpus, encoded on first use."""
        return tokens.encode(self.built, self.models, self.progress)

    @cached_property
    def codes(self) -> tuple[str, ...]:
        """The languages that have a task, from the most to the fewest training pairs.

        Raises:
          CorpusError: a language was asked for that the corpus has not.
        """
        if self.languages is None:
            return self.built.languages
        missing = sorted(set(self.languages) - set(self.built.languages))
        if missing:
            raise CorpusError(
                f"{len(missing)} languages of tasks.TranslationTasks.languages are not in the "
                f"corpus: {', '.join(missing)}; it has {len(self.built.languages)}: "
                f"{', '.join(self.built.languages)}.",
                settings=("languages", "corpus.min_pairs"),
                hint="Remove them, lower min_pairs, or add a source that has them.",
            )
        return tuple(code for code in self.built.languages if code in set(self.languages))

    def task_name(self, language: str) -> str:
        """Return the name of a language's task, `m4_de_en`."""
        return f"{self.prefix}_{language.replace('@', '_').replace('-', '_')}_en"

    def metrics(self, language: str) -> tuple[MetricFn, ...]:
        """Return the metric functions of predictions in the definition of a language's task.

        Those of the seqio Task that is registered under its name, be it `register`'s or one that
        somebody put in its place; where there is none, those that `register` would give it.

        They are called as `seqio.Evaluator` calls them, with the (targets, predictions) of a task,
        and not by it: it reads its examples from the task's dataset, which is the corpus, through
        TensorFlow, and a model is scored where neither is. So seqio is asked only if something has
        imported it. Departures from it: a task's postprocessor, of which ours have none, is not
        applied; metric functions of scores or auxiliary values, and `metric_objs`, are not used.
        """
        seqio = sys.modules.get("seqio")
        name = self.task_name(language)
        if seqio is not None and name in seqio.TaskRegistry.names():
            return tuple(seqio.TaskRegistry.get(name).predict_metric_fns)
        return tuple(metric for metric in self.metric_fns if _of_predictions(metric))

    def rates(self) -> dict[str, float]:
        """Return the share of each language in the mixture, n^(1/T) over their sum."""
        weights = {
            code: self.built.num_pairs(splits.TRAIN, code) ** (1 / self.temperature)
            for code in self.codes
        }
        total = sum(weights.values())
        return {code: weight / total for code, weight in weights.items()}

    def vocab_sizes(self) -> dict[str, int]:
        """Return the number of pieces of `inputs` and `targets`, which may be below those asked."""
        import sentencepiece

        return {
            feature: sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size()
            for feature, path in self.models.items()
        }

    def token_ids(self, split: str, language: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (inputs ids, targets ids) of every pair, int32, end added, untruncated."""
        return self.tokens.pairs(split, language)

    def output_features(self) -> dict[str, "seqio.Feature"]:
        """Return the features of every task, with the vocabularies as seqio knows them."""
        load_tensorflow()
        import seqio

        return {
            feature: seqio.Feature(
                seqio.SentencePieceVocabulary(str(path), extra_ids=0), add_eos=True
            )
            for feature, path in self.models.items()
        }

    def content(self) -> str:
        """Say what the mixture is made of: a hash of corpus and vocabularies, and the rates."""
        return f"{self.tokens.directory.name} {self.rates()}"

    def register(self) -> str:
        """Register the tasks and the mixture with seqio, and return the mixture's name.

        Building corpus, vocabularies and token ids is part of it. What is registered already with
        the same content is left alone, other content under the same names is replaced.
        """
        load_tensorflow()
        import seqio

        from gshard_exp.data.token_source import TokenSource

        rates = self.rates()
        content = f"{self.content()} {self.metric_fns}"
        if _REGISTERED.get(self.prefix) == content and self.prefix in seqio.MixtureRegistry.names():
            return self.prefix
        features = self.output_features()
        seqio.MixtureRegistry.remove(self.prefix)
        for language in self.codes:
            name = self.task_name(language)
            seqio.TaskRegistry.remove(name)
            seqio.TaskRegistry.add(
                name,
                source=TokenSource(self.tokens, language),
                output_features=features,
                preprocessors=[],
                metric_fns=list(self.metric_fns),
                shuffle_buffer_size=None,
            )
        seqio.MixtureRegistry.add(
            self.prefix, [(self.task_name(language), rate) for language, rate in rates.items()]
        )
        _REGISTERED[self.prefix] = content
        return self.prefix


def _of_predictions(metric: MetricFn) -> bool:
    """Tell a metric function of predictions from others by its arguments, as seqio does."""
    required = [
        name
        for name, parameter in inspect.signature(metric).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    return required == ["targets", "predictions"]
