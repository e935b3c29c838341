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
from gshard_exp.moe.gating import Gating, Top2Gating, router_z_loss
from gshard_exp.moe.health import router_health
from gshard_exp.rng import row_uniform
from gshard_exp.sharding.annotate import constrain

# Uniform of variance 1 / fan-in, for each expert apart (facts B3: lingvo's choice; the paper names
# no initialisation).
_expert_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=0
)
_router_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "uniform")


class MoeLayer(nn.Module):
    """A feed-forward layer of `num_experts` experts, of which each token uses one or two.

    Tokens are laid out in G groups of `group_size`, in the order of the batch; the number of
    groups never depends on the number of devices. A last group that the batch does not fill is
    padded with tokens that are never routed. A token whose choices are all dropped gets zeros:
    only the residual connection carries it on.

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
        dispatch: how tokens reach the experts' buffers and come back.
        train_capacity_factor: multiplies the paper's capacity 2S/E in training; 1 is the paper.
        eval_capacity_factor: the same when `deterministic`.
        router_jitter: in training the router, and only the router, sees its input times U[1 - j,
            1 + j), drawn per element. 0 is the paper. Source: Switch Transformer, with 1e-2.
    """

    num_experts: int
    expert_mlp_dim: int
    group_size: int
    gating: Gating = Top2Gating()
    dispatch: Dispatch = EinsumDispatch()
    train_capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    router_jitter: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes and factors without meaning."""
        require_at_least(self, 1, "num_experts", "expert_mlp_dim", "group_size")
        require_positive(self, "train_capacity_factor", "eval_capacity_factor")
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
    ) -> Float[Array, "B L M"]:
        """Route, dispatch, compute and combine.

        Args:
            x_BLM: tokens; the activation dtype of the result.
            valid: False on padding, which is neither routed nor counted.
            rows: index of each row in the global batch, for the random second choice.
            deterministic: no random second choice, capacity of evaluation.
        """
        batch, length, width = x_BLM.shape
        x_GSM = self._group(x_BLM)
        valid_GS = self._group(valid)
        x_GSM = constrain(x_GSM, axes.GROUP, axes.GROUP_TOKENS, axes.ACTIVATION_EMBED)
        uniform_GS = jitter_GSM = None
        if not deterministic:
            uniform_BL = row_uniform(self.make_rng("routing"), rows, (length,))
            uniform_GS = self._group(uniform_BL)
            jitter_GSM = self._jitter(rows, length, width)
        logits_GSE = self._router(x_GSM, jitter_GSM)
        factor = self.eval_capacity_factor if deterministic else self.train_capacity_factor
        capacity = self.gating.capacity(self.group_size, self.num_experts, factor)
        routing = self.gating(logits_GSE, valid_GS, capacity, uniform_GS)
        self._report(routing, logits_GSE, valid_GS, capacity)

        sent_GECM = self.dispatch.dispatch(x_GSM, routing, self.num_experts, capacity)
        sent_EGCM = _to_experts(sent_GECM)
        done_EGCM = self._experts(sent_EGCM)
        done_GECM = _from_experts(done_EGCM)
        y_GSM = self.dispatch.combine(done_GECM, routing)
        y_GSM = constrain(y_GSM, axes.GROUP, axes.GROUP_TOKENS, axes.ACTIVATION_EMBED)
        y_NM = y_GSM.reshape(-1, width)[: batch * length]
        return y_NM.reshape(batch, length, width).astype(x_BLM.dtype)

    def _group(self, x: Array) -> Array:
        """Lay [B, L, ...] out as [G, S, ...], padding the last group with zeros."""
        tokens = x.shape[0] * x.shape[1]
        groups = math.ceil(tokens / self.group_size)
        flat = x.reshape(tokens, *x.shape[2:])
        missing = groups * self.group_size - tokens
        if missing:
            flat = jnp.pad(flat, [(0, missing)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(groups, self.group_size, *x.shape[2:])

    def _jitter(
        self, rows: Int[Array, " B"], length: int, width: int
    ) -> Float[Array, "G S M"] | None:
        if self.router_jitter == 0:
            return None
        uniform_BLM = row_uniform(self.make_rng("routing"), rows, (length, width))
        return self._group(1 - self.router_jitter + 2 * self.router_jitter * uniform_BLM)

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

    def _experts(self, x_EGCM: Float[Array, "E G C M"]) -> Float[Array, "E G C M"]:
        width = x_EGCM.shape[-1]
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
        # One axis R for the slots of all groups: one matrix product per expert. A TPU would pad a
        # C of 1 or 2 to 8 sublanes, and CPUs multiply and transpose flat matrices faster.
        num_experts, groups, capacity, width = x_EGCM.shape
        x_ERM = x_EGCM.reshape(num_experts, groups * capacity, width)
        h_ERH = jnp.einsum("ERM,EMH->ERH", x_ERM, wi_EMH.astype(x_ERM.dtype))
        h_ERH = constrain(jax.nn.relu(h_ERH), axes.EXPERT, axes.EXPERT_GROUP, axes.ACTIVATION_MLP)
        y_ERM = jnp.einsum("ERH,EHM->ERM", h_ERH, wo_EHM.astype(x_ERM.dtype))
        return y_ERM.reshape(num_experts, groups, capacity, width)

    def _report(self, routing, logits_GSE, valid_GS, capacity: int) -> None:
        scale = self.num_experts**2
        z_loss_G = router_z_loss(logits_GSE, valid_GS)
        self.sow("intermediates", "auxiliary_loss", scale * jnp.mean(routing.aux_loss))
        self.sow("intermediates", "router_z_loss", jnp.mean(z_loss_G))
        self.sow("intermediates", "health", router_health(routing, valid_GS, capacity))


def check_groups(
    layer: MoeLayer,
    *,
    batch: int,
    length: int,
    microbatches: int,
    shards: int,
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
        what: "encoder" or "decoder", for the error.
        settings: paths of the layer's `group_size` and of the batch size, for the error.

    Raises:
        SettingError: the groups do not divide over the mesh, or would straddle microbatches.
    """
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


# The constraints on BOTH sides of each transposition make it one all-to-all; with one side alone
# the partitioner replicates the whole [E, G, C, M] array.
def _to_experts(x_GECM: Float[Array, "G E C M"]) -> Float[Array, "E G C M"]:
    x_GECM = constrain(x_GECM, axes.GROUP, None, axes.CAPACITY, axes.ACTIVATION_EMBED)
    x_EGCM = jnp.swapaxes(x_GECM, 0, 1)
    return constrain(x_EGCM, axes.EXPERT, axes.EXPERT_GROUP, axes.CAPACITY, axes.ACTIVATION_EMBED)


def _from_experts(x_EGCM: Float[Array, "E G C M"]) -> Float[Array, "G E C M"]:
    x_EGCM = constrain(x_EGCM, axes.EXPERT, axes.EXPERT_GROUP, axes.CAPACITY, axes.ACTIVATION_EMBED)
    x_GECM = jnp.swapaxes(x_EGCM, 0, 1)
    return constrain(x_GECM, axes.GROUP, None, axes.CAPACITY, axes.ACTIVATION_EMBED)
