"""The loop: losses that are not finite, requests to stop, evaluators, and when it does nothing."""

import dataclasses
import math
import signal
from collections.abc import Mapping

import jax
import numpy as np
import pytest
import tiny_run

from gshard_exp.data.batches import RandomBatches
from gshard_exp.train import loop
from gshard_exp.train.state import model_info, plan_state

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTHS = {"inputs": 8, "targets": 8}
EIGHT_DEVICES = ("DATA_PARTITIONS=2", "NUM_EXPERT_PARTITIONS=2", "NUM_MODEL_PARTITIONS=2")


@pytest.mark.parametrize("step", [6, 7, 8])
def test_a_loss_that_is_not_finite_stops_the_run_with_the_last_checkpoint_intact(tmp_path, step):
    """Between checkpoints (4, 8), just before one is due, and when one is due."""
    tree = tiny_run.poisoned(tmp_path, (step,))
    with pytest.raises(loop.NonFiniteLossError) as error:
        tiny_run.train(tree)
    assert f"at step {step} is not finite" in str(error.value)
    assert "checkpoint_4 is intact" in str(error.value)
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_4"]
    assert all(np.isfinite(array).all() for array in tiny_run.saved(tree).values())


def test_the_same_command_goes_on_from_the_last_good_checkpoint_after_a_bad_loss(tmp_path):
    with pytest.raises(loop.NonFiniteLossError):
        tiny_run.train(tiny_run.poisoned(tmp_path / "stopped", (6,)))
    mended, said = tiny_run.train(tiny_run.poisoned(tmp_path / "stopped", ()))
    whole, _ = tiny_run.train(tiny_run.poisoned(tmp_path / "whole", ()))
    assert said[0].endswith("checkpoint_4")
    tiny_run.assert_equal(tiny_run.arrays(mended), tiny_run.arrays(whole))


def test_a_bad_loss_before_the_first_checkpoint_says_that_there_is_none(tmp_path):
    with pytest.raises(loop.NonFiniteLossError, match="no checkpoint was written yet"):
        tiny_run.train(tiny_run.poisoned(tmp_path, (1,)))
    assert tiny_run.checkpoints(tmp_path) == []


def test_a_skipped_step_changes_neither_parameters_nor_optimizer_state(tmp_path):
    skipping = ("MAX_SKIPPED_STEPS=2",)
    two = tiny_run.poisoned(tmp_path / "two", (3,), *skipping, train_steps=2)
    three = tiny_run.poisoned(tmp_path / "three", (3,), *skipping, train_steps=3)
    (before, _), (after, _) = tiny_run.train(two), tiny_run.train(three)
    for part in ("params", "opt_state"):
        tiny_run.assert_equal(
            tiny_run.arrays(getattr(before, part)), tiny_run.arrays(getattr(after, part))
        )
    assert (int(after.step), int(after.skipped)) == (3, 1)
    assert [record["skipped_steps"] for record in tiny_run.records(tmp_path / "three")] == [0, 0, 1]


def test_a_run_that_may_skip_two_steps_stops_at_the_third_in_a_row(tmp_path):
    tree = tiny_run.poisoned(tmp_path, (3, 4, 5), "MAX_SKIPPED_STEPS=2")
    with pytest.raises(loop.NonFiniteLossError, match=r"at step 5 .* 3 step\(s\) in a row"):
        tiny_run.train(tree)


def test_a_finite_step_sets_the_count_of_skipped_steps_to_zero(tmp_path):
    tree = tiny_run.poisoned(tmp_path, (2, 3, 5, 6), "MAX_SKIPPED_STEPS=2")
    state, _ = tiny_run.train(tree)
    assert (int(state.step), int(state.skipped)) == (12, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_saves_the_step_and_the_same_command_ends_as_if_never_stopped(
    tmp_path, monkeypatch, number
):
    whole, _ = tiny_run.train(tiny_run.experiment(tmp_path / "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(RandomBatches, "__next__", _signals_at(3, number))
        with pytest.raises(loop.Interrupted, match="stopped at step 3"):
            tiny_run.train(tiny_run.experiment(tmp_path / "stopped"))
    assert tiny_run.checkpoints(tmp_path / "stopped") == ["checkpoint_3"]
    resumed, said = tiny_run.train(tiny_run.experiment(tmp_path / "stopped"))
    assert said[0].endswith("checkpoint_3")
    tiny_run.assert_equal(tiny_run.arrays(resumed), tiny_run.arrays(whole))


def test_handlers_of_signals_are_as_before_after_a_run(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tiny_run.train(tiny_run.experiment(tmp_path, train_steps=1))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_complete_run_is_left_as_it_is(tmp_path):
    tree = tiny_run.experiment(tmp_path, train_steps=4)
    tiny_run.train(tree)
    metrics = (tmp_path / "train" / "metrics.jsonl").read_bytes()
    state, said = tiny_run.train(tree)
    assert said[-1] == "step 4 of 4: the run is complete"
    assert int(state.step) == 4
    assert (tmp_path / "train" / "metrics.jsonl").read_bytes() == metrics
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_4"]


def test_another_seed_makes_another_run(tmp_path):
    """The equalities above are not those of constants."""
    one, _ = tiny_run.train(tiny_run.experiment(tmp_path / "0", train_steps=2))
    other, _ = tiny_run.train(tiny_run.experiment(tmp_path / "1", train_steps=2, seed=1))
    with pytest.raises(AssertionError):
        tiny_run.assert_equal(tiny_run.arrays(one), tiny_run.arrays(other))


def test_evaluators_run_at_the_start_when_due_and_at_the_end(tmp_path):
    evaluator = _Counting("dev", 3)
    tree = tiny_run.experiment(tmp_path, train_steps=8, evaluators=(evaluator,))
    _, said = tiny_run.train(tree)
    folder = tmp_path / "training_eval" / "dev"
    steps = [0, 3, 6, 8]
    assert [r["step"] for r in tiny_run.records_of(folder)] == steps
    assert all((folder / f"report_{step}.txt").read_text() == "all is well\n" for step in steps)
    assert sum(line.startswith("all is well") for line in said) == len(steps)


def test_an_evaluation_that_was_reported_is_not_repeated_after_a_resume(tmp_path, monkeypatch):
    evaluators = (_Counting("dev", 4),)
    with monkeypatch.context() as patched:
        patched.setattr(RandomBatches, "__next__", _signals_at(6, signal.SIGTERM))
        with pytest.raises(loop.Interrupted):
            tiny_run.train(tiny_run.experiment(tmp_path, train_steps=8, evaluators=evaluators))
    tiny_run.train(tiny_run.experiment(tmp_path, train_steps=8, evaluators=evaluators))
    assert [r["step"] for r in tiny_run.records_of(tmp_path / "training_eval" / "dev")] == [0, 4, 8]


def test_an_evaluator_that_fails_costs_no_checkpoint_and_runs_on_resuming(tmp_path):
    class Failing(_Counting):
        def __call__(self, *arguments, **how):
            raise RuntimeError("no disk left")

    at_start = tiny_run.experiment(tmp_path, train_steps=8)
    failing = dataclasses.replace(at_start, evaluators=(Failing("dev", 4, at_start=False),))
    with pytest.raises(RuntimeError, match="no disk left"):
        tiny_run.train(failing)
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_4"]
    tiny_run.train(dataclasses.replace(at_start, evaluators=(_Counting("dev", 4),)))
    assert [r["step"] for r in tiny_run.records_of(tmp_path / "training_eval" / "dev")] == [4, 8]


def test_settings_that_change_on_resuming_are_said_and_the_old_ones_kept(tmp_path):
    tree = tiny_run.experiment(tmp_path, train_steps=4)
    loop.train(tree, files={"config.gin": "A = 1  # a.gin:1\n"}, report=[].append)
    said = []
    same = {"config.gin": "A = 1  # elsewhere.gin:7\n"}
    loop.train(tree, files=same, report=said.append)
    assert not any("differ" in line for line in said)
    loop.train(tree, files={"config.gin": "A = 2\n"}, report=said.append)
    assert any("config_until_4.gin" in line for line in said)
    assert (tmp_path / "config_until_4.gin").read_text() == same["config.gin"]
    assert (tmp_path / "config.gin").read_text() == "A = 2\n"


def test_model_info_lists_every_parameter_and_its_totals_add_up(tmp_path):
    tree = tiny_run.experiment(tmp_path, *EIGHT_DEVICES)
    plan = plan_state(tree.model, tree.optimizer, tree.mesh.build(), tree.rules)
    lines = model_info(plan).splitlines()
    variables = [line for line in lines if line.startswith("Variable ")]
    totals = dict(line.split(": ", 1) for line in lines if not line.startswith("Variable "))
    leaves = jax.tree.leaves(plan.abstract.params)
    assert len(variables) == len(leaves)
    sizes = [int(line.split(" size ")[1].split()[0]) for line in variables]
    assert sum(sizes) == int(totals["Total number of parameters"])
    assert sum(sizes) == sum(math.prod(leaf.shape) for leaf in leaves)
    per_device = sum(int(line.rsplit(" ", 1)[1]) for line in variables)
    assert per_device == int(totals["Parameter bytes per device"]) < 4 * sum(sizes)
    assert totals["Mesh"] == "data=2, expert=2, model=2"
    # 4 experts over 2, hidden width 32 over 2: a quarter of 1 * 4 * 16 * 32 floats each.
    (line,) = (line for line in variables if line.startswith("Variable encoder/pattern_0/ffn/wi"))
    assert "size 2048 shape (layers=1, expert=4, embed=16, expert_mlp=32)" in line
    assert "partition spec (None, 'expert', None, 'model') bytes per device 2048" in line


@dataclasses.dataclass(frozen=True)
class _Counting:
    name: str
    every_steps: int
    at_start: bool = True
    batch_size: int = 8
    lengths: Mapping[str, int] = dataclasses.field(default_factory=lambda: LENGTHS)

    def __call__(self, params, *, model, mesh, rules, folder):
        return {"parameters": float(len(tiny_run.arrays(params)))}, "all is well\n"


def _signals_at(step, number):
    draw = RandomBatches.__next__

    def draw_or_signal(self):
        if self._drawn + 1 == step:
            signal.raise_signal(number)
        return draw(self)

    return draw_or_signal
