"""Looks for the mesh, the dispatch and the recomputation with which a step is fastest and fits.

One choice at a time, since each try is a compile: meshes with the rest as it is, then ways of
dispatch on the best mesh, then recomputation. That misses a mesh that is best only with another way
of dispatch.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from gshard_exp.errors import SettingError, first_line
from gshard_exp.model.contract import moe_layers
from gshard_exp.plan.describe import table
from gshard_exp.plan.plan import Plan
from gshard_exp.recompute import REMAT_POLICIES
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.invariance import Way, carried_out, dispatches
from gshard_exp.train.layouts import factorisations, label, most_ways, reason_against

WIDEST_MODEL = 8  # ways to split heads and hidden widths; links are slow beside that
# Experts over all cores that divide them, over half or a quarter of these, or not split.
_NARROWER = (1, 2, 4)
Candidate = tuple[str, Experiment]
Try = Callable[[str, Experiment], Plan]


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of a candidate.

    Attributes:
        name: what it changes.
        plan: None if it could not be compiled.
        reason: why not; else empty.
    """

    name: str
    plan: Plan | None
    reason: str = ""


def search(experiment: Experiment, attempt: Try) -> list[Found]:
    """Try candidates; one that cannot be compiled ends nothing.

    Args:
        experiment: with a mesh that has the machine's cores.
        attempt: compiles a named experiment.

    Returns:
        The fastest that fits first, those that could not be compiled last.
    """
    tried: list[tuple[Found, Experiment]] = []
    name, best = "", experiment
    for choices in (_meshes, _dispatches, _remats):
        for change, candidate in choices(best):
            found = _tried(f"{name} {change}".strip(), candidate, attempt)
            tried.append((found, candidate))
        # Of equal ranks the first, which is nearest to what was asked.
        chosen, best = min(tried, key=lambda one: rank(one[0]))
        name = chosen.name
    return sorted((found for found, _ in tried), key=rank)


def rank(found: Found) -> tuple[int, float]:
    """Order plans: those that fit first, by time; where none is known (CPU, no fit) by memory."""
    plan = found.plan
    if plan is None:
        return 2, 0.0
    spent = plan.step_seconds
    if spent is None:
        total = plan.memory["total"]
        spent = math.inf if total is None else float(total)
    return int(plan.fits is False), spent


def _tried(name: str, candidate: Experiment, attempt: Try) -> Found:
    try:
        return Found(name, attempt(name, candidate))
    except SettingError as error:  # of what only tracing meets
        return Found(name, None, error.problem)
    except RuntimeError as error:  # the compiler's
        return Found(name, None, first_line(error))


def _meshes(experiment: Experiment) -> Iterator[Candidate]:
    """Yield the experiment's own mesh, and others that parameters, batch and groups lie on."""
    own = experiment.mesh
    yield f"mesh {label(own)}", experiment
    for mesh in factorisations(own.count):
        widest = most_ways(experiment, own.count // mesh.model)
        ways = {1, *(widest // narrower for narrower in _NARROWER)}
        if mesh == own or mesh.model > WIDEST_MODEL or mesh.expert not in ways:
            continue
        if not reason_against(experiment, mesh):
            yield f"mesh {label(mesh)}", dataclasses.replace(experiment, mesh=mesh)


def _dispatches(experiment: Experiment) -> Iterator[Candidate]:
    model = experiment.model
    own = {layer.dispatch for stack in model.stacks for _, layer in moe_layers(model, stack)}
    for dispatch in dispatches(model):
        if own != {dispatch}:
            yield type(dispatch).__name__, _by(experiment, Way(experiment.mesh, dispatch))


def _remats(experiment: Experiment) -> Iterator[Candidate]:
    own = {stack.remat for stack in experiment.model.stacks.values()}
    for policy in REMAT_POLICIES:
        if own != {policy}:
            yield f"remat {policy}", _by(experiment, Way(experiment.mesh, remat=policy))


def _by(experiment: Experiment, way: Way) -> Experiment:
    return dataclasses.replace(experiment, model=carried_out(experiment.model, way))


def summary(found: Sequence[Found]) -> str:
    """Lay what was found out as a table, and after it what could not be compiled and why."""
    refused = [one for one in found if one.plan is None]
    lines = [table([one.plan for one in found if one.plan is not None])]
    lines += [f"not compiled  {one.name}: {one.reason}" for one in refused]
    return "\n".join(lines)
