"""Each file of gin/moe/ on a small batch worked by hand, where it differs from Algorithm 1."""

import functools
import re

import jax
import numpy as np
import pytest
from preset_examples import (
    BY_GATE,
    BY_POSITION,
    DEEPSEEK,
    DEEPSPEED,
    DROPLESS,
    EXPERT_CHOICE,
    FAIRSEQ,
    GSHARD,
    LINGVO,
    MESH_TF,
    SWITCH,
    VMOE_BY_GATE,
    VMOE_BY_POSITION,
)

from gshard_exp.config import assemble, find_gin_files, operative_config, shipped_root
from gshard_exp.train.experiment import Experiment

# Preset -> example in the encoder and in the decoder.
EXAMPLES = {
    "gshard": (GSHARD, GSHARD),
    "switch": (SWITCH, SWITCH),
    "lingvo": (LINGVO, LINGVO),
    "praxis": (LINGVO, LINGVO),
    "mesh_tf": (MESH_TF, MESH_TF),
    "flaxformer": (BY_GATE, BY_POSITION),
    "fairseq": (FAIRSEQ, FAIRSEQ),
    "st_moe": (BY_POSITION, BY_POSITION),
    "deepspeed": (DEEPSPEED, DEEPSPEED),
    "vmoe": (VMOE_BY_GATE, VMOE_BY_POSITION),
    "expert_choice": (EXPERT_CHOICE, BY_POSITION),
    "deepseek": (DEEPSEEK, DEEPSEEK),
    "dropless": (DROPLESS, DROPLESS),
}
PLACES = ("encoder", "decoder")
# Preset -> C of 64 tokens and 4 experts in training and evaluation, and of 100 tokens and 64, where
# C is 3.125 in the paper and half of that for 1.25 S/E.
CAPACITIES = {
    "gshard": (32, None, 4, None),  # ceil(3.125), dropless
    "switch": (20, 32, 2, 4),  # ceil(1.95), ceil(3.125)
    "lingvo": (32, 32, 4, 4),  # 3, up to 4
    "praxis": (32, 32, 4, 4),
    "mesh_tf": (20, 32, 4, 4),  # 1 and 3, at least 4
    "flaxformer": (20, 32, 4, 4),  # 2 and 3, at least 4
    "fairseq": (32, 32, 4, 4),  # 2 * ceil(1.5625)
    "st_moe": (20, 32, 4, 4),
    "deepspeed": (32, 32, 4, 4),  # ceil(3.125), at least 4
    "vmoe": (36, 64, 4, 16),  # ceil(33.6) and up to a multiple of 4; 128, at most 64; 13, up to 16
    "expert_choice": (16, 16, 4, 4),  # 2, at least 4
    "deepseek": (None,) * 4,
    "dropless": (None,) * 4,
}
AUX_LOSS_FACTORS = {"vmoe": 0.005, "deepseek": 0.0}  # the others: 0.01


@functools.cache
def assembled(preset):
    files = ("models/tiny", f"moe/{preset}", "sharding/expert_parallel", "tasks/random")
    flags = (
        "MODEL_DIR='unused'",
        "TRAIN_STEPS=1",
        "BATCH_SIZE=8",
        "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    )
    names = [f"gin/{file}.gin" for file in (*files, "runs/pretrain")]
    return assemble(Experiment, names, flags)


def model(preset):
    return assembled(preset).tree.model


def layer(preset, place):
    return getattr(model(preset).module, place).pattern[1].ffn


def capacity(moe, factor, tokens, experts):
    """C, or None if nothing is dropped."""
    return None if factor is None else moe.gating.capacity(tokens, experts, factor)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", EXAMPLES)
def test_worked_by_hand(preset, place):
    moe, want = layer(preset, place), EXAMPLES[preset][PLACES.index(place)]
    _, tokens, experts = want.logits.shape
    assert capacity(moe, moe.train_capacity_factor, tokens, experts) in (want.capacity, None)
    route = jax.jit(moe.gating, static_argnums=2)
    uniform = None if want.rnd is None else np.array([want.rnd], np.float32)
    arguments = (want.logits, np.ones((1, tokens), bool), want.capacity, uniform)
    bias = () if want.bias is None else (np.float32(want.bias),)
    out = route(*arguments, *bias)
    if want.experts is not None:
        np.testing.assert_array_equal(out.expert[0], want.experts)
    kept = np.array([[slot is not None for slot in token] for token in want.slots])
    np.testing.assert_array_equal(out.attempted[0], want.attempted)
    np.testing.assert_array_equal(out.kept[0], kept)
    slots = [slot for token in want.slots for slot in token if slot is not None]
    assert np.asarray(out.slot[0])[kept].tolist() == slots
    np.testing.assert_allclose(out.weight[0], want.weights, rtol=1e-5)
    np.testing.assert_allclose(out.aux_loss, [want.aux_loss], rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", CAPACITIES)
def test_capacities_by_hand(preset, place):
    moe = layer(preset, place)
    factors = (moe.train_capacity_factor, moe.eval_capacity_factor)
    got = [capacity(moe, f, s, e) for s, e in ((64, 4), (100, 64)) for f in factors]
    assert tuple(got) == CAPACITIES[preset]


@pytest.mark.parametrize("preset", EXAMPLES)
def test_losses_have_the_weights_of_the_source(preset):
    assert model(preset).aux_loss_factor == AUX_LOSS_FACTORS.get(preset, 0.01)
    assert model(preset).router_z_loss_factor == (1e-3 if preset == "st_moe" else 0.0)


@pytest.mark.parametrize("preset", EXAMPLES)
def test_the_settings_in_force_make_the_same_experiment_again(preset, tmp_path):
    file = tmp_path / "config.gin"
    file.write_text(operative_config(assembled(preset)))
    assert assemble(Experiment, [str(file)], []).tree == assembled(preset).tree


def test_every_preset_has_an_example_and_names_its_source():
    folder = shipped_root() / "gin/moe"
    found = {path.stem for path in find_gin_files() if path.parent == folder}
    assert found == set(EXAMPLES) == set(CAPACITIES)
    for preset in found:
        header = (folder / f"{preset}.gin").read_text().split("from __gin__")[0]
        source = header.replace("\n# ", " ").split("# Source: ")[1].split("#")[0]
        if preset == "gshard":
            assert "arXiv 2006.16668" in source  # the paper itself, which departs from nothing
        else:
            assert re.match(r"[\w-]+/[\w-]+, (branch \w+, )?(\w+/)+\w+\.(py|gin)\b", source), source
            assert "# Departs from Algorithm 1" in header


@pytest.mark.parametrize("preset", EXAMPLES)
def test_deepseek_alone_has_an_expert_of_all_tokens(preset):
    for place in PLACES:
        moe = layer(preset, place)
        assert moe.shared_mlp_dim == (moe.expert_mlp_dim if preset == "deepseek" else 0)
