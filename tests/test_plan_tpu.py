"""Plans by the TPU compiler itself, for the smallest machines; skipped where libtpu is missing."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest
import tiny_run
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard_exp.moe.dispatch import EinsumDispatch
from gshard_exp.plan import search
from gshard_exp.plan.compile import compile_here, fit_to, optimised
from gshard_exp.plan.plan import make_plan
from gshard_exp.plan.schedule import schedule
from gshard_exp.plan.topology import parse_topology
from gshard_exp.sharding import hlo
from gshard_exp.sharding.instructions import Shape

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu (pip install libtpu)"
)
V3 = "--topology=v3:2x2"
V3_CORE_FLOPS = 61.5e12
# One block a stack, AdamW, no dropout: little to compile.
SMALL = [f"--gin.{binding}" for binding in (*tiny_run.SMALL, "GROUP_SIZE=8", "DROPOUT_RATE=0.0")]


def plan(command, out, *flags, small=SMALL):
    status, printed, error = command(
        "plan", f"--gin_file={tiny_run.TINY}", V3, f"--json={out}", *small, *flags
    )
    assert status == 0, error
    return json.loads(out.read_text()), printed


def test_a_step_that_does_not_fit_is_a_result_with_its_largest_buffers(command, tmp_path):
    # 2^7 x 2^22 parameters in each of two matrices and two stacks are 8 GiB, and as much gradients.
    out = tmp_path / "plan.json"
    dense = [flag.replace("@sparse/", "@dense/") for flag in SMALL if "GROUP" not in flag]
    sizes = (f"--gin.MLP_DIM={2**22}", "--gin.EMBED_DIM=128", "--gin.REMAT_POLICY='full'")
    ((data,), printed) = plan(command, out, *dense, *sizes, small=())
    assert data["fits"] is False
    assert data["step_seconds"] is None
    memory = data["memory_bytes"]
    assert memory["total"] > memory["limit"] > 15 * 2**30
    # What the compiler says that there is.
    assert f"({memory['limit'] / 2**30:.2f}G)" in printed
    missing = f"{-data['margin_bytes'] / 1e9:.3g} GB of memory are missing"
    assert missing in printed
    largest = data["largest_buffers"][0]
    assert largest["bytes"] >= 2**31
    assert str(2**22) in largest["shape"]
    assert "ffn" in largest["op_name"]
    assert "DOES NOT FIT" in printed
    assert data["advice"] in printed


def test_the_verb_plans_and_ranks_steps_for_a_machine_that_is_not_there(
    command, tmp_path, monkeypatch
):
    """Two meshes, then another dispatch; tests/test_plan_search.py has the rest, on CPUs."""
    monkeypatch.setattr(search, "WIDEST_MODEL", 1)
    monkeypatch.setattr(search, "_NARROWER", (1,))
    monkeypatch.setattr(search, "REMAT_POLICIES", {"none": None})
    monkeypatch.setattr(search, "dispatches", lambda model: (EinsumDispatch(),))
    plans, printed = plan(command, tmp_path / "plan.json", "--search")
    for data in plans:
        assert data["fits"] is True
        assert data["cores"] == 8
        assert data["unknown_loops"] == []
        assert data["flops_per_core"]["useful"] > 0
        assert data["step_seconds"] > 0
        # Nothing is quicker than its products at peak.
        at_peak = data["flops_per_core"]["executed"] / (V3_CORE_FLOPS * data["step_seconds"])
        assert at_peak < data["roofline_share"] < 1
        assert data["breakdown_seconds"]["MoE FFN"].keys() >= {"forward", "backward"}
        assert data["versions"]["libtpu"]
    kinds = {data["name"]: {row["kind"] for row in data["collectives"]} for data in plans}
    assert kinds["tiny mesh data=2 expert=4 model=1"] >= {"all-to-all", "all-reduce"}
    assert "CACM" in printed  # the source of the chip's figures
    ranked = printed.split("ranked by predicted time:\n")[1].splitlines()[1:]
    assert len(ranked) == len(plans) == 3
    by_time = [plan["name"] for plan in sorted(plans, key=lambda plan: plan["step_seconds"])]
    assert [line.split("  ")[0] for line in ranked] == by_time


@pytest.mark.parametrize("how", ["--topology=v3:2x2", "--search"])
def test_a_shape_that_libtpu_does_not_take_is_one_clear_error_before_any_compile(
    command, tmp_path, how
):
    file, odd = tmp_path / "plans.json", "--topology=v3:7x7"
    status, printed, error = command(
        "plan",
        f"--gin_file={tiny_run.TINY}",
        how,
        odd,
        f"--json={file}",
        *SMALL,
        "--gin.BATCH_SIZE=784",
    )
    assert status == 2
    assert error.count("error:") == 1
    assert "libtpu does not take --topology=v3:7x7" in error
    assert not printed and not file.exists()


def test_a_gather_on_sparse_cores_is_read():
    """Which jaxlib 0.10.2's `as_text` does not."""
    topology = parse_topology("v6e:2x2")
    mesh = Mesh(np.array(topology.devices()), ("all",))

    def on_each(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    rows = jax.jit(lambda table, ids: table[ids])
    lowered = rows.lower(on_each((64000, 1024), jnp.float32), on_each((2048,), jnp.int32))
    text, error, memory = optimised(lowered, topology)
    assert not error
    assert memory["argument"] >= 4 * 64000 * 1024
    assert 'async_execution_thread="sparsecore"' in text
    moves = [
        work
        for work in schedule(hlo.parse(text))
        if not work.instruction.opcode.endswith(("-done", "-update"))
        and Shape("f32", (2048, 1024)) in work.instruction.shapes
    ]
    assert moves
    assert all(work.op_name.endswith("gather") for work in moves)


@pytest.mark.parametrize("name", ["v2:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_generation_takes_a_step(name):
    topology = parse_topology(name)
    fitted, _ = fit_to(planned.small(), topology)
    data = make_plan("tiny", fitted, compile_here(fitted, topology), "").to_json()
    assert data["fits"] is True
    assert data["step_seconds"] > 0
