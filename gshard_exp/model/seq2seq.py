"""What is trained: the Transformer with its loss, and the shape of its batches."""

import dataclasses
from collections.abc import Mapping

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from gshard_exp import axes
from gshard_exp.errors import SettingError, require_at_least, require_within
from gshard_exp.model.contract import Batch, Entry, Params, axis_names
from gshard_exp.model.rebuild import rebuilt
from gshard_exp.model.sown import layer_health, layer_rngs, refuse_shared_layers, router_losses
from gshard_exp.model.transformer import Stack, Transformer
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.sharding.rules import Names

# Keys of a training batch, as seqio's EncDecFeatureConverter(pack=True) names them; all are
# int32 [B, L] (`encoder_*` of the source length, `decoder_*` of the target length).
BATCH_KEYS = (
    "encoder_input_tokens",
    "decoder_input_tokens",
    "decoder_target_tokens",
    "decoder_loss_weights",
    "encoder_segment_ids",
    "decoder_segment_ids",
    "encoder_positions",
    "decoder_positions",
)


@dataclasses.dataclass(frozen=True)
class Seq2SeqModel:
    """A Transformer and the weights of its losses.

    The loss of a batch is

        cross entropy + z-loss               mean over its target tokens
        + aux_loss_factor    * sum over MoE layers of  E^2 * mean over groups of l_aux
        + router_z_loss_factor * sum over MoE layers of router z-loss

    l_aux is line 13 of Algorithm 1, which is 1/E^2 when experts are used evenly; the paper gives
    no value for its coefficient k. Public code (lingvo, mesh-tensorflow) scales l_aux by E^2 and
    sums over layers with 0.01, so that k = aux_loss_factor * E^2. A gating with a loss of its own
    (`NoisyTopKGating`) divides it by E^2: aux_loss_factor weighs that loss itself.

    Attributes:
        module: the network.
        label_smoothing: probability mass spread evenly over the vocabulary. Not in the paper;
            lingvo trains with 0.1.
        z_loss: weight of log(Z)^2 of the output softmax. Not in the paper; T5 uses 1e-4.
        aux_loss_factor: see above.
        router_z_loss_factor: weight of the router z-loss (ST-MoE: 1e-3). The paper has none.
    """

    module: Transformer
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    aux_loss_factor: float = 0.0
    router_z_loss_factor: float = 0.0

    def __post_init__(self) -> None:
        require_within(self, 0.0, 1.0, "label_smoothing")
        require_at_least(self, 0.0, "z_loss", "aux_loss_factor", "router_z_loss_factor")
        refuse_shared_layers(self.module)

    def init(self, key: Key[Array, ""]) -> tuple[Params, Mapping[str, Names]]:
        """Make parameters and the logical names of their dimensions.

        Shapes of parameters do not depend on the batch: a tiny one is used.

        Returns:
            A nested dict of float32 arrays, and a nested dict of the same structure whose leaves
            are tuples of logical axis names.
        """
        tokens = jnp.zeros((1, 2), jnp.int32)
        variables = self.module.init({"params": key}, tokens, tokens, tokens, enable_dropout=False)
        return flax.core.unfreeze(variables["params"]), axis_names(variables["params_axes"])

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name."""
        return {"encoder": self.module.encoder, "decoder": self.module.decoder}

    def batch_entries(self, batch_size: int, lengths: Mapping[str, int]) -> dict[str, Entry]:
        """Describe the arrays of a batch.

        Raises:
            SettingError: `lengths` are not those of `inputs` and `targets`.
        """
        tokens = self.stack_lengths(lengths)
        names = (axes.BATCH, axes.LENGTH)
        return {
            key: Entry((batch_size, tokens[key.split("_")[0]]), "int32", names)
            for key in BATCH_KEYS
        }

    def stack_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens of a row in each stack, those of the source and of the target."""
        if sorted(lengths) != ["inputs", "targets"] or min(lengths.values()) < 1:
            raise SettingError(
                f"lengths={dict(lengths)} has to name exactly 'inputs' and 'targets', with at "
                "least 1 token each.",
                settings=("lengths",),
            )
        return {"encoder": lengths["inputs"], "decoder": lengths["targets"]}

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Return the number of target tokens, at least 1."""
        return jnp.maximum(jnp.sum(batch["decoder_loss_weights"]).astype(jnp.float32), 1.0)

    def scalars(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn sums over target tokens into means, as t5x users know them."""
        tokens = max(sums["target_tokens"], 1.0)
        return {
            "accuracy": sums["correct"] / tokens,
            "cross_ent_loss_per_all_target_tokens": sums["cross_ent_loss"] / tokens,
            "z_loss_per_all_target_tokens": sums["z_loss"] / tokens,
        }

    def amounts(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Count target tokens, and those of both sides."""
        targets = sums["target_tokens"]
        return {"target_tokens": targets, "tokens": targets + sums["source_tokens"]}

    def loss(
        self,
        params: Params,
        batch: Batch,
        *,
        key: Key[Array, ""] | None,
        total_weight: Float[Array, ""],
        share: float = 1.0,
    ) -> tuple[Float[Array, ""], dict]:
        """Compute the loss of a batch, or what a microbatch adds to the loss of the whole.

        Args:
            params: as made by `init`.
            batch: see `BATCH_KEYS`, and `rows`, int32 [B], the index of each row in the whole.
            key: for dropout and random routing; None evaluates (no randomness).
            total_weight: sum of `decoder_loss_weights` over the whole batch.
            share: rows of this batch over rows of the whole; weighs means over groups.

        Returns:
            The loss (sums over this batch divided by `total_weight`, plus the routers' losses),
            and metrics: sums over target tokens under `sums`, means times `share` under `means`
            and (router health of each MoE layer) under `router`. All of it adds up over parts.
        """
        logits_BLV, intermediates = self._apply(params, batch, key)
        targets_BL = batch["decoder_target_tokens"]
        weights_BL = batch["decoder_loss_weights"].astype(jnp.float32)
        nll_BL, smoothed_BL, z_BL = _token_losses(
            logits_BLV, targets_BL, self.label_smoothing, self.z_loss
        )
        correct_BL = _correct(logits_BLV, targets_BL)
        router_loss, router_metrics = router_losses(
            intermediates,
            aux_loss_factor=self.aux_loss_factor,
            router_z_loss_factor=self.router_z_loss_factor,
            share=share,
        )
        token_loss = jnp.sum((smoothed_BL + z_BL) * weights_BL) / total_weight
        metrics = {
            "sums": {
                "cross_ent_loss": jnp.sum(nll_BL * weights_BL),
                "z_loss": jnp.sum(z_BL * weights_BL),
                "correct": jnp.sum(correct_BL * weights_BL),
                "target_tokens": jnp.sum(weights_BL),
                "source_tokens": jnp.sum(batch["encoder_input_tokens"] > 0).astype(jnp.float32),
            },
            **router_metrics,
        }
        return token_loss + router_loss, metrics

    def evaluate(self, params: Params, batch: Batch) -> dict[str, Array]:
        """Score each row of an unpacked batch without randomness.

        Returns:
            float32 [B] sums over the row's target tokens: `cross_ent_loss` (nats, not smoothed),
            `correct` and `target_tokens`; and float32 scalars, sums over tokens and MoE layers:
            `routed_tokens` and, of these, `dropped_first` and `dropped_second`, whose first or
            second choice had no slot.
        """
        logits_BLV, intermediates = self._apply(params, batch, None)
        targets_BL = batch["decoder_target_tokens"]
        weights_BL = batch["decoder_loss_weights"].astype(jnp.float32)
        nll_BL, _, _ = _token_losses(logits_BLV, targets_BL, 0.0, 0.0)
        correct_BL = _correct(logits_BLV, targets_BL)
        return {
            "cross_ent_loss": jnp.sum(nll_BL * weights_BL, axis=1),
            "correct": jnp.sum(correct_BL * weights_BL, axis=1),
            "target_tokens": jnp.sum(weights_BL, axis=1),
            **_dropped_tokens(intermediates, batch),
        }

    def dropless(self) -> "Seq2SeqModel":
        """Return this model with every token served in evaluation and decoding."""
        return dataclasses.replace(self, module=rebuilt(self.module, _without_capacity))

    def _apply(self, params: Params, batch: Batch, key: Key[Array, ""] | None):
        optional = {
            name: batch[name]
            for name in (
                "encoder_segment_ids",
                "decoder_segment_ids",
                "encoder_positions",
                "decoder_positions",
                "rows",
            )
            if name in batch
        }
        logits_BLV, collected = self.module.apply(
            {"params": params},
            batch["encoder_input_tokens"],
            batch["decoder_input_tokens"],
            batch["decoder_target_tokens"],
            **optional,
            enable_dropout=key is not None,
            rngs=layer_rngs(key),
            mutable=["intermediates"],
        )
        return logits_BLV, collected.get("intermediates", {})


def _without_capacity(module: nn.Module) -> dict[str, None]:
    if not isinstance(module, MoeLayer):
        return {}
    return {"eval_capacity_factor": None, "decode_capacity_factor": None}


def _dropped_tokens(intermediates: Mapping, batch: Batch) -> dict[str, Float[Array, ""]]:
    """Count tokens that met a full expert, over all MoE layers."""
    sides = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
    counts = {key: jnp.zeros(()) for key in ("routed_tokens", "dropped_first", "dropped_second")}
    for place, health in layer_health(intermediates).items():
        tokens = jnp.sum(batch[sides[place.split("/")[0]]] > 0).astype(jnp.float32)
        dropped_first = jnp.sum(health["fraction_dropped_first"])
        dropped_second = jnp.sum(health["fraction_dropped_second"])
        layers = health["fraction_dropped_first"].size
        counts["routed_tokens"] += tokens * layers
        counts["dropped_first"] += tokens * dropped_first
        counts["dropped_second"] += tokens * dropped_second
    return counts


def _correct(
    logits_BLV: Float[Array, "B L V"], targets_BL: Int[Array, "B L"]
) -> Float[Array, "B L"]:
    """Return 1 where no piece scores higher than the target, else 0.

    A maximum, where CPUs take 20 times as long for an argmax; a target that ties counts.
    """
    target_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return (target_BL >= jnp.max(logits_BLV, axis=-1)).astype(jnp.float32)


def _token_losses(
    logits_BLV: Float[Array, "B L V"],
    targets_BL: Int[Array, "B L"],
    label_smoothing: float,
    z_loss: float,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """Return negative log likelihood, its smoothed form and z-loss, nats for each token."""
    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    target_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    nll_BL = log_z_BL - target_BL
    smoothed_BL = nll_BL
    if label_smoothing:
        # (1 - eps) on the target and eps spread evenly over all V pieces.
        uniform_BL = log_z_BL - jnp.mean(logits_BLV, axis=-1)
        smoothed_BL = (1.0 - label_smoothing) * nll_BL + label_smoothing * uniform_BL
    return nll_BL, smoothed_BL, z_loss * jnp.square(log_z_BL)
