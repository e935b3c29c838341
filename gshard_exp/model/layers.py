"""Layers of the Transformer. Each computes in the dtype of its input, from float32 parameters."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jaxtyping import Array, Bool, Float, Int

from gshard_exp import axes
from gshard_exp.errors import require_at_least, require_within
from gshard_exp.rng import row_dropout
from gshard_exp.sharding.annotate import constrain

# Uniform of variance 1 / fan-in (facts B3: lingvo's choice; the paper names no initialisation).
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
Cache = Literal["append", "keep"]


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
        cache: Cache | None = None,
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

        Departure from t5x: cached keys and values are [B, N, K, D], where t5x's are [B, N, D, K].
        """
        width = x_BLM.shape[-1]
        query_BLND = self._project("query", x_BLM) * self.head_dim**-0.5
        if cache is None:
            key, value = self._project("key", memory_BKM), self._project("value", memory_BKM)
            mixed_BLND = self._attend(
                query_BLND, key, value, "BKND", mask, rows=rows, deterministic=deterministic
            )
        else:
            if cache == "keep":
                key, value = self._kept(memory_BKM)
            else:
                key, value, mask = self._appended(memory_BKM, mask)
            # Rows that share a row of the memory are so many queries to it.
            shape = query_BLND.shape
            query_BLND = query_BLND.reshape(key.shape[0], -1, *shape[2:])
            mixed_BLND = self._attend(
                query_BLND, key, value, "BNKD", mask, rows=rows, deterministic=deterministic
            ).reshape(shape)
        out_NDM = nn_partitioning.param_with_axes(
            "out",
            _heads_out_init,
            (self.num_heads, self.head_dim, width),
            jnp.float32,
            axes=(axes.HEADS, axes.KV, axes.EMBED),
        )
        return jnp.einsum("BLND,NDM->BLM", mixed_BLND, out_NDM.astype(x_BLM.dtype))

    def _attend(self, query_BLND, key, value, layout: str, mask, *, rows, deterministic):
        """Mix values; `layout` names the axes of `key` and `value`."""
        scores_BNLK = jnp.einsum(f"BLND,{layout}->BNLK", query_BLND, key).astype(jnp.float32)
        scores_BNLK = jnp.where(mask[:, None, :, :], scores_BNLK, _MASKED)
        weights_BNLK = jax.nn.softmax(scores_BNLK, axis=-1).astype(query_BLND.dtype)
        weights_BNLK = Dropout(self.dropout_rate, name="dropout")(
            weights_BNLK, rows=rows, deterministic=deterministic
        )
        return jnp.einsum(f"BNLK,{layout}->BLND", weights_BNLK, value)

    def _kept(self, memory_BKM: Float[Array, "B K M"]):
        """Return keys and values of the memory, [B, N, K, D], computed by the first call."""

        def computed(name: str) -> Float[Array, "B N K D"]:
            return jnp.swapaxes(self._project(name, memory_BKM), 1, 2)

        if self.has_variable("cache", "memory_key"):
            return self.get_variable("cache", "memory_key"), self.get_variable(
                "cache", "memory_value"
            )
        key_BNKD = self.variable("cache", "memory_key", computed, "key").value
        value_BNKD = self.variable("cache", "memory_value", computed, "value").value
        return key_BNKD, value_BNKD

    def _appended(self, x_BLM: Float[Array, "B L M"], mask: Bool[Array, "B L K"] | None):
        """Add the keys and values of new tokens to the cache; return all, and the mask."""
        key_BNLD = jnp.swapaxes(self._project("key", x_BLM), 1, 2)
        value_BNLD = jnp.swapaxes(self._project("value", x_BLM), 1, 2)
        begun = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros_like, key_BNLD)
        cached_value = self.variable("cache", "cached_value", jnp.zeros_like, value_BNLD)
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        slots_K = jnp.arange(cached_key.value.shape[2])
        new_L = jnp.arange(key_BNLD.shape[2]) + index.value
        if mask is None:
            mask = jnp.broadcast_to(
                (slots_K[None, :] <= new_L[:, None])[None, :, :],
                (x_BLM.shape[0], new_L.size, slots_K.size),
            )
        if not begun:
            return key_BNLD, value_BNLD, mask
        for cached, new_BNLD in ((cached_key, key_BNLD), (cached_value, value_BNLD)):
            updated = jax.lax.dynamic_update_slice_in_dim(
                cached.value, new_BNLD, index.value, axis=2
            )
            cached.value = constrain(
                updated, axes.BATCH, axes.ACTIVATION_HEADS, axes.LENGTH, axes.ACTIVATION_KV
            )
        index.value = index.value + key_BNLD.shape[2]
        return cached_key.value, cached_value.value, mask

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
    ) -> Float[Array, "B L M"]:
        """Apply to each token alone. The other arguments are those of `MoeLayer`, unused here."""
        del valid, rows, deterministic
        width = x_BLM.shape[-1]
        wi_MH = nn_partitioning.param_with_axes(
            "wi", _dense_init, (width, self.mlp_dim), jnp.float32, axes=(axes.EMBED, axes.MLP)
        )
        wo_HM = nn_partitioning.param_with_axes(
            "wo", _dense_init, (self.mlp_dim, width), jnp.float32, axes=(axes.MLP, axes.EMBED)
        )
        h_BLH = jax.nn.relu(jnp.einsum("BLM,MH->BLH", x_BLM, wi_MH.astype(x_BLM.dtype)))
        h_BLH = constrain(h_BLH, axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
        return jnp.einsum("BLH,HM->BLM", h_BLH, wo_HM.astype(x_BLM.dtype))


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
