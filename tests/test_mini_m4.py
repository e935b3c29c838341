"""The table of the mini-M4 experiment's claims, from folders of runs."""

import json
import runpy
import sys
from pathlib import Path

import made_runs
import pytest

FOLDER = Path(__file__).parent.parent / "experiments" / "mini_m4"


@pytest.fixture
def table(monkeypatch, capsys):
    """Run the script; return its rows as lists of cells, the heads first."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["claims.py", *map(str, arguments)])
        runpy.run_path(str(FOLDER / "claims.py"), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    return run


def test_a_row_has_the_losses_and_scores_of_its_run(table, tmp_path):
    run = made_runs.make_run(tmp_path / "l4-e4")
    (file,) = run.glob("inference_eval/*/scores.json")
    scores = json.loads(file.read_text())
    scores["averages"]["high"] = {"bleu": 27.0}
    file.write_text(json.dumps(scores | {"teacher_forced": {"cross_ent_loss": 3.25}}))
    heads, _, cells = table(tmp_path)
    row = dict(zip(heads, cells, strict=True))
    assert row["point"] == "l4-e4"
    steps = range(370, made_runs.STEPS + 1, made_runs.EVERY)  # the last tenth
    last = [made_runs.law(step * made_runs.TOKENS_PER_STEP, made_runs.ACTIVE[4]) for step in steps]
    assert float(row["training loss"]) == pytest.approx(sum(last) / len(last), rel=0.005)
    assert float(row["held-out"]) == pytest.approx(last[-1] + 0.1, abs=5e-4)
    assert row["held-out low"] == "-"  # not in these runs
    assert row["test"] == "3.250"
    assert float(row["BLEU"]) == pytest.approx(scores["averages"]["macro"]["bleu"], abs=0.051)
    assert (row["BLEU high"], row["BLEU middle"]) == ("27.0", "-")


def test_the_readme_has_the_committed_table():
    claims = (FOLDER / "results" / "claims.md").read_text()
    assert len(claims.splitlines()) == 2 + 16
    assert claims in (FOLDER / "README.md").read_text()
