"""Router health by hand, against loops over tokens, and where there is nothing to count."""

import functools

import algorithm1_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.health import router_health

KEYS = {
    "expert_load",
    "max_over_mean_load",
    "unused_experts",
    "expert_usage",
    "fraction_dropped_first",
    "fraction_dropped_second",
    "fraction_rejected_second",
    "fraction_tokens_left_behind",
    "router_entropy",
    "router_confidence",
    "auxiliary_loss",
}


@functools.partial(jax.jit, static_argnums=(0, 3))
def health_of(gating, logits, valid, capacity, uniform=None):
    return router_health(gating(logits, valid, capacity, uniform), valid, capacity)


def test_by_hand():
    # The worked example of test_gating (G=1, S=4, E=3, C=2), and a fifth token of padding.
    # Kept: s0 -> 0, 1; s1 -> 0; s3 -> 1. Overflowed: first of s2; second of s2 and s3.
    # Rejected at random: second of s1. Asked for a slot: expert 0 four times, expert 1 three times.
    gates = np.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1], [0.2, 0.8, 1e-9]]])
    logits = np.concatenate([np.log(gates), np.full((1, 1, 3), 9.0)], axis=1)
    valid = np.array([[True] * 4 + [False]])
    uniform = np.array([[0.6, 0.9, 0.1, 0.1, 0.0]], np.float32)
    got = health_of(Top2Gating(), logits, valid, 2, uniform)
    want = {
        "expert_load": [4 / 7, 3 / 7, 0],
        "max_over_mean_load": 12 / 7,
        "unused_experts": 1,
        "expert_usage": 4 / 6,
        "fraction_dropped_first": 1 / 4,
        "fraction_dropped_second": 2 / 4,
        "fraction_rejected_second": 1 / 4,
        "fraction_tokens_left_behind": 1 / 4,
        "router_entropy": -np.mean(np.sum(gates * np.log(gates), -1)),
        "router_confidence": (0.6 + 0.5 + 0.7 + 0.8) / 4,
        "auxiliary_loss": 0.4625 / 3,
    }
    assert set(got) == set(want) == KEYS
    for key, value in want.items():
        assert got[key].dtype == jnp.float32, key
        np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    ("gating", "loops"), [(Top2Gating(), oracle.top2), (Top1Gating(), oracle.top1)]
)
def test_agrees_with_counting_in_loops(gating, loops):
    rng = np.random.default_rng(0)
    G, S, E, C = 3, 16, 5, 3
    logits = (rng.normal(size=(G, S, E)) + np.arange(E) * 0.5).astype(np.float32)
    valid = rng.random((G, S)) < 0.8
    uniform = rng.random((G, S), np.float32)
    got = health_of(gating, logits, valid, C, uniform)
    out = loops(logits, valid, C, uniform)
    load, kept = np.zeros(E), np.zeros(E)
    counts = dict.fromkeys(("first", "second", "rejected", "behind"), 0)
    for g, s in zip(*np.nonzero(valid), strict=True):
        counts["behind"] += not out.kept[g, s].any()
        for k in range(gating.num_choices):
            load[out.expert[g, s, k]] += out.attempted[g, s, k]
            kept[out.expert[g, s, k]] += out.kept[g, s, k]
            overflowed = out.attempted[g, s, k] and not out.kept[g, s, k]
            counts[("first", "second")[k]] += overflowed
            counts["rejected"] += k == 1 and not out.attempted[g, s, k]
    want = {
        "expert_load": load / load.sum(),
        "max_over_mean_load": load.max() / load.mean(),
        "unused_experts": np.sum(kept == 0),
        "expert_usage": kept.sum() / (G * E * C),
        "fraction_dropped_first": counts["first"] / valid.sum(),
        "fraction_dropped_second": counts["second"] / valid.sum(),
        "fraction_rejected_second": counts["rejected"] / valid.sum(),
        "fraction_tokens_left_behind": counts["behind"] / valid.sum(),
        "auxiliary_loss": out.aux_loss.mean(),
    }
    assert want["fraction_dropped_first"] > 0 and want["fraction_tokens_left_behind"] > 0
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("gating", [Top2Gating(), Top1Gating()])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_a_batch_of_padding_gives_finite_numbers(gating, num_experts):
    got = health_of(gating, np.zeros((2, 3, num_experts)), np.zeros((2, 3), bool), 2)
    for key, value in got.items():
        want = num_experts if key == "unused_experts" else 0
        np.testing.assert_array_equal(value, np.full(value.shape, want), err_msg=key)


def test_one_expert_neither_rejects_nor_drops_a_second_choice():
    got = health_of(Top2Gating(), np.zeros((2, 3, 1)), np.ones((2, 3), bool), 3)
    assert got["fraction_rejected_second"] == got["fraction_dropped_second"] == 0
    assert got["max_over_mean_load"] == 1 and got["expert_usage"] == 1


def test_even_gates_have_entropy_log_e_and_confidence_one_over_e():
    got = health_of(Top1Gating(), np.zeros((1, 4, 8), np.float32), np.ones((1, 4), bool), 4)
    np.testing.assert_allclose(got["router_entropy"], np.log(8), rtol=1e-6)
    np.testing.assert_allclose(got["router_confidence"], 1 / 8, rtol=1e-6)


def test_no_gradient_passes():
    def total(logits):
        got = health_of(Top2Gating(), logits, np.ones((1, 4), bool), 2)
        return sum(jnp.sum(value) for value in got.values())

    logits = np.random.default_rng(0).normal(size=(1, 4, 3)).astype(np.float32)
    assert not np.asarray(jax.grad(total)(logits)).any()
