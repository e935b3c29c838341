"""Gatings beside Top2 and Top1 against loops; what their random numbers and losses depend on."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from test_moe_layer import KEY, layer, tokens, weights

from gshard_exp.errors import SettingError
from gshard_exp.model.layers import MultiHeadAttention
from gshard_exp.model.transformer import DecoderBlock, EncoderBlock
from gshard_exp.moe.biased import BiasedTopKGating
from gshard_exp.moe.expert_choice import ExpertChoiceGating
from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.noisy import NoisyTopKGating
from gshard_exp.sharding.mesh import MeshSpec

pytestmark = pytest.mark.usefixtures("quick_compilation")
G, S, E = 2, 9, 5


def problem(seed=0):
    """Logits, and `valid` with a group of padding."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(G + 1, S, E)).astype(np.float32)
    valid = rng.random((G + 1, S)) < 0.8
    valid[-1] = False
    return logits, valid, rng.random((G + 1, S, E), np.float32)


def run(gating, logits, valid, capacity, uniform=None):
    return jax.device_get(jax.jit(gating, static_argnums=2)(logits, valid, capacity, uniform))


def dense(routing):
    """Weights by token and expert."""
    found = np.zeros(routing.probs.shape)
    np.put_along_axis(found, routing.expert, routing.weight, axis=-1)
    return found


@pytest.mark.parametrize("capacity", [1, 3, S])
def test_experts_take_their_favourite_tokens_as_in_loops(capacity):
    logits, valid, _ = problem()
    out = run(ExpertChoiceGating(), logits, valid, capacity)
    want = np.zeros(logits.shape)
    for group in range(G + 1):
        places = np.flatnonzero(valid[group])
        for expert in range(E):
            by_gate = sorted(places, key=lambda s: -out.probs[group, s, expert])
            for token in by_gate[:capacity]:
                want[group, token, expert] = out.probs[group, token, expert]
    np.testing.assert_array_equal(dense(out), want)
    assert not out.attempted[~valid].any() and not out.aux_loss.any()
    # A slot of an expert is given once.
    for group in range(G + 1):
        kept = out.kept[group]
        slots = list(zip(out.expert[group][kept], out.slot[group][kept], strict=True))
        assert len(set(slots)) == len(slots) and all(slot < capacity for _, slot in slots)


def test_a_token_keeps_the_experts_with_the_largest_gates_where_their_number_is_limited():
    logits, valid, _ = problem()
    free, limited = (
        run(ExpertChoiceGating(most_experts=most), logits, valid, 6) for most in (None, 2)
    )
    assert limited.expert.shape[-1] == 2 and (np.count_nonzero(dense(free), axis=-1) > 2).any()
    rank = np.argsort(np.argsort(-dense(free), axis=-1, kind="stable"), axis=-1)
    np.testing.assert_array_equal(dense(limited), np.where(rank < 2, dense(free), 0))


@pytest.mark.parametrize("choices", [1, 3, 9])
def test_without_noise_or_drops_the_best_experts_are_taken_with_their_gates(choices):
    logits, valid, _ = problem()
    out = run(NoisyTopKGating(num_choices=choices), logits, valid, S)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rank = np.argsort(np.argsort(-logits, axis=-1), axis=-1)
    want = np.where((rank < choices) & valid[..., None], probs, 0)
    np.testing.assert_allclose(dense(out), want, rtol=1e-5)


def test_no_noise_has_an_importance_loss_and_no_load_loss():
    logits, valid, uniform = problem()
    of_load = NoisyTopKGating(importance_weight=0.0)
    assert not run(of_load, logits, valid, S).aux_loss.any()
    assert (run(of_load, logits, valid, S, uniform).aux_loss[:G] > 0).all()
    out = run(NoisyTopKGating(importance_weight=2.0), logits, valid, S)
    importance = out.probs.sum(1)[:G]
    want = 2 * importance.var(-1) / importance.mean(-1) ** 2 / E**2
    np.testing.assert_allclose(out.aux_loss, [*want, 0], rtol=1e-4)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)], ids=["importance", "load"])
def test_the_losses_push_the_logit_of_a_busy_expert_down(weights):
    logits, valid, uniform = problem()
    logits = logits + np.float32([2, 0, 0, 0, 0])
    gating = NoisyTopKGating(importance_weight=weights[0], load_weight=weights[1], noise_std=5.0)

    def loss(shift):
        return jnp.sum(gating(logits + shift[None, None, :], valid, S, uniform).aux_loss)

    shift = jnp.zeros(E)
    gradient = jax.jit(jax.grad(loss))(shift)
    assert gradient[0] == max(gradient) > 0
    # It is the slope of the value.
    step = 1e-2 * np.eye(E, dtype=np.float32)[0]
    slope = (jax.jit(loss)(step) - jax.jit(loss)(-step)) / 2e-2
    np.testing.assert_allclose(gradient[0], slope, rtol=0.05)


def test_second_experts_are_drawn_in_proportion_to_their_gates():
    gates = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    draws = 20_000
    logits = np.broadcast_to(np.log(gates), (1, draws, 4))
    uniform = np.random.default_rng(0).random((1, draws, 4), np.float32)
    gating = Top2Gating(second_choice="sampled", normalize="never")
    out = run(gating, logits, np.ones((1, draws), bool), draws, uniform)
    assert (out.expert[..., 0] == 0).all() and out.attempted.all()
    share = np.bincount(out.expert[0, :, 1], minlength=4) / draws
    # Four deviations of a share p are 4 sqrt(p (1 - p) / n) < .015.
    np.testing.assert_allclose(share, [0, 0.6, 0.3, 0.1], atol=0.015)
    np.testing.assert_allclose(out.weight[0, :, 1], gates[out.expert[0, :, 1]], rtol=1e-5)
    greedy = run(gating, logits[:, :3], np.ones((1, 3), bool), 3)
    assert (greedy.expert[..., 1] == 1).all()  # evaluation draws nothing


def test_random_numbers_of_zero_are_numbers():
    logits, valid, _ = problem()
    zero = np.zeros(logits.shape, np.float32)
    for gating in (Top2Gating(second_choice="sampled"), NoisyTopKGating()):
        out = run(gating, logits, valid, S, zero)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out))
        assert (out.expert[..., 0] != out.expert[..., 1]).all()


NOISY = {
    "sampled": Top2Gating(second_choice="sampled"),
    "noisy": NoisyTopKGating(noise_std=4.0),
}


@pytest.mark.parametrize("gating", NOISY.values(), ids=NOISY)
def test_noise_goes_with_row_and_key(gating):
    moe = layer(group_size=6, gating=gating)
    x, valid = tokens(rows=8)

    def call(x, valid, rows, key=KEY):
        how = {"valid": valid, "rows": rows, "deterministic": False, "rngs": {"routing": key}}
        return np.asarray(models.run(lambda x: moe.apply({"params": weights()}, x, **how), x))

    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    whole = call(x, valid, np.arange(8))
    moved = call(x[order], valid[order], order)
    np.testing.assert_allclose(moved, whole[order], rtol=1e-5, atol=1e-6)
    assert np.abs(call(x, valid, np.arange(8) + 8) - whole).max() > 1e-3
    assert np.abs(call(x, valid, np.arange(8), jax.random.key(4)) - whole).max() > 1e-3


FAMILIES = NOISY | {"experts choose": ExpertChoiceGating()}


@pytest.mark.parametrize("gating", FAMILIES.values(), ids=FAMILIES)
def test_any_mesh_and_parts_give_what_one_device_gives(gating):
    seq2seq = models.model(sparse={"gating": gating, "eval_capacity_factor": 1.0})
    begin = models.start(seq2seq)

    def outcome(mesh, parts):
        step = models.step_function(seq2seq, mesh, begin, microbatches=parts)
        found = models.outcome(step(models.batch()))
        del found["metrics"]["router"]  # fractions are means over what a part holds
        return found

    one = outcome(models.devices(), 1)
    models.assert_trees_close(outcome(MeshSpec(2, 2, 2).build(), 1), one)
    models.assert_trees_close(outcome(models.devices(), 2), one)


def block(cls, **how):
    names = ("attention", "cross_attention") if cls is DecoderBlock else ("attention",)
    attention = {name: MultiHeadAttention(2, 4, 0.0) for name in names}
    return cls(**attention, ffn=layer(**how), dropout_rate=0.0)


@pytest.mark.parametrize(
    "gating",
    [ExpertChoiceGating(), NoisyTopKGating(order="gate"), Top2Gating(order="gate")],
    ids=["experts choose", "noisy by gate", "top2 by gate"],
)
def test_a_decoder_refuses_routing_that_sees_the_future(gating):
    how = {"gating": gating, "eval_capacity_factor": 1.0}
    block(EncoderBlock, **how)
    with pytest.raises(SettingError, match="causal decoder") as caught:
        block(DecoderBlock, **how)
    assert caught.value.settings[0] == "ffn.gating"
    block(DecoderBlock, gating=NoisyTopKGating())


@pytest.mark.parametrize("field", ["train_capacity_factor", "eval_capacity_factor"])
def test_experts_that_choose_need_a_capacity(field):
    factors = {"train_capacity_factor": 1.0, "eval_capacity_factor": 1.0}
    layer(gating=ExpertChoiceGating(), **factors)
    with pytest.raises(SettingError, match=f"{field}=None"):
        layer(gating=ExpertChoiceGating(), **(factors | {field: None}))


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (NoisyTopKGating, {"num_choices": 0}),
        (NoisyTopKGating, {"noise_std": -1.0}),
        (NoisyTopKGating, {"order": "size"}),
        (ExpertChoiceGating, {"most_experts": 0}),
        (ExpertChoiceGating, {"min_capacity": 0}),
        (BiasedTopKGating, {"scale": 0.0}),
        (BiasedTopKGating, {"score": "tanh"}),
        (Top1Gating, {"min_capacity": 0}),
    ],
)
def test_settings_without_meaning_are_refused(cls, wrong):
    (field,) = wrong
    with pytest.raises(SettingError) as caught:
        cls(**wrong)
    assert caught.value.settings == (field,)
