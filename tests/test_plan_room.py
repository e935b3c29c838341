"""No tensor of a step grows with the number of cores except the gate's (paper section 2.3)."""

import dataclasses
import functools

import models
import planned
import pytest

from gshard_exp.plan import parts
from gshard_exp.plan.compile import compile_here
from gshard_exp.plan.plan import make_plan
from gshard_exp.plan.schedule import schedule
from gshard_exp.plan.topology import parse_topology
from gshard_exp.sharding import hlo
from gshard_exp.sharding.mesh import MeshSpec

SIZES = (2, 4, 8)
ROWS_OF_A_CORE = 64  # 512 source and 1024 target tokens
# The tokens of a core, 16 wide: a 1024th of the paper's 2048 tokens, 1024 wide, which are 8 MB.
LARGE = 32 * 2**10


def model(experts, remat="none"):
    """Make a model; without dropout it compiles in half the time."""
    sparse = {"num_experts": experts, "expert_mlp_dim": 1024, "group_size": 128}
    how = {"sparse": sparse, "head_dim": 64, "dropout": 0.0, "remat": remat}
    return models.model(encoder="s", decoder="s", repeats=(2, 2), **how)


@functools.cache
def program(cores):
    """Compile one expert and the same number of tokens a core."""
    experiment = planned.experiment(
        model(cores),
        mesh=MeshSpec(expert=cores),
        batch_size=ROWS_OF_A_CORE * cores,
    )
    return experiment, compile_here(experiment, parse_topology(f"cpu:{cores}"))


def results(cores):
    """Map where a result comes from to the bytes of the largest.

    The router's products and all of the choice of experts may grow: each core scores its tokens for
    every expert.
    """
    found = {}
    for work in schedule(hlo.parse(program(cores)[1].text)):
        part = parts.part(work.op_name, {"encoder/0", "decoder/0"})
        if part not in (parts.GATE_EINSUMS, parts.GATE_CUMSUM):
            size = max((shape.bytes for shape in work.instruction.shapes), default=0)
            found[work.op_name] = max(size, found.get(work.op_name, 0))
    return found


@pytest.mark.parametrize("cores", SIZES[1:])
def test_no_result_grows_with_the_number_of_cores(cores):
    few, many = results(SIZES[0]), results(cores)
    large = {name: size for name, size in many.items() if size >= LARGE}
    assert len(large) > 10
    # A name that the small program has not may have been fused there: then its size has to be one
    # that the small program has.
    grown = {n: s for n, s in large.items() if s > few.get(n, 0) and s not in few.values()}
    assert not grown


def test_a_plan_on_cpu_says_what_can_be_known_without_a_chip():
    experiment, compiled = program(2)
    plan = make_plan("room", experiment, compiled, "")
    data = plan.to_json()
    assert data["cores"] == 2
    assert data["fits"] is None
    assert data["step_seconds"] is None
    memory = data["memory_bytes"]
    assert memory["limit"] is None
    kinds = ("parameters", "optimizer", "gradients", "activations", "other")
    assert sum(memory[kind] for kind in kinds) == memory["total"]
    assert memory["gradients"] == memory["parameters"]
    assert data["flops_per_core"]["executed"] >= data["flops_per_core"]["useful"]
    sent = {row["kind"]: row for row in data["collectives"]}
    assert sent["all-to-all"]["axes"] == "expert"
    assert sent["all-to-all"]["seconds"] is None


def test_recomputation_is_told_apart():
    experiment, _ = program(2)
    again = dataclasses.replace(experiment, model=model(2, remat="full"))
    topology = parse_topology("cpu:2")
    flops = make_plan("full", again, compile_here(again, topology), "").to_json()["flops_per_core"]
    without = make_plan("none", *program(2), "").to_json()["flops_per_core"]
    assert without["recomputed"] == 0
    assert flops["executed"] - flops["recomputed"] == without["executed"]
    assert flops["recomputed"] > 0.1 * flops["executed"]
