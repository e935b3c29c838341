"""What an experiment takes on a machine, by its compiled step: as JSON and for a person."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from gshard_exp.plan import parts
from gshard_exp.plan.compile import Program, seq2seq_model
from gshard_exp.plan.cost import SECONDS_A_YEAR, Cost, estimate
from gshard_exp.plan.schedule import largest_results
from gshard_exp.plan.topology import Topology, parse_topology
from gshard_exp.sharding import hlo
from gshard_exp.sharding.rules import shard_shape
from gshard_exp.sharding.tables import columns
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.flops import useful_flops
from gshard_exp.train.parameters import parameters, totals
from gshard_exp.train.state import abstract_params, placed_params
from gshard_exp.train.step import rounded

TRILLION = 10**12  # source tokens that every model of the paper was trained on


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one experiment takes on one machine.

    Attributes:
        name: of the experiment, as the user wrote it.
        topology: the machine.
        layout: a sentence about mesh and batch.
        params: all parameters, and those that one token uses.
        memory: bytes of one core: `parameters`, `optimizer`, `gradients`, `activations`, `other`,
            `total` (alive at once), `limit` (None on CPU).
        useful_flops: of one core, in a step.
        source_tokens: in a step, over all cores.
        tokens: source tokens of the whole training, for core-years and days.
        program: what the compiler made.
        cost: None if the program does not fit.
        largest: bytes, shape and origin of the largest results, the largest first.
        advice: what to change if it does not fit; else empty.
    """

    name: str
    topology: Topology
    layout: str
    params: tuple[int, int]
    memory: Mapping[str, int | None]
    useful_flops: float
    source_tokens: int
    tokens: int
    program: Program
    cost: Cost | None
    largest: list[tuple[int, str, str]]
    advice: str

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of a step; None on CPU or if the program does not fit."""
        return self.cost.step_seconds if self.cost else None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where there is no limit to compare with."""
        if self.program.error:
            return False
        return None if self.memory["limit"] is None else True

    def to_json(self) -> dict[str, Any]:
        """Return plain values; None where a value is not known."""
        step, cost = self.step_seconds, self.cost
        cores = self.topology.cores
        training = self.tokens / self.source_tokens * step if step else None
        peak = self.topology.peak_flops
        return {
            "name": self.name,
            "topology": self.topology.name,
            "cores": cores,
            "layout": self.layout,
            "params_total": self.params[0],
            "params_active": self.params[1],
            "fits": self.fits,
            "advice": self.advice,
            "memory_bytes": dict(self.memory),
            "largest_buffers": [
                {"bytes": size, "shape": shape, "op_name": op_name}
                for size, shape, op_name in self.largest
            ],
            "flops_per_core": {
                "useful": self.useful_flops,
                "executed": cost.executed_flops if cost else None,
                "recomputed": cost.recomputed_flops if cost else None,
            },
            "bytes_moved": cost.bytes_moved if cost else None,
            "collectives": [vars(row) for row in cost.collectives] if cost else [],
            "breakdown_seconds": cost.breakdown if cost else {},
            "encoder_forward_seconds": cost.encoder_forward if cost else {},
            "step_seconds": step,
            "steps_per_second": 1 / step if step else None,
            "tokens_per_second": self.source_tokens / step if step else None,
            "mfu": self.useful_flops / peak / step if step and peak else None,
            "roofline_share": cost.roofline_seconds / step
            if cost and step and cost.roofline_seconds
            else None,
            "training_tokens": self.tokens,
            "core_years": training * cores / SECONDS_A_YEAR if training else None,
            "days": training / 86400 if training else None,
            "lower_seconds": self.program.lower_seconds,
            "compile_seconds": self.program.compile_seconds,
            "compile_cpu_seconds": self.program.compile_cpu_seconds,
            "unknown_loops": list(cost.unknown_loops) if cost else [],
            "versions": dict(self.program.versions),
        }


def make_plan(
    name: str, experiment: Experiment, program: Program, layout: str, tokens: int = TRILLION
) -> Plan:
    """Read a compiled program.

    Args:
        name: of the experiment.
        experiment: with the mesh and the batch that were compiled.
        program: of `compile_step`.
        layout: a sentence about mesh and batch, of `fit_to`.
        tokens: source tokens of a whole training.
    """
    topology, model = parse_topology(program.topology), seq2seq_model(experiment)
    module = hlo.parse(program.text) if program.text else None
    cost = None
    if module and not program.error:
        cost = estimate(
            module,
            topology,
            sparse=frozenset(parts.sparse_blocks(model)),
            mesh=program.mesh,
        )
    useful = useful_flops(model, batch_size=experiment.batch_size, lengths=experiment.lengths)
    return Plan(
        name=name,
        topology=topology,
        layout=layout,
        params=totals(parameters(model)),
        memory=_memory(experiment, program, topology),
        useful_flops=sum(useful.values()) / topology.cores,
        source_tokens=experiment.batch_size * experiment.lengths["inputs"],
        tokens=tokens,
        program=program,
        cost=cost,
        largest=largest_results(module, 10) if module else [],
        advice=_advice(experiment, program),
    )


def _memory(experiment: Experiment, program: Program, topology: Topology) -> dict[str, int | None]:
    """Split the memory of a core.

    Parameters and optimizer state are known exactly. Gradients: all of them are alive at the end of
    the backward pass, since a step whose gradient is not finite changes nothing; they are counted
    as `_gradient_bytes` says, and activations are what is then left of the peak (among them copies
    of weights in bfloat16, which the TPU compiler makes before its loops). Where the peak is at the
    start of the backward pass, the two together are right and each alone is not.
    """
    state = program.state_bytes
    sizes = program.memory_bytes
    if not sizes:
        wanted = _wanted_bytes(program.error)
        rest: dict[str, int | None] = dict.fromkeys(("gradients", "activations", "other"))
        return {**state, **rest, "total": wanted, "limit": topology.hbm_bytes}
    held = sum(state.values())
    other = max(0, sizes["argument"] - held) + max(0, sizes["output"] - sizes["alias"])
    # XLA on CPU knows no peak: all that it allocates counts.
    allocated = sizes["argument"] + sizes["temp"] + other
    total = allocated if topology.chip is None else sizes["peak"]
    gradients = min(_gradient_bytes(experiment, program), max(0, total - held - other))
    return {
        **state,
        "gradients": gradients,
        "activations": max(0, total - held - other - gradients),
        "other": other,
        "total": total,
        "limit": topology.hbm_bytes,
    }


def _gradient_bytes(experiment: Experiment, program: Program) -> int:
    """Sum the gradients on a core, each in the dtype in which it is kept.

    That is the dtype of what `train.step.rounded` makes of its parameter, unless a batch is
    computed in parts: those are added up in float32.
    """
    dtype = experiment.gradient_dtype
    if dtype == "float32" or experiment.microbatches > 1:
        return program.state_bytes["parameters"]
    mesh = AbstractMesh(tuple(program.mesh.values()), tuple(program.mesh))
    params, names = abstract_params(experiment.model)
    kept = jax.eval_shape(lambda params: rounded(params, names, dtype), params)
    placed = placed_params(experiment.model, mesh, experiment.rules)
    return sum(
        math.prod(shard_shape(leaf.shape, leaf.sharding)) * leaf_kept.dtype.itemsize
        for leaf, leaf_kept in zip(jax.tree.leaves(placed), jax.tree.leaves(kept), strict=True)
    )


def _wanted_bytes(error: str) -> int | None:
    """Read how much memory a program wanted that did not fit: `(19.33G)`."""
    found = re.search(r"\((\d+(?:\.\d+)?)([KMGT])\)|Used (\d+(?:\.\d+)?)([KMGT]) of", error)
    if not found:
        return None
    number, unit = found.group(1) or found.group(3), found.group(2) or found.group(4)
    return round(float(number) * 1024 ** ("KMGT".index(unit) + 1))


def _advice(experiment: Experiment, program: Program) -> str:
    """Say what to change in an experiment that does not fit."""
    if not program.error:
        return ""
    module = seq2seq_model(experiment).module
    stacks = (module.encoder, module.decoder)
    tries = []
    if any(stack.remat in ("none", "dots") for stack in stacks):
        tries.append('keep less for the backward pass: --gin.REMAT_POLICY="products", or "full"')
    elif any(stack.remat != "full" for stack in stacks):
        tries.append('recompute activations: --gin.REMAT_POLICY="full"')
    tries.append(f"compute a batch in parts: --gin.NUM_MICROBATCHES={2 * experiment.microbatches}")
    if module.dtype == "float32":
        tries.append('halve activations: --gin.ACTIVATION_DTYPE="bfloat16"')
    if experiment.gradient_dtype == "float32":
        tries.append('halve gradients: --gin.GRADIENT_DTYPE="bfloat16"')
    tries.append("split the optimizer's state: gin/sharding/zero1.gin with --mesh")
    return "; ".join(tries)


def describe(plan: Plan) -> str:
    """Lay a plan out for a person."""
    data = plan.to_json()
    lines = [f"{plan.name} on {plan.topology.name}: {plan.topology.cores} cores, {plan.layout}"]
    chip = plan.topology.chip
    if chip is not None:
        lines.append(
            f"  a chip: {chip.devices} cores, {chip.peak_flops / 1e12:.4g} TFLOP/s, "
            f"{_size(chip.hbm_bytes)} at {_size(round(chip.hbm_bandwidth))}/s, links of "
            f"{_size(round(chip.link_bandwidth))}/s ({chip.source})"
        )
    memory = ", ".join(f"{k} {_size(v)}" for k, v in plan.memory.items() if v is not None)
    lines.append(f"  memory of a core: {memory}")
    if plan.program.error:
        lines.append("  DOES NOT FIT: " + plan.program.error.splitlines()[0])
        for size, shape, op_name in plan.largest:
            lines.append(f"    {_size(size):>8}  {shape}  {op_name}")
        lines.append(f"  what to change: {plan.advice}")
    if plan.cost is None:
        return "\n".join(lines)
    cost = plan.cost
    lines.append(
        f"  FLOPs of a core: useful {plan.useful_flops:.3g}, executed {cost.executed_flops:.3g}, "
        f"of which recomputed {cost.recomputed_flops:.3g}; {_size(cost.bytes_moved)} moved"
    )
    lines.append("  collectives: " + ("none" if not cost.collectives else ""))
    for row in cost.collectives[:8]:
        spent = "" if row.seconds is None else f", {row.seconds * 1e3:.1f} ms"
        lines.append(
            f"    {row.count:4d} x {row.kind} of {_size(row.bytes)} over {row.axes}{spent}: "
            f"{row.cause}"
        )
    if plan.step_seconds:
        lines += _times(data)
    if cost.unknown_loops:
        lines.append(f"  loops counted once: {', '.join(cost.unknown_loops)}")
    return "\n".join(lines)


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
        f"{plan.params[0] / 1e9:.4g}B",
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
