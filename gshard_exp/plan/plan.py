"""What an experiment takes on a machine, by its compiled step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gshard_exp.model.contract import moe_layers
from gshard_exp.plan import parts
from gshard_exp.plan.compile import Program, seq2seq_model
from gshard_exp.plan.cost import SECONDS_A_YEAR, Cost, estimate
from gshard_exp.plan.memory import advice, memory_of
from gshard_exp.plan.schedule import largest_buffers
from gshard_exp.plan.topology import Topology, parse_topology
from gshard_exp.sharding import hlo
from gshard_exp.sharding.causes import RECOMPUTE
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.flops import useful_flops
from gshard_exp.train.parameters import parameters, totals

TRILLION = 10**12  # source tokens that every model of the paper was trained on


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one experiment takes on one machine.

    Attributes:
        name: of the experiment, as the user wrote it.
        topology: the machine.
        layout: a sentence about mesh and batch.
        params: all parameters, and those that one token uses.
        experts: over all sparse layers.
        memory: bytes of one core: `parameters`, `optimizer`, `gradients`, `activations`, `other`,
            `total` (the sum), `limit` (None on CPU), `peak`; see `memory_of`.
        useful_flops: of one core, in a step.
        empty_slots_flops: of one core, in a step: what the feed-forward layers multiply beyond the
            useful, recomputation left out. Of experts these are slots that no token has; None if
            the program does not fit.
        source_tokens: in a step, over all cores.
        tokens: source tokens of the whole training, for core-years and days.
        program: what the compiler made.
        cost: None if the program does not fit.
        largest: bytes, shape and origin of the largest buffers, the largest first.
        advice: what to change if it does not fit; else empty.
    """

    name: str
    topology: Topology
    layout: str
    params: tuple[int, int]
    experts: int
    memory: Mapping[str, int | None]
    useful_flops: float
    empty_slots_flops: float | None
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

    @property
    def margin(self) -> int | None:
        """Bytes of a core that are left, negative if it does not fit; None if not known."""
        total, limit = self.memory["total"], self.memory["limit"]
        return None if total is None or limit is None else limit - total

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
            "experts_total": self.experts,
            "fits": self.fits,
            "margin_bytes": self.margin,
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
                "empty_slots": self.empty_slots_flops,
                "padding": cost.padding_flops if cost else None,
            },
            "flops_by_part": cost.flops if cost else {},
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
    name: str,
    experiment: Experiment,
    program: Program,
    layout: str,
    tokens: int = TRILLION,
    *,
    fiddle: bool = False,
) -> Plan:
    """Read a compiled program.

    Args:
        name: of the experiment.
        experiment: with the mesh and the batch that were compiled.
        program: of `compile_step`.
        layout: a sentence about mesh and batch, of `fit_to`.
        tokens: source tokens of a whole training.
        fiddle: the experiment is a fiddle config, which advice is to be in flags of.
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
        experts=sum(
            stack.repeats * layer.num_experts
            for name, stack in model.stacks.items()
            for _, layer in moe_layers(model, name)
        ),
        memory=memory_of(experiment, program, topology),
        useful_flops=sum(useful.values()) / topology.cores,
        empty_slots_flops=_empty_slots(cost, useful, topology) if cost else None,
        source_tokens=experiment.batch_size * experiment.lengths["inputs"],
        tokens=tokens,
        program=program,
        cost=cost,
        largest=largest_buffers(module, 10) if module else [],
        advice=advice(experiment, fiddle=fiddle) if program.error else "",
    )


def _empty_slots(cost: Cost, useful: Mapping[str, int], topology: Topology) -> float:
    done = sum(
        flops
        for part in (parts.MOE_FFN, parts.DENSE_FFN)
        for phase, flops in cost.flops.get(part, {}).items()
        if phase != RECOMPUTE
    )
    wanted = (useful["experts"] + useful["dense feed-forward"]) / topology.cores
    return max(0.0, done - wanted)
