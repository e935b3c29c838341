"""Scores by language, averages, delta BLEU, and what dropped tokens cost."""

import json

import jax
import models
import numpy as np
import pytest
import sacrebleu

from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.errors import SettingError
from gshard_exp.score import evaluation
from gshard_exp.score.bleu import Bleu, ChrF
from gshard_exp.score.evaluate import group_of
from gshard_exp.score.in_training import samples
from gshard_exp.score.quality import Baselines, Scored, quality, table
from gshard_exp.score.stream import decoded_lines

RIGHT = "the cat sat on the mat"
WRONG = "the cat sat on a mat"


def exact(targets, predictions):
    """Percent of predictions that are their reference."""
    return {
        "exact": 100 * float(np.mean([t == p for t, p in zip(targets, predictions, strict=True)]))
    }


def results(language, right, wrong=0):
    made = [Scored(language, "s", RIGHT, RIGHT, -0.1)] * right
    return made + [Scored(language, "s", RIGHT, WRONG, -0.2)] * wrong


def test_scores_and_averages_by_hand():
    found = quality(
        [*results("de", 20), *results("sw", 10, 10), *results("xx", 19)],
        ("de", "fr", "sw"),
        lambda code: (exact,),
    )
    assert [found["languages"][code]["exact"] for code in ("de", "sw", "xx")] == [100, 50, 100]
    # xx has 19 sentences: shown, not averaged; fr has none.
    assert found["averages"]["macro"] == {"languages": 2, "exact": 75}
    assert found["averages"]["high"] == {"languages": 1, "exact": 100}
    assert found["averages"]["low"] == {"languages": 1, "exact": 50}
    assert "middle" not in found["averages"] and "fr" not in found["languages"]
    assert found["languages"]["xx"]["group"] == "unknown" and found["sentences"] == 59
    text = table(found, {"de": "German"})
    assert "de German" in text and "* fewer than 20 sentences" in text


def test_thirds_of_the_languages_are_the_resource_groups():
    codes = ("a", "b", "c", "d", "e", "f", "g")
    assert [group_of(code, codes)[0] for code in codes] == list("hhhmmll")


def test_metrics_are_those_of_sacrebleu_with_its_signatures():
    targets, predictions = [RIGHT, "a dog"], [WRONG, "a dog"]
    assert Bleu()(targets, predictions)["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(predictions, [targets]).score
    )
    assert ChrF()(targets, predictions)["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(predictions, [targets]).score
    )
    assert "tok:13a" in Bleu().signature and "nc:6" in ChrF().signature
    assert "case:lc" in Bleu(lowercase=True).signature


def test_metrics_come_from_the_task_definition(tmp_path):
    """seqio finds the metric functions on each task; we find those of a task that replaced it."""
    import seqio

    from gshard_exp.data.corpus import Corpus
    from gshard_exp.data.sources import Tsv
    from gshard_exp.data.vocabulary import SentencePieceVocabulary

    lines = [f"de\tein Satz mit Nummer {i} hier\ta sentence with number {i}" for i in range(300)]
    (tmp_path / "c.tsv").write_text("\n".join(lines))
    vocabulary = SentencePieceVocabulary(size=300)
    tasks = TranslationTasks(
        "scored",
        Corpus((Tsv(str(tmp_path / "c.tsv")),), near_words=99, cache_dir=str(tmp_path)),
        vocabulary,
        vocabulary,
        metric_fns=(Bleu(), ChrF()),
        progress=False,
    )
    tasks.register()
    task = seqio.TaskRegistry.get("scored_de_en")
    assert list(task.predict_metric_fns) == [Bleu(), ChrF()]
    values = {}
    for metric_fn in task.predict_metric_fns:
        values |= metric_fn(targets=[RIGHT], predictions=[WRONG])
    assert values["bleu"] == pytest.approx(sacrebleu.corpus_bleu([WRONG], [[RIGHT]]).score)

    assert tasks.metrics("de") == (Bleu(), ChrF())
    seqio.TaskRegistry.remove("scored_de_en")
    seqio.TaskRegistry.add(
        "scored_de_en",
        source=task.source,
        output_features=task.output_features,
        preprocessors=[],
        metric_fns=[exact],
    )
    assert tasks.register() == "scored" and tasks.metrics("de") == (exact,)


def of_scores(targets, scores):
    return {"likelihood": sum(scores)}


def test_metrics_of_tasks_that_seqio_does_not_know_are_those_they_would_be_registered_with():
    tasks = TranslationTasks("nowhere", corpus=None, metric_fns=(of_scores, exact, Bleu()))
    assert tasks.metrics("de") == (exact, Bleu())


def test_languages_may_have_metrics_of_their_own_and_one_name_stands_for_one_metric():
    made = [*results("de", 20), *results("sw", 20)]
    own = {"de": (exact, lambda targets, predictions: {"a": seqio_scalar(2), "note": "long"})}
    found = quality(made, ("de", "sw"), lambda code: own.get(code, (exact,)))
    assert found["languages"]["de"]["a"] == found["averages"]["macro"]["a"] == 2
    assert found["languages"]["sw"].keys().isdisjoint({"a", "note"})
    header, _, swahili, *_ = table(found, {}).splitlines()
    assert header.split()[2:] == ["exact", "a"] and swahili.split()[-1] == "-"
    own = {"de": (Bleu(lowercase=True),)}
    with pytest.raises(SettingError, match=r"'bleu' is .*case:mixed.* in the task of 'sw'"):
        quality(made, ("de", "sw"), lambda code: own.get(code, (Bleu(),)))


def seqio_scalar(value):
    from seqio.metrics import Scalar

    return Scalar(value)


# --- delta ---------------------------------------------------------------------------------------
def written(tmp_path, **changes):
    content = {"metric": "bleu", "signature": Bleu().signature, "split": "test"}
    content |= {"scores": {"de": 40.0, "it": 3.0}} | changes
    (tmp_path / "b.json").write_text(json.dumps(content))
    return Baselines.read(str(tmp_path / "b.json"))


def test_delta_is_the_difference_to_the_baseline_and_absent_ones_are_listed(tmp_path):
    baselines = written(tmp_path)
    baselines.check((Bleu(),), "test")
    made = [*results("de", 20), *results("sw", 20)]
    found = quality(made, ("de", "sw"), lambda code: (Bleu(),), baselines)
    assert found["languages"]["de"]["delta_bleu"] == pytest.approx(60)
    assert "delta_bleu" not in found["languages"]["sw"] and found["absent_baselines"] == ["sw"]
    assert found["averages"]["macro"]["delta_bleu"] == pytest.approx(60)
    assert found["averages"]["macro"]["languages_with_delta_bleu"] == 1
    assert "no baseline for: sw" in table(found, {})


@pytest.mark.parametrize(
    ("changes", "split", "message"),
    [
        ({"signature": "tok:intl"}, "test", "signature 'tok:intl'"),
        ({"metric": "ter"}, "test", "metric 'ter'"),
        ({}, "validation", "split 'test'"),
    ],
)
def test_baselines_that_are_not_comparable_are_refused(tmp_path, changes, split, message):
    with pytest.raises(SettingError, match=message):
        written(tmp_path, **changes).check((Bleu(),), split)


@pytest.mark.parametrize("content", ["{", "[]", '{"scores": {"de": "x"}}', '{"scores": {}}'])
def test_a_file_that_is_no_table_of_baselines_is_refused(tmp_path, content):
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(SettingError, match="is no table of baselines"):
        Baselines.read(str(tmp_path / "b.json"))


# --- drops ---------------------------------------------------------------------------------------
def losses(model, params, examples):
    return evaluation.losses(
        model,
        params,
        examples,
        batch_size=4,
        lengths={"inputs": 8, "targets": 8},
        mesh=models.devices(),
        rules=models.RULES,
    )


def test_an_evaluation_with_a_capacity_says_what_it_dropped_and_what_that_cost():
    tight = models.model(encoder="s", decoder="s", sparse={"eval_capacity_factor": 0.25})
    params = models.run(lambda key: tight.init(key)[0], jax.random.key(0))
    rng = np.random.default_rng(0)
    examples = [tuple(rng.integers(2, 30, (2, 8)).astype(np.int32)) for _ in range(6)]
    found = losses(tight, params, examples)
    dropless = losses(tight.dropless(), params, examples)
    # One slot for each of 8 experts and group of 16 tokens: at least half the tokens' first choices
    # and more of their second ones find it taken. 3 layers see 6 examples of 8 tokens.
    assert found["routed_tokens"] == 3 * 6 * 8
    assert 0.5 <= found["dropped_first"] < 1 and 0.5 < found["dropped_second"] <= 1
    assert found["dropless_cross_ent_loss"] == pytest.approx(dropless["cross_ent_loss"])
    assert found["cost_of_dropping"] == pytest.approx(
        found["cross_ent_loss"] - dropless["cross_ent_loss"]
    )
    assert abs(found["cost_of_dropping"]) > 1e-4
    assert "cost_of_dropping" not in dropless
    assert "dropping costs" in evaluation.losses_text(found)


# --- small things --------------------------------------------------------------------------------
def test_samples_are_of_fair_length_and_spread_over_the_languages():
    made = [
        Scored("de", "s", "too short", "h", 0.0),
        Scored("de", "s", RIGHT, "h", 0.0),
        Scored("fr", "s", "a b c d", "h", 0.0),
        Scored("sw", "s", RIGHT, "h", 0.0),
        Scored("sw", "s", WRONG, "h", 0.0),
    ]
    chosen = samples(made, ("de", "fr", "sw"), 3)
    assert [(c.language, c.reference) for c in chosen] == [
        ("de", RIGHT),
        ("fr", "a b c d"),
        ("sw", WRONG),  # the other one stands there already
    ]


def test_bytes_that_are_no_utf8_are_reported_with_their_line():
    warnings = []
    lines = list(decoded_lines([b"one\n", b"tw\xc3o\r\n", b"three"], warnings.append))
    assert lines == ["one", "tw\ufffdo", "three"]
    assert len(warnings) == 1 and warnings[0].startswith("line 2: byte 3 (0xc3) is not UTF-8")
