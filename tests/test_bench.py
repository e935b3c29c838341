"""The benchmarks run, at tiny sizes; no time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

from gshard_exp.config import assemble
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.flops import useful_flops

HERE = Path(__file__).parent
BENCH = HERE.parent / "experiments" / "bench"
SMALL = [f"--gin.{binding}" for binding in tiny_run.SMALL]
# Runs a script as if only the core install were there.
CORE = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def bench(script, *arguments, core=False, status=0):
    """Run a script of the benchmark; return its standard output, or its error if one is due."""
    argv = [str(BENCH / script), *arguments]
    if core:
        code = CORE.format(folder=str(BENCH), argv=argv)
        argv = [str(HERE / "core_install.py"), code]
    done = subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
        cwd=HERE.parent,
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_the_machine_has_a_matmul_peak_and_a_bandwidth():
    found = json.loads(bench("peak.py", "--size=64", "--megabytes=1"))
    assert found["matmul_flops_per_s"] > 0
    assert found["memory_bytes_per_s"] > 0


STEP = ("step.py", "--rounds=2", "--peak_size=64", *SMALL)


def test_a_step_is_measured_with_the_core_install_alone():
    found = json.loads(bench(*STEP, f"--gin_file={tiny_run.TINY}", "--json", core=True))
    assert found["tokens_per_step"] == 8 * (8 + 8)
    assert found["useful_flops"] == sum(found["useful_flops_by_part"].values())
    # At capacity factor 1 there are as many slots as choices, and a scatter adds no product.
    assert 1 <= found["executed_flops"] / found["useful_flops"] < 1.05
    assert found["loops_counted_once"] == []
    assert found["memory"]["planned_bytes"] > found["memory"]["temporary_bytes"] > 0
    assert found["memory"]["peak_bytes"] > found["memory"]["planned_bytes"]
    assert found["mfu"] > 0 and found["step"]["rounds"] == 2
    assert found["tokens_per_s"] == pytest.approx(128 / found["step"]["median_s"])
    assert found["compile_s"] > 0


def test_a_step_of_a_text_task_is_measured_without_its_text():
    text = HERE / "gin" / "tiny_text.gin"
    said = bench(*STEP, f"--gin_file={text}", core=True)
    names = [line.split("  ")[0] for line in said.splitlines()]
    assert names == [
        *("device", "step", "tokens", "useful work", "executed", "matmul peak", "MFU", "memory"),
        "compile",
    ]
    assert " ms (median of 2, spread " in said and "not known" not in said


def test_the_size_of_the_comparison_is_that_of_its_description():
    experiment = assemble(Experiment, ["experiments/bench/nllb_size.gin"], []).tree
    module, tokens = experiment.model.module, experiment.batch_size * 64
    assert (experiment.batch_size, experiment.lengths) == (32, {"inputs": 64, "targets": 64})
    for stack in (module.encoder, module.decoder):
        dense, sparse = stack.pattern
        assert (stack.num_layers, dense.ffn.mlp_dim, sparse.ffn.expert_mlp_dim) == (4, 1024, 1024)
        assert sparse.ffn.num_experts == 16 and tokens % sparse.ffn.group_size == 0
        assert sparse.ffn.gating.capacity(sparse.ffn.group_size, 16, 1.0) == 64
    for embedding in (module.source_embedding, module.target_embedding):
        assert (embedding.vocab_size, embedding.embed_dim) == (8000, 256)
    parts = useful_flops(experiment.model, batch_size=32, lengths=experiment.lengths)
    assert sum(parts.values()) == pytest.approx(146e9, rel=0.01)


SCRIPTS = ("step", "train_step", "profile_step", "input_pipeline", "decode")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_setting_is_one_message(script):
    said = bench(f"{script}.py", f"--gin_file={tiny_run.TINY}", "--gin.NUM_HEAD=2", status=2)
    assert said.startswith("error: ") and "Traceback" not in said


def test_our_step_is_compared_with_the_peak_without_the_peer():
    arguments = ("--peer=none", "--rounds=2", "--peak_size=64", f"--gin_file={tiny_run.TINY}")
    found = json.loads(bench("train_step.py", *arguments, *SMALL, "--json"))
    assert found["steps"]["ours"]["share_of_peak"] > 0


def test_our_step_is_compared_with_the_peer():
    pytest.importorskip("torch", reason="the peer needs torch and transformers")
    pytest.importorskip("transformers")
    arguments = ("--rounds=1", "--peak_size=64", f"--gin_file={tiny_run.TINY}")
    found = json.loads(bench("train_step.py", *arguments, "--json"))
    assert found["times_as_fast_as_the_peer"] > 0


def test_every_dispatch_method_is_compared_with_a_dense_layer():
    sizes = ("--rows=2", "--length=8", "--width=8", "--hidden=8", "--group_size=8", "--rounds=1")
    found = json.loads(bench("moe_layer.py", "--experts=4", *sizes, "--json"))
    assert {"EinsumDispatch", "ScatterDispatch"} <= set(found["methods"])
    (size,) = found["sizes"]
    assert size["capacity"] == 2 * 8 // 4
    assert set(size["times_of_dense"]) == set(size["parts_ms"]) == set(found["methods"])
    whole = {"gate", "cumsum", "experts"}
    for name, parts in size["parts_ms"].items():
        buffered = set() if name == "RaggedDispatch" else {"dispatch", "combine"}
        assert set(parts) == whole | buffered


def test_a_profile_adds_up_by_part_and_by_kind():
    arguments = (f"--gin_file={tiny_run.TINY}", "--steps=1", *SMALL, "--json")
    found = json.loads(bench("profile_step.py", *arguments))
    total = sum(row["ms"] for row in found["instructions"])
    for by in ("ms_by_part", "ms_by_kind"):
        assert sum(found[by].values()) - found[by]["waiting"] == pytest.approx(total)
    assert {"attention, products", "experts, products"} <= found["ms_by_part"].keys()
    assert "products" in found["ms_by_kind"]


def test_the_input_pipeline_is_compared_with_what_training_consumes():
    arguments = (f"--gin_file={tiny_run.TINY}", "--batches=10", "--train_tokens_per_s=1")
    found = json.loads(bench("input_pipeline.py", *arguments, "--json"))
    assert found["filled"] == 1.0  # random rows are full, one example each
    assert found["examples_per_s"] == pytest.approx(found["tokens_per_s"] / 16)
    assert found["times_of_training"] == pytest.approx(found["positions_per_s"])


def test_both_beam_searches_are_compared_with_the_floor_without_the_peer():
    arguments = ("--peer=none", "--rounds=1", "--peak_size=64", "--sentences=2")
    (found,) = json.loads(
        bench("decode.py", *arguments, f"--gin_file={tiny_run.TINY}", *SMALL, "--json", core=True)
    )
    assert found["searches"].keys() == {"flat beam", "beam"} and found["floor_s"] > 0
    # M = 16, two heads of 8: six projections; a router of 4 experts and two of 2 x 16 x 32; the
    # table of 30 pieces; 16 pieces there on average and a source of 8: for each of 2 x 4 rows.
    weights = 6 * 16 * 16 + 4 * 16 + 4 * 2 * 16 * 32 + 30 * 16
    used = weights - 2 * 2 * 16 * 32 + 2 * 16 * (16 + 8)
    assert found["step"] == {"flops": 2 * 2 * 4 * used, "weight_bytes": 4 * weights}


def test_the_shared_expert_is_useful_work():
    files = ["gin/models/tiny.gin", "gin/moe/{}.gin", "gin/sharding/expert_parallel.gin"]
    files += ["gin/tasks/random.gin", "gin/runs/pretrain.gin"]
    sizes = {"MODEL_DIR": "unused", "TRAIN_STEPS": 1, "BATCH_SIZE": 4}
    flags = [f"{key}={value!r}" for key, value in sizes.items()]
    flags.append("TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}")
    work = {}
    for routing in ("gshard", "deepseek"):
        named = [file.format(routing) for file in files]
        tree = assemble(Experiment, named, flags).tree
        work[routing] = useful_flops(tree.model, batch_size=4, lengths=tree.lengths)
    # One sparse layer on each side; 4 x 8 tokens, two products of 128 x 512, three passes.
    added = 2 * 3 * 2 * 2 * (4 * 8) * 128 * 512
    assert sum(work["deepseek"].values()) == sum(work["gshard"].values()) + added
