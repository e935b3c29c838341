"""The command line: exit statuses, and what is said of a wrong setting and not written then."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run

from gshard_exp import cli
from gshard_exp.data.batches import RandomBatches
from gshard_exp.train import loop

pytestmark = pytest.mark.usefixtures("quick_compilation")
SPREAD = ("--gin.DATA_PARTITIONS=2", "--gin.NUM_EXPERT_PARTITIONS=2")


@pytest.fixture
def command(command, tmp_path):
    """Call the command line on `tiny.gin`; return its exit status, output and error output."""

    def run(*arguments, verb="train", gin_file=tiny_run.TINY):
        flags = (f"--gin_file={gin_file}", f"--gin.MODEL_DIR={tmp_path / 'run'}")
        return command(verb, *flags, *arguments)

    return run


@pytest.fixture
def complaint(command, tmp_path):
    """Call the command line with a mistake in it; return what it complains of."""

    def run(*arguments, **how):
        status, out, err = command(*arguments, **how)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert not (tmp_path / "run").exists()
        return err

    return run


def test_a_dry_run_prints_settings_and_parameters_and_writes_nothing(command, tmp_path):
    status, out, err = command("--dry_run")
    assert (status, err) == (0, "")
    assert "EMBED_DIM = 16" in out
    assert "Variable encoder/pattern_1/ffn/wi" in out
    assert "Total number of parameters: " in out
    assert list(tmp_path.iterdir()) == []


def test_a_run_ends_with_status_0_and_says_where_its_outputs_lie(command, tmp_path):
    flags = [f"--gin.{binding}" for binding in tiny_run.SMALL]
    status, out, _ = command(*flags, "--gin.TRAIN_STEPS=2")
    assert status == 0
    assert out.splitlines()[-1] == f"outputs: {tmp_path / 'run'}"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.gin",
        "model-info.txt",
        "run.json",
        "checkpoint_2",
        "train",
    }


def test_a_loss_that_is_not_finite_ends_with_status_1_and_a_message(command):
    """A step of 1e36 in every parameter is too large for what comes next."""
    flags = [f"--gin.{binding}" for binding in tiny_run.SMALL]
    status, _, err = command(*flags, "--gin.optimizer.SqrtDecay.learning_rate=1e38")
    assert status == 1
    assert re.match(r"error: loss \S+ \(gradient norm \S+\) at step \d+ is not finite", err)
    assert "Try a lower learning rate" in err
    assert "Traceback" not in err


def test_a_run_that_is_asked_to_stop_ends_with_status_130(command, tmp_path, monkeypatch):
    draw = RandomBatches.__next__

    def draw_and_signal(self):
        signal.raise_signal(signal.SIGINT)
        return draw(self)

    monkeypatch.setattr(RandomBatches, "__next__", draw_and_signal)
    status, _, err = command(*[f"--gin.{binding}" for binding in tiny_run.SMALL])
    assert status == 130
    assert err == "stopped at step 1; the same command goes on\n"
    assert tiny_run.checkpoints(tmp_path / "run") == ["checkpoint_1"]


def test_a_misspelt_macro_is_answered_with_the_nearest_names(complaint):
    message = complaint("--gin.NUM_EXPRETS=8")
    assert "NUM_EXPRETS is set, but nothing reads it." in message
    assert "set at: command line: --gin.NUM_EXPRETS=8" in message
    assert "try: for NUM_EXPRETS: NUM_EXPERTS" in message


@pytest.mark.parametrize(
    "binding",
    [
        "TRAIN_EXPERT_CAPACITY_FACTOR=0.0",
        "DROPOUT_RATE=1.0",
        "LABEL_SMOOTHING=7.0",
        "SCAN_UNROLL=0",
        "NUM_HEADS=0",
        "NUM_EXPERTS=0",
        "GROUP_SIZE=0",
        "ACTIVATION_DTYPE=bf16",
        "REMAT_POLICY=some",
        "CHECKPOINT_PERIOD=0",
        "MODEL_DIR=gs://bucket/run",
        "optimizer.SqrtDecay.constant_steps=0",
    ],
)
def test_a_value_without_meaning_is_answered_with_who_set_it(complaint, binding):
    message = complaint(f"--gin.{binding}")
    assert f"set at: command line: --gin.{binding}" in message
    assert binding.split("=")[1] in message.splitlines()[0]


def test_a_misspelt_parameter_is_answered_with_the_nearest_names(complaint):
    message = complaint("--gin.experiment.Experiment.train_step=3")
    assert "no parameter 'train_step'" in message
    assert "train_steps" in message.split("try:")[1]


def test_a_required_macro_that_is_missing_is_named_with_its_file_and_line(complaint):
    message = complaint(gin_file=tiny_run.GIN / "without_steps.gin")
    assert "TRAIN_STEPS has no value yet." in message
    assert re.search(r"set at: gin/runs/pretrain\.gin:\d+", message)
    assert "--gin.TRAIN_STEPS=VALUE" in message


def test_a_value_of_the_wrong_type_is_refused_where_it_was_set(complaint):
    message = complaint("--gin.NUM_EXPERTS=8.5")
    assert "num_experts is 8.5, of type float. It must be of type int." in message
    assert "command line: --gin.NUM_EXPERTS=8.5" in message


def test_a_batch_that_does_not_divide_over_the_mesh_is_refused_with_one_that_does(complaint):
    message = complaint(*SPREAD, "--gin.BATCH_SIZE=6")
    assert "batch_size=6" in message and "4 mesh partitions" in message
    assert "command line: --gin.BATCH_SIZE=6" in message
    assert "try: Set batch_size to a multiple of 4." in message


def test_groups_that_do_not_divide_over_the_mesh_are_refused_with_sizes_that_do(complaint):
    message = complaint(*SPREAD, "--gin.GROUP_SIZE=24")
    # 64 tokens make 3 groups of 24, over 4 partitions.
    assert "group_size=24: the 64 tokens of a batch" in message
    assert "make 3 groups" in message
    assert "command line: --gin.GROUP_SIZE=24" in message
    assert "try: Set it to 4, 8, 16." in message


def test_a_contradiction_in_a_file_is_answered_with_file_and_line(complaint, tmp_path):
    wrong = tmp_path / "wrong.gin"
    wrong.write_text(f"include '{tiny_run.TINY}'\nGROUP_SIZE = 24\n")
    assert f"{wrong}:2" in complaint(*SPREAD, gin_file=wrong)


def test_heads_that_do_not_divide_over_the_mesh_are_refused_by_the_parameter_s_name(complaint):
    message = complaint("--gin.NUM_MODEL_PARTITIONS=4")
    assert re.search(r"params/|attention/(key|out|query|value)", message)
    assert "size 2 on 'heads', which the mesh splits into 4" in message
    assert re.search(r"set at: gin/sharding/expert_parallel\.gin:\d+ \(rules\.table\)", message)


def test_experts_that_do_not_divide_over_the_mesh_are_refused(complaint):
    message = complaint("--gin.NUM_EXPERTS=6", "--gin.NUM_EXPERT_PARTITIONS=4")
    assert "size 6 on 'expert', which the mesh splits into 4" in message


def test_more_devices_than_there_are_are_refused(complaint):
    message = complaint("--gin.DATA_PARTITIONS=16")
    assert "needs 16 devices and there are 8" in message
    assert "command line: --gin.DATA_PARTITIONS=16" in message


def test_layers_that_the_pattern_does_not_divide_are_refused(complaint):
    message = complaint("--gin.NUM_ENCODER_LAYERS=3")
    assert "num_layers=3 is not a positive multiple of the 2 blocks" in message
    assert "command line: --gin.NUM_ENCODER_LAYERS=3" in message


def test_a_gin_file_that_does_not_exist_is_answered_with_the_nearest(complaint):
    message = complaint(gin_file="gin/models/tyni.gin")
    assert "There is no gin file 'gin/models/tyni.gin'." in message
    assert "gin/models/tiny.gin" in message.split("try:")[1]


def test_debug_shows_the_traceback(command):
    with pytest.raises(ValueError, match="NUM_EXPRETS"):
        command("--gin.NUM_EXPRETS=8", "--debug")


@pytest.mark.parametrize("argv", [["trian", "--gin_file=x"], ["train"], []])
def test_a_wrong_verb_or_no_gin_file_ends_with_status_2_and_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: gshard-exp" in capsys.readouterr().err


def test_a_mistake_in_code_is_not_dressed_up_as_a_wrong_setting(command, monkeypatch):
    def broken(*arguments, **named):
        raise TypeError("a mistake in code")

    monkeypatch.setattr(loop, "train", broken)
    with pytest.raises(TypeError, match="a mistake in code"):
        command()


def test_flags_win_over_files_and_later_files_over_earlier_ones(command, tmp_path):
    later = tmp_path / "later.gin"
    later.write_text("EMBED_DIM = 32\nMLP_DIM = 64\n")
    status, out, _ = command(f"--gin_file={later}", "--gin.EMBED_DIM=48", "--dry_run")
    assert status == 0
    assert re.search(r"^EMBED_DIM = 48 +# command line", out, re.M)
    assert re.search(rf"^MLP_DIM = 64 +# {re.escape(str(later))}:2", out, re.M)
    assert "embed=48, mlp=64" in out


def test_gin_files_are_found_in_the_search_paths(command, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "wide.gin").write_text("EMBED_DIM = 32\n")
    paths = f"--gin_search_paths={tmp_path / 'other'},{tmp_path / 'mine'}"
    status, out, _ = command("--gin_file=wide.gin", paths, "--dry_run")
    assert status == 0
    assert "EMBED_DIM = 32" in out


def test_the_shipped_files_are_found_from_any_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("--dry_run")[0] == 0


def test_a_fresh_process_simulates_the_devices_of_its_mesh_and_gets_the_same_loss(tmp_path):
    def losses(name, *flags):
        small = [f"--gin.{binding}" for binding in tiny_run.SMALL]
        folder = tmp_path / name
        line = [sys.executable, "-m", "gshard_exp", "train", f"--gin_file={tiny_run.TINY}"]
        line += [f"--gin.MODEL_DIR={folder}", "--gin.TRAIN_STEPS=2", *small, *flags]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tiny_run.GIN.parent.parent)
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in tiny_run.records_of(folder / "train")]

    mesh = ("DATA_PARTITIONS", "NUM_EXPERT_PARTITIONS", "NUM_MODEL_PARTITIONS")
    on_eight = losses("eight", *[f"--gin.{axis}=2" for axis in mesh])
    assert on_eight == pytest.approx(losses("one"), rel=1e-5)


def test_help_of_the_module_is_quick_and_lists_the_verbs():
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "gshard_exp", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert time.perf_counter() - began < 3
    assert {"train", "corpus", "tasks"} <= set(done.stdout.split())
