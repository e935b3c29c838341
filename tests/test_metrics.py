"""What a run writes: names, JSON lines, TensorBoard, the console and config.gin."""

import json
import re

import numpy as np
import pytest
import tiny_run

from gshard_exp.config import assemble, operative_config
from gshard_exp.train import loop
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.metrics import Console, JsonLines, Window, router_scalars

EXPERTS = 4
HEALTH = {
    "auxiliary_loss",
    "expert_usage",
    "fraction_dropped_first",
    "fraction_dropped_second",
    "fraction_rejected_second",
    "fraction_tokens_left_behind",
    "max_over_mean_load",
    "router_confidence",
    "router_entropy",
    "unused_experts",
} | {f"expert_load/{expert}" for expert in range(EXPERTS)}
PLAIN = {
    "step",
    "loss",
    "accuracy",
    "cross_ent_loss_per_all_target_tokens",
    "z_loss_per_all_target_tokens",
    "auxiliary_loss",
    "router_loss",
    "router_z_loss",
    "grad_norm",
    "learning_rate",
    "skipped_steps",
    "timing/seconds",
    "timing/steps_per_second",
    "timing/target_tokens_per_second",
    "timing/tokens_per_second",
    # t5x's names, means over the sparse layers
    "fraction_tokens_left_behind",
    "expert_usage",
    "router_confidence",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with layers 1 and 3 of the encoder and 0 of the decoder sparse, and what it said."""
    folder = tmp_path_factory.mktemp("metrics")
    flags = [f"MODEL_DIR={folder}", "NUM_ENCODER_LAYERS=4", "TRAIN_STEPS=5", "LOG_PERIOD=2"]
    flags += [flag for flag in tiny_run.SMALL if "ENCODER" not in flag]
    assembled = assemble(Experiment, [tiny_run.TINY], flags)
    said = []
    config = operative_config(assembled)
    loop.train(assembled.tree, files={"config.gin": config}, report=said.append)
    return assembled, folder, said


def test_metrics_have_the_documented_names(run):
    _, folder, _ = run
    sparse = ("encoder/layer_1", "encoder/layer_3", "decoder/layer_0")
    routers = {f"router/{layer}/{metric}" for layer in sparse for metric in HEALTH}
    for record in tiny_run.records(folder):
        assert set(record) == PLAIN | routers


def test_a_line_of_metrics_is_written_every_period_and_at_the_end(run):
    _, folder, _ = run
    assert [record["step"] for record in tiny_run.records(folder)] == [2, 4, 5]


def test_the_logged_learning_rate_is_the_one_that_the_step_used(run):
    assembled, folder, _ = run
    schedule = assembled.tree.optimizer.learning_rate
    for record in tiny_run.records(folder):
        assert record["learning_rate"] == float(schedule(np.int32(record["step"] - 1)))


def test_expert_loads_of_a_layer_sum_to_one(run):
    _, folder, _ = run
    record = tiny_run.records(folder)[-1]
    for layer in ("encoder/layer_1", "encoder/layer_3", "decoder/layer_0"):
        loads = [record[f"router/{layer}/expert_load/{expert}"] for expert in range(EXPERTS)]
        assert sum(loads) == pytest.approx(1, abs=1e-6)


def test_the_console_says_loss_speed_and_time_left(run):
    _, folder, said = run
    lines = [line for line in said if line.startswith("step ")]
    pattern = r"step +\d+/5  loss \d+\.\d{3}  accuracy 0\.\d{3}  [\d,]+ tokens/s  ETA \d+:\d\d"
    assert len(lines) == 3
    assert all(re.fullmatch(pattern, line) for line in lines)
    losses = [f"loss {record['loss']:.3f}" for record in tiny_run.records(folder)]
    assert all(loss in line for loss, line in zip(losses, lines, strict=True))


def test_tensorboard_shows_the_metrics_of_the_json_lines(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    _, folder, _ = run
    events = EventAccumulator(str(folder / "train"))
    events.Reload()
    records = tiny_run.records(folder)
    for tag in set(records[0]) - {"step"}:
        shown = [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        written = [(r["step"], float(np.float32(r[tag]))) for r in records]
        assert shown == written, tag


def test_config_gin_alone_assembles_to_the_tree_of_the_run(run):
    assembled, folder, _ = run
    assert assemble(Experiment, [str(folder / "config.gin")]).tree == assembled.tree


def test_config_gin_says_who_set_what(run):
    _, folder, _ = run
    text = (folder / "config.gin").read_text()
    assert re.search(r"^NUM_ENCODER_LAYERS = 4 +# command line: .*NUM_ENCODER_LAYERS=4", text, re.M)
    assert re.search(r"^EMBED_DIM = 16 +# .*tests/gin/tiny\.gin:\d+", text, re.M)
    assert re.search(r"^AUX_LOSS_FACTOR = 0\.01 +# gin/moe/gshard\.gin:\d+", text, re.M)
    assert re.search(r"weight_decay = 0\.0 +# default", text)


def test_json_lines_after_the_step_that_a_run_starts_from_are_removed(tmp_path):
    path = tmp_path / "train" / "metrics.jsonl"
    first = JsonLines(path, start_step=0)
    for step in (2, 4, 6):
        first.write_scalars(step, {"loss": float(step)})
    JsonLines(path, start_step=4).write_scalars(6, {"loss": 60.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 2, "loss": 2.0},
        {"step": 4, "loss": 4.0},
        {"step": 6, "loss": 60.0},
    ]


def test_half_a_line_that_a_killed_run_left_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 2.0}\n{"step": 4, "lo')
    JsonLines(path, start_step=4).write_scalars(6, {"loss": 6.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 6]


def test_time_left_is_shown_with_hours_when_there_are_any():
    said = []
    scalars = {"loss": 1.0, "accuracy": 0.5, "timing/tokens_per_second": 1234.5}
    Console(said.append, 7300).write_scalars(100, scalars | {"timing/steps_per_second": 2.0})
    assert said == ["step    100/7300  loss 1.000  accuracy 0.500  1,234 tokens/s  ETA 1:00:00"]


def test_averages_per_token_weigh_steps_by_their_tokens(tmp_path):
    window = Window(tiny_run.experiment(tmp_path).model, lambda step: 0.5)
    # 30 nats over 10 tokens and 10 nats over 30: 40 / 40, not (3 + 1/3) / 2.
    window.add(_metrics(cross_ent_loss=30.0, target_tokens=10.0, loss=3.0))
    window.add(_metrics(cross_ent_loss=10.0, target_tokens=30.0, loss=1.0))
    scalars = window.close()
    assert scalars["cross_ent_loss_per_all_target_tokens"] == 1.0
    assert scalars["loss"] == 2.0
    assert scalars["learning_rate"] == 0.5


def test_a_skipped_step_is_counted_and_left_out_of_the_averages(tmp_path):
    window = Window(tiny_run.experiment(tmp_path).model, lambda updates: float(updates))
    window.add(_metrics(cross_ent_loss=4.0, target_tokens=2.0, loss=2.0))
    window.add(_metrics(cross_ent_loss=np.nan, target_tokens=2.0, loss=np.nan, finite=False))
    scalars = window.close()
    assert scalars["loss"] == scalars["cross_ent_loss_per_all_target_tokens"] == 2.0
    assert scalars["skipped_steps"] == 1
    assert scalars["learning_rate"] == 7.0


def test_the_time_of_the_first_step_is_left_out_with_its_tokens(tmp_path):
    window = Window(tiny_run.experiment(tmp_path).model, lambda step: 0.5)
    for _ in range(3):
        window.add(_metrics(cross_ent_loss=1.0, target_tokens=1.0, loss=1.0))
    window.pause(0.0, steps=1)
    scalars = window.close()
    steps = scalars["timing/steps_per_second"] * scalars["timing/seconds"]
    assert steps == pytest.approx(2)


def test_a_value_that_is_not_finite_is_null_in_json_lines(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl", 0).write_scalars(3, {"loss": np.inf, "accuracy": 0.5})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "loss": None, "accuracy": 0.5}


def test_lines_of_a_run_without_a_checkpoint_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    JsonLines(path, 0).write_scalars(0, {"loss": 1.0})
    JsonLines(path, 0)
    assert path.read_text() == ""


def test_the_load_of_many_experts_becomes_deciles(tmp_path):
    model = tiny_run.experiment(tmp_path).model
    load = np.arange(101, dtype=np.float32)[None] / 100
    scalars = router_scalars(model, {"encoder/pattern_0": {"expert_load": load}})
    place = "router/encoder/layer_0/expert_load"
    assert scalars == {
        f"{place}/p{percent}": pytest.approx(percent / 100) for percent in range(0, 101, 10)
    }


def test_a_window_starts_anew_when_it_is_closed(tmp_path):
    window = Window(tiny_run.experiment(tmp_path).model, lambda step: 0.5)
    for loss in (3.0, 1.0):
        window.add(_metrics(cross_ent_loss=1.0, target_tokens=1.0, loss=loss))
        assert window.close()["loss"] == loss


def _metrics(cross_ent_loss, target_tokens, loss, finite=True):
    return {
        "sums": {
            "cross_ent_loss": cross_ent_loss,
            "z_loss": 0.0,
            "correct": 1.0,
            "target_tokens": target_tokens,
            "source_tokens": 1.0,
        },
        "means": {},
        "router": {},
        "loss": loss,
        "grad_norm": 1.0,
        "finite": finite,
        "updates": 7,
    }
