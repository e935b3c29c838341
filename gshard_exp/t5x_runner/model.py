"""Our model as t5x knows it: the loss is that of `Seq2SeqModel`, keys and all."""

from collections.abc import Callable, Mapping
from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from t5x import decoding
from t5x.metrics import AveragePerStep, StepsPerTime, TimeRate
from t5x.models import DecoderParams, EncoderDecoderModel

from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.moe.layer import T5X_METRICS
from gshard_exp.train.step import accumulate


class GShardModel(EncoderDecoderModel):
    """Drives a `Seq2SeqModel` from t5x.

    From the same seed it makes the parameters that our own runner makes and draws the same numbers
    for dropout and routing: t5x splits and folds its key as we do (t5x/train.py, `trainer.py`).

    Made to be trained by t5x's plain `Trainer`, with `num_microbatches = None`. Its `MoeTrainer`
    (t5x/contrib/moe/trainer.py) multiplies the gradients of experts by the number of expert
    partitions; the gradient of this loss is that of the whole batch on every mesh, so the factor
    is 1 here. t5x would add up the means of microbatches; `microbatches` is ours.

    Args:
        model: network and losses.
        optimizer_def: `NamedOptimizer`, or one of t5x's.
        input_vocabulary: of seqio, of the source.
        output_vocabulary: of seqio, of the target.
        microbatches: parts in which the loss is computed; each is computed once more for its
            gradient.
        decode_fn: t5x's way of looking for translations.
        num_decodes: its width.
    """

    def __init__(
        self,
        model: Seq2SeqModel,
        optimizer_def: Any,
        input_vocabulary: Any,
        output_vocabulary: Any,
        microbatches: int = 1,
        decode_fn: Callable = decoding.beam_search,
        num_decodes: int = 1,
    ) -> None:
        super().__init__(
            module=model.module,
            input_vocabulary=input_vocabulary,
            output_vocabulary=output_vocabulary,
            optimizer_def=optimizer_def,
            decode_fn=decode_fn,
            default_decoder_params=DecoderParams(num_decodes=num_decodes),
        )
        self._model = model
        self._microbatches = microbatches

    def loss_fn(
        self, params: Any, batch: Mapping[str, Array], dropout_rng: Array | None
    ) -> tuple[Float[Array, ""], dict]:
        """Compute the loss of a batch, and what t5x writes of it; see `Seq2SeqModel.loss`.

        The gradient of a loss that is not finite is made NaN, whatever it was: it is all that an
        optimizer of t5x sees, and `NamedOptimizer` then skips the step as `train.step` does.
        """
        key = None if dropout_rng is None else jax.random.wrap_key_data(dropout_rng)
        total_weight = self._model.weight(batch)
        batch = {**batch, "rows": jnp.arange(len(batch["encoder_input_tokens"]))}

        def loss(params: Any, part: Mapping[str, Array]) -> tuple[Array, dict]:
            share = 1.0 / self._microbatches
            return self._model.loss(params, part, key=key, total_weight=total_weight, share=share)

        if self._microbatches > 1:
            loss = jax.checkpoint(loss)  # or the activations of all parts would be kept
        value, metrics = accumulate(loss, params, batch, self._microbatches)
        poison = jnp.where(jnp.isfinite(value), 1.0, jnp.nan)
        return value * poison, _written(value, metrics)


def _written(loss: Float[Array, ""], metrics: Mapping) -> dict[str, clu.metrics.Metric]:
    """Name metrics as both runners do, in forms that t5x adds up over steps."""
    sums = metrics["sums"]
    tokens = sums["target_tokens"]

    def per_token(name: str) -> clu.metrics.Metric:
        return clu.metrics.Average(total=sums[name], count=jnp.maximum(tokens, 1.0))

    written = {
        "loss": AveragePerStep(total=loss),
        "accuracy": per_token("correct"),
        "cross_ent_loss_per_all_target_tokens": per_token("cross_ent_loss"),
        "z_loss_per_all_target_tokens": per_token("z_loss"),
        "timing/steps_per_second": StepsPerTime.from_model_output(),
        "timing/target_tokens_per_second": TimeRate.from_model_output(numerator=tokens),
        "timing/tokens_per_second": TimeRate.from_model_output(
            numerator=tokens + sums["source_tokens"]
        ),
    }
    means = dict(metrics["means"])
    blocks = metrics["router"].values()
    for name in T5X_METRICS if blocks else ():
        means[name] = jnp.mean(jnp.concatenate([health[name] for health in blocks]))
    return written | {name: AveragePerStep(total=mean) for name, mean in means.items()}
