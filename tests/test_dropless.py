"""Experts without capacity: the product by tiles, the dispatch, the layer that drops nothing."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from test_moe_layer import KEY, B, L, M, apply, gradients, layer, tokens, weights

from gshard_exp.errors import SettingError
from gshard_exp.moe import grouped
from gshard_exp.moe.dispatch import EinsumDispatch, ScatterDispatch
from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.layer import check_groups
from gshard_exp.moe.ragged import RaggedDispatch
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.manual import sum_over_devices
from gshard_exp.sharding.mesh import MeshSpec

pytestmark = pytest.mark.usefixtures("quick_compilation")
WAYS = {"tiles": grouped._tiled_dot, "chosen for the platform": grouped.grouped_dot}
# Rows of each expert, and in all: some of nobody, an expert without rows, more than one tile.
SIZES = [
    ((3, 0, 5, 1), 9),
    ((0, 0, 4, 2), 11),
    ((30, 1, 0, 17), 48),
    ((0, 0, 0, 0), 4),
    ((300, 2), 310),
]


def operands(sizes, rows, width=6, hidden=7, dtype=np.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, width))
    w = rng.normal(size=(len(sizes), width, hidden))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("sizes", "rows"), SIZES, ids=str)
def test_each_row_is_multiplied_with_the_weights_of_its_expert(sizes, rows, way):
    x, w, of_each = operands(sizes, rows)
    want = np.zeros((rows, 7))
    expert_of_row = np.repeat(np.arange(len(sizes)), sizes)
    for row, expert in enumerate(expert_of_row):
        want[row] = np.float64(x[row]) @ np.float64(w[expert])
    np.testing.assert_allclose(jax.jit(way)(x, w, of_each), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "rows"), SIZES, ids=str)
def test_gradients_by_tiles_are_those_of_ragged_dot(sizes, rows):
    x, w, of_each = operands(sizes, rows)
    cotangent = np.random.default_rng(1).normal(size=(rows, 7)).astype(np.float32)

    def back(dot):
        return jax.jit(lambda x, w: jax.vjp(lambda x, w: dot(x, w, of_each), x, w)[1](cotangent))

    got, want = back(grouped._tiled_dot)(x, w), back(jax.lax.ragged_dot)(x, w)
    models.assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_expert_without_rows_is_not_read():
    x, w, sizes = operands((3, 0, 5), 8)
    spoiled = w.at[1].set(np.nan)
    np.testing.assert_array_equal(
        jax.jit(grouped._tiled_dot)(x, spoiled, sizes), jax.jit(grouped._tiled_dot)(x, w, sizes)
    )


def test_weight_gradients_of_bfloat16_rows_are_summed_in_float32():
    # 300 rows of 1: summed in bfloat16, 256 + 1 = 256.
    x = jnp.ones((384, 1), jnp.bfloat16)
    w = jnp.ones((1, 1, 1), jnp.bfloat16)
    _, back = jax.vjp(lambda w: grouped._tiled_dot(x, w, jnp.int32([384])), w)
    assert back(jnp.ones((384, 1), jnp.bfloat16))[0].item() == 384


@pytest.mark.parametrize("gating", [Top2Gating(), Top1Gating()], ids=["top2", "top1"])
def test_with_a_capacity_it_computes_what_the_buffers_compute(gating):
    x, valid = tokens()
    params, weight = weights(), np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    ways = [
        layer(gating=gating, dispatch=dispatch, train_capacity_factor=0.5)
        for dispatch in (RaggedDispatch(), ScatterDispatch())
    ]
    one, other = (apply(moe, params, x, valid, key=KEY) for moe in ways)
    assert other[1]["health"]["fraction_dropped_first"] > 0
    models.assert_trees_close(one, other)
    models.assert_trees_close(*(gradients(moe, params, x, valid, weight) for moe in ways))


@pytest.mark.parametrize("dispatch", [EinsumDispatch(), ScatterDispatch(), RaggedDispatch()])
@pytest.mark.parametrize("gating", [Top2Gating(), Top1Gating()], ids=["top2", "top1"])
def test_dropless_is_einsum_with_ample_capacity_in_value_and_gradient(gating, dispatch):
    x, valid = tokens()
    params, weight = weights(), np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    dropless = layer(gating=gating, dispatch=dispatch, train_capacity_factor=None)
    ample = layer(gating=gating, dispatch=EinsumDispatch(), train_capacity_factor=4.0)
    (got, sown), (want, want_sown) = (
        apply(moe, params, x, valid, key=KEY) for moe in (dropless, ample)
    )
    models.assert_trees_close(got, want)
    health = sown["health"]
    assert health["fraction_dropped_first"] == health["fraction_dropped_second"] == 0
    for found, wanted in ((health, want_sown["health"]), (sown, want_sown)):
        assert found.pop("expert_usage") == 1 and wanted.pop("expert_usage") < 0.5
    models.assert_trees_close(sown, want_sown)
    models.assert_trees_close(
        *(gradients(moe, params, x, valid, weight) for moe in (dropless, ample))
    )


def test_dropless_builds_no_buffers_whatever_the_dispatch():
    moe = layer(dispatch=EinsumDispatch(), num_experts=64)
    x, valid = tokens()

    def call(x):
        how = {"valid": valid, "rows": np.arange(B), "deterministic": True}
        return moe.apply({"params": weights(64)}, x, **how)

    lines = str(jax.make_jaxpr(call)(x))
    assert f"64,{L},{M}" not in lines and f"{64 * L},{M}" not in lines


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("gating", [Top2Gating(), Top1Gating()], ids=["top2", "top1"])
def test_without_a_capacity_a_token_does_not_depend_on_its_neighbours(gating, decode):
    x, _ = tokens()
    moe, params = layer(gating=gating), weights()

    def call(x):
        how = {"valid": np.ones(x.shape[:2], bool), "rows": np.arange(len(x)), "decode": decode}
        return np.asarray(
            models.run(lambda x: moe.apply({"params": params}, x, deterministic=True, **how), x)
        )

    whole = call(x)
    np.testing.assert_allclose(call(x[1:2]), whole[1:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(call(x[:, 2:3]), whole[:, 2:3], rtol=1e-5, atol=1e-6)
    # Behind as many tokens that all want the same experts.
    crowd = np.concatenate([np.broadcast_to(x[:, :1], x.shape), x], axis=1)
    np.testing.assert_allclose(call(crowd)[:, L:], whole, rtol=1e-5, atol=1e-6)


MESHES = (MeshSpec(8), MeshSpec(1, 8), MeshSpec(1, 2, 4), MeshSpec(2, 2, 2))


@pytest.fixture(scope="module")
def begin():
    return models.start(models.model())


@pytest.fixture(scope="module")
def ample(begin):
    seq2seq = models.model(sparse={"train_capacity_factor": 8.0})
    return stepped(seq2seq, models.devices(), begin)


def stepped(seq2seq, mesh, begin):
    """Everything of a step but the share of slots in use, which is of buffers."""
    found = models.outcome(models.step_function(seq2seq, mesh, begin)(models.batch()))
    for health in found["metrics"]["router"].values():
        del health["expert_usage"]
    return found


@pytest.mark.parametrize("spec", MESHES, ids=lambda spec: f"{spec.data}x{spec.expert}x{spec.model}")
def test_on_any_mesh_dropless_gives_what_ample_capacity_gives_on_one_device(spec, begin, ample):
    seq2seq = models.model(sparse={"train_capacity_factor": None})
    models.assert_trees_close(stepped(seq2seq, spec.build(), begin), ample)


@pytest.mark.parametrize("remat", ["minimal", "full"])
def test_recomputed_and_unrolled_dropless_layers_give_the_same(remat, begin, ample):
    seq2seq = models.model(sparse={"train_capacity_factor": None}, remat=remat, unroll=2)
    models.assert_trees_close(stepped(seq2seq, models.devices(), begin), ample)


@pytest.mark.parametrize("spec", MESHES, ids=lambda spec: f"{spec.data}x{spec.expert}x{spec.model}")
def test_evaluation_gives_the_same_on_any_mesh_at_any_number_of_rows(spec, begin):
    # 8 rows of 8 tokens are 4 groups of 16, which 8 devices could not share.
    seq2seq = models.model()
    host = {key: value[:8] for key, value in models.batch().items()}

    def evaluate(mesh):
        def call(params, batch):
            with partitioning(mesh, models.RULES):
                return seq2seq.evaluate(params, batch)

        return models.run(call, begin.params, models.on_mesh(host, mesh))

    models.assert_trees_close(evaluate(spec.build()), evaluate(models.devices()))


def test_evaluation_without_a_capacity_has_no_groups_to_fill():
    how = {"batch": 3, "length": 7, "microbatches": 1, "shards": 3, "what": "encoder"}
    moe = layer(group_size=8, eval_capacity_factor=None)
    check_groups(moe, **how, training=False, settings=())
    limited = layer(group_size=16, eval_capacity_factor=1.0)
    for broken, training in ((limited, False), (layer(group_size=16), True)):
        with pytest.raises(SettingError, match="make 2 groups"):
            check_groups(broken, **how, training=training, settings=())


def test_parts_of_different_tokens_are_not_summed():
    mesh = MeshSpec(data=2, expert=2, model=2).build()
    x = jnp.ones((4, 4))
    with (
        partitioning(mesh, models.RULES),
        pytest.raises(SettingError, match=r"'expert' splits both \('batch', None\)"),
    ):
        sum_over_devices(
            lambda x: x, {"x": (x, ("batch", None))}, result=("batch", None), over=("expert",)
        )
