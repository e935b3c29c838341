"""Killed at any moment and run again, a run ends as if it had never stopped."""

import subprocess
import sys
import time
from pathlib import Path

import killed_run
import pytest
import tiny_run

from gshard_exp.config import assemble
from gshard_exp.train.experiment import Experiment

pytestmark = pytest.mark.usefixtures("quick_compilation")
TIMING = "timing/"
# Steps 1 to 12, a checkpoint after each fourth. Each entry: where its processes die, in turn.
POINTS = {
    "while_a_checkpoint_is_written": ["writing 2"],
    "before_after_and_between_checkpoints": ["batch 3", "writing 1", "written 1", "batch 2"],
}


def command(model_dir: Path) -> list[str]:
    return ["train", f"--gin_file={tiny_run.TINY}", f"--gin.MODEL_DIR={model_dir}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run on random tokens that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert killed_run.run(command(folder)) == 0
    return folder


@pytest.mark.parametrize("kills", POINTS.values(), ids=POINTS)
def test_a_run_ends_as_if_it_had_not_been_killed_(kills, whole, tmp_path):
    for kill in kills:
        assert killed_run.run(command(tmp_path), kill) == killed_run.SIGKILLED
    assert killed_run.run(command(tmp_path)) == 0
    assert_same_end(tmp_path, whole)


def test_a_process_killed_from_outside_goes_on_by_the_same_command(whole, tmp_path):
    line = [sys.executable, "-m", "gshard_exp", *command(tmp_path)]
    how = {"cwd": Path(__file__).parent.parent}
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, **how) as process:
        wait_for(tmp_path / "checkpoint_4", process)
        process.kill()
    assert process.returncode == killed_run.SIGKILLED
    resumed = subprocess.run(line, capture_output=True, text=True, check=True, **how)
    assert resumed.stdout.startswith("resuming from ")
    assert_same_end(tmp_path, whole)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Flags of a corpus of three languages, whose sentences differ in length and number."""
    folder = tmp_path_factory.mktemp("text")
    words = {
        "de": ["null", "eins", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht", "neun"],
        "fr": ["rien", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"],
        "es": ["cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"],
    }
    english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    lines = []
    for language, size in (("de", 300), ("fr", 200), ("es", 60)):
        for number in range(size):
            digits = [int(digit) for digit in str(number * 7919 + 10 ** (number % 6))]
            source = " ".join(words[language][digit] for digit in digits)
            lines.append(f"{language}\t{source}\t{' '.join(english[d] for d in digits)}\n")
    (folder / "pairs.tsv").write_text("".join(lines))
    return [
        f"--gin_file={tiny_run.GIN / 'tiny_text.gin'}",
        f"--gin.TSV_PATH={folder / 'pairs.tsv'}",
        f"--gin.CACHE_DIR={folder / 'cache'}",
    ]


@pytest.fixture(scope="module")
def whole_text(text, tmp_path_factory) -> Path:
    """A run on packed, shuffled and mixed text that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole_text") / "run"
    assert killed_run.run(["train", *text, f"--gin.MODEL_DIR={folder}"]) == 0
    return folder


def test_a_run_on_packed_shuffled_and_mixed_text_ends_as_if_it_had_not_been_killed(
    text, whole_text, tmp_path
):
    line = ["train", *text, f"--gin.MODEL_DIR={tmp_path}"]
    assert killed_run.run(line, "written 1") == killed_run.SIGKILLED
    assert (tmp_path / "checkpoint_4").exists()
    # A position was restored here: this process dies with later batches read.
    assert killed_run.run(line, "writing 1") == killed_run.SIGKILLED
    assert killed_run.run(line) == 0
    assert_same_end(tmp_path, whole_text)


def assert_same_end(one: Path, other: Path) -> None:
    """Compare the last checkpoint, bit by bit, and all metrics but clock times."""
    trees = [assemble(Experiment, [str(d / "config.gin")]).tree for d in (one, other)]
    tiny_run.assert_equal(*(tiny_run.saved(tree, 12) for tree in trees))
    metrics = [
        [{k: v for k, v in r.items() if not k.startswith(TIMING)} for r in tiny_run.records(d)]
        for d in (one, other)
    ]
    assert [record["step"] for record in metrics[0]] == list(range(1, 13))
    assert metrics[0] == metrics[1]
    positions = [
        sorted((p.name, p.read_text()) for p in (d / "checkpoint_12" / "data").glob("*.json"))
        for d in (one, other)
    ]
    assert positions[0] == positions[1]


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Wait until a file appears; a process that ended first is an error."""
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path.name} appeared"
        time.sleep(0.001)
