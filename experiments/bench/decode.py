"""Beam search of ours against Hugging Face's `generate` on its NllbMoe, in turn, and the floor.

python experiments/bench/decode.py [--sentences=8 ...] [--rounds=5] [--json]

Both translate the same number of random sentences with a beam of 4 into exactly 32 new pieces each:
the encoder runs once and the decoder 32 times. Without the peer (`--peer=none`) neither torch nor
transformers is needed.

The floor of a pass over the encoder or of one step: the bytes of its weights over the bandwidth
measured in the same run, or its operations over the matmul peak, whichever takes longer.
"""

import argparse
import dataclasses
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from ours import assembled, main, parsed
from peak import SIZES, matmul_peak, memory_bandwidth
from timing import in_turn

from gshard_exp.model.incremental import StepDecoder
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.score.beam import BeamSearch
from gshard_exp.score.flat_beam import FlatBeamSearch

GIN = "experiments/bench/nllb_size.gin"
BEAMS, NEW = 4, 32


class Ours:
    """A compiled search with its model; every call translates, done when it returns."""

    def __init__(self, experiment, params, search, inputs) -> None:
        self._params = StepDecoder.of(experiment.model, params).params
        module = StepDecoder.of(experiment.model, params).module
        self._inputs = inputs

        def run(params, inputs):
            return search(StepDecoder(module, params), inputs, max_length=NEW)

        self._run = jax.jit(run)
        self.pieces = np.count_nonzero(self().tokens[:, 0])

    def __call__(self):
        return jax.block_until_ready(self._run(self._params, self._inputs))


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations and bytes of weights of one pass."""

    flops: float
    weight_bytes: float

    def floor(self, peak: float, bandwidth: float) -> float:
        return max(self.flops / peak, self.weight_bytes / bandwidth)


def encoder_work(module, sentences: int, length: int) -> Work:
    """Encode, and make the decoder's keys and values of the result."""
    tokens, width = sentences * length, module.source_embedding.embed_dim
    flops = weights = 0.0
    for block in module.encoder.pattern:
        repeats = module.encoder.repeats
        inner = block.attention.num_heads * block.attention.head_dim
        dense, used = _ffn(block.ffn, width)
        weights += repeats * (4 * width * inner + dense)
        flops += repeats * tokens * 2 * (4 * width * inner + used + 2 * length * inner)
    cross = [block.cross_attention for block in module.decoder.pattern]
    kept = module.decoder.repeats * sum(2 * width * a.num_heads * a.head_dim for a in cross)
    return Work(flops + tokens * 2 * kept, 4 * (weights + kept))


def step_work(module, sentences: int, length: int) -> Work:
    """One step of the decoder, half of the new pieces being there."""
    rows, width = sentences * BEAMS, module.target_embedding.embed_dim
    table = module.target_embedding.vocab_size * width
    flops, weights = rows * 2.0 * table, float(table)
    for block in module.decoder.pattern:
        repeats = module.decoder.repeats
        inner = block.attention.num_heads * block.attention.head_dim
        dense, used = _ffn(block.ffn, width)
        attention = 2 * inner * (NEW / 2 + length)
        weights += repeats * (6 * width * inner + dense)
        flops += repeats * rows * 2 * (6 * width * inner + used + attention)
    return Work(flops, 4 * weights)


def _ffn(ffn, width: int) -> tuple[int, int]:
    """Return the weights of a feed-forward layer, and those that one token uses."""
    if isinstance(ffn, MoeLayer):
        router, expert = width * ffn.num_experts, 2 * width * ffn.expert_mlp_dim
        return router + ffn.num_experts * expert, router + 2 * expert
    return 2 * width * ffn.mlp_dim, 2 * width * ffn.mlp_dim


def measure(experiment, sentences: int, *, peer: bool, rounds: int, threads: int, sizes) -> dict:
    """Time all searches in turn; return what is printed."""
    module = experiment.model.module
    length = experiment.lengths["inputs"]
    rng = np.random.default_rng(0)
    inputs = rng.integers(3, module.source_embedding.vocab_size, (sentences, length))
    params = jax.jit(lambda key: experiment.model.init(key)[0])(jax.random.key(0))
    searches = {"flat beam": FlatBeamSearch(BEAMS, 1.0), "beam": BeamSearch(BEAMS, 1.0)}
    things = {
        name: Ours(experiment, params, search, jnp.asarray(inputs, jnp.int32))
        for name, search in searches.items()
    }
    # The best of several moments: a machine that others use is slower at some.
    peak, bandwidth = matmul_peak(sizes=sizes), memory_bandwidth()
    pieces = {name: int(thing.pieces) for name, thing in things.items()}
    if peer:
        from peer import PeerGenerate

        things["peer"] = PeerGenerate(experiment, inputs, beams=BEAMS, new=NEW, threads=threads)
    times = in_turn(things, rounds=rounds)
    peak, bandwidth = max(peak, matmul_peak(sizes=sizes)), max(bandwidth, memory_bandwidth())
    encoder, step = encoder_work(module, sentences, length), step_work(module, sentences, length)
    floor = encoder.floor(peak, bandwidth) + NEW * step.floor(peak, bandwidth)
    result = {
        "sentences": sentences,
        "new_pieces": NEW,
        "beams": BEAMS,
        "threads": threads,
        "matmul_peak_flops_per_s": peak,
        "memory_bytes_per_s": bandwidth,
        "encoder": dataclasses.asdict(encoder),
        "step": dataclasses.asdict(step),
        "step_floor_s": step.floor(peak, bandwidth),
        "floor_s": floor,
        "pieces_of_the_best": pieces,
        "searches": {
            name: {
                **timing.json(),
                "tokens_per_s": sentences * NEW / timing.median,
                "times_the_floor": timing.median / floor,
            }
            for name, timing in times.items()
        },
    }
    if peer:
        result["searches"]["peer"]["transformers"] = things["peer"].version
        for name in searches:
            result["searches"][name]["times_as_fast_as_the_peer"] = (
                times["peer"].median / times[name].median
            )
    return result


def table(results: list[dict]) -> str:
    """Lay results out as Markdown."""
    lines = []
    for result in results:
        peak, memory = result["matmul_peak_flops_per_s"], result["memory_bytes_per_s"]
        flops, weights = result["step"]["flops"], result["step"]["weight_bytes"]
        lines += [
            f"{result['sentences']} sentences x {result['new_pieces']} new pieces, beam of "
            f"{result['beams']}: matmul peak {peak / 1e9:.0f} GFLOP/s, memory "
            f"{memory / 1e9:.1f} GB/s; a step is {flops / 1e9:.2f} GFLOP and "
            f"{weights / 1e6:.0f} MB of weights, floor of all {result['floor_s']:.3f} s",
            "",
            "| search | median s | spread | best s | tokens/s | times the floor | times the peer |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in result["searches"].items():
            faster = row.get("times_as_fast_as_the_peer", math.nan)
            named = f"peer (transformers {row['transformers']})" if name == "peer" else name
            lines.append(
                f"| {named} | {row['median_s']:.3f} | {row['spread']:.1%} | {row['min_s']:.3f} | "
                f"{row['tokens_per_s']:,.0f} | {row['times_the_floor']:.2f} | {faster:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", default=GIN)
    parser.add_argument("--peer", choices=("nllb_moe", "none"), default="nllb_moe")
    parser.add_argument("--sentences", type=int, action="append", help="default: 8 and 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--peak_size", type=int, action="append", help="of the peak's product")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments, bindings = parsed(parser)
    experiment = assembled([arguments.gin_file], bindings)
    results = [
        measure(
            experiment,
            sentences,
            peer=arguments.peer != "none",
            rounds=arguments.rounds,
            threads=arguments.threads,
            sizes=tuple(arguments.peak_size or SIZES),
        )
        for sentences in arguments.sentences or (8, 64)
    ]
    print(json.dumps(results, indent=1) if arguments.json else table(results))


if __name__ == "__main__":
    main(run)
