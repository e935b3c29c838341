"""Where the time of our training step goes: a trace of some steps, added up by part of the model.

python experiments/bench/profile_step.py [--gin_file=FILE] [--gin.NAME=VALUE ...] [--json]

Times add up to the duration of the step: a moment in which several instructions run, on several
threads, is divided among them, and one in which none does is called waiting (on a CPU also the
copies that the thread pool makes for an instruction that has already returned).
"""

import argparse
import collections
import glob
import json
import re
import tempfile

import jax
from ours import Step, assembled, main, parsed

from gshard_exp.sharding import hlo

GIN = "experiments/bench/nllb_size.gin"
WAITING = "waiting"
# The first pattern that the name of an instruction's origin matches says its part.
PARTS = (
    ("experts", r"ffn/.*(experts/|_shared/)"),
    ("dispatch and combine", r"ffn/(dispatch|combine)/|scatter|GSX|gather_rows"),
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
        profile = jax.profiler.ProfileData.from_file(path)
    program = hlo.parse(step.compiled.as_text())
    lines = {run.instruction.name: run.instruction for run in program.executions()}
    leaves = {name for name, line in lines.items() if line.opcode not in ("while", "call")}
    seconds = _divide(_events(profile, leaves))
    parts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    rows = []
    for name, of_name in seconds.items():
        ms = 1e3 * of_name / steps
        if name == WAITING:
            parts[name] += ms
            kinds[name] += ms
            continue
        bodies = [i for body in lines[name].called for i in program.computations[body]]
        family = [lines[name], *reversed(bodies)]
        origin = next((line.op_name for line in family if line.op_name), lines[name].opcode)
        kind = _kind({line.opcode for line in family})
        part = part_of(origin) + (", products" if kind == "products" else "")
        parts[part] += ms
        kinds[kind] += ms
        rows.append({"ms": ms, "name": name, "kind": kind, "part": part, "origin": origin})
    rows.sort(key=lambda row: -row["ms"])
    return {
        "ms_by_part": dict(parts.most_common()),
        "ms_by_kind": dict(kinds.most_common()),
        "instructions": rows,
    }


def _kind(opcodes: set[str]) -> str:
    return next((kind for kind, of_kind in KINDS if of_kind & opcodes), "element-wise")


def _events(profile, names: set[str]) -> list[tuple[float, float, str]]:
    """List (start, end, name), in nanoseconds, of what is named and ran."""
    return [
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name in names
    ]


def _divide(events: list[tuple[float, float, str]]) -> dict[str, float]:
    """Divide each moment among the events that run then; return seconds by name."""
    seconds: collections.Counter[str] = collections.Counter()
    running: collections.Counter[str] = collections.Counter()
    starts = [(start, 1, name) for start, _, name in events]
    ends = [(end, -1, name) for _, end, name in events]
    last = min(start for start, _, _ in events)
    for moment, change, name in sorted(starts + ends):
        count = running.total()
        for other, times in running.items() if count else [(WAITING, 1)]:
            seconds[other] += (moment - last) / 1e9 * times / max(count, 1)
        running[name] += change
        if not running[name]:
            del running[name]
        last = moment
    return dict(seconds)


def table(result: dict, top: int) -> str:
    """Lay a result out as Markdown."""
    total = sum(result["ms_by_part"].values())
    lines = []
    for by in ("part", "kind"):
        lines += [f"| {by} | ms of the step | share |", "|---|---|---|"]
        for name, ms in result[f"ms_by_{by}"].items():
            lines.append(f"| {name} | {ms:.0f} | {ms / total:.1%} |")
        lines.append("")
    lines += ["| ms | instruction | kind | from |", "|---|---|---|---|"]
    for row in result["instructions"][:top]:
        lines.append(
            f"| {row['ms']:.0f} | {row['name']} | {row['kind']} | `{row['origin'][-80:]}` |"
        )
    return "\n".join(lines)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", action="append")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=20, help="instructions to list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments, bindings = parsed(parser)
    result = measure(
        arguments.gin_file or [GIN],
        bindings,
        steps=arguments.steps,
    )
    print(json.dumps(result, indent=1) if arguments.json else table(result, arguments.top))


if __name__ == "__main__":
    main(run)
