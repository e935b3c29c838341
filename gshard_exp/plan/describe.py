"""Lays plans out for a person."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard_exp.plan import parts
from gshard_exp.plan.plan import Plan
from gshard_exp.sharding.tables import columns

_LONGEST = 8  # collectives that are printed


def describe(plan: Plan) -> str:
    """Lay a plan out for a person."""
    data = plan.to_json()
    total, active = plan.params
    lines = [
        f"{plan.name} on {plan.topology.name}: {plan.topology.cores} cores, {plan.layout}",
        f"  parameters: {_count(total)}, of which a token uses {_count(active)}",
    ]
    chip = plan.topology.chip
    if chip is not None:
        lines.append(
            f"  a chip: {chip.devices} cores, {chip.peak_flops / 1e12:.4g} TFLOP/s, "
            f"{_size(chip.hbm_bytes)} at {_size(round(chip.hbm_bandwidth))}/s, links of "
            f"{_size(round(chip.link_bandwidth))}/s ({chip.source})"
        )
    memory = ", ".join(f"{k} {_size(v)}" for k, v in plan.memory.items() if v is not None)
    lines.append(f"  memory of a core: {memory}")
    lines += _fit(plan)
    lines.append(
        f"  lowered in {plan.program.lower_seconds:.0f} s, compiled in "
        f"{plan.program.compile_seconds:.0f} s"
    )
    if plan.cost is None:
        return "\n".join(lines)
    cost = plan.cost
    lines.append(
        f"  FLOPs of a core: useful {plan.useful_flops:.3g}; executed {cost.executed_flops:.3g}, "
        f"of which {cost.recomputed_flops:.3g} recomputed and {plan.empty_slots_flops or 0:.3g} on "
        f"empty slots; {cost.padding_flops:.3g} beside them on padding"
    )
    lines.append(f"  memory traffic of a core: {_size(cost.bytes_moved)}")
    lines.append("  collectives: " + ("none" if not cost.collectives else ""))
    for row in cost.collectives[:_LONGEST]:
        spent = "" if row.seconds is None else f", {row.seconds * 1e3:.1f} ms"
        lines.append(
            f"    {row.count:4d} x {row.kind} of {_size(row.bytes)} over {row.axes}{spent}: "
            f"{row.cause}"
        )
    if len(cost.collectives) > _LONGEST:
        lines.append(f"    and {len(cost.collectives) - _LONGEST} kinds more: --json")
    if plan.step_seconds:
        lines += _times(data)
    if cost.unknown_loops:
        lines.append(f"  loops counted once: {', '.join(cost.unknown_loops)}")
    return "\n".join(lines)


def _fit(plan: Plan) -> Iterator[str]:
    """Say whether it fits and by how much; if not, what is large and what to change."""
    margin = plan.margin
    if plan.fits:
        yield f"  fits: {_size(margin)} of {_size(plan.memory['limit'])} are left"
    if not plan.program.error:
        return
    missing = "" if margin is None else f"{_size(-margin)} of memory are missing. "
    yield f"  DOES NOT FIT: {missing}{plan.program.error.splitlines()[0]}"
    for size, shape, op_name in plan.largest:
        yield f"    {_size(size):>8}  {shape}  {op_name}"
    yield f"  what to change: {plan.advice}"


def _times(data: Mapping[str, Any]) -> list[str]:
    header = "".join(f"{phase:>12}" for phase in parts.PHASES)
    lines = [f"  {'milliseconds':28}{header}"]
    for name in parts.PARTS:
        passes = data["breakdown_seconds"].get(name, {})
        if passes:
            cells = (passes.get(phase, 0.0) * 1e3 for phase in parts.PHASES)
            lines.append(f"  {name:28}" + "".join(f"{cell:12.1f}" for cell in cells))
    lines.append(
        f"  predicted step {data['step_seconds']:.3f} s: {data['steps_per_second']:.3g} steps/s, "
        f"{data['tokens_per_second']:,.0f} source tokens/s, MFU {data['mfu']:.1%}, "
        f"{data['roofline_share']:.0%} of the roofline"
    )
    lines.append(
        f"  {data['training_tokens']:.3g} source tokens: {data['core_years']:.3g} core-years, "
        f"{data['days']:.3g} days"
    )
    return lines


def table(plans: Sequence[Plan]) -> str:
    """Lay several plans out as rows."""
    heads = ("experiment", "machine", "params", "fits", "memory", "step s", "steps/s", "MFU")
    return "\n".join(columns([(*heads, "compile"), *map(_row, plans)], right=()))


def _row(plan: Plan) -> tuple[str, ...]:
    data = plan.to_json()

    def known(key: str, form: str) -> str:
        return "-" if data[key] is None else form.format(data[key])

    return (
        plan.name,
        plan.topology.name,
        _count(plan.params[0]),
        {True: "yes", False: "NO", None: "-"}[plan.fits],
        _size(plan.memory["total"]),
        known("step_seconds", "{:.3f}"),
        known("steps_per_second", "{:.3g}"),
        known("mfu", "{:.1%}"),
        f"{plan.program.compile_seconds:.0f} s",
    )


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    power = min(4, int(math.log10(count) // 3))
    return f"{count / 1000**power:.3g} {'kMGT'[power - 1]}B"


def _count(number: int) -> str:
    """Write a number of parameters: `619.4B`, `13.2M`."""
    for unit, one in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= one:
            return f"{number / one:.4g}{unit}"
    return str(number)
