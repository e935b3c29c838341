"""The Mixture-of-Experts feed-forward layer (paper section 2.2, Algorithm 2)."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jaxtyping import Array, Bool, Float, Int, Key

from gshard_exp import axes
from gshard_exp.errors import SettingError, require_at_least, require_positive, require_within
from gshard_exp.moe.dispatch import Dispatch, EinsumDispatch
from gshard_exp.moe.experts import Experts
from gshard_exp.moe.gating import Top2Gating
from gshard_exp.moe.health import count_per_expert, router_health
from gshard_exp.moe.ragged import RaggedDispatch
from gshard_exp.moe.routing import Gating, Routing, router_z_loss
from gshard_exp.recompute import kept, relu
from gshard_exp.rng import row_uniform
from gshard_exp.sharding.annotate import constrain

# Uniform of variance 1 / fan-in, for each expert apart: lingvo's choice
# (lingvo/core/gshard_layers.py); the paper names no initialisation.
_expert_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=0
)
_dense_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")
# Name of the parameter that the optimizer moves by load, see `MoeLayer._bias_loss`.
ROUTER_BIAS = "router_bias"
# Of `health`, once more under names of their own.
T5X_METRICS = ("fraction_tokens_left_behind", "expert_usage", "router_confidence")
_DROPLESS: Dispatch = RaggedDispatch()


class MoeLayer(nn.Module):
    """A feed-forward layer of `num_experts` experts, of which each token uses a few.

    Tokens are laid out in G groups of `group_size`, in the order of the batch; the number of
    groups never depends on the number of devices. A last group that the batch does not fill is
    padded with tokens that are never routed. A token whose choices are all dropped gets zeros:
    only the residual connection carries it on. Without a capacity nothing is dropped, and in
    evaluation and decoding a token's output then does not depend on the others.

    The router computes in float32 whatever the activations are (Switch Transformer's selective
    precision; the paper computes all in float32).

    Sown into `intermediates`: `health` (a dict of `moe.health.router_health`), `auxiliary_loss`
    (E^2 times line 13 of Algorithm 1, which makes it 1 when experts are used evenly) and
    `router_z_loss`, both float32 scalars, means over groups; `bias_loss` where there is a bias;
    and `T5X_METRICS`, which with the two losses are what t5x's MoE models look for
    (t5x/contrib/moe/models.py).

    Attributes:
        num_experts: E, need not equal the number of devices.
        expert_mlp_dim: H of each expert.
        group_size: S, tokens in a routing group.
        gating: Algorithm 1, or another function from logits to `Routing`.
        dispatch: how tokens reach their experts and come back where there is a capacity.
        train_capacity_factor: multiplies the gating's capacity K S/E in training; 1 with K = 2 is
            the paper. None is dropless: every choice is computed, by `RaggedDispatch` whatever
            `dispatch` is.
        eval_capacity_factor: the same when `deterministic`.
        decode_capacity_factor: the same for a step of decoding.
        router_jitter: in training the router, and only the router, sees its input times U[1 - j,
            1 + j), drawn per element. 0 is the paper. Source: Switch Transformer, with 1e-2.
        shared_mlp_dim: hidden width of a further expert that every token uses with weight 1; 0, as
            in the paper, is none. Source: DeepSeekMoE (arXiv 2401.06066).
    """

    num_experts: int
    expert_mlp_dim: int
    group_size: int
    gating: Gating = Top2Gating()
    dispatch: Dispatch = EinsumDispatch()
    train_capacity_factor: float | None = 1.0
    eval_capacity_factor: float | None = None
    decode_capacity_factor: float | None = None
    router_jitter: float = 0.0
    shared_mlp_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes and factors without meaning."""
        require_at_least(self, 1, "num_experts", "expert_mlp_dim", "group_size")
        require_positive(
            self, "train_capacity_factor", "eval_capacity_factor", "decode_capacity_factor"
        )
        require_within(self, 0, 1, "router_jitter")
        require_at_least(self, 0, "shared_mlp_dim")
        for field in ("train_capacity_factor", "eval_capacity_factor"):
            if self.gating.needs_capacity and getattr(self, field) is None:
                raise SettingError(
                    f"{field}=None: without a capacity {type(self.gating).__name__} sends every "
                    "token to every expert.",
                    settings=(field, "gating"),
                    hint="Set a number; 1.0 is the capacity of its source.",
                )
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
        """Route, dispatch, compute and combine.

        Args:
            x_BLM: tokens; the activation dtype of the result.
            valid: False on padding, which is neither routed nor counted.
            rows: index of each row in the global batch, which keys random numbers.
            deterministic: no noise, coins or jitter, and the capacity of evaluation.
            decode: and the capacity of decoding, if `deterministic`.
        """
        batch, length, width = x_BLM.shape
        factor = self.capacity_factor(deterministic=deterministic, decode=decode)
        # Without drops a group means nothing to a token, and a row needs no padding and lies on a
        # mesh as the batch does. In training the auxiliary loss still is one of each group.
        size = length if factor is None and deterministic else self.group_size
        x_GSM = _group(x_BLM, size)
        valid_GS = _group(valid, size)
        x_GSM = constrain(x_GSM, axes.GROUP, axes.GROUP_TOKENS, axes.ACTIVATION_EMBED)
        uniform = jitter_GSM = None
        if not deterministic:
            uniform = self._noise(rows, length)
            jitter_GSM = self._jitter(rows, length, width)
        logits_GSE = self._router(x_GSM, jitter_GSM)
        bias, experts = self._bias(), self._experts(width)
        shared_BLM = self._shared(x_BLM) if self.shared_mlp_dim else None
        if self.is_initializing():
            return x_BLM  # parameters are declared; the rest would be traced for nothing
        capacity, dispatch = size, _DROPLESS  # an expert gets a token once: S slots hold all
        if factor is not None:
            capacity = self.gating.capacity(size, self.num_experts, factor)
            dispatch = self.dispatch
        routing = self.gating(logits_GSE, valid_GS, capacity, uniform, *bias)
        self._report(routing, logits_GSE, valid_GS, None if factor is None else capacity)

        y_GSM = dispatch(x_GSM, routing, experts, capacity)
        y_GSM = constrain(y_GSM, axes.GROUP, axes.GROUP_TOKENS, axes.ACTIVATION_EMBED)
        y_BLM = y_GSM.reshape(-1, width)[: batch * length].reshape(batch, length, width)
        y_BLM = y_BLM.astype(x_BLM.dtype)
        return y_BLM if shared_BLM is None else y_BLM + shared_BLM

    def capacity_factor(self, *, deterministic: bool, decode: bool) -> float | None:
        """Choose the capacity of training, evaluation or decoding; None drops nothing."""
        if not deterministic:
            return self.train_capacity_factor
        return self.decode_capacity_factor if decode else self.eval_capacity_factor

    def _key(self) -> Key[Array, ""]:
        """Return a key of `routing`; of `dropout` where only that is given, as by t5x's models."""
        return self.make_rng("routing" if self.has_rng("routing") else "dropout")

    def _noise(self, rows: Int[Array, " B"], length: int) -> Float[Array, "G S ..."] | None:
        shape = self.gating.noise_shape(self.num_experts)
        if shape is None:
            return None
        return _group(row_uniform(self._key(), rows, (length, *shape)), self.group_size)

    def _bias(self) -> tuple[Float[Array, " E"], ...]:
        """Return the bias of a gating that has one, and nothing for others."""
        if not self.gating.has_bias:
            return ()
        bias_E = nn_partitioning.param_with_axes(
            ROUTER_BIAS,
            jax.nn.initializers.zeros,
            (self.num_experts,),
            jnp.float32,
            axes=(axes.ROUTER_EXPERT,),
        )
        return (jax.lax.stop_gradient(bias_E),)

    def _jitter(
        self, rows: Int[Array, " B"], length: int, width: int
    ) -> Float[Array, "G S M"] | None:
        if self.router_jitter == 0:
            return None
        uniform_BLM = row_uniform(self._key(), rows, (length, width))
        return _group(
            1 - self.router_jitter + 2 * self.router_jitter * uniform_BLM, self.group_size
        )

    def _router(
        self, x_GSM: Float[Array, "G S M"], jitter_GSM: Float[Array, "G S M"] | None
    ) -> Float[Array, "G S E"]:
        router_ME = nn_partitioning.param_with_axes(
            "router",
            _dense_init,
            (x_GSM.shape[-1], self.num_experts),
            jnp.float32,
            axes=(axes.EMBED, axes.ROUTER_EXPERT),
        )
        # By default a TPU would multiply in bfloat16, and some GPUs in TF32.
        highest = jax.lax.Precision.HIGHEST
        x_GSM = x_GSM.astype(jnp.float32)
        if jitter_GSM is not None:
            x_GSM *= jitter_GSM
        return kept(jnp.einsum("GSM,ME->GSE", x_GSM, router_ME, precision=highest))

    def _experts(self, width: int) -> Experts:
        wi_EMH = nn_partitioning.param_with_axes(
            "wi",
            _expert_init,
            (self.num_experts, width, self.expert_mlp_dim),
            jnp.float32,
            axes=(axes.EXPERT, axes.EMBED, axes.EXPERT_MLP),
        )
        wo_EHM = nn_partitioning.param_with_axes(
            "wo",
            _expert_init,
            (self.num_experts, self.expert_mlp_dim, width),
            jnp.float32,
            axes=(axes.EXPERT, axes.EXPERT_MLP, axes.EMBED),
        )
        return Experts(wi_EMH, wo_EHM)

    def _shared(self, x_BLM: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
        """Compute the expert of all tokens."""
        width = x_BLM.shape[-1]
        wi_MH = nn_partitioning.param_with_axes(
            "shared_wi",
            _dense_init,
            (width, self.shared_mlp_dim),
            jnp.float32,
            axes=(axes.EMBED, axes.MLP),
        )
        wo_HM = nn_partitioning.param_with_axes(
            "shared_wo",
            _dense_init,
            (self.shared_mlp_dim, width),
            jnp.float32,
            axes=(axes.MLP, axes.EMBED),
        )
        h_BLH = relu(jnp.einsum("BLM,MH->BLH", x_BLM, wi_MH.astype(x_BLM.dtype)))
        h_BLH = constrain(h_BLH, axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
        return kept(jnp.einsum("BLH,HM->BLM", h_BLH, wo_HM.astype(x_BLM.dtype)))

    def _report(self, routing: Routing, logits_GSE, valid_GS, capacity: int | None) -> None:
        scale = self.num_experts**2
        z_loss_G = router_z_loss(logits_GSE, valid_GS)
        self.sow("intermediates", "auxiliary_loss", scale * jnp.mean(routing.aux_loss))
        self.sow("intermediates", "router_z_loss", jnp.mean(z_loss_G))
        if self.gating.has_bias:
            self.sow("intermediates", "bias_loss", self._bias_loss(routing))
        health = router_health(routing, valid_GS, capacity)
        self.sow("intermediates", "health", health)
        for name in T5X_METRICS:
            self.sow("intermediates", name, health[name])

    def _bias_loss(self, routing: Routing) -> Float[Array, ""]:
        """Return 0, with the load of each expert over the mean as the bias's gradient.

        So the load takes the way of gradients: summed over microbatches and devices, to the
        optimizer, which uses its sign alone. It is whole numbers times a power of two: parts of a
        batch add up exactly, and nothing is seen of it in the norm of all gradients.
        """
        bias_E = self.get_variable("params", ROUTER_BIAS)
        count_E = count_per_expert(routing, routing.attempted, self.num_experts)
        over_E = (self.num_experts * count_E - jnp.sum(count_E)) * 2.0**-40
        return jnp.sum((bias_E - jax.lax.stop_gradient(bias_E)) * jax.lax.stop_gradient(over_E))


def _group(x: Array, size: int) -> Array:
    """Lay [B, L, ...] out as [G, size, ...], padding the last group with zeros."""
    tokens = x.shape[0] * x.shape[1]
    groups = math.ceil(tokens / size)
    flat = x.reshape(tokens, *x.shape[2:])
    missing = groups * size - tokens
    if missing:
        flat = jnp.pad(flat, [(0, missing)] + [(0, 0)] * (flat.ndim - 1))
    return flat.reshape(groups, size, *x.shape[2:])


def check_groups(
    layer: MoeLayer,
    *,
    batch: int,
    length: int,
    microbatches: int,
    shards: int,
    training: bool,
    what: str,
    settings: tuple[str, ...],
) -> None:
    """Refuse groups that a batch cannot be laid out in.

    Args:
        layer: whose `group_size` counts.
        batch: rows in a microbatch.
        length: tokens in a row.
        microbatches: parts of the whole batch; a group has to lie in one of them.
        shards: number of mesh partitions of the group axis.
        training: otherwise evaluation, which has groups only if it has a capacity.
        what: "encoder" or "decoder", for the error.
        settings: paths of the layer's `group_size` and of the batch size, for the error.

    Raises:
        SettingError: the groups do not divide over the mesh, or would straddle microbatches.
    """
    if layer.capacity_factor(deterministic=not training, decode=False) is None and not training:
        return
    tokens, size = batch * length, layer.group_size
    groups = math.ceil(tokens / size)
    straddles = microbatches > 1 and tokens % size
    if groups % shards == 0 and not straddles:
        return
    # Divisors of the tokens that leave a multiple of `shards` groups.
    share = tokens // shards if tokens % shards == 0 else tokens
    fits = [s for s in range(1, share + 1) if share % s == 0]
    near = sorted(sorted(fits, key=lambda s: abs(s - size))[:3])
    problem = (
        f"do not fill whole groups in each of {microbatches} microbatches"
        if straddles
        else f"make {groups} groups, which do not divide over {shards} mesh partitions"
    )
    raise SettingError(
        f"group_size={size}: the {tokens} tokens of a batch ({what}: {batch} rows x {length}) "
        f"{problem}.",
        settings=settings,
        hint=f"Set it to {', '.join(map(str, near))}.",
    )
