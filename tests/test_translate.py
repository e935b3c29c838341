"""From a TSV file to translations and scores, through the command line."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import beam_oracle
import numpy as np
import orbax.checkpoint as ocp
import pytest
import reversal

from gshard_exp import cli, load_translator
from gshard_exp.errors import SettingError
from gshard_exp.score.beam import BeamSearch
from gshard_exp.score.flat_beam import FlatBeamSearch
from gshard_exp.score.translator import batches
from gshard_exp.use.loading import open_model

pytestmark = pytest.mark.usefixtures("quick_compilation")
GIN = Path(__file__).parent / "gin" / "reversal.gin"
SENTENCE, TRANSLATION = reversal.pair("sw", (1, 2, 3, 4))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that has learnt its task; corpus and cache are gone."""
    folder = tmp_path_factory.mktemp("reversal")
    reversal.write(folder / "corpus.tsv")
    arguments = [
        f"--gin_file={GIN}",
        f"--gin.MODEL_DIR={folder / 'run'}",
        f"--gin.TSV_PATH={folder / 'corpus.tsv'}",
        f"--gin.CACHE_DIR={folder / 'cache'}",
    ]
    assert cli.main(["train", *arguments]) == 0
    shutil.rmtree(folder / "cache")
    (folder / "corpus.tsv").unlink()
    return folder / "run"


@pytest.fixture(scope="module")
def opened(run):
    return open_model(run)


def said(capsys, *words):
    """Run a verb; return exit status, lines on standard output, and standard error."""
    capsys.readouterr()
    status = cli.main(list(words))
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


@pytest.mark.parametrize("beam_size", [1, 4])
def test_greedy_and_beam_translations_are_right(run, capsys, beam_size):
    rng = np.random.default_rng(beam_size)
    pairs = [
        reversal.pair(("sw", "fi")[i % 2], rng.integers(0, 10, rng.integers(2, 5)))
        for i in range(24)
    ]
    sources = [source for source, _ in pairs]
    status, lines, err = said(
        capsys, "translate", f"--model_dir={run}", f"--gin.BEAM_SIZE={beam_size}", *sources
    )
    right = sum(line == target for line, (_, target) in zip(lines, pairs, strict=True))
    assert status == 0 and right >= 23 and not err


def test_scores_of_the_held_out_split_are_near_perfect(run, capsys, tmp_path):
    baselines = tmp_path / "baselines.json"
    signature = open_model(run).metrics("sw")[0].signature
    scores = {"metric": "bleu", "signature": signature, "split": "test", "scores": {"sw": 90.0}}
    baselines.write_text(json.dumps(scores))
    status, lines, _ = said(capsys, "eval", f"--model_dir={run}", f"--baselines={baselines}")
    assert status == 0
    folder = run / "inference_eval" / "test_300"
    found = json.loads((folder / "scores.json").read_text())
    assert found["averages"]["macro"]["bleu"] > 95 and found["averages"]["macro"]["chrf"] > 95
    swahili = found["languages"]["sw"]
    assert swahili["delta_bleu"] == pytest.approx(swahili["bleu"] - 90)
    assert found["absent_baselines"] == ["fi"] and "no baseline for: fi" in lines
    assert found["teacher_forced"]["accuracy"] > 0.95 and found["step"] == 300
    rows = [json.loads(row) for row in (folder / "translations.jsonl").read_text().splitlines()]
    assert len(rows) == found["sentences"]
    assert {"language", "source", "reference", "hypothesis", "score"} == rows[0].keys()
    for row in rows:
        words = reversal.WORDS[row["language"]].split()
        digits = [words.index(word) for word in row["source"].split()]
        assert reversal.pair(row["language"], digits) == (row["source"], row["reference"])


def share_of_short_words(targets, predictions):
    words = [word for line in predictions for word in line.split()]
    return {"short": 100 * sum(len(word) == 3 for word in words) / len(words)}


def test_a_metric_of_the_users_own_task_stands_in_the_table(run, capsys, tmp_path):
    """Of one language; the other has those of the config."""
    import seqio

    load = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["test"])
    name = open_model(run).experiment.data.tasks.task_name("sw")
    features = {"targets": seqio.Feature(seqio.ByteVocabulary())}
    registered = seqio.TaskRegistry.get(name)  # by the training run of this process
    seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add(
        name,
        source=load,
        output_features=features,
        preprocessors=[],
        metric_fns=[share_of_short_words],
    )
    try:
        status, lines, _ = said(capsys, "eval", f"--model_dir={run}", f"--output={tmp_path}")
    finally:
        seqio.TaskRegistry.remove(name)
        seqio.TaskRegistry.add_provider(name, registered)
    found = json.loads((tmp_path / "scores.json").read_text())
    assert status == 0 and "bleu" not in found["languages"]["sw"]
    rows = [json.loads(row) for row in (tmp_path / "translations.jsonl").read_text().splitlines()]
    predictions = [row["hypothesis"] for row in rows if row["language"] == "sw"]
    value = share_of_short_words([], predictions)["short"]
    assert found["languages"]["sw"]["short"] == pytest.approx(value) and 20 < value < 60
    assert found["metrics"]["share_of_short_words"] == "share_of_short_words"
    assert "bleu" in found["languages"]["fi"] and "short" not in found["languages"]["fi"]
    assert found["averages"]["macro"]["short"] == found["languages"]["sw"]["short"]
    header = next(line for line in lines if line.startswith("language"))
    assert "short" in header.split()


def test_languages_and_examples_of_an_evaluation_can_be_chosen(run, capsys, tmp_path):
    words = [f"--model_dir={run}", "--languages=fi,de", "--max_examples=3", f"--output={tmp_path}"]
    status, _, err = said(capsys, "eval", "--split=validation", *words)
    found = json.loads((tmp_path / "scores.json").read_text())
    assert status == 0 and found["sentences"] == 3 and list(found["languages"]) == ["fi"]
    assert "not trained on de" in err and not found["averages"]


def test_limited_capacities_are_compared_with_dropless(run, capsys, tmp_path):
    words = [f"--model_dir={run}", "--max_examples=8", f"--output={tmp_path}"]
    limits = ["--gin.EVAL_EXPERT_CAPACITY_FACTOR=0.1", "--gin.DECODE_EXPERT_CAPACITY_FACTOR=0.02"]
    status, lines, _ = said(capsys, "eval", *words, *limits, "--gin.GROUP_SIZE=64")
    found = json.loads((tmp_path / "scores.json").read_text())["teacher_forced"]
    assert status == 0 and found["dropped_first"] > 0.05
    assert found["cost_of_dropping"] != 0 and found["dropped_second"] > found["dropped_first"]
    assert found["decoding"]["score"] < found["decoding"]["dropless_score"]
    assert [line for line in lines if line.startswith("capacity of decoding: mean score -")]


def test_bleu_was_scored_during_training(run):
    folder = run / "training_eval" / "translations"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [200, 300]  # when due, and at the end
    assert records[-1]["bleu"] > 95 and records[-1]["bleu/sw"] > 95
    assert "reference: " in (folder / "report_300.txt").read_text()


def test_lines_of_standard_input_come_out_in_order(run, capsys, monkeypatch):
    long = " ".join(["nne"] * 40)
    text = f"{SENTENCE}\n\n   \nmoja \xff\n".encode("latin-1") + f"{long}\ntatu sita".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    status, lines, err = said(capsys, "translate", f"--model_dir={run}", "--lang=xx")
    assert status == 0 and len(lines) == 6
    assert lines[:3] == [TRANSLATION, "", ""] and lines[5] == "six three"
    assert "line 4: byte 6 (0xff) is not UTF-8" in err
    assert "line 5: longer than the 31 pieces" in err
    assert "was not trained on 'xx' (it knows sw, fi)" in err


def test_a_file_gives_json_lines_with_scores(run, capsys, tmp_path):
    (tmp_path / "lines.txt").write_text(f"{SENTENCE}\n")
    words = [f"--model_dir={run}", f"--file={tmp_path / 'lines.txt'}", "--json"]
    _, (line,), _ = said(capsys, "translate", *words, "--gin.BEAM_SIZE=3")
    row = json.loads(line)
    scores = [hypothesis["score"] for hypothesis in row["hypotheses"]]
    assert row["hypotheses"][0]["text"] == TRANSLATION and len(scores) == 3
    assert scores == sorted(scores, reverse=True) and scores[0] > -0.5


def test_the_folder_may_be_named_from_where_one_is(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    _, lines, _ = said(capsys, "translate", f"--model_dir={run.name}", SENTENCE)
    assert lines == [TRANSLATION]


def test_both_searches_and_the_reference_agree_on_a_trained_model(opened, run):
    translator = opened.translator
    scorer = beam_oracle.Scorer(opened.experiment.model, opened.params, 8)
    sources = [SENTENCE, "yksi kaksi", "tisa tatu sifuri"]
    for search in (BeamSearch(3, 0.8, 8), FlatBeamSearch(3, 0.8, 8)):
        other = dataclasses.replace(translator, search=search)
        for source, found in zip(sources, other.hypotheses(sources), strict=True):
            ids = translator.processors[0].encode(source, add_eos=True)
            expected = beam_oracle.beam_search(scorer, ids, beams=3, alpha=0.8, longest=8)
            texts = [translator.processors[1].decode(list(p)) for _, _, p, _ in expected]
            assert [hypothesis.text for hypothesis in found] == texts
            got = [(h.score, h.log_prob) for h in found]
            np.testing.assert_allclose(got, [e[:2] for e in expected], rtol=1e-5, atol=1e-5)


def test_a_model_translates_alike_on_another_mesh(run, opened):
    sources = [SENTENCE, "kolme", "nane saba"]
    meshed = load_translator(
        run, bindings=["DATA_PARTITIONS=2", "NUM_EXPERT_PARTITIONS=2", "NUM_MODEL_PARTITIONS=2"]
    )
    assert meshed.mesh.size == 8
    one, other = opened.translator.translate(sources), meshed.translate(sources)
    assert [t.text for t in one] == [t.text for t in other]
    np.testing.assert_allclose([t.score for t in one], [t.score for t in other], atol=1e-5)


def test_translating_imports_neither_seqio_nor_tensorflow(run):
    program = (
        "import sys, gshard_exp; assert 'jax' not in sys.modules; "
        f"print(gshard_exp.load_translator({str(run)!r}).translate([{SENTENCE!r}])[0].text); "
        "assert not {'tensorflow', 'seqio'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == TRANSLATION


def test_scoring_imports_neither_seqio_nor_tensorflow(run, tmp_path):
    arguments = ["eval", f"--model_dir={run}", "--max_examples=2", f"--output={tmp_path}"]
    program = (
        f"import sys; from gshard_exp import cli; assert cli.main({arguments}) == 0; "
        "assert not {'tensorflow', 'seqio'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads((tmp_path / "scores.json").read_text())["sentences"] == 4


# --- bad input: one clear message each, exit status 2 --------------------------------------------
def damaged(run, tmp_path, *parts):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for part in parts:
        place = copy / part
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return copy


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["checkpoint_300"], "holds no checkpoint"),
        (["config.gin"], "is not the folder of a run"),
        (["checkpoint_300/state/_METADATA"], "checkpoint_300 of .* is not whole"),
        (["checkpoint_300/state/ocdbt.process_0"], "checkpoint_300 of .* is not whole"),
        (["data/languages.json"], "holds no vocabularies"),
        (["data/source.model"], "is not the vocabulary that this model was trained with"),
    ],
)
def test_what_is_missing_is_named(run, tmp_path, parts, message):
    with pytest.raises(SettingError, match=message):
        load_translator(damaged(run, tmp_path, *parts))


def test_a_vocabulary_of_another_model_is_refused(run, tmp_path, capsys):
    copy = damaged(run, tmp_path, "data/source.model")
    shutil.copy(run / "data/target.model", copy / "data/source.model")
    status, _, err = said(capsys, "translate", f"--model_dir={copy}", "moja")
    assert status == 2 and "is not the vocabulary" in err and "Traceback" not in err


def test_a_step_without_a_checkpoint_and_a_file_that_is_not_there_are_refused(run, capsys):
    status, _, err = said(capsys, "translate", f"--model_dir={run}", "--step=7", "moja")
    assert status == 2 and "no checkpoint of step 7; there are 300" in err
    status, _, err = said(capsys, "translate", f"--model_dir={run}", "--file=/no/such/file")
    assert status == 2 and "/no/such/file cannot be read" in err
    status, _, err = said(capsys, "eval", f"--model_dir={run}", "--split=train")
    assert status == 2 and "test" in err


def test_another_models_settings_do_not_fit_its_checkpoint(run):
    with pytest.raises(SettingError, match="does not fit this experiment"):
        load_translator(run, bindings=["EMBED_DIM=32"])


# --- batches -------------------------------------------------------------------------------------
def test_sentences_go_with_others_of_their_length():
    lengths = [3] * 20 + [60] + [12] * 4 + [0]
    found = list(batches(lengths, longest=64, batch_size=16, parts=1))
    assert [(len(b.indices), b.rows, b.length) for b in found] == [
        (16, 16, 8),
        (4, 16, 8),  # a quarter of a batch is worth one, and the shape is compiled already
        (4, 4, 16),
        (1, 1, 64),
    ]
    assert sorted(i for b in found for i in b.indices) == list(range(25))


def test_a_few_short_sentences_join_longer_ones_and_rows_fill_the_mesh():
    found = list(batches([3, 20, 20, 20, 20, 20], longest=24, batch_size=32, parts=4))
    assert [(b.indices, b.rows, b.length) for b in found] == [((0, 1, 2, 3, 4, 5), 8, 24)]


def test_a_sweep_of_trained_models_is_scored(run, capsys, tmp_path):
    (tmp_path / "both").symlink_to(run)
    points = [{"name": "both", "dir": "both", "axes": {}, "bindings": []}]
    content = {"schema": 1, "name": "one", "base": [str(GIN)], "points": points}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    baselines = tmp_path / "baselines.json"
    words = ["--split=validation", "--max_examples=21", f"--baselines_to={baselines}"]
    status, lines, err = said(capsys, "sweep", "eval", str(tmp_path), *words)
    assert (status, err) == (0, "")
    assert float(lines[0].split()[2]) > 90 and lines[-2] == "1 done"
    found = json.loads(baselines.read_text())
    assert found["split"] == "validation" and found["scores"]["sw"] > 90


def test_a_folder_whose_checkpoint_t5x_wrote_translates_and_is_scored_the_same(
    run, opened, tmp_path, capsys
):
    """The layout is that of `t5x_runner/layout.py`; the rest of the folder is as ours."""
    (tmp_path / "config.gin").write_text((run / "config.gin").read_text())
    shutil.copytree(run / "data", tmp_path / "data")
    tree = {"target": opened.params, "state": {"step": np.int32(opened.step)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        place = tmp_path / f"checkpoint_{opened.step}" / "state"
        checkpointer.save(place, ocp.args.PyTreeSave(tree))
    assert said(capsys, "translate", f"--model_dir={tmp_path}", SENTENCE) == (0, [TRANSLATION], "")
    how = ("eval", "--split=validation", "--max_examples=4")
    tables = [said(capsys, *how, f"--model_dir={folder}")[1][:-1] for folder in (run, tmp_path)]
    assert tables[0] == tables[1] and len(tables[0]) > 5
