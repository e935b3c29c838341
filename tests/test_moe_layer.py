"""The MoE layer against loops, the dense layer, and itself on other layouts of one batch."""

import dataclasses

import algorithm1_oracle as oracle
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.model.layers import FeedForward
from gshard_exp.moe.dispatch import EinsumDispatch, ScatterDispatch
from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.mesh import MeshSpec

B, L, M, E, H = 4, 6, 5, 4, 7
KEY = jax.random.key(3)


def tokens(rows=B, length=L, seed=0):
    """x, and `valid` with some padding at the end of each row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, length, M)).astype(np.float32)
    valid = np.arange(length)[None, :] < rng.integers(length // 2, length + 1, (rows, 1))
    return x, valid


def layer(**changes) -> MoeLayer:
    return MoeLayer(**{"num_experts": E, "expert_mlp_dim": H, "group_size": 8} | changes)


def weights(num_experts=E, seed=1):
    rng = np.random.default_rng(seed)
    shapes = {"router": (M, num_experts), "wi": (num_experts, M, H), "wo": (num_experts, H, M)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def apply(moe, params, x, valid, *, rows=None, key=None):
    """Return the output and what was sown; training if there is a key."""
    rows = np.arange(len(x)) if rows is None else rows

    def call(params, x, valid, rows):
        rngs = None if key is None else {"routing": key}
        y, sown = moe.apply(
            {"params": params},
            x,
            valid=valid,
            rows=rows,
            deterministic=key is None,
            rngs=rngs,
            mutable=["intermediates"],
        )
        return y, {name: value[0] for name, value in sown["intermediates"].items()}

    return models.run(call, params, x, valid, rows)


def gradients(moe, params, x, valid, weight, *, key=KEY):
    """Gradients of sum(weight * y) + both router losses with respect to params and x."""

    def loss(params, x):
        y, sown = moe.apply(
            {"params": params},
            x,
            valid=valid,
            rows=np.arange(len(x)),
            deterministic=False,
            rngs={"routing": key},
            mutable=["intermediates"],
        )
        losses = sown["intermediates"]
        return jnp.sum(y * weight) + losses["auxiliary_loss"][0] + losses["router_z_loss"][0]

    return models.run(jax.grad(loss, argnums=(0, 1)), params, x)


def slowly(params, x, valid, route, group_size, capacity):
    """The whole layer, one token at a time, from Algorithm 1 as loops."""
    flat_x, flat_valid = x.reshape(-1, M).astype(np.float64), valid.reshape(-1)
    groups = -(-len(flat_x) // group_size)
    missing = groups * group_size - len(flat_x)
    logits = np.pad(flat_x @ params["router"], [(0, missing), (0, 0)])
    logits = logits.reshape(groups, group_size, -1)
    grouped_valid = np.pad(flat_valid, (0, missing)).reshape(groups, group_size)
    routed = route(logits, grouped_valid, capacity)
    y = np.zeros_like(flat_x)
    for g, s, k in zip(*np.nonzero(routed.kept), strict=True):
        token, e = g * group_size + s, routed.expert[g, s, k]
        hidden = np.maximum(flat_x[token] @ params["wi"][e], 0)
        y[token] += routed.weight[g, s, k] * (hidden @ params["wo"][e])
    log_z = np.where(grouped_valid, np.log(np.exp(logits).sum(-1)), 0)
    z_loss = ((log_z**2).sum(1) / np.maximum(grouped_valid.sum(1), 1)).mean()
    return y.reshape(x.shape), routed, z_loss


@pytest.mark.parametrize(
    "dispatch", [EinsumDispatch(), ScatterDispatch()], ids=["einsum", "scatter"]
)
@pytest.mark.parametrize(
    ("gating", "route", "capacity"),
    [(Top2Gating(), oracle.top2, 4), (Top1Gating(), oracle.top1, 2)],
    ids=["top2", "top1"],
)
def test_layer_computes_what_loops_over_tokens_compute(gating, route, capacity, dispatch):
    # C = 2 * 8 / 4 = 4 for two choices, 8 / 4 = 2 for one.
    x, valid = tokens()
    params = weights()
    moe = layer(gating=gating, dispatch=dispatch, eval_capacity_factor=1.0)
    y, sown = apply(moe, params, x, valid)
    expected, routed, z_loss = slowly(params, x, valid, route, 8, capacity)
    assert (routed.attempted & ~routed.kept).sum() > 0  # some tokens overflow
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sown["auxiliary_loss"], E**2 * routed.aux_loss.mean(), rtol=1e-5)
    np.testing.assert_allclose(sown["health"]["auxiliary_loss"], routed.aux_loss.mean(), rtol=1e-5)
    np.testing.assert_allclose(sown["router_z_loss"], z_loss, rtol=1e-5)


@pytest.mark.parametrize("key", [None, KEY], ids=["evaluation", "training"])
def test_one_expert_with_ample_capacity_is_the_dense_layer(key):
    x, _ = tokens()
    valid = np.ones((B, L), bool)
    params = weights(num_experts=1)
    sparse, dense = layer(num_experts=1), FeedForward(mlp_dim=H)
    dense_params = {"wi": params["wi"][0], "wo": params["wo"][0]}
    weight = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    how = {"valid": valid, "rows": np.arange(B), "deterministic": key is None}
    rngs = None if key is None else {"routing": key}

    def value(module, x, params, rngs=None):
        return jnp.sum(module.apply({"params": params}, x, rngs=rngs, **how) * weight)

    got, (got_x, got_params) = models.run(
        jax.value_and_grad(lambda x, p: value(sparse, x, p, rngs), argnums=(0, 1)), x, params
    )
    expected = models.run(
        jax.value_and_grad(lambda x, p: value(dense, x, p), argnums=(0, 1)), x, dense_params
    )
    got_dense = {"wi": got_params["wi"][0], "wo": got_params["wo"][0]}
    models.assert_trees_close((got, (got_x, got_dense)), expected, atol=1e-5)
    assert not np.any(got_params["router"])


def test_a_batch_that_does_not_fill_the_last_group_is_one_padded_by_hand():
    # 3 rows of 6 are 18 tokens, groups of 8 hold 24: a fourth row of padding.
    x, valid = tokens(rows=3)
    padded_x = np.concatenate([x, np.ones((1, L, M), np.float32)])
    padded_valid = np.concatenate([valid, np.zeros((1, L), bool)])
    y, sown = apply(layer(), weights(), x, valid, key=KEY)
    padded_y, padded_sown = apply(layer(), weights(), padded_x, padded_valid, key=KEY)
    models.assert_trees_close((y, sown), (padded_y[:3], padded_sown), rtol=1e-6)
    weight = np.ones_like(padded_x)
    of_params, of_x = gradients(layer(), weights(), x, valid, weight[:3])
    padded_params, padded_of_x = gradients(layer(), weights(), padded_x, padded_valid, weight)
    models.assert_trees_close((of_params, of_x), (padded_params, padded_of_x[:3]))


def test_padding_gets_nothing_and_causes_nothing():
    x, valid = tokens()
    other = np.where(valid[..., None], x, 100.0).astype(np.float32)
    y, sown = apply(layer(), weights(), x, valid, key=KEY)
    other_y, other_sown = apply(layer(), weights(), other, valid, key=KEY)
    models.assert_trees_close((other_y, other_sown), (y, sown), rtol=0, atol=0)
    assert np.any(y[valid]) and not np.any(np.asarray(y)[~valid])
    of_params, of_x = gradients(layer(), weights(), x, valid, np.ones_like(x))
    other_params, other_of_x = gradients(layer(), weights(), other, valid, np.ones_like(x))
    models.assert_trees_close((other_params, other_of_x), (of_params, of_x))
    assert not np.any(np.asarray(other_of_x)[~valid])


def test_tokens_that_overflow_get_zeros():
    # 8 equal tokens of one group choose the same two experts, which have C = 2 * 8 / 4 = 4 slots.
    x = np.broadcast_to(tokens()[0][:1, :1], (1, 8, M))
    y, _ = apply(layer(eval_capacity_factor=1.0), weights(), x, np.ones((1, 8), bool))
    assert np.all(np.any(y[0, :4] != 0, axis=-1))
    assert not np.any(y[0, 4:])


@dataclasses.dataclass(frozen=True)
class SeeCapacity(EinsumDispatch):
    """Notes the capacity that the layer asks for."""

    seen: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def dispatch(self, x, routing, num_experts, capacity):
        self.seen.append(capacity)
        return super().dispatch(x, routing, num_experts, capacity)


@pytest.mark.parametrize(
    ("how", "capacity"),
    [
        ({"deterministic": False}, 5),
        ({"deterministic": True}, 8),
        ({"deterministic": True, "decode": True}, 6),
    ],
    ids=["training", "evaluation", "decoding"],
)
def test_training_evaluation_and_decoding_have_capacities_of_their_own(how, capacity):
    # 2 * 8 / 4 = 4 slots, times 1.25, 2 and 1.5.
    see = SeeCapacity()
    moe = layer(
        dispatch=see,
        train_capacity_factor=1.25,
        eval_capacity_factor=2.0,
        decode_capacity_factor=1.5,
    )
    x, valid = tokens()
    jax.eval_shape(
        lambda: moe.apply(
            {"params": weights()}, x, valid=valid, rows=np.arange(B), rngs={"routing": KEY}, **how
        )
    )
    assert see.seen == [capacity]


def test_no_size_in_the_computation_depends_on_the_mesh():
    x, valid = tokens(rows=8, length=8)

    def shapes(mesh):
        def call(x):
            with partitioning(mesh, models.RULES):
                return layer().apply(
                    {"params": weights()},
                    x,
                    valid=valid,
                    rows=np.arange(8),
                    deterministic=False,
                    rngs={"routing": KEY},
                )

        equations = jax.make_jaxpr(call)(x).jaxpr.eqns
        return [(e.primitive.name, [v.aval.shape for v in e.outvars]) for e in equations]

    one = shapes(models.devices(1))
    assert any((8, E, 4, M) in found for _, found in one)  # G = 64 / 8 groups
    for spec in (MeshSpec(data=8), MeshSpec(expert=4), MeshSpec(data=2, expert=2)):
        assert shapes(spec.build()) == one


def test_the_random_second_choice_of_a_row_goes_with_its_index():
    # A group a row, so that rows do not meet: with their indices they may stand in any order.
    moe = layer(group_size=L)
    x, valid = tokens(rows=8)
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    y, _ = apply(moe, weights(), x, valid, key=KEY)
    moved, _ = apply(moe, weights(), x[order], valid[order], rows=order, key=KEY)
    np.testing.assert_allclose(moved, np.asarray(y)[order], rtol=1e-5, atol=1e-6)
    part, _ = apply(moe, weights(), x[4:], valid[4:], rows=np.arange(4, 8), key=KEY)
    np.testing.assert_allclose(part, np.asarray(y)[4:], rtol=1e-5, atol=1e-6)


def test_the_random_second_choice_depends_on_row_and_key():
    moe = layer(group_size=L)
    x, valid = tokens(rows=8)
    y, _ = apply(moe, weights(), x, valid, key=KEY)
    for how in ({"rows": np.arange(8) + 8, "key": KEY}, {"key": jax.random.key(4)}):
        other, _ = apply(moe, weights(), x, valid, **how)
        assert np.any(np.abs(np.asarray(other) - y) > 1e-3)


def test_the_router_sees_float32_logits_of_bfloat16_tokens():
    @dataclasses.dataclass(frozen=True)
    class SeeDtype(Top2Gating):
        seen: list = dataclasses.field(default_factory=list, hash=False, compare=False)

        def __call__(self, logits, *args):
            self.seen.append(logits.dtype)
            return super().__call__(logits, *args)

    see = SeeDtype()
    x, valid = tokens()
    y, sown = apply(layer(gating=see), weights(), x.astype(jnp.bfloat16), valid)
    assert see.seen == [jnp.float32]
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(sown)} == {jnp.dtype("float32")}
