"""Layers of the Transformer. Each computes in the dtype of its input, from float32 parameters."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jaxtyping import Array, Bool, Float, Int

from gshard_exp import axes
from gshard_exp.errors import require_at_least, require_within
from gshard_exp.recompute import kept, relu
from gshard_exp.rng import row_dropout
from gshard_exp.sharding.annotate import constrain

# Uniform of variance 1 / fan-in: lingvo's choice (lingvo/core/gshard_layers.py); the paper names no
# initialisation.
_dense_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")
_heads_in_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "uniform", in_axis=0, out_axis=(1, 2)
)
_heads_out_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "uniform", in_axis=(0, 1), out_axis=2
)
# Masked scores: far below any real score, and far above float32's lowest, so that a row whose
# every key is masked gives a uniform distribution instead of NaN.
_MASKED = -1e9

# What an attention does with the collection `cache`: "append" adds the keys and values of the new
# tokens to those of the tokens before (self-attention), "keep" computes those of the memory once
# (attention to the encoder).
CacheUse = Literal["append", "keep"]


class RmsNorm(nn.Module):
    """Scale each token to unit root mean square, then by a learned gain.

    Not in the paper; lingvo's GShard builder normalises so, without a bias and with epsilon 1e-6.
    """

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "... M"]) -> Float[Array, "... M"]:
        """Normalise over the last axis, in float32."""
        scale_M = nn_partitioning.param_with_axes(
            "scale", nn.initializers.ones, (x.shape[-1],), jnp.float32, axes=(axes.EMBED,)
        )
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        # An explicit reshape: implicit rank promotion is off in the tests.
        gain = scale_M.reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * jax.lax.rsqrt(mean_square + self.epsilon) * gain).astype(x.dtype)


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, step, layer, row, position) alone."""

    rate: float

    def __post_init__(self) -> None:
        """Refuse rates that leave nothing."""
        require_within(self, 0.0, 1.0, "rate")
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B ..."], *, rows: Int[Array, " B"], deterministic: bool
    ) -> Float[Array, "B ..."]:
        """Return x itself when `deterministic` or the rate is 0."""
        if deterministic or self.rate == 0.0:
            return x
        return row_dropout(x, self.rate, self.make_rng("dropout"), rows)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention; heads x head width need not equal the model width.

    No biases (the paper mentions none). Softmax in float32.

    Attributes:
        num_heads: N.
        head_dim: D, the width of keys, queries and values of one head.
        dropout_rate: applied to the attention weights.
    """

    num_heads: int
    head_dim: int
    dropout_rate: float

    def __post_init__(self) -> None:
        """Refuse sizes and rates without meaning."""
        require_at_least(self, 1, "num_heads", "head_dim")
        require_within(self, 0.0, 1.0, "dropout_rate")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x_BLM: Float[Array, "B L M"],
        memory_BKM: Float[Array, "B K M"],
        *,
        mask: Bool[Array, "B L K"] | None,
        rows: Int[Array, " B"],
        deterministic: bool,
        cache: CacheUse | None = None,
    ) -> Float[Array, "B L M"]:
        """Attend from `x_BLM` to `memory_BKM` where `mask` is True.

        With `cache`, the first call that finds no variables in the collection of that name makes
        them, and later calls use them (t5x's contract: t5x/examples/scalable_t5/layers.py):

        * "append": the first call gives the capacity, K slots of zeros. Later ones write the L
          new tokens to the slots from `cache_index` on, and attend to all slots where `mask`
          [B, L, capacity] is True; without a mask, to the new token and those before it.
        * "keep": the first call computes keys and values of the memory, later ones do not look at
          `memory_BKM`. `x_BLM` may have n times the rows of the memory: n consecutive rows then
          share one row of it, and `mask` is [B of the memory, n * L, K].

        Cached keys are [B, N, D, K] as in t5x; values are [B, N, K, D], where t5x's are as its
        keys. The axis that a step sums over comes first, the one that it keeps last: on CPU the
        products of a step take a fifth of the time that they take with [B, N, K, D] keys.
        """
        width = x_BLM.shape[-1]
        query_BLND = self._project("query", x_BLM)
        how = {"rows": rows, "deterministic": deterministic}
        if cache is not None:
            mixed_BLND = self._from_cache(query_BLND, memory_BKM, cache, mask, **how)
        else:
            key_BKND = self._project("key", memory_BKM)
            value_BKND = self._project("value", memory_BKM)
            # Initialising declares parameters; the rest would be traced for nothing.
            mixed_BLND = (
                query_BLND
                if self.is_initializing()
                else self._mixed(query_BLND, key_BKND, value_BKND, mask, **how)
            )
        out_NDM = nn_partitioning.param_with_axes(
            "out",
            _heads_out_init,
            (self.num_heads, self.head_dim, width),
            jnp.float32,
            axes=(axes.HEADS, axes.KV, axes.EMBED),
        )
        return kept(jnp.einsum("BLND,NDM->BLM", mixed_BLND, out_NDM.astype(x_BLM.dtype)))

    def _mixed(self, query_BLND, key_BKND, value_BKND, mask, **how):
        """Return the values that each query attends to, as many as there are queries."""
        # Kept scaled: an operand of a product only, which on TPU takes half of float32's memory.
        query_BLND, key_BKND = kept(query_BLND * self.head_dim**-0.5), kept(key_BKND)
        scores_BNLK = jnp.einsum("BLND,BKND->BNLK", query_BLND, key_BKND)
        weights_BNLK = self._weights(scores_BNLK, mask, **how)
        return jnp.einsum("BNLK,BKND->BLND", weights_BNLK, kept(value_BKND))

    def _weights(self, scores_BNLK, mask, *, rows, deterministic):
        """Return the softmax over K where `mask` is True, in the dtype of the scores."""
        scores32_BNLK = scores_BNLK.astype(jnp.float32)
        scores32_BNLK = jnp.where(mask[:, None, :, :], scores32_BNLK, _MASKED)
        weights_BNLK = jax.nn.softmax(scores32_BNLK, axis=-1).astype(scores_BNLK.dtype)
        return Dropout(self.dropout_rate, name="dropout")(
            weights_BNLK, rows=rows, deterministic=deterministic
        )

    def _from_cache(self, query_BLND, memory_BKM, cache: CacheUse, mask, **how):
        """Attend to keys and values of the cache."""
        if cache == "keep":
            key_BNDK, value_BNKD = self._kept(memory_BKM)
        else:
            key_BNDK, value_BNKD, mask = self._appended(memory_BKM, mask)
        # Rows that share a row of the memory are so many queries to it.
        folded_BLND = query_BLND.reshape(key_BNDK.shape[0], -1, *query_BLND.shape[2:])
        query_BNLD = jnp.swapaxes(folded_BLND, 1, 2) * self.head_dim**-0.5
        scores_BNLK = jnp.einsum("BNLD,BNDK->BNLK", query_BNLD, key_BNDK)
        weights_BNLK = self._weights(scores_BNLK, mask, **how)
        mixed_BNLD = jnp.einsum("BNLK,BNKD->BNLD", weights_BNLK, value_BNKD)
        return jnp.swapaxes(mixed_BNLD, 1, 2).reshape(query_BLND.shape)

    def _kept(self, memory_BKM: Float[Array, "B K M"]):
        """Return keys [B, N, D, K] and values [B, N, K, D] of the memory, of the first call."""
        if self.has_variable("cache", "memory_key"):
            key_BNDK = self.get_variable("cache", "memory_key")
            return key_BNDK, self.get_variable("cache", "memory_value")
        key_BNDK, value_BNKD = self._to_cache(memory_BKM)
        self.variable("cache", "memory_key", lambda: key_BNDK)
        self.variable("cache", "memory_value", lambda: value_BNKD)
        return key_BNDK, value_BNKD

    def _appended(self, x_BLM: Float[Array, "B L M"], mask: Bool[Array, "B L K"] | None):
        """Add the keys and values of new tokens to the cache; return all, and the mask."""
        key_BNDL, value_BNLD = self._to_cache(x_BLM)
        begun = self.has_variable("cache", "cached_key")
        keys = self.variable("cache", "cached_key", jnp.zeros_like, key_BNDL)
        values = self.variable("cache", "cached_value", jnp.zeros_like, value_BNLD)
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        rows, length = x_BLM.shape[:2]
        if mask is None:
            slots_K, new_L = jnp.arange(keys.value.shape[3]), jnp.arange(length) + index.value
            causal_LK = slots_K[None, :] <= new_L[:, None]
            mask = jnp.broadcast_to(causal_LK[None, :, :], (rows, *causal_LK.shape))
        if not begun:
            return key_BNDL, value_BNLD, mask
        write = jax.lax.dynamic_update_slice_in_dim
        before = (axes.BATCH, axes.ACTIVATION_HEADS)
        keys.value = constrain(
            write(keys.value, key_BNDL, index.value, axis=3),
            *(*before, axes.ACTIVATION_KV, axes.LENGTH),
        )
        values.value = constrain(
            write(values.value, value_BNLD, index.value, axis=2),
            *(*before, axes.LENGTH, axes.ACTIVATION_KV),
        )
        index.value = index.value + length
        return keys.value, values.value, mask

    def _to_cache(self, x_BLM: Float[Array, "B L M"]):
        """Return keys [B, N, D, L] and values [B, N, L, D] as a cache keeps them."""
        key_BLND, value_BLND = self._project("key", x_BLM), self._project("value", x_BLM)
        return jnp.transpose(key_BLND, (0, 2, 3, 1)), jnp.swapaxes(value_BLND, 1, 2)

    def _project(self, name: str, x_BLM: Float[Array, "B L M"]) -> Float[Array, "B L N D"]:
        kernel_MND = nn_partitioning.param_with_axes(
            name,
            _heads_in_init,
            (x_BLM.shape[-1], self.num_heads, self.head_dim),
            jnp.float32,
            axes=(axes.EMBED, axes.HEADS, axes.KV),
        )
        y_BLND = jnp.einsum("BLM,MND->BLND", x_BLM, kernel_MND.astype(x_BLM.dtype))
        return constrain(y_BLND, axes.BATCH, axes.LENGTH, axes.ACTIVATION_HEADS, axes.ACTIVATION_KV)


class FeedForward(nn.Module):
    """The dense feed-forward layer: wo . relu(wi . x), without biases.

    Attributes:
        mlp_dim: H.
    """

    mlp_dim: int

    def __post_init__(self) -> None:
        """Refuse sizes without meaning."""
        require_at_least(self, 1, "mlp_dim")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x_BLM: Float[Array, "B L M"],
        *,
        valid: Bool[Array, "B L"],
        rows: Int[Array, " B"],
        deterministic: bool,
        decode: bool = False,
    ) -> Float[Array, "B L M"]:
        """Apply to each token alone. The other arguments are those of `MoeLayer`, unused here."""
        del valid, rows, deterministic, decode
        width = x_BLM.shape[-1]
        wi_MH = nn_partitioning.param_with_axes(
            "wi", _dense_init, (width, self.mlp_dim), jnp.float32, axes=(axes.EMBED, axes.MLP)
        )
        wo_HM = nn_partitioning.param_with_axes(
            "wo", _dense_init, (self.mlp_dim, width), jnp.float32, axes=(axes.MLP, axes.EMBED)
        )
        h_BLH = relu(jnp.einsum("BLM,MH->BLH", x_BLM, wi_MH.astype(x_BLM.dtype)))
        h_BLH = constrain(h_BLH, axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
        return kept(jnp.einsum("BLH,HM->BLM", h_BLH, wo_HM.astype(x_BLM.dtype)))


class Embedding(nn.Module):
    """Token embeddings, of unit variance, and the logits made with the same matrix.

    Attributes:
        vocab_size: V, rows of the matrix; at least the number of pieces of the vocabulary.
        embed_dim: M.
    """

    vocab_size: int
    embed_dim: int

    def __post_init__(self) -> None:
        """Refuse sizes without meaning."""
        require_at_least(self, 1, "vocab_size", "embed_dim")
        super().__post_init__()

    def setup(self) -> None:
        """Declare the matrix."""
        self.table_VM = nn_partitioning.param_with_axes(
            "embedding",
            nn.initializers.normal(1.0),
            (self.vocab_size, self.embed_dim),
            jnp.float32,
            axes=(axes.VOCAB, axes.EMBED),
        )

    def __call__(self, tokens: Int[Array, "B L"], dtype: str) -> Float[Array, "B L M"]:
        """Look tokens up, as activations of `dtype`."""
        return jnp.take(self.table_VM.astype(dtype), tokens, axis=0)

    def logits(self, x_BLM: Float[Array, "B L M"]) -> Float[Array, "B L V"]:
        """Score each piece: x . table / sqrt(M), in float32.

        The division keeps the logits of a fresh model near unit variance (T5's choice; the paper
        does not say how softmax weights and embeddings relate, its parameter counts imply that
        the target matrix serves both).
        """
        x_BLM = x_BLM * self.embed_dim**-0.5
        logits_BLV = jnp.einsum(
            "BLM,VM->BLV",
            x_BLM,
            self.table_VM.astype(x_BLM.dtype),
            preferred_element_type=jnp.float32,
        )
        return constrain(logits_BLV, axes.BATCH, axes.LENGTH, axes.ACTIVATION_VOCAB)


def sinusoidal_positions(
    positions: Int[Array, "B L"], width: int, dtype: str
) -> Float[Array, "B L M"]:
    """Return sine and cosine position codes (Vaswani et al. 2017).

    The paper does not name a position scheme; its parameter counts leave room for none that
    learns more than a few thousand numbers. Sines need no maximum length.
    """
    half = (width + 1) // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1)
    frequencies = jnp.exp(-jnp.log(10_000.0) * exponents)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    codes = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return codes[:, :, :width].astype(dtype)


class DecodePositions(nn.Module):
    """Counts the tokens of step-by-step decoding that have gone by, in the collection `cache`.

    The variable's name is one that t5x (t5x/decoding.py, `cache_map`) knows to be an index.
    """

    @nn.compact
    def __call__(self, tokens: Int[Array, "B L"]) -> Int[Array, "B L"]:
        """Return the positions of the next tokens; the first call only makes the counter."""
        begun = self.has_variable("cache", "position_embedder_index")
        index = self.variable("cache", "position_embedder_index", jnp.zeros, (), jnp.int32)
        positions = jnp.broadcast_to(index.value + jnp.arange(tokens.shape[1]), tokens.shape)
        if begun:
            index.value = index.value + tokens.shape[1]
        return positions
