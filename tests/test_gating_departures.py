"""Every argument of the gatings that departs from Algorithm 1, against loops and by hand."""

import functools
import itertools

import algorithm1_oracle as oracle
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gating import problems

from gshard_exp.errors import SettingError
from gshard_exp.moe.capacity import slots_per_expert
from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.layer import MoeLayer

CHOICES = {
    "second_choice": ("random", "all"),
    "second_threshold": (0.5, 0.2),
    "rejected_choice": ("queues", "steps_aside"),
    "second_queue": ("attempted", "kept"),
    "normalize": ("before_drops", "after_drops", "never"),
    "aux_counts": ("first", "all"),
    "order": ("position", "gate"),
}
# Each departure alone, and two mixtures of many.
ALONE = [{name: v} for name, values in CHOICES.items() for v in values[1:]]
MIXED = [
    {name: values[-1] for name, values in CHOICES.items() if name != "second_choice"},
    {name: values[1] for name, values in CHOICES.items()},
]
SHAPES = ((2, 6, 2), (3, 8, 4))
GATES = np.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1], [0.2, 0.7, 0.1]]])


@functools.partial(jax.jit, static_argnums=0)
def route(gating, logits, valid, capacity, uniform):
    return gating(logits, valid, capacity, uniform)


def route_all(gating, gates, capacity, uniform=None):
    logits = np.log(np.asarray(gates, np.float32))
    return route(gating, logits, np.ones(logits.shape[:2], bool), capacity, uniform)


def name_of(departure):
    return ",".join(f"{k}={v}" for k, v in departure.items()) if len(departure) < 2 else "mixed"


@pytest.mark.parametrize("departure", ALONE + MIXED, ids=name_of)
def test_agrees_with_loops_that_depart_likewise(departure):
    gating = Top2Gating(**departure)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(problems(SHAPES))
    def check(problem):
        logits, valid, capacity, uniform = problem
        if gating.order == "gate":
            # Equal gates of two tokens are equal but for rounding: no order to compare.
            noise = np.random.default_rng(0).normal(size=logits.shape)
            logits = (logits + 0.01 * noise).astype(np.float32)
        want = oracle.top2(logits, valid, capacity, uniform, **departure)
        got = route(gating, logits, valid, capacity, uniform)
        np.testing.assert_array_equal(got.attempted, want.attempted)
        np.testing.assert_array_equal(got.kept, want.kept)
        np.testing.assert_array_equal(np.asarray(got.slot)[want.kept], want.slot[want.kept])
        np.testing.assert_allclose(got.weight, want.weight, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got.aux_loss, want.aux_loss, rtol=1e-5, atol=1e-7)

    check()


@pytest.mark.parametrize("departure", ALONE, ids=name_of)
def test_each_departure_changes_something(departure):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 16, 4)).astype(np.float32)
    valid, uniform = np.ones((4, 16), bool), rng.random((4, 16), np.float32)
    paper = route(Top2Gating(), logits, valid, 4, uniform)
    other = route(Top2Gating(**departure), logits, valid, 4, uniform)
    same = [np.array_equal(a, b) for a, b in zip(paper, other, strict=True)]
    assert not all(same)


@pytest.mark.parametrize(
    "names",
    list(itertools.product(CHOICES["rejected_choice"], CHOICES["second_queue"])),
    ids="-".join,
)
def test_no_slot_is_given_twice_in_any_queue(names):
    rejected, behind = names

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(problems(SHAPES), st.sampled_from(CHOICES["order"]))
    def check(problem, order):
        logits, valid, capacity, uniform = problem
        gating = Top2Gating(rejected_choice=rejected, second_queue=behind, order=order)
        out = jax.tree.map(np.asarray, route(gating, logits, valid, capacity, uniform))
        assert (out.slot[out.kept] >= 0).all() and (out.slot[out.kept] < capacity).all()
        for group in range(len(valid)):
            kept = out.kept[group]
            slots = list(zip(out.expert[group][kept], out.slot[group][kept], strict=True))
            assert len(set(slots)) == len(slots)

    check()


def test_queues_without_gaps_fill_every_slot_that_somebody_asks_for():
    # With rejected choices aside an expert has an empty slot only if all its choices are kept.
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(8, 16, 4)) + np.arange(4)).astype(np.float32)
    gating = Top2Gating(rejected_choice="steps_aside")
    out = route(gating, logits, np.ones((8, 16), bool), 5, rng.random((8, 16), np.float32))
    for g, e in itertools.product(range(8), range(4)):
        mine = np.asarray(out.expert[g]) == e
        asked, kept = (int((mine & np.asarray(x[g])).sum()) for x in (out.attempted, out.kept))
        assert kept == min(asked, 5)


def test_behind_whom_second_choices_queue_changes_their_positions_and_nothing_else():
    # First choices that overflow leave no slot for second ones, however those are numbered.
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(problems(SHAPES))
    def check(problem):
        attempted = route(Top2Gating(), *problem)
        kept = route(Top2Gating(second_queue="kept"), *problem)
        slots = [jnp.where(out.kept, out.slot, 0) for out in (attempted, kept)]
        np.testing.assert_array_equal(*slots)
        models.assert_trees_close(kept._replace(slot=attempted.slot), attempted, rtol=0, atol=0)

    check()


def test_a_threshold_is_where_the_second_choice_becomes_certain():
    # g2 / (g1 + g2) = .1, .2, .3 and threshold .2: kept with probability .5, 1, 1.
    gates = np.array([[[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]])
    gating = Top2Gating(second_threshold=0.2)
    for rnd, first in ((0.49, True), (0.51, False)):
        uniform = np.array([[rnd, 0.99, 0.99]], np.float32)
        out = route_all(gating, gates, 3, uniform)
        assert out.attempted[0, :, 1].tolist() == [first, True, True]


def test_the_coin_sees_the_gate_itself_unless_it_is_normalised_before_drops():
    # g1, g2 = .5, .3: normalised .375, 2 * .375 = .75 > .7; the gate itself: .6 < .7.
    gates, uniform = np.array([[[0.5, 0.3, 0.2]]]), np.array([[0.7]], np.float32)
    for how, taken in (("before_drops", True), ("after_drops", False), ("never", False)):
        out = route_all(Top2Gating(normalize=how), gates, 1, uniform)
        assert bool(out.attempted[0, 0, 1]) is taken, how


def test_priority_goes_to_the_largest_first_gate_and_equals_keep_their_order():
    # First choices of GATES: experts 0 0 0 1 with gates .6 .5 .7 .7. At C=1 expert 0 keeps s2.
    out = route_all(Top1Gating(order="gate"), GATES, 1)
    assert out.kept[0, :, 0].tolist() == [False, False, True, True]
    assert out.slot[0, :, 0].tolist() == [1, 2, 0, 0]
    equal = route_all(Top1Gating(order="gate"), np.full((1, 3, 2), 0.5), 2)
    assert equal.slot[0, :, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["after_drops", "never"])
def test_gradients_are_finite_where_everything_is_dropped_or_padding(how):
    valid = np.array([[True, True, True, False]])
    gating = Top2Gating(normalize=how, order="gate")
    total = jax.jit(lambda x: jnp.sum(gating(x, valid, 1, None).weight ** 2))
    grad = jax.grad(total)(np.zeros((1, 4, 2), np.float32))
    assert np.isfinite(grad).all()


@pytest.mark.parametrize(
    ("rounding", "minimum", "want"),
    [  # K=2, S=18, E=4, factor 1.25: exact 11.25; per choice 5.625
        ("ceil", 1, 12),
        ("floor", 1, 11),
        ("nearest", 1, 11),
        ("floor_then_four", 1, 12),
        ("ceil_per_choice", 1, 12),
        ("floor", 13, 13),
        ("floor_then_four", 13, 16),
        ("floor_then_four", 17, 18),  # 20, but never more than S
    ],
)
def test_roundings_of_the_capacity(rounding, minimum, want):
    gating = Top2Gating(min_capacity=minimum, capacity_rounding=rounding)
    assert gating.capacity(18, 4, 1.25) == want
    assert slots_per_expert(2, 18, 4, 1.25, minimum, rounding) == want


def test_nearest_takes_halves_to_even_and_per_choice_rounds_before_doubling():
    assert [slots_per_expert(1, s, 2, 1.0, rounding="nearest") for s in (5, 7)] == [2, 4]
    assert slots_per_expert(2, 9, 8, 1.0, rounding="ceil_per_choice") == 4  # 2 * ceil(9/8)
    assert slots_per_expert(2, 9, 8, 1.0) == 3  # ceil(9/4)


@pytest.mark.parametrize("field", [*CHOICES, "capacity_rounding", "min_capacity"])
def test_a_value_without_meaning_is_refused_and_named(field):
    with pytest.raises(SettingError) as error:
        Top2Gating(**{field: 0 if field in ("second_threshold", "min_capacity") else "often"})
    assert error.value.settings == (field,)


def test_jitter_moves_the_router_in_training_alone_and_goes_with_the_row():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 6, 5)).astype(np.float32)
    params = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in (("router", (5, 4)), ("wi", (4, 5, 7)), ("wo", (4, 7, 5)))
    }

    def z_loss(jitter, order, training=True):
        moe = MoeLayer(num_experts=4, expert_mlp_dim=7, group_size=6, router_jitter=jitter)
        rngs = {"routing": jax.random.key(3)} if training else None
        y, sown = models.run(
            lambda p, x, rows: moe.apply(
                {"params": p},
                x,
                valid=np.ones((4, 6), bool),
                rows=rows,
                deterministic=not training,
                rngs=rngs,
                mutable=["intermediates"],
            ),
            params,
            x[order],
            order,
        )
        return np.asarray(y)[np.argsort(order)], float(sown["intermediates"]["router_z_loss"][0])

    inorder, turned = np.arange(4), np.array([2, 0, 3, 1])
    plain, small = z_loss(0.0, inorder), z_loss(0.01, inorder)
    assert 0 < abs(small[1] - plain[1]) < 0.05 * plain[1]
    np.testing.assert_allclose(z_loss(0.01, turned)[0], small[0], rtol=1e-4, atol=1e-5)
    assert z_loss(0.5, inorder, training=False)[1] == z_loss(0.0, inorder, training=False)[1]
    with pytest.raises(SettingError, match="router_jitter"):
        z_loss(1.0, inorder)
