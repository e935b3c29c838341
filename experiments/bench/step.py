"""The training step of any gin file on random batches: time, tokens, work, memory, compile time.

python experiments/bench/step.py --gin_file=FILE [--gin_file=...] [--gin.NAME=VALUE ...] [--json]

Runs on whatever devices JAX finds, with the core install alone: the text of a gin file is replaced
by random tokens, and its corpus is neither built nor asked for.
"""

import argparse
import json
import resource
import sys
import time

import jax
from ours import Step, assembled, main, parsed
from peak import SIZES, matmul_peak
from timing import in_turn

from gshard_exp.sharding import hlo
from gshard_exp.train.flops import useful_flops


def measure(files: list[str], bindings: list[str], *, rounds: int, sizes) -> dict:
    """Time the step of an experiment; return what is printed."""
    experiment = assembled(files, bindings)
    began = time.perf_counter()
    step = Step(experiment)
    ready_s = time.perf_counter() - began
    device, devices = step.mesh.devices.flat[0], step.mesh.devices.size
    dtype = experiment.model.module.dtype
    peak = matmul_peak(dtype, sizes=sizes)
    timing = in_turn({"step": step}, rounds=rounds, warm_up=2)["step"]
    peak = max(peak, matmul_peak(dtype, sizes=sizes))
    # CPU devices are shares of one machine.
    all_devices_peak = peak if device.platform == "cpu" else peak * devices
    parts = useful_flops(
        experiment.model, batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    program = hlo.parse(step.compiled.as_text())
    tokens = experiment.batch_size * sum(experiment.lengths.values())
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "devices": devices,
        "dtype": dtype,
        "jax": jax.__version__,
        "step": timing.json(),
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / timing.median,
        "useful_flops": sum(parts.values()),
        "useful_flops_by_part": parts,
        # Of one device; work of custom calls other than cuBLAS products is not in it.
        "executed_flops": program.flops() * devices,
        "loops_counted_once": program.unknown_loops(),
        "custom_calls": program.custom_calls(),
        "matmul_peak_flops_per_s": peak,
        "mfu": sum(parts.values()) / timing.median / all_devices_peak,
        "executed_share_of_peak": program.flops() * devices / timing.median / all_devices_peak,
        "memory": memory(step.compiled, device),
        "trace_and_lower_s": step.lower_s,
        "compile_s": step.compile_s,
        "ready_s": ready_s,
        "last_loss": step.last_loss,
    }


def memory(compiled: jax.stages.Compiled, device: jax.Device) -> dict[str, int | None]:
    """Return bytes on one device: what the program was planned with, and the peak if it is known.

    The plan holds arguments (state and batch), results that do not take their place, and
    temporaries. CPU devices do not count what they use: there the peak is that of the process, the
    interpreter and the compiler included.
    """
    plan = compiled.memory_analysis()
    if device.platform == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "planned_bytes": None
        if plan is None
        else plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes,
        "temporary_bytes": None if plan is None else plan.temp_size_in_bytes,
        "peak_bytes": peak,
    }


def table(result: dict) -> str:
    """Lay a result out as lines for a person."""
    step, stored = result["step"], result["memory"]
    size = lambda n: "not known" if n is None else f"{n / 2**20:,.0f} MiB"  # noqa: E731
    rows = [
        ("device", f"{result['devices']} x {result['device']}, {result['dtype']}"),
        (
            "step",
            f"{step['median_s'] * 1e3:.1f} ms (median of {step['rounds']}, spread "
            f"{step['spread']:.1%}, best {step['min_s'] * 1e3:.1f} ms)",
        ),
        ("tokens", f"{result['tokens_per_s']:,.0f} a second, source + target"),
        ("useful work", f"{result['useful_flops'] / 1e9:,.1f} GFLOP a step"),
        ("executed", f"{result['executed_flops'] / 1e9:,.1f} GFLOP a step"),
        ("matmul peak", f"{result['matmul_peak_flops_per_s'] / 1e9:,.0f} GFLOP/s a device"),
        (
            "MFU",
            f"{result['mfu']:.1%} useful, {result['executed_share_of_peak']:.1%} executed",
        ),
        (
            "memory",
            f"{size(stored['planned_bytes'])} planned, of which temporary "
            f"{size(stored['temporary_bytes'])}; peak {size(stored['peak_bytes'])}",
        ),
        (
            "compile",
            f"{result['compile_s']:.1f} s (tracing before: {result['trace_and_lower_s']:.1f} s)",
        ),
    ]
    if result["loops_counted_once"]:
        rows.append(("counted once", ", ".join(result["loops_counted_once"])))
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", action="append", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peak_size", type=int, action="append", help="of the peak's product")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, bindings = parsed(parser)
    result = measure(
        arguments.gin_file,
        bindings,
        rounds=arguments.rounds,
        sizes=tuple(arguments.peak_size or SIZES),
    )
    print(json.dumps(result, indent=1) if arguments.json else table(result))


if __name__ == "__main__":
    main(run)
