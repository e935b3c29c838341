"""Einsum, scatter and gather dispatch against loops and each other, and in what they allocate."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gshard_exp.moe.dispatch import EinsumDispatch, ScatterDispatch
from gshard_exp.moe.gather import GatherDispatch
from gshard_exp.moe.gating import Top1Gating, Top2Gating
from gshard_exp.moe.routing import Routing

DISPATCHES = (EinsumDispatch(), ScatterDispatch(), GatherDispatch())
G, S, E, M = 3, 8, 4, 5
# Tight, roomy, one slot, one expert; two choices and one.
CASES = (
    (Top2Gating(), 4, 2),
    (Top2Gating(), 4, 8),
    (Top2Gating(), 4, 1),
    (Top2Gating(), 1, 4),
    (Top1Gating(), 4, 2),
)


def name(value):
    return type(value).__name__


@functools.partial(jax.jit, static_argnums=0)
def route(gating, logits, valid, capacity, uniform):
    return gating(logits, valid, capacity, uniform)


def problem(num_experts=E, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(G, S, num_experts)).astype(np.float32)
    valid = rng.random((G, S)) < 0.8
    valid[-1] = False  # a group of padding
    uniform = rng.random((G, S), np.float32)
    return logits, valid, uniform, jnp.asarray(rng.normal(size=(G, S, M)), dtype)


def experts(x_GECM):
    """Stands for the experts: differs per expert and slot, not linear, not 0 at 0."""
    scale = 1 + jnp.arange(x_GECM.size, dtype=jnp.float32).reshape(x_GECM.shape) % 7
    return (jnp.tanh(x_GECM) * scale.astype(x_GECM.dtype) + 0.5).astype(x_GECM.dtype)


def loops(x, routing, num_experts, capacity):
    """Buffers and round trip, one token at a time in float64."""
    x = np.asarray(x, np.float64)
    routing = jax.tree.map(np.asarray, routing)
    sent = np.zeros((G, num_experts, capacity, M))
    for where in zip(*np.nonzero(routing.kept), strict=True):
        sent[where[0], routing.expert[where], routing.slot[where]] = x[where[0], where[1]]
    done = np.asarray(experts(jnp.asarray(sent, jnp.float32)), np.float64)
    back = np.zeros((G, S, M))
    for where in zip(*np.nonzero(routing.kept), strict=True):
        row = done[where[0], routing.expert[where], routing.slot[where]]
        back[where[0], where[1]] += routing.weight[where] * row
    return sent, done, back


def test_all_move_four_tokens_by_hand():
    # G=1, S=4, E=3, C=2, M=1, the routing of the worked example of test_gating. x = 10 20 30 40.
    # Expert 0 holds s0, s1; expert 1 holds s3, s0; expert 2 nobody (its slot 0 was used up by a
    # rejected choice). Sent through unchanged and weighted:
    #   s0 10 * (2/3 + 1/3) = 10, s1 20 * 5/9, s2 nowhere, s3 40 * .8
    yes, no = True, False
    routing = Routing(
        expert=jnp.int32([[[0, 1], [0, 2], [0, 1], [1, 0]]]),
        slot=jnp.int32([[[0, 1], [1, 0], [2, 2], [0, 3]]]),
        kept=jnp.array([[[yes, yes], [yes, no], [no, no], [yes, no]]]),
        weight=jnp.float32([[[2 / 3, 1 / 3], [5 / 9, 0], [0, 0], [0.8, 0]]]),
        probs=jnp.zeros((1, 4, 3)),
        attempted=jnp.ones((1, 4, 2), bool),
        aux_loss=jnp.zeros(1),
    )
    x = jnp.float32([[[10], [20], [30], [40]]])
    for way in DISPATCHES:
        sent = way.dispatch(x, routing, 3, 2)
        assert sent[0, :, :, 0].tolist() == [[10, 20], [40, 10], [0, 0]]
        np.testing.assert_allclose(
            way.combine(sent, routing)[0, :, 0], [10, 100 / 9, 0, 32], rtol=1e-6
        )


@pytest.mark.parametrize("way", DISPATCHES, ids=name)
@pytest.mark.parametrize(("gating", "num_experts", "capacity"), CASES)
def test_moves_tokens_as_the_loops_do(way, gating, num_experts, capacity):
    logits, valid, uniform, x = problem(num_experts)
    routing = route(gating, logits, valid, capacity, uniform)
    sent, done, back = loops(x, routing, num_experts, capacity)
    np.testing.assert_array_equal(
        jax.jit(way.dispatch, static_argnums=(2, 3))(x, routing, num_experts, capacity), sent
    )
    got = jax.jit(way.combine)(jnp.asarray(done, jnp.float32), routing)
    np.testing.assert_allclose(got, back, rtol=1e-5, atol=1e-6)
    assert not np.asarray(got)[~valid].any()


@pytest.mark.parametrize(("gating", "num_experts", "capacity"), CASES)
def test_all_agree_in_value_and_every_gradient(gating, num_experts, capacity):
    logits, valid, uniform, x = problem(num_experts)
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(G, num_experts, capacity, M)).astype(np.float32)
    cotangent = rng.normal(size=(G, S, M)).astype(np.float32)

    def outcome(way):
        def layer(x, logits, bias):
            routing = gating(logits, valid, capacity, uniform)
            sent = way.dispatch(x, routing, num_experts, capacity)
            return way.combine(experts(sent) + bias, routing)  # bias: a handle on expert outputs

        value, back = jax.vjp(layer, x, logits, bias)
        return value, *back(cotangent)

    one, *others = (jax.jit(outcome, static_argnums=0)(way) for way in DISPATCHES)
    for what, a, *b in zip(("value", "x", "logits", "expert outputs"), one, *others, strict=True):
        for other in b:
            np.testing.assert_allclose(a, other, rtol=1e-5, atol=1e-5, err_msg=what)
        if what != "logits" or num_experts > 1:  # one expert: the weight is 1 whatever the logit
            assert np.abs(a).max() > 0.01, what


@pytest.mark.parametrize("way", DISPATCHES, ids=name)
def test_gradient_to_the_combine_weights_is_the_inner_product_with_the_expert_output(way):
    logits, valid, uniform, x = problem()
    routing = route(Top2Gating(), logits, valid, 2, uniform)
    _, done, _ = loops(x, routing, E, 2)
    cotangent = np.random.default_rng(2).normal(size=(G, S, M)).astype(np.float32)

    def total(weight):
        y = way.combine(jnp.asarray(done, jnp.float32), routing._replace(weight=weight))
        return jnp.sum(y * cotangent)

    want = np.zeros((G, S, 2))
    for where in zip(*np.nonzero(np.asarray(routing.kept)), strict=True):
        row = done[where[0], routing.expert[where], routing.slot[where]]
        want[where] = row @ cotangent[where[0], where[1]]
    np.testing.assert_allclose(jax.grad(total)(routing.weight), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", DISPATCHES[1:], ids=name)
def test_bfloat16_stays_bfloat16_and_is_that_of_the_einsums(way):
    logits, valid, uniform, x = problem(dtype=jnp.bfloat16)
    routing = route(Top2Gating(), logits, valid, 2, uniform)
    want, sent = (each.dispatch(x, routing, E, 2) for each in (DISPATCHES[0], way))
    assert want.dtype == sent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(want), np.float32(sent))  # copies, exact
    want, back = (each.combine(sent, routing) for each in (DISPATCHES[0], way))
    assert want.dtype == back.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(want), np.float32(back), rtol=2**-7)


def subjaxprs(jaxpr):
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from subjaxprs(inner)


def largest(function, *args):
    """Elements of the largest array that a program builds, and the shapes of all."""
    shapes = [
        v.aval.shape
        for jaxpr in subjaxprs(jax.make_jaxpr(function)(*args).jaxpr)
        for eqn in jaxpr.eqns
        for v in eqn.outvars
    ]
    return max(int(np.prod(shape)) for shape in shapes), shapes


def big(groups=2, size=1024, num_experts=2048, width=16):
    """The smallest capacity the paper's family has: E = 2048, S = 1024, C = 1."""
    capacity = Top2Gating().capacity(size, num_experts, 1.0)
    assert capacity == 1
    spec = jax.ShapeDtypeStruct
    return (
        (groups, size, num_experts, capacity, width),
        spec((groups, size, num_experts), jnp.float32),
        spec((groups, size), jnp.bool_),
        spec((groups, size), jnp.float32),
        spec((groups, size, width), jnp.bfloat16),
    )


def test_gating_builds_nothing_larger_than_the_gates_at_2048_experts():
    (groups, size, num_experts, capacity, _), logits, valid, uniform, _ = big()

    def forward_and_back(logits, valid, uniform):
        def total(logits):
            out = Top2Gating()(logits, valid, capacity, uniform)
            return jnp.sum(out.weight) + jnp.sum(out.aux_loss)

        return jax.value_and_grad(total)(logits)

    assert largest(forward_and_back, logits, valid, uniform)[0] == groups * size * num_experts


@pytest.mark.parametrize("way", DISPATCHES, ids=name)
def test_dispatch_builds_nothing_larger_than_it_must_at_2048_experts(way):
    (groups, size, num_experts, capacity, width), logits, valid, uniform, x = big()
    routing = jax.eval_shape(
        lambda *a: Top2Gating()(*a[:2], capacity, a[2]), logits, valid, uniform
    )

    def forward_and_back(x, routing):
        def layer(x, weight):
            used = routing._replace(weight=weight)
            return way.combine(way.dispatch(x, used, num_experts, capacity), used)

        value, back = jax.vjp(layer, x, routing.weight)
        return value, back(value)

    size_built, shapes = largest(forward_and_back, x, routing)
    buffers = groups * num_experts * capacity * width
    if isinstance(way, EinsumDispatch):
        assert size_built == groups * size * num_experts * capacity  # Algorithm 2's mask, once flat
        assert (groups, size, num_experts, capacity) not in shapes
    else:
        assert size_built == buffers
        assert all(
            not (size in shape and num_experts * capacity in shape) for shape in shapes if shape
        )


@pytest.mark.parametrize("way", DISPATCHES, ids=name)
def test_split_groups_need_no_communication_forward_or_back(way):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec(("a", "b")))
    spec = jax.ShapeDtypeStruct
    x = spec((16, S, M), jnp.float32)
    args = (x, spec((16, S, E), jnp.float32), spec((16, S), jnp.bool_), spec((16, S), jnp.float32))

    def forward_and_back(x, logits, valid, uniform):
        def layer(x, logits):
            routing = Top2Gating()(logits, valid, 2, uniform)
            return way.combine(jnp.tanh(way.dispatch(x, routing, E, 2)), routing)

        value, back = jax.vjp(layer, x, logits)
        return value, back(value)

    compiled = jax.jit(forward_and_back, in_shardings=split).lower(*args).compile()
    collective = r"\b(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    assert re.findall(collective + r"(?:-start)?\(", compiled.as_text()) == []
    assert all(out.is_equivalent_to(split, 3) for out in jax.tree.leaves(compiled.output_shardings))
