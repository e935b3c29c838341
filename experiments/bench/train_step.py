"""Our training step against Hugging Face's NllbMoe in torch, in turn, and against the matmul peak.

python experiments/bench/train_step.py [--gin.NAME=VALUE ...] [--rounds=10] [--json]

Without the peer (`--peer=none`) neither torch nor transformers is needed.
"""

import argparse
import json
import os

from ours import Step, assembled, main, parsed
from peak import SIZES, matmul_peak
from timing import in_turn

from gshard_exp.train.flops import useful_flops

GIN = "experiments/bench/nllb_size.gin"


def measure(
    file: str, bindings: list[str], *, peer: bool, rounds: int, threads: int, sizes
) -> dict:
    """Time both steps in turn; return what is printed."""
    experiment = assembled([file], bindings)
    steps = {"ours": Step(experiment)}
    peak = matmul_peak(sizes=sizes)
    if peer:
        from peer import PeerStep, torch_matmul_peak

        steps["peer"] = PeerStep(experiment, threads)
        peak = max(peak, torch_matmul_peak(size=max(sizes)))
    times = in_turn(steps, rounds=rounds, warm_up=2)
    # Once more: a machine that others use may have been slower before.
    peak = max(peak, matmul_peak(sizes=sizes))
    parts = useful_flops(
        experiment.model, batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    useful = sum(parts.values())
    tokens = experiment.batch_size * sum(experiment.lengths.values())
    result = {
        "threads": threads,
        "matmul_peak_flops_per_s": peak,
        "useful_flops": useful,
        "useful_flops_by_part": parts,
        "floor_s": useful / peak,
        "tokens_per_step": tokens,
        "steps": {
            name: {
                **times[name].json(),
                "tokens_per_s": tokens / times[name].median,
                "share_of_peak": useful / times[name].median / peak,
            }
            for name in steps
        },
    }
    if peer:
        result["steps"]["peer"]["transformers"] = steps["peer"].version
        result["steps"]["peer"]["expert_rows_per_step"] = steps["peer"].expert_rows
        result["times_as_fast_as_the_peer"] = times["peer"].median / times["ours"].median
    return result


def table(result: dict) -> str:
    """Lay a result out as Markdown."""
    lines = [
        f"matmul peak {result['matmul_peak_flops_per_s'] / 1e9:.0f} GFLOP/s, useful work "
        f"{result['useful_flops'] / 1e9:.1f} GFLOP a step (floor {result['floor_s']:.2f} s), "
        f"{result['threads']} threads",
        "",
        "| step | median s | spread | best s | tokens/s | share of peak |",
        "|---|---|---|---|---|---|",
    ]
    for name, step in result["steps"].items():
        named = f"{name} (transformers {step['transformers']})" if name == "peer" else name
        lines.append(
            f"| {named} | {step['median_s']:.3f} | {step['spread']:.1%} | {step['min_s']:.3f} | "
            f"{step['tokens_per_s']:,.0f} | {step['share_of_peak']:.1%} |"
        )
    if "peer" in result["steps"]:
        rows = result["steps"]["peer"]["expert_rows_per_step"]
        lines += [
            "",
            f"{result['times_as_fast_as_the_peer']:.2f} times as fast as the peer, whose experts "
            f"computed {rows:,} rows a step",
        ]
    return "\n".join(lines)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", default=GIN)
    parser.add_argument("--peer", choices=("nllb_moe", "none"), default="nllb_moe")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--peak_size", type=int, action="append", help="of the peak's product")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments, bindings = parsed(parser)
    result = measure(
        arguments.gin_file,
        bindings,
        peer=arguments.peer != "none",
        rounds=arguments.rounds,
        threads=arguments.threads,
        sizes=tuple(arguments.peak_size or SIZES),
    )
    print(json.dumps(result, indent=1) if arguments.json else table(result))


if __name__ == "__main__":
    main(run)
