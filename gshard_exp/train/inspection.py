"""What the training step of an experiment sends between devices."""

import flax.linen as nn

from gshard_exp.model.contract import Model
from gshard_exp.sharding.census import Census, take
from gshard_exp.train.experiment import Experiment, batch_on, plan_experiment


def inspect(experiment: Experiment) -> Census:
    """Compile the training step on the experiment's mesh and read its collectives; nothing runs.

    Raises:
        SettingError: something does not fit; its settings are paths from the experiment.
    """
    plan, step = plan_experiment(experiment)
    return take(
        step,
        plan.abstract,
        batch_on(experiment, plan.mesh),
        mesh=plan.mesh,
        layers=layer_kinds(experiment.model),
    )


def layer_kinds(model: Model) -> dict[str, str]:
    """Map the path of each layer, as JAX's `op_name`s have it, to its class.

    Returns:
        `{"encoder/pattern_1/ffn": "MoeLayer", ...}`, and what lies beside the stacks.
    """
    kinds = {
        f"{stack}/pattern_{index}/{field}": type(layer).__name__
        for stack, blocks in model.stacks.items()
        for index, block in enumerate(blocks.pattern)
        for field, layer in _layers(block).items()
    }
    beside = _layers(model.module).items()
    return kinds | {
        field: type(layer).__name__ for field, layer in beside if field not in model.stacks
    }


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    fields = (field for field in module.__dataclass_fields__ if field not in ("parent", "name"))
    found = {field: getattr(module, field) for field in fields}
    return {field: layer for field, layer in found.items() if isinstance(layer, nn.Module)}
