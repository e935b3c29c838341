"""Looking at experiments without running them: show, diff, check and components."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

from gshard_exp import cli
from gshard_exp.config import components, find_gin_files, reading, shipped_root
from gshard_exp.config.diff import differences
from gshard_exp.config.flatten import flatten
from gshard_exp.config.validate import complete_experiments
from gshard_exp.moe import gating

REPO = Path(__file__).parent.parent
TINY = tiny_run.TINY
SMALL, LARGE = "gin/paper/moe_128e_12l.gin", "gin/paper/moe_2048e_36l.gin"
DENSE = "gin/paper/dense_96l.gin"
TINY_TOTAL, TINY_ACTIVE = 17_824, 13_728  # by hand, see below


@pytest.fixture
def output(command):
    """Call the command line, which has to succeed; return its output."""

    def run(*argv):
        status, out, err = command(*argv)
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def refusal(command):
    """Call the command line with a mistake in it; return the one error."""

    def run(*argv):
        status, out, err = command(*argv)
        assert (status, out) == (2, "")
        assert err.startswith("error: ") and err.count("error: ") == 1
        assert "Traceback" not in err
        return err

    return run


# show


def test_show_has_one_line_for_each_leaf(output):
    lines = output("show", f"--gin_file={TINY}").splitlines()
    shown = [line.split(" = ")[0] for line in lines]
    leaves = flatten(reading.read_subject(TINY).assembled.tree)
    assert len(set(shown)) == len(shown)
    assert set(leaves) <= set(shown)


def test_show_says_who_set_a_value(output):
    out = output("show", f"--gin_file={SMALL}", "--gin.RANDOM_SEED=7", "--gin.MODEL_DIR=x")
    line = next(n for n, text in enumerate(_text(SMALL), 1) if text == "NUM_EXPERTS = 128")
    experts = f"model.module.encoder.pattern[1].ffn.num_experts = 128  # {SMALL}:{line}"
    assert experts in out.splitlines()
    assert "\nseed = 7  # command line: --gin.RANDOM_SEED=7\n" in out


def test_show_says_what_is_a_default(output):
    out = output("show", f"--gin_file={SMALL}")
    assert ".ffn.gating.min_capacity = 1  # default\n" in out


def test_show_names_the_class_of_each_object(output):
    out = output("show", f"--gin_file={SMALL}", "--gin_file=gin/moe/switch.gin")
    assert re.search(r"\.ffn\.gating = @gating\.Top1Gating\(\)  # gin/moe/switch\.gin:\d+\n", out)


def test_show_fills_a_required_place_and_says_so(output):
    out = output("show", f"--gin_file={SMALL}")
    assert re.search(r"^model_dir = '<MODEL_DIR>'  # gin/runs/pretrain\.gin:\d+$", out, re.M)
    assert "# placeholders for what a run has to set: MODEL_DIR='<MODEL_DIR>'" in out
    assert "placeholder" not in output("show", f"--gin_file={SMALL}", "--gin.MODEL_DIR=x")


def test_show_params_tabulates_path_axes_and_counts(output):
    lines = output("show", f"--gin_file={TINY}", "--params").splitlines()
    row = next(n for n, line in enumerate(lines) if line.endswith("encoder/pattern_1/ffn/wi"))
    assert lines[row].split() == ["2,048", "1,024", "encoder/pattern_1/ffn/wi"]
    assert lines[row + 1].strip() == "layers=1, expert=4, embed=16, expert_mlp=32"
    assert lines[-1].split()[:2] == [f"{TINY_TOTAL:,}", f"{TINY_ACTIVE:,}"]


def test_the_table_of_parameters_fits_80_columns(output):
    out = output("show", f"--gin_file={LARGE}", "--params")
    table = out[out.index("parameters  ") :].splitlines()
    assert max(map(len, table)) <= 80


def test_show_lists_no_address(output):
    for name in complete_experiments():
        assert " at 0x" not in output("show", f"--gin_file={name}")


# diff


def test_diff_lists_what_differs_with_both_values_and_who_set_them(output, tmp_path):
    other = tmp_path / "other.gin"
    other.write_text("GROUP_SIZE = 32\n")
    out = output("diff", TINY, f"{TINY},{other}")
    path = "model.module.encoder.pattern[1].ffn.group_size"
    line = _text(TINY).index("GROUP_SIZE = 16") + 1
    assert f"\n{path}\n  A 16  # {TINY}:{line}\n  B 32  # {other}:1\n" in out
    assert "\n2 settings differ\n" in out  # encoder and decoder


def test_diff_gives_the_difference_in_total_and_active_parameters(output):
    out = output("diff", TINY, f"{TINY},gin/moe/switch.gin")
    rows = {line.split("  ")[0]: line.split()[-3:] for line in out.splitlines()}
    assert rows["total"] == ["17,824", "17,824", "+0"]
    assert rows["active a token"] == ["13,728", "11,680", "-2,048"]


def test_diff_of_two_classes_with_equal_fields_names_the_classes(output):
    out = output("diff", TINY, f"{TINY},gin/moe/switch.gin")
    assert re.search(r"ffn\.gating\n  A @gating\.Top2Gating\(\).*\n  B @gating\.Top1Gating", out)


def test_diff_tells_two_classes_of_one_name_apart(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "gating.py").write_text(
        "import dataclasses\n"
        "from gshard_exp.moe import gating\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Top2Gating(gating.Top2Gating):\n"
        "    pass\n"
    )
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from mine import gating\n"
        "GATING = @gating.Top2Gating()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    a, b = (reading.read_subject(name) for name in (TINY, f"{TINY},{tmp_path / 'mine.gin'}"))
    found = [d for d in differences(a.assembled, b.assembled) if d.path.endswith(".gating")]
    assert [(d.a.value, d.b.value) for d in found] == [
        ("@gshard_exp.moe.gating.Top2Gating", "@mine.gating.Top2Gating")
    ] * 2


def test_diff_says_what_only_one_side_has(output):
    out = output("diff", SMALL, DENSE)
    assert re.search(r"encoder\.pattern\[1\]\n  A @transformer.*\n  B \(nothing here\)\n", out)


def test_diff_of_an_experiment_with_itself_is_empty(output):
    out = output("diff", SMALL, SMALL)
    assert "no settings differ" in out
    assert "+0" in out


def test_diff_takes_the_folder_of_a_run(output, tmp_path):
    config = output("train", f"--gin_file={TINY}", "--gin.MODEL_DIR=x", "--dry_run")
    config = config[: config.index("Variable ")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.gin").write_text(config)
    out = output("diff", tmp_path / "run", TINY)
    assert f"A: {tmp_path / 'run'}" in out
    assert "\nmodel_dir\n  A 'x'" in out
    assert "\n1 setting differs\n" in out


# check


def test_check_finds_all_shipped_experiments_valid(output):
    out = output("check")
    shipped = [path.relative_to(shipped_root()) for path in find_gin_files()]
    # Parts and sweeps of an experiment lie in folders below its own.
    complete = [
        str(path)
        for path in shipped
        if (path.parts[0] == "experiments" and len(path.parts) == 3) or path.parts[1] == "paper"
    ]
    assert sorted(re.findall(r"^ok +(\S+)$", out, re.M)) == sorted(complete)
    assert f"\n{len(complete)} checked, 0 failed\n" in out
    assert "placeholders for what a run has to set: MODEL_DIR='<MODEL_DIR>'" in out


def test_check_reports_every_failure_with_its_whole_message(command, tmp_path):
    first, second = tmp_path / "first.gin", tmp_path / "second.gin"
    first.write_text(f"include '{TINY}'\nNUM_EXPRETS = 8\n")
    second.write_text(f"include '{TINY}'\nNUM_EXPERTS = 8.5\n")
    status, out, err = command("check", first, TINY, second)
    assert (status, err) == (2, "")
    assert f"FAILED  {first}\n        NUM_EXPRETS is set, but nothing reads it." in out
    assert f"        {'  set at'}: {first}:2\n" in out
    assert "try: for NUM_EXPRETS: NUM_EXPERTS" in out
    assert f"ok      {TINY}\n" in out
    assert f"FAILED  {second}\n" in out and "num_experts is 8.5, of type float" in out
    assert "\n3 checked, 2 failed\n" in out


def test_check_refuses_a_batch_that_does_not_divide_over_a_mesh_that_is_not_there(command):
    status, out, _ = command("check", LARGE, "--gin.BATCH_SIZE=1000")
    assert status == 2
    assert "batch_size=1000 makes 1000 rows at once, which do not divide over the 2048" in out
    assert "set at: command line: --gin.BATCH_SIZE=1000" in out


def test_check_refuses_experts_that_do_not_divide_over_the_mesh(command):
    flags = ("--gin.NUM_EXPERTS=2047", "--gin.TRAIN_STEPS=1")
    status, out, _ = command("check", LARGE, *flags)
    assert status == 2
    assert "encoder/pattern_1/ffn/w" in out or "decoder/pattern_1/ffn/w" in out
    assert "size 2047 on 'expert', which the mesh splits into 2048" in out


def test_check_takes_a_mesh_axis_that_is_whatever_is_there_for_1(command):
    assert command("check", TINY, "--gin.DATA_PARTITIONS=-1", "--gin.BATCH_SIZE=3")[0] == 0
    assert command("check", TINY, "--gin.DATA_PARTITIONS=2", "--gin.BATCH_SIZE=3")[0] == 2


def test_check_does_not_choose_sizes(command):
    status, out, _ = command("check", tiny_run.GIN / "without_steps.gin")
    assert status == 2
    assert "TRAIN_STEPS has no value yet." in out


def test_check_writes_nothing(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output("check", f"gin/tasks/m4.gin,{tiny_run.GIN / 'tiny_text.gin'}")
    assert list(tmp_path.iterdir()) == []


# components


def test_components_lists_what_gin_files_build():
    listed = {c.path for kind in components.KINDS for c in components.components(kind)}
    assert {
        "gshard_exp.moe.gating.Top2Gating",
        "gshard_exp.moe.gating.Top1Gating",
        "gshard_exp.moe.noisy.NoisyTopKGating",
        "gshard_exp.moe.expert_choice.ExpertChoiceGating",
        "gshard_exp.moe.biased.BiasedTopKGating",
        "gshard_exp.moe.dispatch.EinsumDispatch",
        "gshard_exp.moe.dispatch.ScatterDispatch",
        "gshard_exp.moe.gather.GatherDispatch",
        "gshard_exp.moe.ragged.RaggedDispatch",
        "gshard_exp.moe.layer.MoeLayer",
        "gshard_exp.model.transformer.Transformer",
        "gshard_exp.train.optimizer.Adafactor",
        "gshard_exp.train.optimizer.SqrtDecay",
        "gshard_exp.data.batches.SeqioData",
        "gshard_exp.data.sources.Tsv",
        "gshard_exp.data.packages.GettextPackage",
        "gshard_exp.score.evaluate.LossByLanguage",
        "gshard_exp.score.in_training.TranslationQuality",
        "gshard_exp.score.beam.BeamSearch",
        "gshard_exp.score.flat_beam.FlatBeamSearch",
        "gshard_exp.score.bleu.Bleu",
    } <= listed


@pytest.mark.parametrize("kind", components.KINDS, ids=[k.title for k in components.KINDS])
def test_every_component_says_what_it_is(kind):
    members = components.components(kind)
    assert members
    assert all(member.summary for member in members)


def test_a_new_gating_function_is_listed_without_being_named_anywhere(monkeypatch, output):
    @dataclasses.dataclass(frozen=True)
    class NewGating(gating.Top1Gating):
        """Route by the weather."""

        rain: float = 0.5

    NewGating.__module__, NewGating.__qualname__ = gating.__name__, "NewGating"
    monkeypatch.setattr(gating, "NewGating", NewGating, raising=False)
    out = output("components")
    signature = out.split("NewGating(")[1].split(")")[0]
    assert "min_capacity: int = 1" in signature and "rain: float = 0.5" in signature
    assert "Route by the weather." in out


def test_components_fits_80_columns_and_shows_defaults(output):
    out = output("components")
    assert max(map(len, out.splitlines())) <= 80
    assert "      dispatch: Dispatch = @dispatch.EinsumDispatch(),\n" in out
    assert "Route each token to its best expert" in out


# Mistakes and cost.


@pytest.mark.parametrize("verb", [["show"], ["diff", TINY]], ids=["show", "diff"])
def test_a_file_that_does_not_exist_is_answered_with_the_nearest(refusal, verb):
    name = "gin/models/tyni.gin"
    message = refusal(*verb, f"--gin_file={name}" if verb == ["show"] else name)
    assert f"There is no gin file '{name}'." in message
    assert "gin/models/tiny.gin" in message.split("try:")[1]


@pytest.mark.parametrize("verb", ["show", "diff"])
def test_a_folder_that_holds_no_run_is_refused(refusal, tmp_path, verb):
    argv = [f"--gin_file={tmp_path}"] if verb == "show" else [tmp_path, TINY]
    message = refusal(verb, *argv)
    assert f"The folder '{tmp_path}' holds no config.gin." in message


def test_check_goes_on_after_a_file_that_does_not_exist(command, tmp_path):
    status, out, err = command("check", "none.gin", tmp_path, TINY)
    assert (status, err) == (2, "")
    assert "There is no gin file 'none.gin'." in out
    assert "set at: command line: none.gin\n" in out
    assert "holds no config.gin" in out
    assert "\n3 checked, 2 failed\n" in out


def test_a_file_that_is_no_text_is_refused(refusal, tmp_path):
    (tmp_path / "binary.gin").write_bytes(b"\xff\xfe\x00")
    assert "binary.gin' is no text" in refusal("show", f"--gin_file={tmp_path / 'binary.gin'}")


VERBS = {
    "show": ["show", f"--gin_file={LARGE}", "--params"],
    "diff": ["diff", SMALL, LARGE],
    "check": ["check"],
    "components": ["components"],
    "fiddle": ["show", "--fdl_config=moe_2048e_60l", "--as=gin"],
    "code": ["show", f"--gin_file={LARGE}", "--as=fiddle"],
    "graph": ["show", f"--gin_file={LARGE}", "--graph"],
    "trace": ["check", "--trace", TINY],
}


@pytest.mark.parametrize("argv", VERBS.values(), ids=VERBS)
def test_it_loads_no_data_package_and_starts_no_device(argv):
    code = f"""
import sys
from gshard_exp.cli import main
assert main({argv}) == 0
loaded = {{"tensorflow", "seqio", "sentencepiece", "sacrebleu"}} & set(sys.modules)
assert not loaded, loaded
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device was started"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_stops_reading_gets_no_traceback():
    command = f"{sys.executable} -m gshard_exp show --gin_file={SMALL} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=REPO)
    assert done.stdout.startswith("model_dir = ")
    assert done.stderr == ""


def test_help_lists_the_verbs(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert {"show", "diff", "check", "components"} <= set(capsys.readouterr().out.split())


def _text(name):
    return (shipped_root() / name).read_text().splitlines()
