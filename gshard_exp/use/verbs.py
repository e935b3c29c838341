"""What the verbs `translate` and `eval` do."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gshard_exp.data.model_files import HELD_OUT
from gshard_exp.errors import SettingError
from gshard_exp.model.incremental import StepDecoder
from gshard_exp.score import evaluation
from gshard_exp.score.quality import Baselines, Scored, table
from gshard_exp.score.stream import LINES_AT_ONCE, decoded_lines, translate_lines
from gshard_exp.score.translator import Translator
from gshard_exp.use.loading import OpenedModel, open_model


@dataclasses.dataclass(frozen=True)
class Which:
    """Which model, as the command line names it.

    Attributes:
        model_dir: folder of a run.
        step: of the checkpoint; None: the newest.
        bindings: gin bindings that win over its config.gin.
        batch_size: sentences at once; None: 32.
    """

    model_dir: str
    step: int | None = None
    bindings: Sequence[str] = ()
    batch_size: int | None = None

    def open(self) -> OpenedModel:
        """Load it."""
        return open_model(
            self.model_dir, step=self.step, bindings=self.bindings, batch_size=self.batch_size
        )


def translate(
    which: Which,
    texts: Sequence[str],
    *,
    file: str | None,
    language: str | None,
    as_json: bool,
) -> None:
    """Translate arguments, a file or standard input, line by line, to standard output.

    Args:
        which: model.
        texts: to translate; none: read `file`.
        file: lines of UTF-8; None: standard input.
        language: of the text, only to warn if the model never saw it.
        as_json: write JSON lines with all hypotheses and scores instead of the best one's text.
    """
    opened = which.open()
    translator = opened.translator
    if language is not None and language not in translator.languages:
        _warn(
            f"{which.model_dir} was not trained on {language!r} (it knows "
            f"{', '.join(translator.languages)}); translating all the same"
        )
    with _lines(texts, file) as (lines, at_once):
        for line, hypotheses in translate_lines(translator, lines, _warn, at_once):
            best = hypotheses[0]
            if as_json:
                found = [dataclasses.asdict(hypothesis) for hypothesis in hypotheses]
                row = {"source": line, "hypotheses": found}
                print(json.dumps(row, ensure_ascii=False), flush=True)
            else:
                # A translation is one line, whatever pieces it is made of.
                print(" ".join(best.text.split("\n")), flush=True)


def evaluate(
    which: Which,
    *,
    split: str,
    languages: Sequence[str] | None,
    baselines: str | None,
    max_examples: int | None,
    output: str | None,
) -> None:
    """Translate a held-out split, print a table of scores and write them to files.

    Args:
        which: model.
        split: "test" or "validation".
        languages: codes; None: all.
        baselines: JSON file of `quality.Baselines`.
        max_examples: of each language, the first so many; None: all.
        output: folder for the files; None: MODEL_DIR/inference_eval/SPLIT_STEP.
    """
    if split not in HELD_OUT:
        raise SettingError(
            f"split={split!r} is not kept with a model; there are {' and '.join(HELD_OUT)}.",
            settings=("split",),
        )
    opened = which.open()
    table_of_baselines = None if baselines is None else Baselines.read(baselines)
    if table_of_baselines is not None:
        for code in table_of_baselines.scores:
            table_of_baselines.check(opened.metrics(code), split)
    pairs = _pairs(opened, split, languages, max_examples)
    results = _translated(opened.translator, pairs)
    teacher_forced: dict[str, Any] = dict(_losses(opened, pairs))
    model = opened.model
    if evaluation.has_capacity(model, "decode"):
        decoder = StepDecoder.of(model.dropless(), opened.params)
        dropless = dataclasses.replace(opened.translator, decoder=decoder)
        teacher_forced["decoding"] = evaluation.decode_cost(results, _translated(dropless, pairs))
    search: Any = opened.translator.search
    about = {
        "model_dir": str(which.model_dir),
        "step": opened.step,
        "split": split,
        "max_examples": max_examples,
        "search": {"method": type(search).__name__, **dataclasses.asdict(search)},
    }
    codes = [language.code for language in opened.files.languages]
    found = evaluation.report(
        results, codes, opened.metrics, table_of_baselines, teacher_forced, about
    )
    text = table(found, opened.translator.languages) + evaluation.losses_text(teacher_forced)
    name = f"{split}_{opened.step}"
    folder = Path(output or Path(which.model_dir).expanduser() / "inference_eval" / name)
    evaluation.write(folder, found, results, text)
    print(text, end="")
    print(f"outputs: {folder.resolve()}")


def _translated(translator: Translator, pairs: Sequence[evaluation.Pair]) -> list[Scored]:
    results: list[Scored] = []
    for part in evaluation.translate_pairs(translator, pairs):
        results += part
        print(f"translated {len(results)} of {len(pairs)}", file=sys.stderr, flush=True)
    return results


def _pairs(
    opened: OpenedModel, split: str, languages: Sequence[str] | None, max_examples: int | None
) -> list[evaluation.Pair]:
    known = {language.code for language in opened.files.languages}
    unknown = [code for code in languages or () if code not in known]
    if unknown:
        _warn(f"the model was not trained on {', '.join(unknown)}; no held-out text of it is here")
    taken: dict[str, int] = {}
    pairs = []
    for pair in opened.files.pairs(split):
        code = pair[0]
        if languages is not None and code not in languages:
            continue
        taken[code] = taken.get(code, 0) + 1
        if max_examples is None or taken[code] <= max_examples:
            pairs.append(pair)
    if not pairs:
        raise SettingError(
            f"there is no sentence of {', '.join(languages or known)} in the {split} split.",
            settings=("languages",),
            hint=f"Languages of this model: {', '.join(sorted(known))}.",
        )
    return pairs


def _losses(opened: OpenedModel, pairs: Sequence[evaluation.Pair]) -> Mapping[str, float]:
    source, target = opened.translator.processors
    examples = [
        (
            np.asarray(source.encode(text, add_eos=True), np.int32),
            np.asarray(target.encode(english, add_eos=True), np.int32),
        )
        for _, text, english in pairs
    ]
    return evaluation.losses(
        opened.model,
        opened.params,
        examples,
        batch_size=opened.translator.batch_size,
        lengths=opened.translator.lengths,
        mesh=opened.translator.mesh,
        rules=opened.translator.rules,
    )


@contextlib.contextmanager
def _lines(texts: Sequence[str], file: str | None) -> Iterator[tuple[Iterable[str], int]]:
    """Open what is to be translated, and say how many lines to read at once."""
    if texts:
        yield texts, LINES_AT_ONCE
    elif file is not None:
        try:
            opened = Path(file).expanduser().open("rb")
        except OSError as error:
            raise SettingError(f"{file} cannot be read: {error.strerror}.", ("file",)) from error
        with opened:
            yield decoded_lines(opened, _warn), LINES_AT_ONCE
    else:
        # Whoever types a line waits for its translation.
        at_once = 1 if sys.stdin.isatty() else LINES_AT_ONCE
        yield decoded_lines(sys.stdin.buffer, _warn), at_once


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
