"""Optimizers and schedules against optax layer by layer, and numbers by hand."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

from gshard_exp import axes
from gshard_exp.errors import SettingError
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules
from gshard_exp.train.optimizer import Adafactor, AdamW, SqrtDecay, WarmupCosine, state_names
from gshard_exp.train.state import plan_state

# Two stacks of different depth, experts, a norm, an embedding: some large enough to be factored.
SIZES = {
    axes.LAYERS: (2, 3),
    axes.EXPERT: 3,
    axes.EMBED: 128,
    axes.EXPERT_MLP: 130,
    axes.MLP: 20,
    axes.VOCAB: 140,
}
NAMES = {
    "encoder": {
        "wi": (axes.LAYERS, axes.EXPERT, axes.EMBED, axes.EXPERT_MLP),
        "wo": (axes.LAYERS, axes.EXPERT, axes.EXPERT_MLP, axes.EMBED),
        "scale": (axes.LAYERS, axes.EMBED),
    },
    "decoder": {"wi": (axes.LAYERS, axes.EMBED, axes.MLP)},
    "embedding": {"embedding": (axes.VOCAB, axes.EMBED)},
}
DEPTH = {"encoder": 2, "decoder": 3}


def is_names(leaf):
    return isinstance(leaf, tuple)


def tree(seed, scale):
    """Parameters or gradients; each layer, and each step, of another magnitude."""
    rng = np.random.default_rng(seed)

    def leaf(path, names):
        sizes = SIZES | {axes.LAYERS: DEPTH.get(path[0].key)}
        x = rng.normal(size=[sizes[name] for name in names]) * scale
        if names[0] == axes.LAYERS:
            x *= (10.0 ** np.arange(len(x))).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.asarray(x, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, NAMES, is_leaf=is_names)


def unstacked(values):
    """One dict entry for each layer's array."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        key = jax.tree_util.keystr(path)
        if path[0].key in DEPTH:
            found |= {f"{key}{layer}": leaf[layer] for layer in range(len(leaf))}
        else:
            found[key] = leaf
    return found


def steps(tx, params, gradients):
    state = tx.init(params)

    def step(carry, gradient):
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    compiled = models.compiled(step, (params, state), gradients[0])
    for gradient in gradients:
        params, state = compiled((params, state), gradient)
    return params


GRADIENTS = [tree(seed, 10.0**-seed) for seed in (1, 2, 3)]


def test_adafactor_updates_stacked_layers_as_optax_updates_each_layer_apart():
    schedule = SqrtDecay(learning_rate=0.3, constant_steps=2)
    got = steps(Adafactor(schedule).make(NAMES), tree(0, 0.1), GRADIENTS)
    apart = optax.adafactor(schedule, min_dim_size_to_factor=128, decay_rate=0.8)
    expected = steps(apart, unstacked(tree(0, 0.1)), [unstacked(g) for g in GRADIENTS])
    models.assert_trees_close(unstacked(got), expected)


def test_adafactor_over_whole_stacks_would_update_otherwise():
    # The comparison above means something: one RMS for all layers is not one RMS for each.
    schedule = SqrtDecay(learning_rate=0.3, constant_steps=2)
    got = steps(Adafactor(schedule).make(NAMES), tree(0, 0.1), GRADIENTS)
    whole = steps(optax.adafactor(schedule), tree(0, 0.1), GRADIENTS)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        models.assert_trees_close(got, whole, rtol=1e-2, atol=1e-2)


def test_first_step_of_adafactor_by_hand():
    # Step 1: the decay 1 - 1^-0.8 is 0, so the second moment is g^2 and the update g / |g| = +-1,
    # RMS 1, not clipped. It is scaled by the RMS of the parameter, here sqrt((9 + 16) / 2), and by
    # the rate 0.01.
    params = {"decoder": {"scale": jnp.float32([[3.0, 4.0]])}}
    names = {"decoder": {"scale": (axes.LAYERS, axes.EMBED)}}
    got = steps(Adafactor().make(names), params, [{"decoder": {"scale": jnp.float32([[7, -2]])}}])
    step = 0.01 * np.sqrt(12.5)
    np.testing.assert_allclose(got["decoder"]["scale"], [[3 - step, 4 + step]], rtol=1e-5)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.01), (9_999, 0.01), (10_000, 0.01), (40_000, 0.005), (1_000_000, 0.001)],
)
def test_sqrt_decay_is_flat_for_10k_steps_and_falls_as_one_over_the_root_of_the_step(step, rate):
    np.testing.assert_allclose(SqrtDecay()(jnp.int32(step)), rate, rtol=1e-5)


def test_warmup_cosine_rises_linearly_and_falls_to_its_end():
    schedule = WarmupCosine(peak=0.4, warmup_steps=4, total_steps=12, final=0.1)
    rates = [float(schedule(jnp.int32(step))) for step in (0, 1, 4, 8, 12, 20)]
    # Half way down (step 8) the cosine is at the middle of peak and end.
    np.testing.assert_allclose(rates, [0, 0.1, 0.4, 0.25, 0.1, 0.1], atol=1e-6)


def test_a_warmup_longer_than_the_schedule_is_refused():
    with pytest.raises(SettingError, match="warmup_steps=5 does not fit in total_steps=5"):
        WarmupCosine(peak=1.0, warmup_steps=5, total_steps=5)


def test_adamw_by_hand_in_numpy():
    rate, b1, b2, epsilon, decay = 0.25, 0.9, 0.98, 1e-9, 0.1
    optimizer = AdamW(SqrtDecay(rate, constant_steps=1), b1, b2, epsilon, weight_decay=decay)
    got = steps(optimizer.make(NAMES), tree(0, 0.1), GRADIENTS)
    expected = jax.tree.map(np.asarray, tree(0, 0.1))
    mean = square = jax.tree.map(np.zeros_like, expected)
    for step, gradient in enumerate(GRADIENTS):
        t = step + 1
        scaled = rate / np.sqrt(max(step, 1))
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * np.asarray(g), mean, gradient)
        square = jax.tree.map(
            lambda v, g: b2 * v + (1 - b2) * np.square(np.asarray(g)), square, gradient
        )
        expected = jax.tree.map(
            lambda p, m, v, t=t, scaled=scaled: (
                p - scaled * ((m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + epsilon) + decay * p)
            ),
            expected,
            mean,
            square,
        )
    models.assert_trees_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [Adafactor, lambda **how: AdamW(SqrtDecay(), **how)])
def test_a_gradient_longer_than_the_global_norm_counts_as_one_of_that_norm(make):
    gradients = [GRADIENTS[0], GRADIENTS[1]]
    limit = 5.0

    def clipped(gradient):
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
        assert norm > limit
        return jax.tree.map(lambda g: g * (limit / norm), gradient)

    got = steps(make(max_grad_norm=limit).make(NAMES), tree(0, 0.1), gradients)
    expected = steps(make().make(NAMES), tree(0, 0.1), [clipped(g) for g in gradients])
    models.assert_trees_close(got, expected)


def test_a_gradient_shorter_than_the_global_norm_is_left_alone():
    # Adam's first step does not see the scale of a gradient; the mean that it keeps does.
    tx = AdamW(SqrtDecay(), max_grad_norm=1e9).make(NAMES)
    _, state = tx.update(GRADIENTS[0], tx.init(tree(0, 0.1)), tree(0, 0.1))
    mean = optax.tree_utils.tree_get(state, "mu")
    models.assert_trees_close(mean, jax.tree.map(lambda g: 0.1 * g, GRADIENTS[0]))


@pytest.mark.parametrize("optimizer", [Adafactor(), AdamW(SqrtDecay(), max_grad_norm=1.0)])
def test_each_dimension_of_optimizer_state_is_named_after_the_parameters_dimension(optimizer):
    # All named sizes differ, so that a name is right if the size is that of the name.
    params = jax.eval_shape(lambda: tree(0, 1.0))
    state = jax.eval_shape(optimizer.make(NAMES).init, params)
    names = state_names(state, NAMES, params)
    named = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found = names
        for entry in path:
            found = (
                found[getattr(entry, "key", getattr(entry, "idx", None))]
                if not hasattr(entry, "name")
                else getattr(found, entry.name)
            )
        assert len(found) == leaf.ndim
        for name, size in zip(found, leaf.shape, strict=True):
            if name == axes.LAYERS:
                assert size in SIZES[axes.LAYERS]
            elif name is not None:
                assert size == SIZES[name]
                named += 1
    assert named >= 5


def test_factored_moments_and_their_placeholders_have_the_names_that_remain():
    params = jax.eval_shape(lambda: tree(0, 1.0))
    state = jax.eval_shape(Adafactor().make(NAMES).init, params)
    names = state_names(state, NAMES, params)
    encoder = names.inner_states["encoder"].inner_state[0]
    layers, expert, embed, mlp = NAMES["encoder"]["wi"]
    # wi is [2, 3, 128, 130]: v_row is a mean over the largest dimension, v_col over the next.
    assert encoder.v_row["encoder"]["wi"] == (layers, expert, embed)
    assert encoder.v_col["encoder"]["wi"] == (layers, expert, mlp)
    assert encoder.v["encoder"]["wi"] == (layers, None)
    assert encoder.v_row["encoder"]["wo"] == (layers, expert, embed)
    # A norm's scale is not factored.
    assert encoder.v["encoder"]["scale"] == (layers, embed)
    assert encoder.v_row["encoder"]["scale"] == (layers, None)


ZERO1 = Rules(models.table(), optimizer=((axes.EMBED, axes.DATA),))
ADAMW = AdamW(SqrtDecay(0.01, constant_steps=1))


def test_zero1_rules_split_optimizer_state_over_data_and_leave_parameters_whole():
    # Every parameter of the model has one `embed` dimension: 8 devices hold 1/8 of each moment.
    mesh = MeshSpec(data=8).build()
    plans = [plan_state(models.model(), ADAMW, mesh, rules) for rules in (models.RULES, ZERO1)]

    def bytes_per_device(tree):
        return sum(
            np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
            if leaf.ndim
        )

    whole, split = (bytes_per_device(plan.abstract.opt_state) for plan in plans)
    assert split * 8 == whole
    assert plans[0].shardings.params == plans[1].shardings.params


def test_zero1_rules_change_no_update():
    begin = models.start(models.model(), ADAMW)
    mesh = MeshSpec(data=4, expert=2).build()
    states = [
        models.step_function(models.model(), mesh, begin, optimizer=ADAMW, rules=rules)(
            models.batch()
        )[0]
        for rules in (models.RULES, ZERO1)
    ]
    moment = optax.tree_utils.tree_get(states[1].opt_state, "mu")["source_embedding"]["embedding"]
    assert moment.addressable_shards[0].data.shape == (models.VOCAB, models.WIDTH // 4)
    models.assert_trees_close(states[1].opt_state, states[0].opt_state)
    # Adam's first step is the sign of a gradient: rounding may turn that of one near 0.
    models.assert_trees_close(states[1].params, states[0].params, atol=1e-4)
