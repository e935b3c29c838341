"""Gating against worked examples, the loops of Algorithm 1, and its invariants."""

import functools

import algorithm1_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard_exp.errors import SettingError
from gshard_exp.moe.capacity import slots_per_expert
from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.routing import router_z_loss

# Few shapes, so that few programs are compiled.
SHAPES = ((1, 1, 1), (2, 5, 1), (2, 6, 2), (1, 3, 8), (3, 8, 4))  # G, S, E; one has S < E
GATINGS = ((Top2Gating(), oracle.top2), (Top1Gating(), oracle.top1))


@functools.partial(jax.jit, static_argnums=0)
def route(gating, logits, valid, capacity, uniform):
    return gating(logits, valid, capacity, uniform)


@st.composite
def problems(draw, shapes=SHAPES):
    """(logits, valid, capacity, uniform), with ties, padding, crowding and tight buffers."""
    G, S, E = draw(st.sampled_from(shapes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(("normal", "ties", "equal", "one_expert", "two_experts")))
    logits = {
        "normal": lambda: rng.normal(size=(G, S, E)) * 2,
        "ties": lambda: rng.integers(0, 3, size=(G, S, E)),
        "equal": lambda: np.zeros((G, S, E)),
        "one_expert": lambda: rng.normal(size=(G, S, E)) + 9 * (np.arange(E) == E - 1),
        "two_experts": lambda: rng.normal(size=(G, S, E)) + 9 * (np.arange(E) >= E - 2),
    }[kind]()
    valid = {
        "none padded": lambda: np.ones((G, S), bool),
        "some padded": lambda: rng.random((G, S)) < 0.7,
        "a group padded": lambda: np.arange(G)[:, None] + np.zeros((G, S)) > 0,
        "all padded": lambda: np.zeros((G, S), bool),
    }[draw(st.sampled_from(("none padded", "some padded", "a group padded", "all padded")))]()
    capacity = draw(st.sampled_from((1, 2, S)))
    uniform = rng.random((G, S), np.float32) if draw(st.booleans()) else None
    return logits.astype(np.float32), valid, capacity, uniform


modestly = settings(max_examples=60, deadline=None, derandomize=True)


def test_top2_worked_by_hand():
    # G=1, S=4, E=3, C=2. Gates per token, and what Algorithm 1 does with them:
    #   s0  .6 .3 .1   first 0: position 0 of expert 0, kept; second 1
    #   s1  .5 .1 .4   first 0: position 1, kept;             second 2
    #   s2  .7 .2 .1   first 0: position 2, overflows;        second 1
    #   s3  .2 .8 .0+  first 1: position 0, kept;             second 0
    # Counts after the first pass, overflow included: c = (3, 1, 0).
    # Second pass, normalised g2 and rnd:
    #   s0 -> 1: position 1; g2 = .3/.9 = 1/3; 2/3 > .6, kept
    #   s1 -> 2: position 0; g2 = .4/.9;       8/9 > .9 fails, rejected; position 0 is used up
    #   s2 -> 1: position 2; g2 = .2/.9;       4/9 > .1, but 2 >= C, overflows
    #   s3 -> 0: position 3; g2 = .2/1;        .4 > .1, but 3 >= C, overflows
    # m = (2.0, 1.4, .6)/4; aux = 1/3 (3/4 * .5 + 1/4 * .35) = 1/3 * .4625
    gates = np.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1], [0.2, 0.8, 1e-9]]])
    uniform = np.array([[0.6, 0.9, 0.1, 0.1]], np.float32)
    out = route(Top2Gating(), jnp.log(gates.astype(np.float32)), np.ones((1, 4), bool), 2, uniform)
    assert out.expert.tolist() == [[[0, 1], [0, 2], [0, 1], [1, 0]]]
    assert out.slot.tolist() == [[[0, 1], [1, 0], [2, 2], [0, 3]]]
    assert out.attempted.tolist() == [[[True, True], [True, False], [True, True], [True, True]]]
    assert out.kept.tolist() == [[[True, True], [True, False], [False, False], [True, False]]]
    np.testing.assert_allclose(
        out.weight, [[[2 / 3, 1 / 3], [5 / 9, 0], [0, 0], [0.8, 0]]], rtol=1e-6
    )
    np.testing.assert_allclose(out.aux_loss, [0.4625 / 3], rtol=1e-6)


def test_top1_worked_by_hand():
    # G=1, S=4, E=3, C=2, gates as above: experts 0 0 0 1, positions 0 1 2 0, the third overflows.
    # Weights are the gates themselves; the auxiliary loss is that of the first choices, as above.
    gates = np.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1], [0.2, 0.8, 1e-9]]])
    out = route(Top1Gating(), jnp.log(gates.astype(np.float32)), np.ones((1, 4), bool), 2, None)
    assert out.expert.tolist() == [[[0], [0], [0], [1]]]
    assert out.slot.tolist() == [[[0], [1], [2], [0]]]
    assert out.kept.tolist() == [[[True], [True], [False], [True]]]
    np.testing.assert_allclose(out.weight, [[[0.6], [0.5], [0], [0.8]]], rtol=1e-6)
    np.testing.assert_allclose(out.aux_loss, [0.4625 / 3], rtol=1e-6)


def test_a_rejected_second_choice_uses_up_its_position():
    # Line (22) stands outside the `if`. Both tokens choose 0 then 1; s0 is rejected at random, so
    # s1 gets position 1 of expert 1, which at C=1 is an overflow beside an empty slot.
    logits = np.log(np.array([[[0.8, 0.2], [0.8, 0.2]]], np.float32))
    uniform = np.array([[0.5, 0.1]], np.float32)  # 2 * g2 = .4
    out = route(Top2Gating(), logits, np.ones((1, 2), bool), 1, uniform)
    assert out.slot[0, :, 1].tolist() == [0, 1]
    assert out.attempted[0, :, 1].tolist() == [False, True]
    assert out.kept[0, :, 1].tolist() == [False, False]


@pytest.mark.parametrize(("gating", "loops"), GATINGS)
def test_agrees_with_the_loops_of_the_paper(gating, loops):
    @modestly
    @given(problems())
    def check(problem):
        logits, valid, capacity, uniform = problem
        want = loops(logits, valid, capacity, uniform)
        got = route(gating, logits, valid, capacity, uniform)
        np.testing.assert_array_equal(got.kept, want.kept)
        np.testing.assert_array_equal(got.attempted, want.attempted)
        asked = want.expert >= 0
        np.testing.assert_array_equal(np.asarray(got.expert)[asked], want.expert[asked])
        np.testing.assert_array_equal(np.asarray(got.slot)[want.kept], want.slot[want.kept])
        np.testing.assert_allclose(got.weight, want.weight, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.probs, want.probs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.aux_loss, want.aux_loss, rtol=1e-5, atol=1e-7)

    check()


@pytest.mark.parametrize("gating", [gating for gating, _ in GATINGS])
def test_no_slot_is_given_twice_and_none_beyond_the_capacity(gating):
    @modestly
    @given(problems())
    def check(problem):
        logits, valid, capacity, uniform = problem
        out = jax.tree.map(np.asarray, route(gating, logits, valid, capacity, uniform))
        assert (out.slot[out.kept] >= 0).all() and (out.slot[out.kept] < capacity).all()
        assert ((out.expert >= 0) & (out.expert < logits.shape[-1])).all()
        assert not out.kept[~valid].any() and not out.probs[~valid].any()
        assert (out.weight[~out.kept] == 0).all()
        for group in range(len(valid)):
            kept = out.kept[group]
            slots = list(zip(out.expert[group][kept], out.slot[group][kept], strict=True))
            assert len(set(slots)) == len(slots)

    check()


@pytest.mark.parametrize("gating", [gating for gating, _ in GATINGS])
def test_renaming_the_experts_renames_the_choices(gating):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 8, 4)).astype(np.float32)  # no ties: those go by name
    uniform = rng.random((3, 8), np.float32)
    valid = rng.random((3, 8)) < 0.8
    order = np.array([2, 0, 3, 1])  # new expert i was expert order[i]
    old = route(gating, logits, valid, 2, uniform)
    new = route(gating, logits[..., order], valid, 2, uniform)
    np.testing.assert_array_equal(new.kept, old.kept)
    np.testing.assert_array_equal(new.slot, old.slot)
    asked = np.asarray(valid)
    np.testing.assert_array_equal(order[new.expert][asked], np.asarray(old.expert)[asked])
    np.testing.assert_allclose(new.weight, old.weight, rtol=1e-6)
    np.testing.assert_allclose(new.aux_loss, old.aux_loss, rtol=1e-6)


@pytest.mark.parametrize("gating", [gating for gating, _ in GATINGS])
def test_padding_changes_nothing_for_the_other_tokens(gating):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 5, 4)).astype(np.float32)
    uniform = rng.random((2, 5), np.float32)
    where = np.array([0, 2, 3, 6, 7])  # the five tokens among eight
    spread = np.full((2, 8, 4), np.nan, np.float32)
    spread[:, where] = logits
    spread_uniform = np.zeros((2, 8), np.float32)
    spread_uniform[:, where] = uniform
    valid = np.zeros((2, 8), bool)
    valid[:, where] = True
    alone = route(gating, logits, np.ones((2, 5), bool), 2, uniform)
    padded = route(gating, spread, valid, 2, spread_uniform)
    for field in ("expert", "slot", "kept", "attempted", "weight", "probs"):
        np.testing.assert_array_equal(getattr(padded, field)[:, where], getattr(alone, field))
    np.testing.assert_allclose(padded.aux_loss, alone.aux_loss, rtol=1e-6)


@pytest.mark.parametrize("gating", [gating for gating, _ in GATINGS])
def test_padding_of_any_content_leaves_the_gradient_finite_and_zero_there(gating):
    logits = np.random.default_rng(2).normal(size=(2, 4, 3)).astype(np.float32)
    valid = np.array([[True, True, False, False], [False] * 4])
    logits[~valid] = np.nan

    def total(logits):
        out = gating(logits, valid, 2, None)
        z = router_z_loss(logits, valid)
        return jnp.sum(out.weight[..., 0]) + jnp.sum(out.aux_loss) + jnp.sum(z)

    grad = np.asarray(jax.jit(jax.grad(total))(logits))
    assert np.isfinite(grad).all() and not grad[~valid].any() and grad[valid].any()


def test_two_experts_of_one_token_share_weight_one_unless_one_is_dropped():
    logits = np.random.default_rng(3).normal(size=(3, 8, 4)).astype(np.float32)
    valid = np.ones((3, 8), bool)
    roomy = route(Top2Gating(), logits, valid, 8, None)
    assert roomy.kept.all()
    np.testing.assert_allclose(roomy.weight.sum(-1), 1, rtol=1e-6)
    tight = route(Top2Gating(), logits, valid, 1, None)
    np.testing.assert_array_equal(
        tight.weight, np.where(tight.kept, roomy.weight, 0), "not renormalised after a drop"
    )


def test_the_second_expert_differs_from_the_first_where_every_other_gate_underflows():
    logits = np.array([[[0, -300, -300], [-300, -300, 0]]], np.float32)  # gates 1 and 0 exactly
    out = route(Top2Gating(), logits, np.ones((1, 2), bool), 2, None)
    assert out.expert.tolist() == [[[0, 1], [2, 0]]]
    assert out.kept.tolist() == [[[True, False], [True, False]]]
    np.testing.assert_array_equal(out.weight, [[[1, 0], [1, 0]]])


def test_gradient_of_the_weights_by_hand():
    # Top-1: d g1 / d logits = g1 (onehot - g), so the router learns from the task loss. Top-2: the
    # weight w1 = g1 / (g1 + g2) is the sigmoid of l1 - l2; its gradient is w1 w2 (+1, -1, 0).
    logits = np.log(np.array([[[0.6, 0.3, 0.1]]], np.float32))
    valid = np.ones((1, 1), bool)

    def gradient(gating):
        return jax.grad(lambda x: route(gating, x, valid, 1, None).weight[0, 0, 0])(logits)[0, 0]

    np.testing.assert_allclose(gradient(Top1Gating()), [0.24, -0.18, -0.06], rtol=1e-5)
    np.testing.assert_allclose(gradient(Top2Gating()), [2 / 9, -2 / 9, 0], rtol=1e-5, atol=1e-7)


def test_padding_makes_no_nan_on_the_way():
    with jax.debug_nans(True):
        Top2Gating()(jnp.zeros((1, 2, 2)), jnp.zeros((1, 2), bool), 1, None)


def test_with_one_expert_every_first_choice_has_weight_one_and_there_is_no_second():
    logits = np.random.default_rng(4).normal(size=(2, 5, 1)).astype(np.float32)
    out = route(Top2Gating(), logits, np.ones((2, 5), bool), 5, None)
    assert out.kept[..., 0].all() and not out.kept[..., 1].any() and not out.attempted[..., 1].any()
    np.testing.assert_array_equal(out.weight[..., 0], 1)
    np.testing.assert_array_equal(out.aux_loss, 1)


def test_second_choices_are_kept_with_probability_two_g2():
    # g2 = .2 everywhere, so 40 % of 20000 second choices; standard deviation .35 %.
    logits = np.broadcast_to(np.log(np.float32([0.8, 0.2])), (2, 10000, 2))
    uniform = jax.random.uniform(jax.random.key(0), (2, 10000))
    out = route(Top2Gating(), logits, np.ones((2, 10000), bool), 10000, uniform)
    assert abs(float(out.attempted[..., 1].mean()) - 0.4) < 0.015


def test_auxiliary_loss_differentiates_the_mean_gates_and_not_the_counts():
    # d aux / d logits with c_e held constant, by central differences in float64 on the loops.
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(1, 6, 3))
    valid = np.array([[True, True, False, True, True, True]])
    total = jax.jit(lambda x: jnp.sum(Top2Gating()(x, valid, 2, None).aux_loss))
    got = jax.grad(total)(logits.astype(np.float32))
    first = oracle.top2(logits, valid, 2).expert[0, valid[0], 0]
    count = np.bincount(first, minlength=3)

    def aux(x):
        gates = np.array([oracle.softmax(row) for row in x[0][valid[0]]])
        return np.mean(count / 5 * gates.mean(0))

    want = np.zeros_like(logits)
    for where in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[where] = 1e-5
        want[where] = (aux(logits + step) - aux(logits - step)) / 2e-5
    np.testing.assert_allclose(got, want, atol=1e-7)


def test_auxiliary_loss_is_one_over_e_squared_at_an_even_load():
    logits = np.tile(np.eye(4, dtype=np.float32), (1, 2, 1)) * 1e-3  # each expert first twice
    out = route(Top1Gating(), logits, np.ones((1, 8), bool), 2, None)
    np.testing.assert_allclose(out.aux_loss, [1 / 16], rtol=1e-3)


def test_weights_stay_float32_for_bfloat16_logits():
    logits = jnp.zeros((1, 4, 3), jnp.bfloat16)
    out = route(Top2Gating(), logits, jnp.ones((1, 4), bool), 2, None)
    assert out.weight.dtype == out.probs.dtype == out.aux_loss.dtype == jnp.float32
    assert out.slot.dtype == out.expert.dtype == jnp.int32


@pytest.mark.parametrize(
    ("choices", "size", "experts", "factor", "minimum", "want"),
    [
        (2, 1024, 512, 1.0, 1, 4),  # the paper's C = 2S/E
        (2, 2048, 2048, 1.0, 1, 2),
        (2, 1024, 2048, 1.0, 1, 1),
        (2, 100, 16, 1.0, 1, 13),  # 12.5, up
        (1, 100, 10, 1.1, 1, 11),  # in floats 11.000000000000002
        (2, 8, 64, 1.0, 1, 1),  # S < E
        (2, 8, 64, 1.0, 4, 4),
        (2, 8, 64, 1.0, 16, 8),  # never more than S
        (2, 16, 1, 1.0, 1, 16),
        (1, 128, 8, 1.25, 1, 20),
    ],
)
def test_capacity(choices, size, experts, factor, minimum, want):
    assert slots_per_expert(choices, size, experts, factor, minimum) == want
    gating = {1: Top1Gating, 2: Top2Gating}[choices](min_capacity=minimum)
    assert gating.num_choices == choices
    assert gating.capacity(size, experts, factor) == want


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_capacity_factor_that_is_no_positive_number_is_refused(factor):
    with pytest.raises(SettingError, match="capacity factor"):
        Top2Gating().capacity(8, 2, factor)


@pytest.mark.parametrize("gating", [Top1Gating, Top2Gating])
def test_a_minimum_below_one_slot_is_refused_and_named(gating):
    with pytest.raises(SettingError, match="min_capacity=0") as error:
        gating(min_capacity=0)
    assert error.value.settings == ("min_capacity",)


def test_z_loss_by_hand():
    # logsumexp(0, 0) = log 2 and logsumexp(log 3, 0) = log 4; the third token is padding.
    logits = np.array([[[0, 0], [np.log(3), 0], [50, 50]], [[7, 7]] * 3], np.float32)
    valid = np.array([[True, True, False], [False] * 3])
    want = [(np.log(2) ** 2 + np.log(4) ** 2) / 2, 0]
    np.testing.assert_allclose(router_z_loss(logits, valid), want, rtol=1e-6)
