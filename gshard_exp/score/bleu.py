"""BLEU and chrF of sacrebleu, in the form of seqio's metric functions."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# (targets, predictions) -> {name: score}: what seqio calls a metric function. Ours, and those of
# anybody who wants it, say under `signature` all that two scores must share to be comparable.
Metric = Callable[..., Mapping[str, Any]]


def signatures(metrics: Sequence[Metric]) -> dict[str, str]:
    """Return {name: signature} of metrics; one that has no signature has its own name."""
    found = {}
    for metric in metrics:
        name = getattr(metric, "name", getattr(metric, "__name__", type(metric).__name__))
        found[name] = getattr(metric, "signature", name)
    return found


def scores(
    metrics: Sequence[Metric], targets: Sequence[str], predictions: Sequence[str]
) -> dict[str, float]:
    """Return all that metrics say, by the names that they give it.

    A number may be wrapped in seqio's `Scalar`; a `Text`, an image and the like are no score.
    """
    found = {}
    for metric in metrics:
        for name, value in metric(targets, predictions).items():
            number = getattr(value, "value", value)
            if isinstance(number, numbers.Real):
                found[name] = float(number)
    return found


@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU, 0 to 100, of text as it is (detokenised). Source: sacrebleu.

    The paper does not say which BLEU it reports; tokenisation "13a" and exponential smoothing are
    sacrebleu's defaults.

    Attributes:
        tokenize: sacrebleu's name of the tokenisation ("13a", "intl", "char", ...).
        lowercase: compare without regard to case.
    """

    tokenize: str = "13a"
    lowercase: bool = False

    @property
    def name(self) -> str:
        """Under which the score is reported."""
        return "bleu"

    @property
    def signature(self) -> str:
        """sacrebleu's signature."""
        return _signature(self._metric())

    def __call__(self, targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
        """Score predictions against one reference each."""
        return {self.name: self._metric().corpus_score(list(predictions), [list(targets)]).score}

    def _metric(self) -> Any:
        from sacrebleu.metrics import BLEU

        return BLEU(tokenize=self.tokenize, lowercase=self.lowercase)


@dataclass(frozen=True)
class ChrF:
    """chrF, 0 to 100. Source: sacrebleu, whose defaults these are.

    Attributes:
        char_order: longest n-gram of characters.
        word_order: longest n-gram of words; 2 is chrF++.
    """

    char_order: int = 6
    word_order: int = 0

    @property
    def name(self) -> str:
        """Under which the score is reported."""
        return "chrf"

    @property
    def signature(self) -> str:
        """sacrebleu's signature."""
        return _signature(self._metric())

    def __call__(self, targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
        """Score predictions against one reference each."""
        return {self.name: self._metric().corpus_score(list(predictions), [list(targets)]).score}

    def _metric(self) -> Any:
        from sacrebleu.metrics import CHRF

        return CHRF(char_order=self.char_order, word_order=self.word_order)


def _signature(metric: Any) -> str:
    # The number of references is known to sacrebleu only after it has scored.
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())
