"""No array of a training step grows with the number of devices, except the gate (section 2.3).

The step is compiled for 2, 4 and 8 devices with as many experts, and as many tokens on each. Arrays
are told apart by where they come from, and their shapes are those of one device.
"""

import itertools

import jax
import models
import planned

from gshard_exp import axes
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
        encoder="s",
        decoder="s",
        repeats=(1, 1),
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


def growing(few, many):
    """The origins of arrays above the gate's size that are larger on more devices."""
    return {
        name: (few[name], size)
        for name, size in many.items()
        if size > GATE_BYTES and few.get(name, size) < size
    }


def test_nothing_but_the_gate_grows_with_the_number_of_devices():
    sizes = [sizes_of(devices) for devices in SIZES]
    large = [name for name, size in sizes[-1].items() if size > GATE_BYTES]
    assert any("/experts/" in name for name in large)
    assert any("/dispatch/" in name or "/combine/" in name for name in large)
    for few, many in itertools.pairwise(sizes):
        assert not growing(few, many)


def test_without_the_constraint_on_the_side_of_the_groups_buffers_of_all_groups_grow(monkeypatch):
    def by_expert_only(value, *names):
        return constrain(value, *names) if names[0] != axes.GROUP else value

    monkeypatch.setattr(experts, "constrain", by_expert_only)
    found = growing(sizes_of(SIZES[0]), sizes_of(SIZES[-1]))
    assert any("/ffn/" in name for name in found)
