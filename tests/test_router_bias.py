"""The bias that balances experts: its gradient is the load, and the optimizer steps by its sign."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import tiny_run
from test_moe_layer import KEY, B, E, L, M, layer, tokens, weights

from gshard_exp.moe.biased import BiasedTopKGating
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.optimizer import Adafactor, AdamW, WarmupCosine

pytestmark = pytest.mark.usefixtures("quick_compilation")
GATING = BiasedTopKGating(num_choices=2)
SPARSE = {"gating": GATING, "shared_mlp_dim": 12}
RATE = 0.25
ADAMW = AdamW(
    WarmupCosine(peak=0.1, warmup_steps=0, total_steps=9),
    max_grad_norm=1.0,
    weight_decay=0.1,
    router_bias_rate=RATE,
)


def biased_weights(bias):
    return weights() | {"router_bias": np.float32(bias)}


def bias_gradient(bias, x, valid):
    def loss(params):
        how = {"valid": valid, "rows": np.arange(len(x)), "deterministic": False}
        _, sown = layer(gating=GATING, group_size=L).apply(
            {"params": params}, x, rngs={"routing": KEY}, mutable=["intermediates"], **how
        )
        return sown["intermediates"]["bias_loss"][0]

    value, gradient = models.run(jax.value_and_grad(loss), biased_weights(bias))
    assert value == 0
    assert not any(np.any(leaf) for name, leaf in gradient.items() if name != "router_bias")
    return np.asarray(gradient["router_bias"])


@pytest.mark.parametrize("bias", [(0, 0, 0, 0), (9, 0, 0, 0), (0, -9, 0, -9)], ids=str)
def test_the_gradient_of_the_bias_is_the_load_over_the_mean(bias):
    x, valid = tokens()
    score = 1 / (1 + np.exp(-(x @ weights()["router"]))) + np.float32(bias)
    chosen = np.argsort(-score, axis=-1)[..., :2]
    count = np.array([np.sum((chosen == e) & valid[..., None]) for e in range(E)])
    want = (E * count - count.sum()) * 2.0**-40
    np.testing.assert_array_equal(bias_gradient(bias, x, valid), np.float32(want))


def test_the_bias_decides_who_is_chosen_and_weighs_nothing():
    logits = np.random.default_rng(0).normal(size=(2, 6, E)).astype(np.float32)
    valid = np.ones((2, 6), bool)
    route = jax.jit(GATING, static_argnums=2)
    raised = route(logits, valid, 6, None, jnp.float32([9, 0, 0, 0]))
    assert (raised.expert[..., 0] == 0).all()
    score = 1 / (1 + np.exp(-logits))
    own = np.take_along_axis(score, np.asarray(raised.expert), axis=-1)
    np.testing.assert_allclose(raised.weight, own / own.sum(-1, keepdims=True), rtol=1e-5)
    none, zero = (route(logits, valid, 6, None, *bias) for bias in ((), (jnp.zeros(E),)))
    models.assert_trees_close(none, zero)


@pytest.mark.parametrize(
    "optimizer", [ADAMW, Adafactor(router_bias_rate=RATE)], ids=["adamw", "adafactor"]
)
def test_a_step_moves_the_bias_by_the_rate_and_nothing_else_of_it_depends_on_the_bias(optimizer):
    seq2seq = models.model(sparse=SPARSE)
    begin = models.start(seq2seq, optimizer)
    step = models.step_function(seq2seq, models.devices(), begin, optimizer=optimizer)
    state, metrics = jax.device_get(step(models.batch()))
    bias = state.params["encoder"]["pattern_0"]["ffn"]["router_bias"]
    load = metrics["router"]["encoder/pattern_0"]["expert_load"]
    assert bias.shape == load.shape == (2, models.EXPERTS)  # a bias of each layer of the scan
    # A load that is the mean exactly moves nothing.
    over = np.where(np.abs(load - 1 / models.EXPERTS) < 1e-6, 0, load - 1 / models.EXPERTS)
    np.testing.assert_array_equal(bias, -RATE * np.sign(over))
    assert len(np.unique(bias)) >= 2


@pytest.fixture(scope="module")
def begin():
    return models.start(models.model(sparse=SPARSE))


@pytest.fixture(scope="module")
def one_device(begin):
    step = models.step_function(models.model(sparse=SPARSE), models.devices(), begin)
    return models.outcome(step(models.batch()))


@pytest.mark.parametrize("spec", [MeshSpec(8), MeshSpec(2, 2, 2)], ids=["8x1x1", "2x2x2"])
def test_bias_and_shared_expert_are_the_same_on_any_mesh(spec, begin, one_device):
    step = models.step_function(models.model(sparse=SPARSE), spec.build(), begin)
    models.assert_trees_close(models.outcome(step(models.batch())), one_device)


@pytest.mark.parametrize(
    ("changes", "parts"), [({}, 4), ({"remat": "full", "unroll": 2}, 1)], ids=["parts", "unrolled"]
)
def test_the_load_adds_up_over_microbatches_and_is_counted_once(changes, parts, begin, one_device):
    seq2seq = models.model(sparse=SPARSE, **changes)
    step = models.step_function(seq2seq, models.devices(), begin, microbatches=parts)
    got = models.outcome(step(models.batch()))
    for outcome in (got, found := dict(one_device)):
        outcome["metrics"] = {k: v for k, v in outcome["metrics"].items() if k != "router"}
    models.assert_trees_close(got, found)
    of_bias = [
        outcome["gradients"]["encoder"]["pattern_0"]["ffn"]["router_bias"]
        for outcome in (got, found)
    ]
    np.testing.assert_array_equal(*of_bias)
    assert np.any(of_bias[0])


def test_repeated_steps_even_out_the_load():
    # All tokens like expert 0 best; nothing is trained but the bias.
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 256, E)).astype(np.float32) + np.float32([2, 0, 0, -1])
    valid = np.ones((1, 256), bool)
    route = jax.jit(GATING, static_argnums=2)

    def most_over_mean(bias):
        out = route(logits, valid, 256, None, bias)
        count = np.bincount(np.asarray(out.expert).ravel(), minlength=E)
        return count, count.max() / count.mean()

    bias = np.zeros(E, np.float32)
    before = most_over_mean(bias)[1]
    for _ in range(100):
        count, _ = most_over_mean(bias)
        bias -= np.float32(0.01 * np.sign(count - count.mean()))
    assert before > 1.6 and most_over_mean(bias)[1] < 1.1


def test_a_shared_expert_is_a_dense_layer_beside_the_others():
    x, valid = tokens()
    rng = np.random.default_rng(5)
    shared = {
        "shared_wi": rng.normal(size=(M, 12)).astype(np.float32),
        "shared_wo": rng.normal(size=(12, M)).astype(np.float32),
    }
    how = {"valid": valid, "rows": np.arange(B), "deterministic": True}
    alone = layer().apply({"params": weights()}, x, **how)
    both = layer(shared_mlp_dim=12).apply({"params": weights() | shared}, x, **how)
    dense = np.maximum(x @ shared["shared_wi"], 0) @ shared["shared_wo"]
    np.testing.assert_allclose(both, alone + dense, rtol=1e-4, atol=1e-4)


def test_a_run_that_was_stopped_goes_on_with_its_bias(tmp_path):
    biased = "gshard_exp.moe.biased.BiasedTopKGating"
    flags = (f"GATING=@{biased}()", f"{biased}.num_choices=1")
    whole, halves = (
        tiny_run.experiment(tmp_path / name, *flags, train_steps=8) for name in ("whole", "halves")
    )
    expected, _ = tiny_run.train(whole)
    tiny_run.train(dataclasses.replace(halves, train_steps=4))
    resumed, said = tiny_run.train(halves)
    assert said[0].endswith("checkpoint_4")
    tiny_run.assert_equal(tiny_run.arrays(resumed), tiny_run.arrays(expected))
    bias = np.asarray(expected.params["encoder"]["pattern_0"]["ffn"]["router_bias"])
    # Eight steps of 1e-3, up or down.
    assert np.abs(bias).max() >= 1e-3
    np.testing.assert_allclose(bias / 1e-3, np.round(bias / 1e-3), atol=1e-3)
