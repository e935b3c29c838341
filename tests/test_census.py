"""What training sends between devices: goldens of a small step, and programs known by hand."""

import json

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import tiny_run
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard_exp import cli
from gshard_exp.model.contract import abstract_batch
from gshard_exp.sharding import census
from gshard_exp.sharding.causes import Cause, causes
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.inspection import layer_kinds
from gshard_exp.train.invariance import quick_compilation
from gshard_exp.train.state import plan_state
from gshard_exp.train.step import partitioned_train_step

MOE = "encoder/pattern_1/ffn"
LAYERS = 2  # repetitions of (dense, sparse) in the encoder; the decoder is dense
SHAPE = {"repeats": (LAYERS, 1), "encoder": "ds", "decoder": "d"}
# E * M * H of the layer's weights, told apart from all other shapes by H.
HIDDEN = 24


def of_step(mesh, **changes):
    model = models.model(**SHAPE, sparse={"expert_mlp_dim": HIDDEN}, **changes)
    plan = plan_state(model, models.Sgd(), mesh, models.RULES)
    lengths = {"inputs": models.SOURCE, "targets": models.TARGET}
    batch = abstract_batch(model.batch_entries(models.ROWS, lengths), mesh, models.RULES)
    return census.take(
        partitioned_train_step(plan, models.RULES),
        plan.abstract,
        batch,
        mesh=mesh,
        layers=layer_kinds(model),
        compiler_options=quick_compilation(),
    )


@pytest.fixture(scope="module")
def step():
    """Two ways over data, four over experts."""
    return of_step(MeshSpec(data=2, expert=4).build())


def rows(found, kind, when=None):
    return [row for row in found.rows if row.kind == kind and when in (None, row.when)]


def test_a_sparse_layer_sends_its_tokens_twice_forward_and_twice_backward(step):
    # ROWS * SOURCE = 128 tokens in 8 groups of 16, one on each device; C = 2 * 16 / 8 = 4, so that
    # a device sends E * C * M = 8 * 4 * 16 float32.
    sent = 8 * 4 * 16 * 4
    found = {
        (row.when, row.causes[0].place): (row.count, row.bytes, row.group, row.axes)
        for row in rows(step, "all-to-all")
    }
    each = (LAYERS, sent, 4, ("expert",))
    assert found == {
        (when, f"{MOE}/{scope}"): each
        for when in ("forward", "backward")
        for scope in ("dispatch", "combine")
    }
    assert all(row.causes[0].layer == "MoeLayer" for row in rows(step, "all-to-all"))
    # And no other, which could have hidden behind one of the four.
    assert len(rows(step, "all-to-all")) == 4
    assert step.count("all-to-all", "forward") == 2 * LAYERS
    assert step.count("all-to-all", "backward") == 2 * LAYERS
    assert step.count("all-to-all") == 4 * LAYERS


def test_nothing_else_that_is_more_than_health_is_sent_forward(step):
    # Router health and the sums of the loss: a few numbers a layer.
    others = [r for r in step.rows if r.when == "forward" and r.kind != "all-to-all"]
    assert {row.kind for row in others} <= {"all-reduce"}
    assert max(row.bytes for row in others) <= 4 * 64


def test_weights_of_experts_are_never_gathered(step):
    assert step.count("all-gather") == 0
    assert step.replications == ()


def test_gradients_of_experts_are_summed_over_data_alone(step):
    # A device has 2 of the 8 experts: wi [2, 16, 24] and wo [2, 24, 16].
    of_experts = [row for row in rows(step, "all-reduce") if f" {HIDDEN}" in str(row.shapes)]
    assert {row.axes for row in of_experts} == {("data",)}
    assert {row.when for row in of_experts} == {"backward"}
    shapes = sum((row.count * len(row.shapes) for row in of_experts), 0)
    assert shapes == 2 * LAYERS
    assert sum(row.count * row.bytes for row in of_experts) == LAYERS * 2 * (2 * 16 * 24 * 4)


def test_gradients_of_replicated_weights_are_summed_over_all_rows(step):
    summed = [r for r in rows(step, "all-reduce", "backward") if r.axes == ("data", "expert")]
    places = {cause.place for row in summed for cause in row.causes}
    dense = {f"{stack}/pattern_0/ffn" for stack in ("encoder", "decoder")}
    assert {"encoder/pattern_0/attention", *dense} <= places
    assert not any(row.axes == ("expert",) for row in rows(step, "all-reduce", "backward"))


def test_experts_on_an_axis_of_their_own_have_no_gradient_to_sum():
    found = of_step(MeshSpec(expert=8).build())
    shapes = [shape for row in rows(found, "all-reduce") for shape in row.shapes]
    assert not [shape for shape in shapes if f" {HIDDEN}" in shape]
    assert found.count("all-to-all", "forward") == 2 * LAYERS


def test_recomputation_is_told_from_the_first_computation():
    found = of_step(MeshSpec(expert=8).build(), remat="full")
    counts = {w: found.count("all-to-all", w) for w in ("forward", "recompute", "backward")}
    assert counts == dict.fromkeys(counts, 2 * LAYERS)


def on(mesh, *spec):
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.fixture
def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))


def test_a_value_that_nobody_replicates_and_every_device_gathers_is_warned_of(mesh):
    def sums(x):
        return jnp.cumsum(jax.lax.with_sharding_constraint(x * 2, on(mesh, ("a", "b"), None)), 0)

    x = jax.ShapeDtypeStruct((48, 40), jnp.float32, sharding=on(mesh, ("a", "b"), None))
    found = census.take(jax.jit(sums, out_shardings=on(mesh, ("a", "b"), None)), x, mesh=mesh)
    (whole,) = found.replications
    assert (whole.shape, whole.bytes, whole.count) == ("f32[48, 40]", 48 * 40 * 4, 1)
    assert whole.axes == ("a", "b")
    assert "('a', 'b')" in whole.missing and "cumsum" in str(whole.cause)
    assert "warning: f32[48, 40] (7,680 bytes) becomes whole" in found.table()


@pytest.mark.parametrize("with_unused", [False, True])
def test_the_warning_of_a_parameter_names_it_with_its_size_and_what_is_missing(with_unused, mesh):
    def running(params):
        # Along the dimension that is split.
        return jnp.sum(jnp.cumsum(params["encoder"]["positions"], 0) ** 2)

    split = on(mesh, ("a", "b"), None)
    positions = jax.ShapeDtypeStruct((48, 40), jnp.float32, sharding=split)
    params = {"encoder": {"positions": positions}}
    if with_unused:  # which XLA drops from the arguments
        params["scale"] = jax.ShapeDtypeStruct((40,), jnp.float32, sharding=on(mesh))
    found = census.take(jax.jit(running), params, mesh=mesh)
    missing = (
        "it has the size of encoder/positions, split (('a', 'b'), None): "
        "annotate the operands and the result of cumsum reduce_window_sum"
    )
    (written,) = json.loads(found.as_json())["replications"]
    assert (written["shape"], written["bytes"], written["axes"]) == (
        "f32[48, 40]",
        7680,
        ["a", "b"],
    )
    assert written["missing"] == missing
    (warning,) = (line for line in found.table().splitlines() if line.startswith("warning"))
    assert warning.startswith("warning: f32[48, 40] (7,680 bytes) becomes whole on every device")
    assert warning.endswith(missing)


def test_a_value_that_is_replicated_on_purpose_is_not(mesh):
    x = jax.ShapeDtypeStruct((48, 40), jnp.float32, sharding=on(mesh, ("a", "b"), None))
    found = census.take(jax.jit(lambda x: x * 2, out_shardings=on(mesh)), x, mesh=mesh)
    assert found.count("all-gather") == 1
    assert found.replications == ()


def test_loops_multiply_and_causes_are_read(mesh):
    def loss(w, x):
        def body(x, _):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    w = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=on(mesh))
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=on(mesh, "b", None))
    step = jax.jit(jax.grad(loss), out_shardings=on(mesh))
    found = census.take(step, w, x, mesh=mesh)
    reduced = rows(found, "all-reduce", "backward")
    assert [(row.axes, row.bytes) for row in reduced] == [(("b",), 16 * 16 * 4)]
    assert reduced[0].count in (1, 3)  # summed once after the loop, or in each of its steps


ASYNCHRONOUS = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %a = bf16[8,4]{1,0:T(8,128)(2,1)} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(f)/jvp(M)/M.encode/encoder/ffn/dispatch/transpose"}
}

ENTRY %main (x: bf16[8,4], y: f32[16]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[16]{0} parameter(1)
  %s = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}, u32[]) async-start(%x), calls=%wrapped
  %r = f32[16]{0} all-reduce-start(%y), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add, metadata={op_name="jit(f)/transpose(jvp(M))/M.encode/encoder/ffn/experts/ERM,EMH->ERH/dot_general"}
  %c = (f32[16]{0}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
  %d = bf16[8,4]{1,0} async-done(%s), calls=%wrapped
  %rd = f32[16]{0} all-reduce-done(%r)
  %cd = f32[16]{0} collective-permute-done(%c)
  ROOT %o = bf16[8,4]{1,0} copy(%d)
}
"""  # noqa: E501


def test_asynchronous_collectives_count_once_each():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "expert"))
    found = census.read(ASYNCHRONOUS, mesh)
    assert {(row.kind, row.count, row.bytes, row.axes) for row in found.rows} == {
        ("all-to-all", 1, 64, ("expert",)),
        ("all-reduce", 1, 64, ("data",)),
        ("collective-permute", 1, 64, ("expert",)),
    }


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        (
            "jit(step)/jvp(Net)/Net.encode/encoder/while/body/closed_call/layers/pattern_1/ffn/"
            "experts/ERM,EMH->ERH/dot_general",
            [Cause("forward", f"{MOE}/experts", "MoeLayer", "ERM,EMH->ERH")],
        ),
        (
            "jit(step)/transpose(jvp(Net))/Net.decode/target_embedding.logits/BLM,VM->BLV/dot_general",
            [Cause("backward", "target_embedding", "", "logits BLM,VM->BLV")],
        ),
        (
            "jit(step)/transpose(jvp(Net))/encoder/while/body/checkpoint/rematted_computation/layers/"
            "pattern_1/ffn/dispatch/transpose",
            [Cause("recompute", f"{MOE}/dispatch", "MoeLayer", "transpose")],
        ),
        (
            "jit(step)/(transpose(jvp(Net))/encoder/a/mul:jvp()/reduce_sum:jvp()/reduce_sum)",
            [
                Cause("backward", "encoder/a", "", "mul"),
                Cause("forward", "", "", "reduce_sum"),
            ],
        ),
        ("jit(f)/jit(_take)/gather", [Cause("outside", "", "", "take gather")]),
        ("", [Cause("outside", "", "", "XLA does not say")]),
    ],
)  # fmt: skip
def test_an_op_name_is_made_readable(op_name, expected):
    assert list(causes(op_name, {MOE: "MoeLayer"})) == expected


def test_inspect_prints_and_writes_what_a_gin_file_sends(tmp_path, capsys):
    out = tmp_path / "census.json"
    given = ("--devices=2", f"--json={out}")
    status = cli.main(["inspect", f"--gin_file={tiny_run.TINY}", *given])
    printed = capsys.readouterr().out
    assert status == 0
    assert "The training step on data=1 expert=2 model=1" in printed
    assert "forward encoder/pattern_1/ffn/dispatch (MoeLayer): transpose" in printed
    written = json.loads(out.read_text())
    assert written["mesh"] == {"data": 1, "expert": 2, "model": 1}
    sent = [r for r in written["rows"] if r["kind"] == "all-to-all"]
    assert sum(row["count"] for row in sent) == 2 * 2 * 2  # stacks, ways, passes


def test_devices_that_no_mesh_divides_are_an_error_with_the_reason(capsys):
    # 3 divides neither the 8 rows nor the 4 experts.
    assert cli.main(["inspect", f"--gin_file={tiny_run.TINY}", "--devices=3"]) == 2
    assert "lies on no mesh of 3 devices" in capsys.readouterr().err
