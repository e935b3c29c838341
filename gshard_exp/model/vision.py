"""An image classifier: a convolutional stem, then a stack of (sparse) Transformer blocks.

Shows that nothing but a model's own module knows of text. As in V-MoE (arXiv 2106.05974, "Scaling
Vision with Sparse Mixture of Experts") tokens are places of the image and experts stand in for the
feed-forward layers of every other block; the stem of convolutions replaces V-MoE's cut into
patches.

Letters, besides those of `axes.py`: I rows of the image, J columns, F features (channels); V is the
number of classes, L = I/2 * J/2 the number of tokens.
"""

import dataclasses
from collections.abc import Mapping

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jaxtyping import Array, Float, Int, Key

from gshard_exp import axes
from gshard_exp.errors import SettingError, require_at_least, require_one_of, require_within
from gshard_exp.model.contract import Batch, Entry, Params, axis_names
from gshard_exp.model.layers import Dropout, RmsNorm
from gshard_exp.model.sown import layer_rngs, refuse_shared_layers, router_losses
from gshard_exp.model.transformer import Stack
from gshard_exp.sharding.annotate import constrain
from gshard_exp.sharding.rules import Names

# He et al. (arXiv 1502.01852): variance 2 / fan-in, for relu.
_conv_init = jax.nn.initializers.variance_scaling(2.0, "fan_in", "uniform")
_head_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")
_DOWNSAMPLING = 2


class ConvStem(nn.Module):
    """Two 3 x 3 convolutions, the second with stride 2, each with a relu: an image to tokens.

    Rows and columns of the image may be split over the mesh (`image_rows`, `image_columns`): the
    partitioner then exchanges the rows at the borders, "halos" (paper section 3.3 and appendix
    A.4), with the neighbours.

    Attributes:
        channels: features after the first convolution.
        embed_dim: M, features after the second.
    """

    channels: int
    embed_dim: int

    def __post_init__(self) -> None:
        """Refuse sizes without meaning."""
        require_at_least(self, 1, "channels", "embed_dim")
        super().__post_init__()

    @nn.compact
    def __call__(self, x_BIJF: Float[Array, "B I J F"]) -> Float[Array, "B L M"]:
        """Return one token for each 2 x 2 places, row by row."""
        x_BIJF = self._convolve("first", x_BIJF, self.channels, stride=1)
        x_BIJM = self._convolve("second", x_BIJF, self.embed_dim, stride=_DOWNSAMPLING)
        batch, rows, columns, width = x_BIJM.shape
        return x_BIJM.reshape(batch, rows * columns, width)

    def _convolve(self, name: str, x_BIJF: Array, features: int, *, stride: int) -> Array:
        place = (axes.BATCH, axes.IMAGE_ROWS, axes.IMAGE_COLUMNS)
        # Kernel rows, kernel columns, features in and out.
        kernel_KKFM = nn_partitioning.param_with_axes(
            name,
            _conv_init,
            (3, 3, x_BIJF.shape[-1], features),
            jnp.float32,
            axes=(None, None, None, axes.EMBED),
        )
        x_BIJF = constrain(x_BIJF, *place, axes.ACTIVATION_EMBED)
        y_BIJM = jax.lax.conv_general_dilated(
            x_BIJF,
            kernel_KKFM.astype(x_BIJF.dtype),
            window_strides=(stride, stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return constrain(jax.nn.relu(y_BIJM), *place, axes.ACTIVATION_EMBED)


class VisionMoe(nn.Module):
    """Stem, learned positions, blocks, mean over places, linear classifier.

    Attributes:
        image_size: rows and columns of an image; even.
        image_channels: features of an image.
        num_classes: V.
        stem: template of the stem.
        encoder: stack of `EncoderBlock`s, which attend to all places.
        dropout_rate: applied to the tokens.
        dtype: of the activations.
    """

    image_size: int
    image_channels: int
    num_classes: int
    stem: ConvStem
    encoder: Stack
    dropout_rate: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse sizes, rates and dtypes without meaning."""
        require_at_least(self, 2, "image_size", "num_classes")
        require_at_least(self, 1, "image_channels")
        require_within(self, 0.0, 1.0, "dropout_rate")
        require_one_of(self, ("float32", "bfloat16"), "dtype")
        if self.image_size % _DOWNSAMPLING:
            raise SettingError(
                f"image_size={self.image_size}: the stem halves it, so it has to be even.",
                settings=("image_size",),
            )
        super().__post_init__()

    @property
    def num_tokens(self) -> int:
        """L, tokens of an image."""
        return (self.image_size // _DOWNSAMPLING) ** 2

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B I J F"],
        *,
        rows: Int[Array, " B"] | None = None,
        enable_dropout: bool = True,
    ) -> Float[Array, "B V"]:
        """Score each class.

        Args:
            images: of any scale.
            rows: index of each image in the global batch (keys the random numbers).
            enable_dropout: training. False: no randomness, capacity of evaluation.

        Returns:
            float32 logits.
        """
        batch, tokens = images.shape[0], self.num_tokens
        how = {
            "rows": jnp.arange(batch) if rows is None else rows,
            "deterministic": not enable_dropout,
        }
        x_BLM = self.stem(images.astype(self.dtype))
        width = x_BLM.shape[-1]
        positions_LM = nn_partitioning.param_with_axes(
            "positions", nn.initializers.normal(0.02), (tokens, width), jnp.float32,
            axes=(None, axes.EMBED),
        )  # fmt: skip
        x_BLM = x_BLM + positions_LM.astype(x_BLM.dtype)[None, :, :]
        x_BLM = Dropout(self.dropout_rate, name="input_dropout")(x_BLM, **how)
        x_BLM = constrain(x_BLM, axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
        inputs = {
            "mask": jnp.ones((batch, tokens, tokens), bool),
            "valid": jnp.ones((batch, tokens), bool),
            "rows": how["rows"],
        }
        x_BLM = self.encoder(x_BLM, inputs, deterministic=how["deterministic"])
        x_BM = jnp.mean(RmsNorm(name="encoder_norm")(x_BLM).astype(jnp.float32), axis=1)
        head_MV = nn_partitioning.param_with_axes(
            "head", _head_init, (width, self.num_classes), jnp.float32,
            axes=(axes.EMBED, axes.VOCAB),
        )  # fmt: skip
        return jnp.einsum("BM,MV->BV", x_BM, head_MV)


@dataclasses.dataclass(frozen=True)
class ImageClassifier:
    """A classifier of images and the weights of its losses; a `model.contract.Model`.

    The loss is the mean cross entropy over images, and of the routers what `Seq2SeqModel` has.

    Attributes:
        module: the network.
        label_smoothing: probability mass spread evenly over the classes.
        aux_loss_factor: of the sum over MoE layers of E^2 * l_aux.
        router_z_loss_factor: of the sum over MoE layers of the router z-loss.
    """

    module: VisionMoe
    label_smoothing: float = 0.0
    aux_loss_factor: float = 0.0
    router_z_loss_factor: float = 0.0

    def __post_init__(self) -> None:
        require_within(self, 0.0, 1.0, "label_smoothing")
        require_at_least(self, 0.0, "aux_loss_factor", "router_z_loss_factor")
        refuse_shared_layers(self.module)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The one stack."""
        return {"encoder": self.module.encoder}

    def init(self, key: Key[Array, ""]) -> tuple[Params, Mapping[str, Names]]:
        """Make parameters and the logical names of their dimensions."""
        images = jnp.zeros(self._image_shape(1), jnp.float32)
        variables = self.module.init({"params": key}, images, enable_dropout=False)
        return flax.core.unfreeze(variables["params"]), axis_names(variables["params_axes"])

    def batch_entries(self, batch_size: int, lengths: Mapping[str, int]) -> dict[str, Entry]:
        """Describe a batch: `images` float32, and `labels`."""
        self.stack_lengths(lengths)
        image = (axes.BATCH, axes.IMAGE_ROWS, axes.IMAGE_COLUMNS, None)
        return {
            "images": Entry(self._image_shape(batch_size), "float32", image),
            "labels": Entry((batch_size,), "int32", (axes.BATCH,)),
        }

    def stack_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens of an image; the model leaves no length open."""
        if lengths:
            raise SettingError(
                f"lengths={dict(lengths)} has to be empty: image_size="
                f"{self.module.image_size} says how many tokens an image has.",
                settings=("lengths",),
            )
        return {"encoder": self.module.num_tokens}

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Return the number of images."""
        return jnp.float32(len(batch["labels"]))

    def loss(
        self,
        params: Params,
        batch: Batch,
        *,
        key: Key[Array, ""] | None,
        total_weight: Float[Array, ""],
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], dict]:
        """Compute the loss of a batch or a part of it; see `model.contract.Model.loss`."""
        logits_BV, collected = self.module.apply(
            {"params": params},
            batch["images"],
            rows=batch["rows"],
            enable_dropout=key is not None,
            rngs=layer_rngs(key),
            mutable=["intermediates"],
        )
        router_loss, router_metrics = router_losses(
            collected.get("intermediates", {}),
            aux_loss_factor=self.aux_loss_factor,
            router_z_loss_factor=self.router_z_loss_factor,
            share=share,
        )
        log_BV = jax.nn.log_softmax(logits_BV)
        nll_B = -jnp.take_along_axis(log_BV, batch["labels"][:, None], axis=-1)[:, 0]
        smoothing = self.label_smoothing
        smoothed_B = (1.0 - smoothing) * nll_B - smoothing * jnp.mean(log_BV, axis=-1)
        right_B = jnp.argmax(logits_BV, axis=-1) == batch["labels"]
        metrics = {
            "sums": {
                "cross_ent_loss": jnp.sum(nll_B),
                "correct": jnp.sum(right_B.astype(jnp.float32)),
                "examples": jnp.float32(len(right_B)),
            },
            **router_metrics,
        }
        return jnp.sum(smoothed_B) / total_weight + router_loss, metrics

    def scalars(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn sums over images into means."""
        images = max(sums["examples"], 1.0)
        return {
            "accuracy": sums["correct"] / images,
            "cross_ent_loss_per_example": sums["cross_ent_loss"] / images,
        }

    def amounts(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Count images, and their tokens."""
        return {
            "examples": sums["examples"],
            "tokens": sums["examples"] * self.module.num_tokens,
        }

    def logits(self, params: Params, images: Float[Array, "B I J F"]) -> Float[Array, "B V"]:
        """Score the classes without randomness."""
        return self.module.apply({"params": params}, images, enable_dropout=False)

    def _image_shape(self, batch_size: int) -> tuple[int, int, int, int]:
        module = self.module
        return batch_size, module.image_size, module.image_size, module.image_channels
