"""No array of a training step grows with the number of devices, except the gate (section 2.3).

The step is compiled for 2, 4 and 8 devices with as many experts, and as many tokens on each. Arrays
are told apart by where they come from, and their shapes are those of one device.
"""

import jax
import models
import planned
import pytest

from gshard_exp.moe import experts
from gshard_exp.plan.schedule import schedule
from gshard_exp.sharding import hlo
from gshard_exp.sharding.annotate import constrain
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.experiment import batch_on
from gshard_exp.train.state import plan_state
from gshard_exp.train.step import partitioned_train_step

SIZES = (2, 4, 8)
ROWS = 4  # of each device: 32 source and 64 target tokens
GROUP = 32
# The gate, [G, S, E], may grow: of the decoder's two groups, for both choices, on 8 devices.
GATE_BYTES = 4 * (2 * GROUP * SIZES[-1]) * 2


def sizes_of(devices):
    """The largest array of each origin in the step on so many devices, in bytes."""
    seq2seq = models.model(
        encoder="ds",
        decoder="ds",
        repeats=(2, 2),
        sparse={"num_experts": devices, "group_size": GROUP, "expert_mlp_dim": 24},
    )
    experiment = planned.experiment(
        seq2seq, mesh=MeshSpec(expert=devices), batch_size=ROWS * devices
    )
    mesh = experiment.mesh.build(jax.devices()[:devices])
    plan = plan_state(seq2seq, experiment.optimizer, mesh, experiment.rules)
    step = partitioned_train_step(plan, experiment.rules)
    text = models.compiled(step, plan.abstract, batch_on(experiment, mesh)).as_text()
    found: dict[str, int] = {}
    for work in schedule(hlo.parse(text)):
        size = max((shape.bytes for shape in work.instruction.shapes), default=0)
        found[work.op_name] = max(found.get(work.op_name, 0), size)
    return found


def growing():
    """The origins of arrays, the gate's left out, that are larger on more devices."""
    few, some, many = (sizes_of(devices) for devices in SIZES)
    return {
        name: (few[name], some.get(name), size)
        for name, size in many.items()
        if size > GATE_BYTES and few.get(name, size) < size
    }


def test_nothing_but_the_gate_grows_with_the_number_of_devices():
    assert not growing()


@pytest.mark.parametrize("side", [0, 1])
def test_without_a_constraint_beside_a_transposition_buffers_of_all_groups_are_seen_to_grow(
    side, monkeypatch
):
    calls = []

    def all_but_one_side(value, *names):
        calls.append(names)
        by_expert = names[0] == "expert" and len(names) == 4
        by_group = names[0] == "group"
        return value if (by_group, by_expert)[side] else constrain(value, *names)

    monkeypatch.setattr(experts, "constrain", all_but_one_side)
    assert any("ffn" in name for name in growing())
    assert calls
