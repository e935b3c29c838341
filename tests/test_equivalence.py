"""One computation however it is carried out: scanned or not, recomputed or not, whole or in parts.

Dropout and random second choices are on unless a test says otherwise. tests/test_any_mesh.py has
meshes and dispatch methods.
"""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.recompute import REMAT_POLICIES

KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def begin():
    return models.start(models.model())


@pytest.fixture(scope="module")
def in_parts(begin):
    """Parts of a batch -> the step on one device, compiled once."""

    @functools.cache
    def step(parts):
        return models.step_function(models.model(), models.devices(), begin, microbatches=parts)

    return step


@pytest.fixture(scope="module")
def one_device(in_parts):
    return models.outcome(in_parts(1)(models.batch()))


def test_the_step_that_meshes_are_compared_by_drops_and_rejects(one_device):
    # Otherwise the comparison would not reach the random and the overflowing part of routing.
    health = one_device["metrics"]["router"]["encoder/pattern_0"]
    for metric in ("fraction_dropped_first", "fraction_dropped_second", "fraction_rejected_second"):
        assert (health[metric] > 0.05).all()


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_give_what_the_whole_batch_gives(parts, in_parts, one_device):
    got = models.outcome(in_parts(parts)(models.batch()))

    def but_health(found):
        # Fractions of tokens are means over what a part holds: see the next test.
        return found | {"metrics": {k: v for k, v in found["metrics"].items() if k != "router"}}

    models.assert_trees_close(but_health(got), but_health(one_device))


def test_router_health_of_equally_full_microbatches_averages_to_that_of_the_whole(in_parts):
    whole, parts = (
        models.outcome(in_parts(parts)(full_batch()))["metrics"]["router"] for parts in (1, 4)
    )
    for metrics in (*whole.values(), *parts.values()):
        # Of these the docstring says that they describe one batch.
        for one_batch in ("max_over_mean_load", "unused_experts", "expert_load"):
            del metrics[one_batch]
    models.assert_trees_close(parts, whole)


def full_batch():
    """One example a row, no padding."""
    batch = models.batch()
    rng = np.random.default_rng(1)
    for key, value in batch.items():
        if key.endswith("tokens"):
            batch[key] = rng.integers(1, models.VOCAB, value.shape, dtype=np.int32)
        elif key.endswith("positions"):
            batch[key] = np.broadcast_to(np.arange(value.shape[1], dtype=np.int32), value.shape)
        else:
            batch[key] = np.ones_like(value)
    return batch


PATTERNS = {"encoder": "ds", "decoder": "s", "repeats": (2, 1)}


@pytest.fixture(scope="module")
def params():
    return models.run(lambda key: models.model(**PATTERNS).init(key)[0], jax.random.key(0))


def value_and_gradients(params, key, **changes):
    seq2seq = models.model(**(PATTERNS | changes))
    batch = models.batch(rows=4)
    total = jnp.float32(batch["decoder_loss_weights"].sum())

    def loss(params):
        return seq2seq.loss(params, batch, key=key, total_weight=total)

    (value, metrics), gradients = models.run(jax.value_and_grad(loss, has_aux=True), params)
    return {"loss": value, "metrics": metrics, "gradients": gradients}


@pytest.fixture(scope="module")
def scanned(params):
    return value_and_gradients(params, KEY)


def test_unrolled_layers_give_what_scanned_layers_give(params, scanned):
    models.assert_trees_close(value_and_gradients(params, KEY, unroll=2), scanned)


@pytest.mark.parametrize(
    ("remat", "unroll"),
    [*((policy, 1) for policy in REMAT_POLICIES if policy != "none"), ("full", 2)],
)
def test_recomputation_changes_neither_values_nor_gradients_nor_health(
    remat, unroll, params, scanned
):
    got = value_and_gradients(params, KEY, remat=remat, unroll=unroll)
    models.assert_trees_close(got, scanned)


def test_router_health_has_a_leading_axis_over_the_repetitions_of_the_pattern(scanned):
    health = scanned["metrics"]["router"]
    assert sorted(health) == ["decoder/pattern_0", "encoder/pattern_1"]
    for name, repeats in (("encoder/pattern_1", 2), ("decoder/pattern_0", 1)):
        assert health[name]["expert_load"].shape == (repeats, models.EXPERTS)
        assert health[name]["router_entropy"].shape == (repeats,)
        np.testing.assert_allclose(health[name]["expert_load"].sum(-1), 1, rtol=1e-6)


def encode(module, params, batch, **how):
    return module.apply(
        {"params": params},
        batch["encoder_input_tokens"],
        batch["encoder_segment_ids"],
        encoder_positions=batch["encoder_positions"],
        method="encode",
        mutable=["intermediates"],
        **how,
    )


def loop_over_layers(module, params, batch, block_rngs):
    """The encoder as a plain loop over sliced parameters; returns (output, health by block)."""
    segments = batch["encoder_segment_ids"]
    x_BLM = embedded(module, params, batch)
    same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    how = {"mask": same, "valid": segments > 0, "rows": np.arange(len(segments))}
    health = []
    for layer in range(2):
        for index, block in enumerate(module.encoder.pattern):
            stacked = params["encoder"][f"pattern_{index}"]
            own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked)
            rngs = block_rngs(layer, index)
            x_BLM, sown = block.apply(
                {"params": own},
                x_BLM,
                **how,
                deterministic=rngs is None,
                rngs=rngs,
                mutable=["intermediates"],
            )
            if index == 1:
                health.append(sown["intermediates"]["ffn"]["health"][0])
    rms = jnp.sqrt(jnp.mean(jnp.square(x_BLM), -1, keepdims=True) + 1e-6)
    return x_BLM / rms, jax.tree.map(lambda *leaves: jnp.stack(leaves), *health)


def embedded(module, params, batch):
    """Token embeddings and sines, without the input dropout (rate 0 in these tests)."""
    x_BLM = params["source_embedding"]["embedding"][batch["encoder_input_tokens"]]
    half = models.WIDTH // 2
    angles = batch["encoder_positions"][..., None] * 10_000.0 ** (-np.arange(half) / (half - 1))
    return x_BLM + jnp.float32(np.concatenate([np.sin(angles), np.cos(angles)], -1))


@pytest.mark.parametrize("unroll", [1, 2])
def test_scanned_and_unrolled_layers_give_what_a_plain_loop_gives(unroll, params):
    module = models.model(**PATTERNS, unroll=unroll).module
    batch = models.batch(rows=4)
    got, sown = models.run(lambda p: encode(module, p, batch, enable_dropout=False), params)
    expected, health = models.run(
        lambda p: loop_over_layers(module, p, batch, lambda layer, index: None), params
    )
    models.assert_trees_close(got, expected)
    got_health = sown["intermediates"]["encoder"]["pattern_1"]["ffn"]["health"][0]
    models.assert_trees_close(got_health, health)
