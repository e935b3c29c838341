"""Looks for the mesh, the dispatch and the recomputation with which a step is fastest and fits.

One choice at a time, since each try is a compile: meshes with the rest as it is, then ways of
dispatch on the best mesh, then recomputation. That misses a mesh that is best only with another way
of dispatch.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from gshard_exp.errors import SettingError
from gshard_exp.model.transformer import REMAT_POLICIES, Stack
from gshard_exp.moe.dispatch import EinsumDispatch, ScatterDispatch
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.plan.compile import seq2seq_model
from gshard_exp.plan.plan import Plan
from gshard_exp.plan.topology import Topology
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.experiment import Experiment, check_without_devices

WIDEST_MODEL = 8  # ways to split heads and hidden widths; links are slow beside that
Candidate = tuple[str, Experiment]
Try = Callable[[str, Experiment], Plan]


def search(experiment: Experiment, topology: Topology, attempt: Try) -> list[Plan]:
    """Try candidates, and return their plans, the fastest that fits first.

    Args:
        experiment: with a mesh that has the machine's cores.
        topology: the machine.
        attempt: compiles a named experiment.
    """
    tried: list[tuple[Plan, str, Experiment]] = []
    best, label = experiment, ""
    for choices in (_meshes, _dispatches, _remats):
        for name, candidate in choices(best, topology):
            whole = f"{label} {name}".strip()
            tried.append((attempt(whole, candidate), whole, candidate))
        # Of equal ranks (nothing fits) the first, which is nearest to what was asked.
        _, label, best = min(tried, key=lambda one: rank(one[0]))
    return sorted((plan for plan, _, _ in tried), key=rank)


def rank(plan: Plan) -> tuple[bool, float]:
    """Order plans: those that fit first, by time (on CPU, where no time is known, by memory)."""
    spent = plan.step_seconds
    return (plan.fits is False, spent if spent is not None else float(plan.memory["total"] or 0))


def _meshes(experiment: Experiment, topology: Topology) -> Iterator[Candidate]:
    """Yield every factorisation that parameters, batch and groups divide over."""
    cores = topology.cores
    own = experiment.mesh
    experts = math.gcd(cores, *(layer.num_experts for layer in _layers(experiment)))
    found = [own]
    for model in range(1, WIDEST_MODEL + 1):
        for expert in (experts, experts // 2, experts // 4, 1):
            if expert and cores % (model * expert) == 0:
                found.append(MeshSpec(cores // (model * expert), expert, model))
    for spec in dict.fromkeys(found):
        candidate = dataclasses.replace(experiment, mesh=spec)
        try:
            check_without_devices(candidate)
        except SettingError:
            continue  # it does not divide
        yield f"mesh {spec.data}x{spec.expert}x{spec.model}", candidate


def _dispatches(experiment: Experiment, topology: Topology) -> Iterator[Candidate]:
    del topology
    layers = list(_layers(experiment))
    for dispatch in (EinsumDispatch(), ScatterDispatch()):
        if layers and any(layer.dispatch != dispatch for layer in layers):
            name = type(dispatch).__name__

            def change(stack: Stack, dispatch=dispatch) -> Stack:
                blocks = (
                    block.clone(ffn=block.ffn.clone(dispatch=dispatch))
                    if isinstance(block.ffn, MoeLayer)
                    else block
                    for block in stack.pattern
                )
                return stack.clone(pattern=tuple(blocks))

            yield name, _with_stacks(experiment, change)


def _remats(experiment: Experiment, topology: Topology) -> Iterator[Candidate]:
    del topology
    for policy in REMAT_POLICIES:
        if any(stack.remat != policy for stack in _stacks(experiment)):

            def change(stack: Stack, policy: str = policy) -> Stack:
                return stack.clone(remat=policy)

            yield f"remat {policy}", _with_stacks(experiment, change)


def _stacks(experiment: Experiment) -> tuple[Stack, Stack]:
    module = seq2seq_model(experiment).module
    return module.encoder, module.decoder


def _layers(experiment: Experiment) -> Iterator[MoeLayer]:
    for stack in _stacks(experiment):
        for block in stack.pattern:
            if isinstance(block.ffn, MoeLayer):
                yield block.ffn


def _with_stacks(experiment: Experiment, change: Callable[[Stack], Stack]) -> Experiment:
    model = seq2seq_model(experiment)
    module = model.module
    changed = module.clone(encoder=change(module.encoder), decoder=change(module.decoder))
    return dataclasses.replace(experiment, model=dataclasses.replace(model, module=changed))
