"""What a report says of runs that are not what they seem, or do not compare."""

import json
from pathlib import Path

import made_runs
import pytest

from gshard_exp.score.quality import Baselines
from gshard_exp.sweep import report, tables


@pytest.fixture
def sweep(tmp_path):
    return made_runs.make_sweep(tmp_path / "sweep")


def test_runs_of_no_point_of_a_sweep_are_named(sweep):
    """As after a value was taken out of an axis."""
    content = json.loads((sweep / "sweep.json").read_text())
    content["points"] = [point for point in content["points"] if point["name"] != "l8-e16"]
    (sweep / "sweep.json").write_text(json.dumps(content))
    (note,) = report.collect([sweep]).notes
    assert "holds runs of no point of the sweep as it is now: l8-e16 (" in note.replace("also ", "")


def test_a_folder_that_may_not_be_read_is_named_and_the_rest_reported(sweep, monkeypatch):
    (sweep.parent / "private").mkdir()
    listed = Path.iterdir

    def iterdir(folder):
        if folder.name == "private":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    found = report.collect([sweep.parent])
    assert len(found.runs) == 4
    assert [each.what.split("/")[-1] for each in found.damage] == [
        "private cannot be read: Permission denied"
    ]


def test_a_run_that_was_killed_after_its_last_step_is_not_done(sweep):
    """In its last evaluation, say: `sweep status` calls it interrupted."""
    place = sweep / "l4-e4" / "run.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"finished": False}))
    assert report.collect([sweep]).runs[0].status == "step 400 of 400"


def test_scores_of_a_part_and_of_all_sentences_are_said_not_to_compare(sweep):
    place = sweep / "l4-e4" / "inference_eval" / "test_400" / "scores.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"max_examples": 20}))
    (note,) = report.collect([sweep]).notes
    assert "not measured alike" in note
    assert "l4-e4: test, beam of 4, 20 sentences of a language" in note


def test_a_group_without_a_baseline_has_no_delta_of_older_baselines(sweep):
    place = sweep / "l4-e4" / "inference_eval" / "test_400" / "scores.json"
    content = json.loads(place.read_text())
    content["averages"]["low"] = {"bleu": 20.0, "delta_bleu": 99.0}
    place.write_text(json.dumps(content))
    signature = content["metrics"]["bleu"]
    baselines = Baselines("other.json", "bleu", signature, "test", {"l00": 1.0})
    scores = report.collect([sweep], baselines=baselines).runs[0].scores
    assert scores.average("delta_bleu", "low") is None
    assert scores.average("delta_bleu") == scores.languages["l00"]["bleu"] - 1.0


def test_an_axis_that_is_called_as_a_column_has_one_column(sweep):
    content = json.loads((sweep / "sweep.json").read_text())
    for number, point in enumerate(content["points"]):
        point["axes"]["seed"] = number
    (sweep / "sweep.json").write_text(json.dumps(content))
    heads = tables.points(report.collect([sweep])).heads
    assert list(heads).count("seed") == 1
