"""The picture of an experiment: what stands in it, and that no two boxes cross."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from gshard_exp import cli
from gshard_exp.config.graph import graph
from gshard_exp.config.reading import read_subject
from gshard_exp.config.validate import complete_experiments

SVG = "{http://www.w3.org/2000/svg}"
LARGE = "gin/paper/moe_2048e_36l.gin"


def drawn(name):
    return ElementTree.fromstring(graph(read_subject(name)))


def words(picture):
    return [text.text for text in picture.iter(f"{SVG}text")]


def boxes(picture):
    """List (left, top, right, bottom) of every rectangle but the ground."""
    places = [
        [float(rect.get(key)) for key in ("x", "y", "width", "height")]
        for rect in picture.iter(f"{SVG}rect")
        if rect.get("x")
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in places]


def beside(one, other):
    apart = [one[i + 2] <= other[i] or other[i + 2] <= one[i] for i in (0, 1)]
    return any(apart)


def within(inner, outer):
    starts, ends = ((0, 1), (2, 3))
    return all(inner[i] >= outer[i] for i in starts) and all(inner[i] <= outer[i] for i in ends)


@pytest.mark.parametrize("name", complete_experiments())
def test_a_box_lies_within_another_or_beside_it(name):
    found = boxes(drawn(name))
    assert len(found) > 10
    for one, other in itertools.combinations(found, 2):
        assert beside(one, other) or within(one, other) or within(other, one)


@pytest.mark.parametrize("name", [LARGE, "experiments/quickstart/quickstart.gin"])
def test_every_line_of_text_lies_within_the_picture(name):
    """The letters of a monospaced font of size 12 are 7.2 wide."""
    picture = drawn(name)
    for text in picture.iter(f"{SVG}text"):
        assert float(text.get("x")) + 7.2 * len(text.text) <= float(picture.get("width"))
        assert 0 < float(text.get("y")) <= float(picture.get("height"))


def test_it_shows_models_stacks_blocks_and_parts_with_their_parameters():
    """W of an attention: 4 x 1024 x 16 x 128, 9 times; of an expert: 2 x 1024 x 8192."""
    said = words(drawn(LARGE))
    assert said[0] == f"Experiment  {LARGE}"
    titles = ("model: Seq2SeqModel", "module: Transformer", "encoder: Stack", "decoder: Stack")
    assert set(titles) <= set(said)
    assert {"pattern[0]: EncoderBlock", "pattern[1]: DecoderBlock", "ffn: MoeLayer"} <= set(said)
    assert {"data: SeqioData", "optimizer: Adafactor", "rules: Rules"} <= set(said)
    assert f"{9 * 4 * 1024 * 16 * 128:,} parameters" in said
    experts = 9 * 2048 * 2 * 1024 * 8192
    router = 9 * 1024 * 2048
    assert f"{experts + router:,} parameters" in said
    assert f"{9 * 2 * 2 * 1024 * 8192 + router:,} used by a token" in said
    assert said.count("9 x its pattern") == 2


def test_it_shows_what_is_no_default_and_leaves_the_rest_out():
    said = words(drawn(f"{LARGE},gin/moe/lingvo.gin"))
    assert "num_experts = 2048" in said and "second_choice = 'all'" in said
    assert not [line for line in said if line.startswith(("router_jitter", "second_threshold"))]


def test_rules_are_grouped_by_mesh_axis():
    said = words(drawn(LARGE))
    assert [line for line in said if line.strip() == "batch, group -> ('data', 'expert')"]


def test_what_was_drawn_before_is_named():
    assert words(drawn(LARGE)).count("tasks = as data.tasks") == 2


def test_text_that_means_something_in_svg_is_escaped(tmp_path):
    (tmp_path / "odd.gin").write_text('MODEL_DIR = "<a & b>"\n')
    assert "model_dir = '<a & b>'" in words(drawn(f"{LARGE},{tmp_path / 'odd.gin'}"))


def test_it_goes_to_a_file_or_to_the_output(tmp_path, capsys):
    file = tmp_path / "picture.svg"
    assert cli.main(["show", f"--gin_file={LARGE}", f"--graph={file}"]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert cli.main(["show", "--fdl_config=moe_2048e_36l", "--graph"]) == 0
    by_fiddle = capsys.readouterr().out
    assert re.sub("fdl:moe_2048e_36l", LARGE, by_fiddle) == file.read_text()
