"""Plans: machines by name, meshes for them, parts by name, and costs worked by hand."""

import dataclasses
import importlib.util

import jax
import models
import planned
import pytest
from test_census import ASYNCHRONOUS

from gshard_exp.errors import SettingError
from gshard_exp.paths import parameter_path
from gshard_exp.plan import collectives, parts
from gshard_exp.plan.compile import Program, fit_to
from gshard_exp.plan.cost import estimate
from gshard_exp.plan.describe import describe, table
from gshard_exp.plan.plan import make_plan
from gshard_exp.plan.schedule import largest_buffers, schedule
from gshard_exp.plan.topology import parse_topology, require_compiler
from gshard_exp.sharding import hlo
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.state import plan_state

V3 = parse_topology("v3:32x32")


def test_a_v3_chip_has_two_cores_of_16_gib_of_which_a_program_may_take_most():
    assert V3.cores == 2048
    assert V3.chip.hbm_bytes == 2 * 16 * 2**30
    assert V3.available == pytest.approx(15.48 * 2**30)
    assert V3.peak_flops == 61.5e12


@pytest.mark.parametrize("name", ["v9:2x2", "v3", "v3:0x2", "cpu:2x2", "cpu:0", "v3:4"])
def test_an_unknown_machine_is_refused_with_what_there_is(name):
    with pytest.raises(SettingError, match=r"v2, v3, v4, v5e, v5p, v6e.*v3:32x32"):
        parse_topology(name)


def test_without_libtpu_a_tpu_is_refused_and_a_cpu_is_not(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_compiler(parse_topology("cpu:8"))
    with pytest.raises(SettingError, match="pip install"):
        require_compiler(V3)


def test_the_experiments_own_mesh_is_kept_if_it_has_the_cores():
    wanted = dataclasses.replace(planned.experiment(), mesh=MeshSpec(data=2, expert=4))
    fitted, layout = fit_to(wanted, parse_topology("cpu:8"))
    assert fitted.mesh == wanted.mesh
    assert "data=2 expert=4 model=1 (of the gin file)" in layout


def test_experts_are_split_over_as_many_cores_as_divide_them():
    # 8 experts on 32 cores: 8 ways, and the rest over rows.
    fitted, layout = fit_to(planned.experiment(), parse_topology("cpu:32"))
    assert fitted.mesh == MeshSpec(data=4, expert=8)
    assert "chosen" in layout


def test_tokens_of_a_core_set_the_batch():
    # 64 source tokens x 8 cores / 8 tokens a row.
    fitted, layout = fit_to(planned.experiment(), parse_topology("cpu:8"), tokens_per_core=64)
    assert fitted.batch_size == 64 * 8 // models.SOURCE
    assert "64 source tokens a core" in layout


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mesh": "file"}, "data=1 expert=1 model=1 does not fit cpu:8, which has 8 cores"),
        ({"mesh": "1x3x1"}, "does not fit cpu:8"),
        ({"mesh": "8"}, "neither auto, file nor"),
    ],
)
def test_what_does_not_fit_the_machine_is_refused(how, message):
    with pytest.raises(SettingError, match=message):
        fit_to(planned.experiment(), parse_topology("cpu:8"), **how)


def test_tokens_that_make_no_whole_rows_are_refused():
    with pytest.raises(SettingError, match=r"is 12 tokens, no whole number of rows of 8\."):
        fit_to(planned.experiment(), parse_topology("cpu:4"), tokens_per_core=3)


def test_a_tpu_collective_takes_the_published_time():
    # Figure 9: 2364 and 10631 microseconds; half of 8 MB takes half as long.
    for mebibytes, micros in ((8, 2364), (32, 10631), (4, 1182), (64, 21262)):
        spent = collectives.seconds("all-to-all", mebibytes * 2**20, 2048, V3)
        assert spent == pytest.approx(micros * 1e-6)
    # Between 128 and 512 cores: 256, which stands in the figure.
    assert collectives.seconds("all-to-all", 8 * 2**20, 256, V3) == pytest.approx(1227e-6)
    assert collectives.seconds("all-to-all", 8 * 2**20, 1, V3) == 0
    assert collectives.seconds("all-to-all", 8 * 2**20, 8, parse_topology("cpu:8")) is None


@pytest.mark.parametrize(
    ("kind", "mebibytes", "micros"), [("all-to-all", 8, 2364), ("all-reduce", 32, 609)]
)
def test_the_formulas_of_other_machines_give_the_published_times_of_v3(kind, mebibytes, micros):
    spent = collectives._torus(kind, mebibytes * 2**20, 2048, V3)
    assert spent == pytest.approx(micros * 1e-6, rel=0.1)


FORWARD = "jit(step)/jvp(Transformer)/Transformer.encode/encoder/while/body/layers/pattern_{}/{}"
BACKWARD = "jit(step)/transpose(jvp(Transformer))/Transformer.decode/decoder/while/body/{}{}"


@pytest.mark.parametrize(
    ("op_name", "part", "phase"),
    [
        (FORWARD.format(0, "attention/attention._project/BLM,MND->BLND/dot_general"), 0, 0),
        (FORWARD.format(0, "attention/BLND,NDM->BLM/dot_general"), 0, 0),
        (FORWARD.format(1, "attention/BLND,BKND->BNLK/dot_general"), 1, 0),
        (FORWARD.format(0, "ffn/BLM,MH->BLH/dot_general"), 2, 0),
        (FORWARD.format(1, "ffn/ffn._router/GSM,ME->GSE/dot_general"), 3, 0),
        (FORWARD.format(1, "ffn/GSX,GSM->GXM/dot_general"), 3, 0),
        (FORWARD.format(1, "ffn/cumsum"), 4, 0),
        (FORWARD.format(1, "ffn/dispatch/transpose"), 5, 0),
        (
            BACKWARD.format(
                "checkpoint/rematted_computation/", "layers/pattern_1/ffn/combine/transpose"
            ),
            5,
            1,
        ),
        (BACKWARD.format("checkpoint/", "layers/pattern_1/ffn/experts/ERM,EMH->ERH"), 6, 2),
        ("jit(step)/jvp(Transformer)/Transformer.decode/target_embedding.logits/BLM,VM->BLV", 7, 0),
        (FORWARD.format(1, "attention_norm/rsqrt"), 8, 0),
        ("jit(step)/jvp(Transformer)/Transformer.encode/encoder/while/body/dynamic_slice", 9, 0),
        ("jit(step)/vmap()/reduce_sum", 11, 3),
    ],
)
def test_a_name_tells_part_and_pass(op_name, part, phase):
    assert parts.part(op_name, {"encoder/1", "decoder/1"}) == parts.PARTS[part]
    assert parts.phase(op_name) == parts.PHASES[phase]


def test_a_sum_in_the_backward_pass_is_the_gradients():
    name = BACKWARD.format("checkpoint/", "layers/pattern_0/ffn/BLM,MH->BLH/dot_general")
    assert parts.part(name, set()) == parts.DENSE_FFN
    assert parts.part(name, set(), sums_gradients=True) == parts.GRADIENT_SUM


def test_sparse_blocks_are_named_by_stack_and_place():
    assert parts.sparse_blocks(models.model(encoder="ds", decoder="sd")) == {
        "encoder/1",
        "decoder/0",
    }


# Five trips of: a fusion of 940 cycles that reads one 1 KiB slice of a 5 KiB array, an all-to-all
# of 8 MiB, a reshape without a name.
MOE = 'metadata={op_name="jit(step)/jvp(T)/encoder/while/body/layers/pattern_1/ffn/'
TPU = f"""HloModule jit_step

%fused (p.0: f32[5,256], p.1: s32[]) -> f32[1,256] {{
  %p.0 = f32[5,256] parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %cut = f32[1,256] dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={{1,256}}
}}

%body (s: (s32[], f32[5,256], bf16[2048,2048])) -> (s32[], f32[5,256], bf16[2048,2048]) {{
  %s = (s32[], f32[5,256], bf16[2048,2048]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[5,256] get-tuple-element(%s), index=1
  %y = bf16[2048,2048] get-tuple-element(%s), index=2
  %f = f32[1,256] fusion(%x, %i), kind=kLoop, calls=%fused, {MOE}experts/relu"}}, \
backend_config={{"window_config":{{"estimated_cycles":"940"}}}}
  %a = bf16[2048,2048] all-to-all(%y), replica_groups=[1,2048]<=[2048], {MOE}dispatch/transpose"}}
  %r = bf16[2048,2048] reshape(%a)
  ROOT %t = (s32[], f32[5,256], bf16[2048,2048]) tuple(%i, %x, %r)
}}

%less (s: (s32[], f32[5,256], bf16[2048,2048])) -> pred[] {{
  %s = (s32[], f32[5,256], bf16[2048,2048]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(5)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (s: (s32[], f32[5,256], bf16[2048,2048])) -> (s32[], f32[5,256], bf16[2048,2048]) {{
  %s = (s32[], f32[5,256], bf16[2048,2048]) parameter(0)
  ROOT %w = (s32[], f32[5,256], bf16[2048,2048]) while(%s), condition=%less, body=%body
}}
"""


def test_an_instruction_moves_what_it_reads_and_writes():
    work = {row.instruction.name: row for row in schedule(hlo.parse(TPU))}
    assert set(work) == {"f", "a", "r", "l"}
    # One slice read and written, and the s32 that says which; not all five.
    assert work["f"].bytes == 2 * 1024 + 4
    assert work["f"].times == 5
    assert work["f"].cycles == 940
    assert work["r"].cycles is None
    assert work["r"].op_name == work["a"].op_name


def test_a_step_takes_cycles_and_bytes_and_collectives_times_trips():
    cost = estimate(hlo.parse(TPU), V3, sparse=frozenset({"encoder/1"}), mesh={"expert": 2048})
    # 940 cycles at 940 MHz are a microsecond.
    assert cost.breakdown[parts.MOE_FFN] == {"forward": pytest.approx(5e-6)}
    # Figure 9, and 8 MiB read and written at 450 GB/s.
    moved = 5 * 2 * 2**23 / 450e9
    assert cost.breakdown[parts.DISPATCH_COMBINE] == {"forward": pytest.approx(5 * 2364e-6 + moved)}
    assert cost.step_seconds == pytest.approx(5e-6 + 5 * 2364e-6 + moved)
    (row,) = cost.collectives
    assert (row.kind, row.count, row.bytes, row.axes) == ("all-to-all", 5, 2**23, "expert")
    assert row.cause == "dispatch and combine, forward"
    assert cost.unknown_loops == ()


def test_asynchronous_collectives_take_their_time_and_name_their_axes():
    topology = parse_topology("v3:2x2")
    mesh = {"data": 4, "expert": 2}
    cost = estimate(hlo.parse(ASYNCHRONOUS), topology, sparse=frozenset(), mesh=mesh)
    found = {(row.kind, row.count, row.bytes, row.group, row.axes) for row in cost.collectives}
    assert found == {
        ("all-to-all", 1, 64, 2, "expert"),  # within what an async-start calls
        ("all-reduce", 1, 64, 4, "data"),
        ("collective-permute", 1, 64, 2, "expert"),
    }
    assert all(row.seconds == collectives.LATENCY for row in cost.collectives)
    # And the copy at the end: 64 bytes in, 64 out.
    assert cost.step_seconds == pytest.approx(3 * collectives.LATENCY + 128 / 450e9)
    assert cost.bytes_moved == 128


def test_equal_names_in_two_computations_are_two_instructions():
    text = TPU.replace("%w = (s32[]", "%a = (s32[]")  # the loop is called like what it sends
    cost = estimate(hlo.parse(text), V3, sparse=frozenset({"encoder/1"}), mesh={"expert": 2048})
    assert [row.count for row in cost.collectives] == [5]


def test_the_largest_buffers_are_named():
    size, shape, origin = largest_buffers(hlo.parse(TPU), 1)[0]
    assert (size, shape) == (2**23, "bf16[2048,2048]")
    assert origin.endswith("ffn/dispatch/transpose")


def test_a_plan_that_does_not_fit_is_a_result_with_what_is_large_and_what_to_change():
    error = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (19.33G) exceeds available HBM (15.48G)."
    )
    state = {"parameters": 10, "optimizer": 1}
    program = Program("v3:32x32", {"expert": 2048}, TPU, error, {}, state, 0.1, 0.2, 0.2, {})
    plan = make_plan("tiny", planned.experiment(), program, "layout")
    data = plan.to_json()
    assert data["fits"] is False
    assert data["step_seconds"] is None
    assert data["memory_bytes"]["total"] == round(19.33 * 2**30)
    assert data["margin_bytes"] == pytest.approx((15.48 - 19.33) * 2**30)
    assert data["memory_bytes"]["limit"] == V3.available
    assert data["largest_buffers"][0]["bytes"] == 2**23
    text = describe(plan)
    assert "DOES NOT FIT: 4.13 GB of memory are missing" in text
    assert "REMAT_POLICY" in text
    assert "NO" in table([plan]).splitlines()[1]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_only_gradients_of_matrices_take_half_and_only_where_they_are_not_added_up(microbatches):
    tree = planned.experiment(gradient_dtype="bfloat16", microbatches=microbatches)
    mesh = MeshSpec(expert=4).build()
    plan = plan_state(tree.model, tree.optimizer, mesh, tree.rules)
    state, halved = {"parameters": 0, "optimizer": 0}, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(plan.abstract.params):
        size = 4 * leaf.size // (4 if "expert" in str(leaf.sharding.spec) else 1)
        state["parameters"] += size
        kept = ("embedding", "norm", "router")
        halved += 0 if any(word in parameter_path(path) for word in kept) else size // 2
    sizes = {"argument": sum(state.values()), "output": 0, "alias": 0, "temp": 10**9}
    sizes |= {"generated_code": 0, "peak": 10**9}
    program = Program("v3:2x1", dict(mesh.shape), "", "", sizes, state, 0.1, 0.2, 0.2, {})
    gradients = make_plan("tiny", tree, program, "layout").memory["gradients"]
    assert 0 < halved < state["parameters"] // 2
    assert gradients == state["parameters"] - (halved if microbatches == 1 else 0)
