"""Where the time of our training step goes: a trace of some steps, added up by part of the model.

python experiments/bench/profile_step.py [--gin_file=FILE] [--gin.NAME=VALUE ...] [--json]

Times are those of instructions while they run, on all threads of the machine added up: parts that
run beside one another count both, and shares are of that sum, not of the step's duration.
"""

import argparse
import collections
import glob
import json
import re
import sys
import tempfile

import jax
from ours import Step, assembled

from gshard_exp.config import binding_from_flag
from gshard_exp.sharding import hlo

GIN = "experiments/bench/nllb_size.gin"
# The first pattern that the name of an instruction's origin matches says its part.
PARTS = (
    ("experts", r"ffn/.*(EGCM,EMH|EGCH,EHM)"),
    ("dispatch and combine", r"_scatter_rows|_gather_rows|scatter|GSX|gather_rows"),
    ("gating", r"ffn/.*(softmax|argmax|cumsum|one_hot|top_k|sort)|GSM,ME"),
    ("attention", r"attention"),
    ("rest of feed-forward", r"ffn"),
    ("norms", r"norm"),
    ("logits", r"BLM,VM->BLV"),
    ("embeddings", r"embed"),
)


# The first of these opcodes that an instruction or its body has says its kind.
KINDS = (
    ("products", {"dot", "convolution", "custom-call"}),
    ("random numbers", {"xor", "rng-bit-generator"}),
    ("scatter, gather and sort", {"scatter", "gather", "sort"}),
    ("layers in and out of their stacks", {"dynamic-slice", "dynamic-update-slice"}),
    ("sums and maxima", {"reduce", "reduce-window"}),
    ("layout", {"copy", "transpose"}),
)


def part_of(op_name: str) -> str:
    """Return the part of the model that an instruction belongs to."""
    for part, pattern in PARTS:
        if re.search(pattern, op_name):
            return part
    return "loss, optimizer and other"


def measure(files: list[str], bindings: list[str], *, steps: int) -> dict:
    """Trace steps; return milliseconds of a step by part and by instruction."""
    step = Step(assembled(files, bindings))
    step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                step()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        seconds = _seconds_by_instruction(jax.profiler.ProfileData.from_file(path))
    program = hlo.parse(step.compiled.as_text())
    lines = {run.instruction.name: run.instruction for run in program.executions()}
    parts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    rows = []
    for name in seconds.keys() & lines.keys():
        ms = 1e3 * seconds[name] / steps
        bodies = [i for body in lines[name].called for i in program.computations[body]]
        family = [lines[name], *reversed(bodies)]
        origin = next((line.op_name for line in family if line.op_name), lines[name].opcode)
        kind = _kind({line.opcode for line in family})
        parts[part_of(origin)] += ms
        kinds[kind] += ms
        rows.append({"ms": ms, "name": name, "kind": kind, "origin": origin})
    rows.sort(key=lambda row: -row["ms"])
    return {
        "ms_by_part": dict(parts.most_common()),
        "ms_by_kind": dict(kinds.most_common()),
        "instructions": rows,
    }


def _kind(opcodes: set[str]) -> str:
    return next((kind for kind, of_kind in KINDS if of_kind & opcodes), "element-wise")


def _seconds_by_instruction(profile) -> dict[str, float]:
    """Add up events by name, less what runs within them (loops and calls hold their bodies)."""
    seconds: dict[str, float] = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            open_events: list[tuple[float, str]] = []
            for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
                end = event.start_ns + event.duration_ns
                while open_events and open_events[-1][0] <= event.start_ns:
                    open_events.pop()
                if open_events:
                    seconds[open_events[-1][1]] -= event.duration_ns / 1e9
                seconds[event.name] += event.duration_ns / 1e9
                open_events.append((end, event.name))
    return seconds


def table(result: dict, top: int) -> str:
    """Lay a result out as Markdown."""
    total = sum(result["ms_by_part"].values())
    lines = []
    for by in ("part", "kind"):
        lines += [f"| {by} | ms of thread time | share |", "|---|---|---|"]
        for name, ms in result[f"ms_by_{by}"].items():
            lines.append(f"| {name} | {ms:.0f} | {ms / total:.1%} |")
        lines.append("")
    lines += ["| ms | instruction | kind | from |", "|---|---|---|---|"]
    for row in result["instructions"][:top]:
        lines.append(
            f"| {row['ms']:.0f} | {row['name']} | {row['kind']} | `{row['origin'][-80:]}` |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", action="append")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=20, help="instructions to list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    gin = [word for word in sys.argv[1:] if word.startswith("--gin.")]
    arguments = parser.parse_args([word for word in sys.argv[1:] if word not in gin])
    result = measure(
        arguments.gin_file or [GIN],
        [binding_from_flag(word) for word in gin],
        steps=arguments.steps,
    )
    print(json.dumps(result, indent=1) if arguments.json else table(result, arguments.top))


if __name__ == "__main__":
    main()
