"""The peer: Hugging Face's NllbMoe in torch, its training step and beam search at given sizes.

Needs `torch` and `transformers`. Equal to ours: layers and which of them are sparse, widths, heads,
one vocabulary of the same size (tied, where ours has a table for each side), top-2 with a random
second choice, dropout on inputs, residual branches of attention and attention weights, auxiliary
loss, AdamW. Different: learned biases and layer norm, no dropout after feed-forward layers (its
`activation_dropout` stands there, but within the layers as well), and capacity that counts over the
whole batch: 256 slots per expert there are 4 groups of 64 here.
"""

import time

import numpy as np
import torch
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration, __version__

from gshard_exp.moe.layer import MoeLayer
from gshard_exp.train.experiment import Experiment


def config(experiment: Experiment) -> NllbMoeConfig:
    """Return the peer's configuration of an experiment's sizes.

    Raises:
        ValueError: the peer has nothing like it.
    """
    module = experiment.model.module
    encoder, decoder = module.encoder, module.decoder
    dense, sparse = encoder.pattern[0], encoder.pattern[-1]
    if [isinstance(block.ffn, MoeLayer) for block in (*encoder.pattern, *decoder.pattern)] != [
        False,
        True,
    ] * 2:
        raise ValueError("the peer's layers are sparse in turn, the second first")
    heads, width = dense.attention.num_heads, module.target_embedding.embed_dim
    if heads * dense.attention.head_dim != width:
        raise ValueError(f"{heads} heads of {dense.attention.head_dim} are not as wide as {width}")
    tokens = experiment.batch_size * experiment.lengths["inputs"]
    layer = sparse.ffn
    capacity = layer.gating.capacity(tokens, layer.num_experts, layer.train_capacity_factor)
    return NllbMoeConfig(
        vocab_size=module.target_embedding.vocab_size,
        max_position_embeddings=max(experiment.lengths.values()),
        d_model=width,
        encoder_layers=encoder.num_layers,
        decoder_layers=decoder.num_layers,
        encoder_ffn_dim=layer.expert_mlp_dim,
        decoder_ffn_dim=layer.expert_mlp_dim,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_sparse_step=len(encoder.pattern),
        decoder_sparse_step=len(decoder.pattern),
        num_experts=layer.num_experts,
        expert_capacity=capacity,
        second_expert_policy="random",
        normalize_router_prob_before_dropping=True,
        router_aux_loss_coef=experiment.model.aux_loss_factor,
        output_router_logits=True,
        dropout=module.dropout_rate,
        attention_dropout=dense.attention.dropout_rate,
        activation_dropout=0.0,
        moe_token_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        # Version 4 finds its router logits by their place behind the cache's.
        use_cache=__version__.startswith("4."),
        pad_token_id=0,
    )


class PeerStep:
    """The peer with its optimizer; every call is one step.

    Attributes:
        version: of transformers.
        expert_rows: rows that the experts of all layers computed in the last step.
    """

    version = __version__

    def __init__(self, experiment: Experiment, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self._model = NllbMoeForConditionalGeneration(config(experiment)).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        batch = next(
            experiment.data.train_batches(
                batch_size=experiment.batch_size, lengths=experiment.lengths
            )
        )
        as_torch = lambda key: torch.from_numpy(batch[key].astype(np.int64))  # noqa: E731
        self._batch = {
            "input_ids": as_torch("encoder_input_tokens"),
            "decoder_input_ids": as_torch("decoder_input_tokens").clamp(min=1),
            "labels": as_torch("decoder_target_tokens"),
        }
        self.expert_rows = 0
        for name, module in self._model.named_modules():
            if name.split(".")[-1].startswith("expert_"):
                module.register_forward_pre_hook(self._count)

    def _count(self, module, inputs) -> None:
        del module
        self.expert_rows += inputs[0].shape[0]

    def __call__(self) -> float:
        self.expert_rows = 0
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(**self._batch).loss
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def torch_matmul_peak(*, size: int = 2048, rounds: int = 5) -> float:
    """Return the most operations a second that torch reaches in a square product."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    best = float("inf")
    for _ in range(rounds + 1):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


class PeerGenerate:
    """The peer's beam search; every call translates.

    Attributes:
        version: of transformers.
    """

    version = __version__

    def __init__(
        self, experiment: Experiment, inputs: np.ndarray, *, beams: int, new: int, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        settings = config(experiment)
        settings.update(
            {
                "max_position_embeddings": max(*experiment.lengths.values(), new + 2),
                "output_router_logits": False,
                "use_cache": True,
            }
        )
        self._model = NllbMoeForConditionalGeneration(settings).eval()
        self._inputs = torch.from_numpy(inputs.astype(np.int64))
        self._how = {
            "num_beams": beams,
            "min_new_tokens": new,
            "max_new_tokens": new,
            "do_sample": False,
        }

    def __call__(self) -> None:
        with torch.no_grad():
            found = self._model.generate(self._inputs, **self._how)
        assert found.shape[0] == self._inputs.shape[0]
