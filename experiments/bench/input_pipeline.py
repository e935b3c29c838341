"""The input pipeline alone: what it makes a second, against what training consumes.

python experiments/bench/input_pipeline.py --gin_file=FILE [--gin.NAME=VALUE ...] [--json]

Builds the corpus of the gin file if it is not in the cache. What training consumes is measured too
(the same experiment on random tokens), unless it is given as --train_tokens_per_s.
"""

import argparse
import json
import time

import numpy as np
from ours import Step, as_written, assembled, main, parsed
from timing import in_turn

ENOUGH = 5  # times what training consumes


def measure(files, bindings, *, batches: int, train_tokens_per_s: float | None) -> dict:
    """Time batches in a row; return what is printed."""
    experiment = as_written(files, bindings)
    positions = experiment.batch_size * sum(experiment.lengths.values())
    if train_tokens_per_s is None:
        step = in_turn({"step": Step(assembled(files, bindings))}, rounds=5, warm_up=2)["step"]
        train_tokens_per_s = positions / step.median
    began = time.perf_counter()
    stream = experiment.data.train_batches(
        batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    next(stream)
    first_s = time.perf_counter() - began
    for _ in range(batches // 10):  # what was prefetched before the clock starts
        next(stream)
    examples = tokens = 0
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(batches):
        batch = next(stream)
        examples += int(np.max(batch["decoder_segment_ids"], axis=1).sum())
        tokens += int(np.sum(batch["encoder_segment_ids"] > 0))
        tokens += int(np.sum(batch["decoder_segment_ids"] > 0))
    seconds = time.perf_counter() - began
    rate = batches * positions / seconds
    return {
        "first_batch_s": first_s,
        "batches": batches,
        "examples_per_s": examples / seconds,
        "tokens_per_s": tokens / seconds,
        "filled": tokens / (batches * positions),
        # Padding is computed with as well: positions are what both sides are compared in.
        "positions_per_s": rate,
        "cpu_ms_per_batch": 1e3 * (time.process_time() - cpu_began) / batches,
        "train_positions_per_s": train_tokens_per_s,
        "times_of_training": rate / train_tokens_per_s,
    }


def table(result: dict) -> str:
    """Lay a result out as lines for a person."""
    times = result["times_of_training"]
    return "\n".join(
        (
            f"first batch after {result['first_batch_s']:.1f} s",
            f"{result['examples_per_s']:,.0f} examples/s, {result['tokens_per_s']:,.0f} tokens/s, "
            f"{result['filled']:.1%} of the positions filled, "
            f"{result['cpu_ms_per_batch']:.1f} ms of processor time a batch",
            f"{result['positions_per_s']:,.0f} positions/s; training consumes "
            f"{result['train_positions_per_s']:,.0f}: {times:.1f} times as fast"
            + ("" if times >= ENOUGH else f", less than the {ENOUGH} that are asked for"),
        )
    )


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", action="append", required=True)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--train_tokens_per_s", type=float)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, bindings = parsed(parser)
    result = measure(
        arguments.gin_file,
        bindings,
        batches=arguments.batches,
        train_tokens_per_s=arguments.train_tokens_per_s,
    )
    print(json.dumps(result, indent=1) if arguments.json else table(result))


if __name__ == "__main__":
    main(run)
