"""Layers of the Transformer. Each computes in the dtype of its input, from float32 parameters."""

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
        mask: Bool[Array, "B L K"],
        rows: Int[Array, " B"],
        deterministic: bool,
    ) -> Float[Array, "B L M"]:
        """Attend from `x_BLM` to `memory_BKM` where `mask` is True."""
        width = x_BLM.shape[-1]
        query_BLND = self._project("query", x_BLM)
        key_BKND = self._project("key", memory_BKM)
        value_BKND = self._project("value", memory_BKM)
        query_BLND = query_BLND * self.head_dim**-0.5
        scores_BNLK = jnp.einsum("BLND,BKND->BNLK", query_BLND, key_BKND)
        scores_BNLK = scores_BNLK.astype(jnp.float32)
        scores_BNLK = jnp.where(mask[:, None, :, :], scores_BNLK, _MASKED)
        weights_BNLK = jax.nn.softmax(scores_BNLK, axis=-1).astype(x_BLM.dtype)
        weights_BNLK = Dropout(self.dropout_rate, name="dropout")(
            weights_BNLK, rows=rows, deterministic=deterministic
        )
        mixed_BLND = jnp.einsum("BNLK,BKND->BLND", weights_BNLK, value_BKND)
        out_NDM = nn_partitioning.param_with_axes(
            "out",
            _heads_out_init,
            (self.num_heads, self.head_dim, width),
            jnp.float32,
            axes=(axes.HEADS, axes.KV, axes.EMBED),
        )
        return jnp.einsum("BLND,NDM->BLM", mixed_BLND, out_NDM.astype(x_BLM.dtype))

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
