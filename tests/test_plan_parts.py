"""Parts of the model by the names that JAX gives to the instructions of a real training step."""

import re

import models
import planned
import pytest

from gshard_exp.plan import parts
from gshard_exp.sharding.causes import BACKWARD, FORWARD, RECOMPUTE, causes
from gshard_exp.train.experiment import batch_on
from gshard_exp.train.state import plan_state
from gshard_exp.train.step import partitioned_train_step

FFN = "/layers/pattern_1/ffn/"  # of the encoder: the decoder has one layer
ALL = (FORWARD, RECOMPUTE, BACKWARD)
LAYERS = {
    "buffers": {"shared_mlp_dim": 16},
    "ragged": {"train_capacity_factor": None},
}


@pytest.fixture(scope="module")
def op_names():
    """Names of all instructions of a compiled step, by the kind of its sparse layers."""
    return {kind: names_of_step(fields) for kind, fields in LAYERS.items()}


def names_of_step(fields):
    seq2seq = models.model(encoder="ds", decoder="d", sparse=fields, dropout=0.0, remat="full")
    experiment = planned.experiment(seq2seq)
    mesh = models.devices()
    plan = plan_state(seq2seq, experiment.optimizer, mesh, experiment.rules)
    step = partitioned_train_step(plan, experiment.rules, 1)
    text = models.compiled(step, plan.abstract, batch_on(experiment, mesh)).as_text()
    return set(re.findall(r'op_name="([^"]*)"', text))


# What is looked for are einsums and primitives, never the scopes that `parts` goes by.
@pytest.mark.parametrize(
    ("kind", "pattern", "part", "phases"),
    [
        ("buffers", r"ERM,EMH->ERH/dot_general$", parts.MOE_FFN, ALL),
        ("buffers", r"ERH,EHM->ERM/dot_general$", parts.MOE_FFN, ALL),
        ("buffers", r"BLM,MH->BLH/dot_general$", parts.MOE_FFN, ALL),  # the shared expert
        ("buffers", r"GSM,ME->GSE/dot_general$", parts.GATE_EINSUMS, ALL),
        (
            "buffers",
            r"GSX,GSM->GXM/dot_general$",
            parts.GATE_EINSUMS,
            (FORWARD, RECOMPUTE),
        ),
        (
            "buffers",
            r"GSX,GXM->GSM/dot_general$",
            parts.GATE_EINSUMS,
            (FORWARD, BACKWARD),
        ),
        ("buffers", r"cumsum", parts.GATE_CUMSUM, (FORWARD, RECOMPUTE)),
        ("buffers", r"^[^>]*transpose$", parts.DISPATCH_COMBINE, ALL),
        # Tiles of rows, which the CPU multiplies one at a time.
        ("ragged", r"^(?!.*GSM).*dot_general$", parts.MOE_FFN, ALL),
        ("ragged", r"GSM,ME->GSE/dot_general$", parts.GATE_EINSUMS, ALL),
    ],
)
def test_names_of_a_real_step_tell_the_part_in_every_pass(op_names, kind, pattern, part, phases):
    found = [name for name in op_names[kind] if re.search(pattern, name.partition(FFN)[2])]
    assert set(map(parts.phase, found)) == set(phases)
    assert {parts.part(name, {"encoder/1"}) for name in found} == {part}


def test_a_product_of_the_experts_has_a_place_of_its_own(op_names):
    (name,) = (
        name
        for name in op_names["buffers"]
        if name.endswith("ERM,EMH->ERH/dot_general") and parts.phase(name) == FORWARD
    )
    (cause,) = causes(name, {"encoder/pattern_1/ffn": "MoeLayer"})
    assert str(cause) == "forward encoder/pattern_1/ffn/experts (MoeLayer): ERM,EMH->ERH"
