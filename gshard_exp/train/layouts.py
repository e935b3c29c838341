"""The meshes that an experiment can lie on."""

import dataclasses
import math

from gshard_exp import axes
from gshard_exp.errors import SettingError
from gshard_exp.model.contract import moe_layers
from gshard_exp.sharding.mesh import FILL, MeshSpec
from gshard_exp.train.experiment import Experiment, check_without_devices


def factorisations(devices: int) -> list[MeshSpec]:
    """List the meshes of exactly so many devices, by ascending sizes of `data`, then `expert`."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        MeshSpec(data, expert, devices // data // expert)
        for data in divisors
        for expert in divisors
        if devices % (data * expert) == 0
    ]


def reason_against(experiment: Experiment, mesh: MeshSpec) -> str:
    """Say why batches, groups or parameters do not lie on a mesh; empty if they do.

    Evaluators are left out: they take no part in a step.
    """
    try:
        check_without_devices(dataclasses.replace(experiment, mesh=mesh, evaluators=()))
    except SettingError as error:
        return error.problem
    return ""


def spread(experiment: Experiment, devices: int) -> Experiment:
    """Put an experiment on so many devices.

    Its own mesh counts if it has that many, or takes what is there. Otherwise, of the meshes that
    it can lie on, the one with the smallest `model` axis, then the largest `expert` axis: the
    paper's layout.

    Raises:
        SettingError: there is none.
    """
    sizes = dataclasses.astuple(experiment.mesh)
    if FILL in sizes or math.prod(sizes) == devices:
        return experiment
    meshes = sorted(factorisations(devices), key=lambda mesh: (mesh.model, -mesh.expert))
    reasons = {}
    for mesh in meshes:
        reasons[mesh] = reason_against(experiment, mesh)
        if not reasons[mesh]:
            return dataclasses.replace(experiment, mesh=mesh)
    raise SettingError(
        f"the experiment lies on no mesh of {devices} devices. On "
        f"{label(meshes[0])}: {reasons[meshes[0]]}",
        settings=("mesh.data", "mesh.expert", "mesh.model"),
        hint="Change what it says, or the number of devices.",
    )


def most_ways(experiment: Experiment, devices: int) -> int:
    """Return over how many of so many devices the experts of every layer can be split.

    1 if the model has none.
    """
    model = experiment.model
    layers = (layer for stack in model.stacks for _, layer in moe_layers(model, stack))
    experts = {layer.num_experts for layer in layers}
    return math.gcd(devices, *experts) if experts else 1


def label(mesh: MeshSpec) -> str:
    """Write the sizes of a mesh: `data=2 expert=4 model=1`."""
    sizes = dataclasses.astuple(mesh)
    return " ".join(f"{axis}={size}" for axis, size in zip(axes.MESH_AXES, sizes, strict=True))
