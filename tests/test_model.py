"""The Transformer: who sees whom, dtypes, dropout, the loss, and the names of its parameters."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.errors import SettingError
from gshard_exp.model import layers, transformer
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.rng import row_dropout
from gshard_exp.train.state import abstract_params, parameter_path

DENSE = {"encoder": "d", "decoder": "d", "repeats": (1, 2)}
KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def dense():
    return initialised(**DENSE)


@pytest.fixture(scope="module")
def sparse():
    return initialised(decoder="s", repeats=(2, 1))


def initialised(**how):
    seq2seq = models.model(**how)
    return seq2seq, models.run(lambda key: seq2seq.init(key)[0], jax.random.key(0))


ARGUMENTS = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
OPTIONAL = ("segment_ids", "positions")


def call(seq2seq, params, batch, *, key=None):
    """Logits and what was sown; training if there is a key."""
    optional = {k: v for k, v in batch.items() if k.endswith(OPTIONAL) or k == "rows"}
    rngs = {} if key is None else {"dropout": key, "routing": key}
    return seq2seq.module.apply(
        {"params": params},
        *(batch[name] for name in ARGUMENTS),
        **optional,
        enable_dropout=key is not None,
        rngs=rngs,
        mutable=["intermediates"],
    )


def logits(seq2seq, params, batch, *, key=None):
    return np.asarray(models.run(lambda p, b: call(seq2seq, p, b, key=key)[0], params, batch))


def test_logits_do_not_see_later_targets(dense):
    batch = models.batch(rows=2)
    for side in ("segment_ids", "positions"):  # one example a row
        del batch[f"encoder_{side}"], batch[f"decoder_{side}"]
    batch["decoder_target_tokens"] = np.full((2, models.TARGET), 3, np.int32)
    before = logits(*dense, batch)
    changed = dict(batch, decoder_input_tokens=batch["decoder_input_tokens"].copy())
    changed["decoder_input_tokens"][:, 9] = 1 + (changed["decoder_input_tokens"][:, 9] + 5) % 30
    after = logits(*dense, changed)
    np.testing.assert_array_equal(after[:, :9], before[:, :9])
    assert np.all(np.abs(after[:, 9:] - before[:, 9:]).max(-1) > 1e-4)


def test_a_packed_row_is_its_examples_alone(dense):
    packed = models.batch(rows=1)
    together = logits(*dense, packed)[0]
    for segment in (1, 2):
        alone = {}
        for key, value in packed.items():
            inside = packed[f"{key.split('_')[0]}_segment_ids"][0] == segment
            alone[key] = value[:, inside]
        for side in ("encoder", "decoder"):  # the defaults: one example a row, counted from 0
            del alone[f"{side}_segment_ids"], alone[f"{side}_positions"]
        inside = packed["decoder_segment_ids"][0] == segment
        np.testing.assert_allclose(logits(*dense, alone)[0], together[inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("changed", "other"), [(1, 2), (2, 1)])
def test_attention_never_crosses_examples_of_a_row(changed, other, dense):
    batch = models.batch(rows=4)
    before = logits(*dense, batch)
    moved = dict(batch)
    for name in ARGUMENTS:
        inside = batch[f"{name.split('_')[0]}_segment_ids"] == changed
        moved[name] = np.where(inside, 1 + (batch[name] + 7) % 30, batch[name])
    after = logits(*dense, moved)
    segments = batch["decoder_segment_ids"]
    np.testing.assert_array_equal(after[segments == other], before[segments == other])
    assert np.all(np.abs(after - before).max(-1)[segments == changed] > 1e-4)


def test_the_decoder_sees_the_source(dense):
    batch = models.batch(rows=2)
    moved = dict(batch, encoder_input_tokens=1 + (batch["encoder_input_tokens"] + 7) % 30)
    difference = np.abs(logits(*dense, moved) - logits(*dense, batch)).max(-1)
    assert np.all(difference[batch["decoder_segment_ids"] > 0] > 1e-4)


def test_heads_times_head_width_need_not_be_the_model_width():
    params, _ = abstract_params(models.model(head_dim=5, **DENSE))
    attention = params["decoder"]["pattern_0"]["cross_attention"]
    assert attention["query"].shape == (2, models.WIDTH, models.HEADS, 5)
    assert attention["out"].shape == (2, models.HEADS, 5, models.WIDTH)


def test_bfloat16_activations_keep_parameters_gradients_and_logits_in_float32():
    seq2seq = models.model(dtype="bfloat16")
    params, _ = abstract_params(seq2seq)
    batch = models.batch(rows=2)
    total = jnp.float32(1)

    def loss(params):
        return seq2seq.loss(params, batch, key=KEY, total_weight=total)

    gradients, metrics = jax.eval_shape(jax.grad(loss, has_aux=True), params)
    outputs, sown = jax.eval_shape(lambda p: call(seq2seq, p, batch, key=KEY), params)
    for leaf in jax.tree.leaves((params, gradients, metrics, outputs, sown)):
        assert leaf.dtype == jnp.float32
    encoded = jax.eval_shape(
        lambda p: seq2seq.module.apply(
            {"params": p},
            batch["encoder_input_tokens"],
            batch["encoder_segment_ids"],
            enable_dropout=False,
            method="encode",
        ),
        params,
    )
    assert encoded.dtype == jnp.bfloat16


def test_bfloat16_activations_stay_near_float32(dense):
    half = models.model(dtype="bfloat16", **DENSE)
    batch = models.batch(rows=2)
    difference = logits(half, dense[1], batch) - logits(*dense, batch)
    assert 0 < np.abs(difference).max() < 0.1


def test_the_loss_is_that_of_its_docstring():
    # Weights of each term that no other has, so that none can stand in for another.
    weights = {
        "label_smoothing": 0.2,
        "z_loss": 0.03,
        "aux_loss_factor": 0.5,
        "router_z_loss_factor": 0.07,
    }
    seq2seq, params = initialised(decoder="s", **weights)
    batch = models.batch(rows=4)
    total = 50.0
    got, metrics = models.run(
        lambda p: seq2seq.loss(p, batch, key=None, total_weight=jnp.float32(total)), params
    )
    logits_BLV, sown = models.run(lambda p: call(seq2seq, p, batch), params)

    scores = np.asarray(logits_BLV, np.float64)
    log_z = np.log(np.exp(scores).sum(-1))
    targets = np.eye(models.VOCAB)[batch["decoder_target_tokens"]]
    smooth = 0.8 * targets + 0.2 / models.VOCAB
    cross_entropy = -(smooth * (scores - log_z[..., None])).sum(-1)
    nll = -(targets * (scores - log_z[..., None])).sum(-1)
    mask = batch["decoder_loss_weights"]
    layers = [sown["intermediates"][stack]["pattern_0"]["ffn"] for stack in ("encoder", "decoder")]
    # l_aux as health reports it, without coefficient: 2 layers of the encoder, 1 of the decoder.
    l_aux = np.concatenate([layer["health"][0]["auxiliary_loss"] for layer in layers])
    router_z = np.concatenate([layer["router_z_loss"][0] for layer in layers])
    assert l_aux.shape == router_z.shape == (3,)
    expected = ((cross_entropy + 0.03 * log_z**2) * mask).sum() / total
    expected += 0.5 * models.EXPERTS**2 * l_aux.sum() + 0.07 * router_z.sum()
    np.testing.assert_allclose(got, expected, rtol=1e-5)

    sums = metrics["sums"]
    np.testing.assert_allclose(sums["cross_ent_loss"], (nll * mask).sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["z_loss"], (0.03 * log_z**2 * mask).sum(), rtol=1e-5)
    right = scores.argmax(-1) == batch["decoder_target_tokens"]
    assert sums["correct"] == (right * mask).sum()
    assert sums["target_tokens"] == mask.sum()
    assert sums["source_tokens"] == (batch["encoder_input_tokens"] > 0).sum()


def test_evaluation_sums_over_each_row_without_smoothing(sparse):
    seq2seq, params = sparse
    batch = models.batch(rows=4)
    got = models.run(lambda p: seq2seq.evaluate(p, batch), params)
    scores = logits(seq2seq, params, batch).astype(np.float64)
    log_z = np.log(np.exp(scores).sum(-1))
    target = np.take_along_axis(scores, batch["decoder_target_tokens"][..., None], -1)[..., 0]
    mask = batch["decoder_loss_weights"]
    np.testing.assert_allclose(got["cross_ent_loss"], ((log_z - target) * mask).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(got["target_tokens"], mask.sum(1))


def test_a_fresh_models_cross_entropy_is_near_that_of_guessing(sparse):
    seq2seq, params = sparse
    got = models.run(lambda p: seq2seq.evaluate(p, models.batch()), params)
    loss = got["cross_ent_loss"].sum() / got["target_tokens"].sum()
    assert np.log(models.VOCAB) < loss < np.log(models.VOCAB) + 1


def test_dropout_zeroes_its_rate_of_elements_and_scales_the_others():
    rate, rows, width = 0.3, 64, 1000
    y = np.asarray(row_dropout(jnp.ones((rows, width)), rate, KEY, jnp.arange(rows)))
    rounded = round(0.3 * 2**16) / 2**16  # what is left is scaled by the rate in force
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - rounded)], rtol=1e-6)
    # Of n = 64,000 coins the share has a standard deviation of sqrt(.3 * .7 / n) = .0018; that of
    # one row's 1000 coins .0145, of one column's 64 coins .057.
    np.testing.assert_allclose((y == 0).mean(), rate, atol=4 * 0.0018)
    np.testing.assert_allclose((y == 0).mean(1), rate, atol=5 * 0.0145)
    np.testing.assert_allclose((y == 0).mean(0), rate, atol=5 * 0.057)


def test_neighbours_that_share_a_random_word_are_dropped_independently():
    y = np.asarray(row_dropout(jnp.ones((64, 1000)), 0.5, KEY, jnp.arange(64))) == 0
    # 64,000 pairs of fair coins agree in half of the cases, with a standard deviation of .002.
    for distance in (1, 2, 3, 4, 500):
        agree = (y == np.roll(y, distance, axis=1)).mean()
        np.testing.assert_allclose(agree, 0.5, atol=4 * 0.002)


def test_dropout_of_a_row_depends_on_its_index_and_the_key_alone():
    x = jnp.ones((8, 3, 5))
    order = jnp.array([5, 2, 7, 0, 1, 6, 3, 4])
    whole = row_dropout(x, 0.5, KEY, jnp.arange(8))
    np.testing.assert_array_equal(row_dropout(x, 0.5, KEY, order), whole[order])
    np.testing.assert_array_equal(row_dropout(x[:2], 0.5, KEY, jnp.array([6, 7])), whole[6:])
    assert not np.array_equal(whole[0], whole[1])
    assert not np.array_equal(row_dropout(x, 0.5, jax.random.key(6), jnp.arange(8)), whole)


def test_every_dropout_of_the_model_goes_with_the_row(dense):
    batch = models.batch(rows=8)
    order = np.array([5, 2, 7, 0, 1, 6, 3, 4])
    whole = logits(*dense, batch | {"rows": np.arange(8)}, key=KEY)
    moved = {key: value[order] for key, value in batch.items()} | {"rows": order}
    np.testing.assert_allclose(logits(*dense, moved, key=KEY), whole[order], rtol=1e-4, atol=1e-5)
    assert np.abs(whole - logits(*dense, batch)).max() > 0.1


def test_layers_of_a_stack_draw_numbers_of_their_own():
    # The same weights in both layers of the encoder: without numbers of their own, so would be
    # the random second choices that they reject.
    params = initialised(repeats=(2, 1))[1]
    same = jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * 2), params["encoder"])
    same["pattern_0"]["attention"]["out"] *= 0  # so that both layers see nearly one input
    same["pattern_0"]["ffn"]["wo"] *= 0
    quiet = models.model(repeats=(2, 1), dropout=0.0)
    _, sown = models.run(
        lambda p: call(quiet, p, models.batch(), key=KEY), params | {"encoder": same}
    )
    health = sown["intermediates"]["encoder"]["pattern_0"]["ffn"]["health"][0]
    np.testing.assert_allclose(*health["router_entropy"], rtol=1e-5)
    assert len(set(np.asarray(health["fraction_rejected_second"]))) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"remat": "half"}, "remat='half' is not known"), ({"repeats": (0, 1)}, "num_layers=0")],
)
def test_a_stack_that_cannot_be_is_refused(changes, message):
    with pytest.raises(SettingError, match=message):
        models.model(**changes)


GOLDEN = """
decoder/pattern_0/attention/key [1, 16, 8, 4] float32 layers embed heads kv
decoder/pattern_0/attention/out [1, 8, 4, 16] float32 layers heads kv embed
decoder/pattern_0/attention/query [1, 16, 8, 4] float32 layers embed heads kv
decoder/pattern_0/attention/value [1, 16, 8, 4] float32 layers embed heads kv
decoder/pattern_0/attention_norm/scale [1, 16] float32 layers embed
decoder/pattern_0/cross_attention/key [1, 16, 8, 4] float32 layers embed heads kv
decoder/pattern_0/cross_attention/out [1, 8, 4, 16] float32 layers heads kv embed
decoder/pattern_0/cross_attention/query [1, 16, 8, 4] float32 layers embed heads kv
decoder/pattern_0/cross_attention/value [1, 16, 8, 4] float32 layers embed heads kv
decoder/pattern_0/cross_attention_norm/scale [1, 16] float32 layers embed
decoder/pattern_0/ffn/wi [1, 16, 16] float32 layers embed mlp
decoder/pattern_0/ffn/wo [1, 16, 16] float32 layers mlp embed
decoder/pattern_0/ffn_norm/scale [1, 16] float32 layers embed
decoder_norm/scale [16] float32 embed
encoder/pattern_0/attention/key [2, 16, 8, 4] float32 layers embed heads kv
encoder/pattern_0/attention/out [2, 8, 4, 16] float32 layers heads kv embed
encoder/pattern_0/attention/query [2, 16, 8, 4] float32 layers embed heads kv
encoder/pattern_0/attention/value [2, 16, 8, 4] float32 layers embed heads kv
encoder/pattern_0/attention_norm/scale [2, 16] float32 layers embed
encoder/pattern_0/ffn/wi [2, 16, 16] float32 layers embed mlp
encoder/pattern_0/ffn/wo [2, 16, 16] float32 layers mlp embed
encoder/pattern_0/ffn_norm/scale [2, 16] float32 layers embed
encoder/pattern_1/attention/key [2, 16, 8, 4] float32 layers embed heads kv
encoder/pattern_1/attention/out [2, 8, 4, 16] float32 layers heads kv embed
encoder/pattern_1/attention/query [2, 16, 8, 4] float32 layers embed heads kv
encoder/pattern_1/attention/value [2, 16, 8, 4] float32 layers embed heads kv
encoder/pattern_1/attention_norm/scale [2, 16] float32 layers embed
encoder/pattern_1/ffn/router [2, 16, 8] float32 layers embed router_expert
encoder/pattern_1/ffn/wi [2, 8, 16, 16] float32 layers expert embed expert_mlp
encoder/pattern_1/ffn/wo [2, 8, 16, 16] float32 layers expert expert_mlp embed
encoder/pattern_1/ffn_norm/scale [2, 16] float32 layers embed
encoder_norm/scale [16] float32 embed
source_embedding/embedding [32, 16] float32 vocab embed
target_embedding/embedding [32, 16] float32 vocab embed
"""


def test_parameters_have_their_paths_shapes_dtypes_and_names():
    params, names = abstract_params(models.model(encoder="ds", repeats=(2, 1)))
    flat_names = jax.tree.leaves(names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    lines = [
        f"{parameter_path(path)} {list(leaf.shape)} {leaf.dtype} {' '.join(axes)}"
        for (path, leaf), axes in zip(
            jax.tree_util.tree_leaves_with_path(params), flat_names, strict=True
        )
    ]
    assert "\n".join(lines) == GOLDEN.strip()


def test_one_layer_object_in_two_places_is_refused():
    attention = layers.MultiHeadAttention(num_heads=2, head_dim=4, dropout_rate=0.0)
    block = transformer.DecoderBlock(attention, attention, layers.FeedForward(8), 0.0)
    encoder = transformer.EncoderBlock(
        layers.MultiHeadAttention(2, 4, 0.0), layers.FeedForward(8), 0.0
    )
    module = transformer.Transformer(
        layers.Embedding(8, 8),
        layers.Embedding(8, 8),
        transformer.Stack(1, (encoder,)),
        transformer.Stack(1, (block,)),
        0.0,
    )
    with pytest.raises(SettingError, match=r"attention and .*cross_attention.*share"):
        Seq2SeqModel(module)
