"""The Mixture-of-Experts feed-forward layer (paper section 2.2, Algorithm 2)."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jaxtyping import Array, Bool, Float, Int

from gshard_exp import axes
from gshard_exp.errors import SettingError, require_at_least, require_positive, require_within
from gshard_exp.moe.dispatch import Dispatch, EinsumDispatch
from gshard_exp.moe.experts import Experts
from gshard_exp.moe.gating import Gating, Top2Gating, router_z_loss
from gshard_exp.moe.health import router_health
from gshard_exp.moe.ragged import RaggedDispatch
from gshard_exp.rng import row_uniform
from gshard_exp.sharding.annotate import constrain

# Uniform of variance 1 / fan-in, for each expert apart (facts B3: lingvo's choice; the paper names
# no initialisation).
_expert_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=0
)
_router_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")
_DROPLESS: Dispatch = RaggedDispatch()


class MoeLayer(nn.Module):
    """A feed-forward layer of `num_experts` experts, of which each token uses one or two.

    Tokens are laid out in G groups of `group_size`, in the order of the batch; the number of
    groups never depends on the number of devices. A last group that the batch does not fill is
    padded with tokens that are never routed. A token whose choices are all dropped gets zeros:
    only the residual connection carries it on. Without a capacity nothing is dropped, and in
    evaluation and decoding a token's output then does not depend on the others.

    The router computes in float32 whatever the activations are (Switch Transformer's selective
    precision; the paper computes all in float32).

    Sown into `intermediates`: `health` (a dict of `moe.health.router_health`), `auxiliary_loss`
    (E^2 times line 13 of Algorithm 1, which makes it 1 when experts are used evenly) and
    `router_z_loss`, both float32 scalars, means over groups.

    Attributes:
        num_experts: E, need not equal the number of devices.
        expert_mlp_dim: H of each expert.
        group_size: S, tokens in a routing group.
        gating: Algorithm 1, or another function from logits to `Routing`.
        dispatch: how tokens reach their experts and come back where there is a capacity.
        train_capacity_factor: multiplies the paper's capacity 2S/E in training; 1 is the paper.
            None is dropless: every choice is computed, by `RaggedDispatch` whatever `dispatch` is.
        eval_capacity_factor: the same when `deterministic`.
        decode_capacity_factor: the same for a step of decoding.
        router_jitter: in training the router, and only the router, sees its input times U[1 - j,
            1 + j), drawn per element. 0 is the paper. Source: Switch Transformer, with 1e-2.
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

    def __post_init__(self) -> None:
        """Refuse sizes and factors without meaning."""
        require_at_least(self, 1, "num_experts", "expert_mlp_dim", "group_size")
        require_positive(
            self, "train_capacity_factor", "eval_capacity_factor", "decode_capacity_factor"
        )
        require_within(self, 0, 1, "router_jitter")
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
            rows: index of each row in the global batch, for the random second choice.
            deterministic: no random second choice, capacity of evaluation.
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
        uniform_GS = jitter_GSM = None
        if not deterministic:
            uniform_BL = row_uniform(self.make_rng("routing"), rows, (length,))
            uniform_GS = _group(uniform_BL, size)
            jitter_GSM = self._jitter(rows, length, width)
        logits_GSE = self._router(x_GSM, jitter_GSM)
        capacity, dispatch = size, _DROPLESS  # an expert gets a token once: S slots hold all
        if factor is not None:
            capacity = self.gating.capacity(size, self.num_experts, factor)
            dispatch = self.dispatch
        routing = self.gating(logits_GSE, valid_GS, capacity, uniform_GS)
        self._report(routing, logits_GSE, valid_GS, None if factor is None else capacity)

        y_GSM = dispatch(x_GSM, routing, self._experts(width), capacity)
        y_GSM = constrain(y_GSM, axes.GROUP, axes.GROUP_TOKENS, axes.ACTIVATION_EMBED)
        y_NM = y_GSM.reshape(-1, width)[: batch * length]
        return y_NM.reshape(batch, length, width).astype(x_BLM.dtype)

    def capacity_factor(self, *, deterministic: bool, decode: bool) -> float | None:
        """Choose the capacity of training, evaluation or decoding; None drops nothing."""
        if not deterministic:
            return self.train_capacity_factor
        return self.decode_capacity_factor if decode else self.eval_capacity_factor

    def _jitter(
        self, rows: Int[Array, " B"], length: int, width: int
    ) -> Float[Array, "G S M"] | None:
        if self.router_jitter == 0:
            return None
        uniform_BLM = row_uniform(self.make_rng("routing"), rows, (length, width))
        return _group(
            1 - self.router_jitter + 2 * self.router_jitter * uniform_BLM, self.group_size
        )

    def _router(
        self, x_GSM: Float[Array, "G S M"], jitter_GSM: Float[Array, "G S M"] | None
    ) -> Float[Array, "G S E"]:
        router_ME = nn_partitioning.param_with_axes(
            "router",
            _router_init,
            (x_GSM.shape[-1], self.num_experts),
            jnp.float32,
            axes=(axes.EMBED, axes.ROUTER_EXPERT),
        )
        # By default a TPU would multiply in bfloat16, and some GPUs in TF32.
        highest = jax.lax.Precision.HIGHEST
        x_GSM = x_GSM.astype(jnp.float32)
        if jitter_GSM is not None:
            x_GSM *= jitter_GSM
        return jnp.einsum("GSM,ME->GSE", x_GSM, router_ME, precision=highest)

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

    def _report(self, routing, logits_GSE, valid_GS, capacity: int | None) -> None:
        scale = self.num_experts**2
        z_loss_G = router_z_loss(logits_GSE, valid_GS)
        self.sow("intermediates", "auxiliary_loss", scale * jnp.mean(routing.aux_loss))
        self.sow("intermediates", "router_z_loss", jnp.mean(z_loss_G))
        self.sow("intermediates", "health", router_health(routing, valid_GS, capacity))


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
