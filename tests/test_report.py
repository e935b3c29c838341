"""Reports: what is read from run folders, and what becomes of damaged ones."""

import csv
import json
import shutil

import made_runs
import numpy as np
import pytest

from gshard_exp.score.quality import Baselines
from gshard_exp.sweep import report, tables
from gshard_exp.sweep.runs import differing_settings


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep that no test changes."""
    return made_runs.make_sweep(tmp_path_factory.mktemp("made") / "sweep")


@pytest.fixture
def sweep(made, tmp_path):
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "sweep")


def names(found):
    return [run.name for run in found.runs]


def damage(found):
    return {each.where: each.what for each in found.damage}


ALL = ["l4-e4", "l4-e16", "l8-e4", "l8-e16"]


def test_a_sweep_reports_its_points_in_their_order_and_those_that_wait(made):
    found = report.collect([made])
    assert (found.title, names(found)) == ("depth by experts", ALL)
    assert found.waiting == ("l12-e4",)
    assert (found.damage, found.notes) == ((), [])
    assert found.axes == ["layers", "experts"]
    assert found.runs[1].axes == {"layers": 4, "experts": 16}


def test_a_run_a_folder_of_runs_and_several_folders_are_reported(sweep):
    (sweep / "sweep.json").unlink()
    assert names(report.collect([sweep])) == sorted(ALL)
    assert names(report.collect([sweep.parent])) == [f"sweep/{name}" for name in sorted(ALL)]
    both = report.collect([sweep / "l4-e4", sweep / "l8-e4"])
    assert names(both) == ["l4-e4", "l8-e4"]
    assert both.title == "l4-e4, l8-e4"


def test_a_folder_that_is_named_twice_is_reported_once(made):
    assert names(report.collect([made, made / "l4-e4"])) == ALL


def test_two_runs_of_one_name_are_told_apart(made, tmp_path):
    other = shutil.copytree(made / "l4-e4", tmp_path / "l4-e4")
    found = report.collect([made / "l4-e4", other])
    assert names(found) == [str(made / "l4-e4"), str(other)]


def test_numbers_of_a_run_are_those_of_its_files(made):
    run = report.collect([made]).runs[0]
    assert run.status == "done"
    assert run.tokens == 400 * 900.0
    np.testing.assert_allclose(run.curve[-1][0], 360_000)
    np.testing.assert_allclose(run.curve[-1][1], made_runs.law(360_000, 200_000), rtol=0.02)
    assert [tokens for tokens, _ in run.held_out_curve] == [180_000, 360_000]
    assert (run.model.total, run.model.active) == (600_000, 200_000)  # as run.json says
    assert run.flops == 6 * 200_000 * 1024 * 400
    np.testing.assert_allclose(run.core_hours, 400 * 0.3 * 4 * 2 / 3600)
    np.testing.assert_allclose(run.step_hours, 40 * 2.5 / 3600)
    bleu = [made_runs.bleu(i, 4, 4) for i in range(30)]
    np.testing.assert_allclose(report.average(run, "bleu"), np.mean(bleu))


def test_a_run_without_run_json_is_counted_from_its_settings(sweep):
    (sweep / "l4-e4" / "run.json").unlink()
    run = report.collect([sweep]).runs[0]
    assert run.damage == () and run.core_hours is None
    assert run.model.total > run.model.active > 1000
    assert run.flops > 0 and run.model.tokens_per_step == 8 * 16
    assert run.status == "done"


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path):
    made_runs.make_run(tmp_path / "half", steps=200)
    assert report.collect([tmp_path]).runs[0].status == "step 200 of 400"


def test_the_held_out_loss_before_training_is_not_that_of_a_trained_model(tmp_path):
    folder = made_runs.make_run(tmp_path / "run")
    path = folder / "training_eval" / "validation" / "metrics.jsonl"
    made_runs.write_lines(path, [{"step": 0, "cross_ent_loss": 9.0}])
    run = report.collect([folder]).runs[0]
    assert run.held_out_curve == [(0.0, 9.0)] and report.held_out_loss(run) is None
    made_runs.write_lines(path, [{"step": n, "cross_ent_loss": 9.0 - n} for n in (0, 1, 200)])
    assert report.held_out_loss(report.collect([folder]).runs[0]) == -191.0


def test_a_run_that_has_only_begun_is_no_damage(tmp_path):
    folder = made_runs.make_run(tmp_path / "new")
    for name in ("train", "training_eval", "inference_eval", "run.json"):
        place = folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    (folder / "train").mkdir()
    (folder / "train" / "metrics.jsonl").touch()
    found = report.collect([folder])
    assert found.damage == ()
    assert found.runs[0].status == "no step yet"
    assert found.thresholds == ()


def test_tokens_to_reach_lie_on_the_line_between_two_logged_steps():
    curve = [(100.0, 5.0), (200.0, 4.0), (300.0, 4.2), (400.0, 3.0)]
    assert report.tokens_to_reach(curve, 4.5) == 150.0
    assert report.tokens_to_reach(curve, 4.0) == 200.0
    assert report.tokens_to_reach(curve, 3.6) == 350.0
    assert report.tokens_to_reach(curve, 6.0) == 100.0
    assert report.tokens_to_reach(curve, 2.9) is None


def test_default_thresholds_are_reached_by_all_by_half_and_by_one():
    curves = [[(1.0, 9.0), (2.0, best)] for best in (3.04, 3.48, 3.94, 4.41)]
    assert report.default_thresholds(curves) == [4.5, 4.0, 3.1]
    reached = [
        sum(report.tokens_to_reach(curve, threshold) is not None for curve in curves)
        for threshold in (4.5, 4.0, 3.1)
    ]
    assert reached == [4, 3, 1]
    assert report.default_thresholds([[(1.0, 3.013)], [(1.0, 3.024)]]) == [3.03, 3.02]
    assert report.default_thresholds([]) == []


def test_settings_that_differ_are_listed_and_nothing_else(made):
    found = differing_settings(report.collect([made]).runs)
    told = {paths[0]: (len(paths), values) for paths, values in found}
    assert told == {
        "model.module.encoder.num_layers": (1, ["4", "4", "8", "8"]),
        "model.module.encoder.pattern[1].ffn.num_experts": (2, ["4", "16", "4", "16"]),
    }


def test_runs_that_do_not_compare_are_said_to_be_so(sweep):
    place = sweep / "l4-e4" / "inference_eval" / "test_400" / "scores.json"
    scores = json.loads(place.read_text())
    place.write_text(json.dumps(scores | {"split": "validation"}))
    place = sweep / "l8-e4" / "run.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"data": {"hash": "other"}}))
    notes = report.collect([sweep]).notes
    assert "l4-e4: validation, beam of 4" in notes[0]
    assert "not trained on the same data" in notes[1]


def test_the_test_split_and_the_newest_step_speak_for_a_run(sweep):
    folder = sweep / "l4-e4" / "inference_eval"
    scores = json.loads((folder / "test_400" / "scores.json").read_text())
    for name, change in (
        ("validation_500", {"split": "validation", "step": 500}),
        ("test_300", {"step": 300}),
    ):
        (folder / name).mkdir()
        (folder / name / "scores.json").write_text(json.dumps(scores | change))
    run = report.collect([sweep]).runs[0]
    assert (run.scores.split, run.scores.step) == ("test", 400)


def test_bleu_during_training_stands_in_until_there_is_an_evaluation(sweep):
    run = sweep / "l4-e4"
    shutil.rmtree(run / "inference_eval")
    (run / "training_eval" / "translations").mkdir()
    made_runs.write_lines(
        run / "training_eval" / "translations" / "metrics.jsonl",
        [{"step": 200, "bleu/macro": 1.0}, {"step": 400, "bleu/macro": 2.0, "bleu/l00": 3.0}],
    )
    found = report.collect([sweep], baselines=baselines())
    assert found.notes[0].startswith("l4-e4: no delta BLEU yet")
    scores = found.runs[0].scores
    assert (scores.step, scores.average("bleu"), scores.languages) == (
        400,
        2.0,
        {"l00": {"bleu": 3.0}},
    )


def baselines(**changes):
    scores = {code: made_runs.baseline(i) + 1 for i, code in enumerate(made_runs.CODES)}
    fields = {"metric": "bleu", "signature": made_runs.SIGNATURE, "split": "test"}
    return Baselines("other.json", **(fields | {"scores": scores} | changes))


def test_baselines_of_the_command_line_win_over_those_of_the_evaluation(made):
    before = report.collect([made]).runs[0]
    after = report.collect([made], baselines=baselines()).runs[0]
    moved = report.average(after, "delta_bleu") - report.average(before, "delta_bleu")
    np.testing.assert_allclose(moved, -1.0)


def test_baselines_of_another_signature_mean_nothing_and_are_told(made):
    found = report.collect([made], baselines=baselines(signature="nrefs:2"))
    assert [note.split(": ")[:2] for note in found.notes] == [[n, "no delta BLEU"] for n in ALL]
    assert report.average(found.runs[0], "delta_bleu") is not None  # the evaluation's own stays


def break_lines(run):
    path = run / "train" / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])
    return "train/metrics.jsonl: the last line is cut off; 39 whole lines are used"


def break_a_middle_line(run):
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[5], lines[8] = "}{", '["no", "object"]'
    path.write_text("\n".join(lines) + "\n")
    return "train/metrics.jsonl: 2 line(s) are no record with a step (line 6, 9); 38 whole"


def break_bytes(run):
    (run / "train" / "metrics.jsonl").write_bytes(b"\xff\xfe\x00" * 50)
    return "train/metrics.jsonl: the last line is cut off; 0 whole lines are used"


def break_record(run):
    (run / "run.json").write_text('{"schema": 1, "seed"')
    return "run.json cannot be read"


def break_schema(run):
    (run / "run.json").write_text('{"schema": 7}')
    return "run.json has schema 7"


def break_record_type(run):
    (run / "run.json").write_text("[]")
    return "run.json holds a list, not an object"


def break_config(run):
    (run / "config.gin").write_text("seq2seq.Seq2SeqModel.no_such = 3\n")
    return "config.gin does not assemble"


def break_config_bytes(run):
    (run / "config.gin").write_bytes(b"\xff\xfe\xfa")
    return "config.gin does not assemble"


def lose_config(run):
    (run / "config.gin").unlink()
    return "config.gin is not there"


def lose_metrics(run):
    (run / "train" / "metrics.jsonl").unlink()
    (run / "checkpoint_400").mkdir()
    return "train/metrics.jsonl is not there"


def break_scores(run):
    (run / "inference_eval" / "test_400" / "scores.json").write_text('{"step": 400}')
    return "inference_eval/test_400/scores.json is no result of an evaluation"


def break_languages(run):
    (run / "data" / "languages.json").write_text('{"languages": [{"code": "de"}]}')
    return "data/languages.json"


BREAKS = [
    break_lines,
    break_a_middle_line,
    break_bytes,
    break_record,
    break_schema,
    break_record_type,
    break_config,
    break_config_bytes,
    lose_config,
    lose_metrics,
    break_scores,
    break_languages,
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda f: f.__name__)
def test_damage_is_named_and_the_rest_reported(sweep, broken):
    whole = report.collect([sweep])
    told = broken(sweep / "l8-e4")
    found = report.collect([sweep])
    assert names(found) == ALL
    assert list(damage(found)) == ["l8-e4"] and told in damage(found)["l8-e4"]
    rows = [tables.points(one).rows for one in (whole, found)]
    kept = [0, 1, 3]
    assert [rows[0][i][:8] for i in kept] == [rows[1][i][:8] for i in kept]


def test_a_broken_sweep_file_loses_the_axes_and_no_run(sweep):
    (sweep / "sweep.json").write_text('{"schema": 1, "points": [{"name": "x"}]}')
    found = report.collect([sweep])
    assert sorted(names(found)) == sorted(ALL)
    assert damage(found)[str(sweep)].startswith("sweep.json is damaged: ")


def test_of_two_folders_the_empty_one_is_named(made, tmp_path):
    (tmp_path / "empty").mkdir()
    found = report.collect([made, tmp_path / "empty", tmp_path / "nowhere"])
    assert names(found) == ALL
    assert [each.what.split("/")[-1] for each in found.damage] == [
        "empty holds no run",
        "nowhere is no folder",
    ]


def test_a_report_of_nothing_is_an_error_with_status_2(command, tmp_path):
    (tmp_path / "empty").mkdir()
    status, out, err = command("report", tmp_path / "empty")
    assert (status, out) == (2, "")
    assert "there is nothing to report: " in err and "empty holds no run" in err
    assert not list((tmp_path / "empty").iterdir())
    (tmp_path / "empty" / "sweep.json").write_text(
        json.dumps({"schema": 1, "name": "s", "points": [made_runs.point("p", 4, 4)]})
    )
    status, _, err = command("report", tmp_path / "empty")
    assert status == 2 and "1 point" in err


def test_the_verb_writes_every_form_and_says_where(command, sweep):
    break_lines(sweep / "l8-e4")
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    status, out, err = command("report", sweep)
    assert status == 0
    assert out.splitlines()[0].split()[:4] == ["point", "layers", "experts", "status"]
    assert len(out.splitlines()) == 6 and out.splitlines()[-1].endswith("report/index.html")
    assert "warning: l8-e4: train/metrics.jsonl: the last line is cut off" in err
    folder = sweep / "report"
    content = json.loads((folder / "report.json").read_text())
    assert content["damage"][0]["where"] == "l8-e4" and content["waiting"] == ["l12-e4"]
    with (folder / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["point"] for row in rows] == [row["point"] for row in content["points"]] == ALL
    assert float(rows[0]["bleu"]) == content["points"][0]["bleu"]
    lines = (folder / "points.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| l")]) == len(ALL)
    page = (folder / "index.html").read_text()
    assert "the last line is cut off" in page and "l12-e4" in page
    assert before == {path: path.read_bytes() for path in before}  # nothing lost


def test_a_report_goes_where_it_is_sent_and_reaches_what_it_is_asked(command, made, tmp_path):
    output = tmp_path / "there"
    argv = ["report", made / "l4-e4", f"--output={output}", "--reach=6,4.2"]
    status, _, _ = command(*argv)
    assert status == 0
    rows = json.loads((output / "report.json").read_text())["tokens_to_reach"]
    assert list(rows[0]) == ["point", "6", "4.2"]
    run = report.collect([made]).runs[0]
    assert rows[0]["6"] == report.tokens_to_reach(run.curve, 6.0)
    assert not (made / "l4-e4" / "report").exists()


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--reach=3,x", "no list of numbers"),
        ("--smooth=0", "at least 1"),
        ("--baselines=nowhere.json", "no table of baselines"),
        ("--gin.TRAIN_STEPS=3", "only reads runs"),
    ],
)
def test_a_wrong_flag_is_an_error_with_status_2(command, made, tmp_path, flag, said):
    status, _, err = command("report", made, f"--output={tmp_path / 'r'}", flag)
    assert status == 2 and said in err
    assert not (tmp_path / "r").exists()
