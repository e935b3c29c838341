"""`gshard-exp audit`: presets against Algorithm 1, as table and JSON."""

import json

import pytest

from gshard_exp import cli
from gshard_exp.config import routing

BATCHES = ("random", "skewed", "crowded", "sure", "equal")


def test_all_presets_are_compared_in_table_and_json(tmp_path, capsys):
    file = tmp_path / "audit.json"
    assert cli.main(["audit", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    assert report["num_experts"] == routing.EXPERTS
    rows = {(row["batch"], row["gating"]): row for row in report["rows"]}
    names = [gating for batch, gating in rows if batch == "random"]
    assert {name.split(",")[0] for name in names} == set(routing.preset_names())
    assert names[0] == "gshard" and "flaxformer, encoder" in names and "lingvo" in names
    assert len(rows) == len(names) * len(BATCHES)
    for batch in BATCHES:
        paper, lingvo, dropless = (rows[batch, n] for n in ("gshard", "lingvo", "dropless"))
        assert not any(paper[k] for k in ("routed_differently", "lost", "weighed_differently"))
        assert lingvo["lost"] == 0 and rows[batch, "praxis"] | {"gating": "lingvo"} == lingvo
        assert dropless["capacity"] is None
        assert dropless["overflowed"] == dropless["left_behind"] == 0
    assert rows["random", "lingvo"]["gained"] > 50  # nothing is rejected at random
    assert rows["crowded", "switch"]["left_behind"] > 400  # of 512: one expert for all

    out = capsys.readouterr().out
    table = dict.fromkeys(line.split("  ")[0].strip() for line in out.splitlines())
    assert all(name in table for name in names)
    assert max(map(len, out.splitlines())) <= 90
    row = rows["random", "switch"]
    numbers = next(line for line in out.splitlines() if line.startswith("switch")).split()[1:]
    assert numbers[0] == str(row["capacity"]) and numbers[1] == str(row["routed_differently"])
    assert numbers[-1] == f"{row['auxiliary_loss']:.3f}"


def test_one_preset_with_a_setting_of_ones_own_and_a_file_of_ones_own(tmp_path, capsys):
    file = tmp_path / "mine.gin"
    text = (routing.shipped_root() / "gin/moe/gshard.gin").read_text()
    file.write_text(text + 'gating.Top2Gating.second_choice = "all"\n')
    assert cli.main(["audit", "--preset=gshard", f"--preset={file}"]) == 0
    out = capsys.readouterr().out
    paper, mine = (
        next(line for line in out.splitlines() if line.startswith(name)).split()
        for name in ("gshard", str(file))
    )
    assert paper[2] == "0" and int(mine[2]) > 50
    json_file = tmp_path / "out.json"
    flags = ["--preset=lingvo", f"--json={json_file}", "--gin.gating.Top2Gating.min_capacity=64"]
    assert cli.main(["audit", *flags]) == 0
    rows = json.loads(json_file.read_text())["rows"]
    assert {row["gating"] for row in rows} == {"lingvo"} and rows[0]["capacity"] == 64


@pytest.mark.parametrize("flag", ["--preset=gshart", "--preset=gin/moe/gshart.gin"])
def test_an_unknown_preset_is_answered_with_the_nearest(flag, capsys):
    assert cli.main(["audit", flag]) == 2
    error = capsys.readouterr().err
    assert "gshart" in error and "gshard" in error.split("try:")[1]
