"""Each file of gin/moe/ on a small batch worked by hand, where it differs from Algorithm 1."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from gshard_exp.config import assemble, find_gin_files, operative_config, shipped_root
from gshard_exp.train.experiment import Experiment

# Gates of one group, all of whose first choices are expert 0.
#   s0  .6 .3 .1   experts 0, 1;  g2 / (g1 + g2) = 1/3
#   s1  .5 .1 .4   experts 0, 2;  4/9
#   s2  .7 .2 .1   experts 0, 1;  2/9
#   s3  .6 .1 .3   experts 0, 2;  1/3
# m = (.6, .175, .225) and c = (4, 0, 0): line (13) is 1/3 * (4/4 * .6) = .2
FOUR = ((0.6, 0.3, 0.1), (0.5, 0.1, 0.4), (0.7, 0.2, 0.1), (0.6, 0.1, 0.3))
FOUR_RND = (0.7, 0.9, 0.1, 0.6)
T, F = True, False


@dataclasses.dataclass(frozen=True)
class Example:
    """A group, and what comes of it: per token, a pair of first and second choice."""

    gates: tuple
    rnd: tuple
    capacity: int  # in training
    attempted: tuple
    slots: tuple  # None where not kept
    weights: tuple
    aux_loss: float


# C = ceil(2 * 4 / 3) = 3. First choices take positions 0 1 2 3 of expert 0; s3 overflows.
# Second: s0 -> 1: position 0, 2/3 > .7 fails, and the position is used up;
#         s1 -> 2: position 0, 8/9 > .9 fails; s2 -> 1: position 1, 4/9 > .1;
#         s3 -> 2: position 1, 2/3 > .6.
GSHARD = Example(
    FOUR,
    FOUR_RND,
    3,
    attempted=((T, F), (T, F), (T, T), (T, T)),
    slots=((0, None), (1, None), (2, 1), (None, 1)),
    weights=((2 / 3, 0), (5 / 9, 0), (7 / 9, 2 / 9), (0, 1 / 3)),
    aux_loss=0.2,
)

# C = ceil(1.25 * 4 / 3) = 2: s2 and s3 overflow. Weights are the gates.
SWITCH = Example(
    FOUR,
    FOUR_RND,
    2,
    attempted=((T,), (T,), (T,), (T,)),
    slots=((0,), (1,), (None,), (None,)),
    weights=((0.6,), (0.5,), (0,), (0,)),
    aux_loss=0.2,
)

# C = floor(2 * 4 / 3) = 2, up to 4 (lingvo's minimum as well): s3 finds the slot 3 that it has not
# in the paper. No coin: the second choices of s0 and s1 stay.
LINGVO = Example(
    FOUR,
    FOUR_RND,
    4,
    attempted=((T, T),) * 4,
    slots=((0, 0), (1, 0), (2, 1), (3, 1)),
    weights=((2 / 3, 1 / 3), (5 / 9, 4 / 9), (7 / 9, 2 / 9), (2 / 3, 1 / 3)),
    aux_loss=0.2,
)

# C = floor(1.25 * 4 / 3) = 1, at least 4. rnd = .5, and the coin asks for g2 > .2 * .5 = .1.
#   s0  .9 .09 .01  experts 0, 1;  g2 = .09/.99 = 1/11, rejected, uses no position
#   s1  .5 .1 .4    experts 0, 2;  4/9, position 0 of expert 2
#   s2  .8 .15 .05  experts 0, 1;  .15/.95 = 3/19 = .158, taken; the paper asks for .25. Position 1
#                   of expert 1, behind the first choice of s3: in the paper s0 would stand there
#   s3  .1 .6 .3    experts 1, 2;  1/3, position 1 of expert 2
# m = (2.3, .94, .76)/4; c = (3, 1, 0); aux = 1/3 (3/4 * .575 + 1/4 * .235) = 1/3 * .49
MESH_TF = Example(
    ((0.9, 0.09, 0.01), (0.5, 0.1, 0.4), (0.8, 0.15, 0.05), (0.1, 0.6, 0.3)),
    (0.5,) * 4,
    4,
    attempted=((T, F), (T, T), (T, T), (T, T)),
    slots=((0, None), (1, 0), (2, 1), (0, 1)),
    weights=((10 / 11, 0), (5 / 9, 4 / 9), (16 / 19, 3 / 19), (2 / 3, 1 / 3)),
    aux_loss=0.49 / 3,
)

# Six tokens; C = round(1.25 * 6 / 3 = 2.5) = 2 (half to even), at least 4.
#   s0  .5 .3 .2    experts 0, 1        s3  .4 .35 .25  experts 0, 1
#   s1  .61 .29 .1  experts 0, 1        s4  .8 .15 .05  experts 0, 1
#   s2  .7 .1 .2    experts 0, 2        s5  .3 .6 .1    experts 1, 0
# c, first choices: (5, 1, 0); second: (1, 4, 1); all: (6, 5, 1).
# m = (3.31, 1.79, .9)/6; aux = 1/3 (6 * 3.31 + 5 * 1.79 + .9)/36 = 1/3 * 29.71/36. Algorithm 1 has
# 1/3 (5 * 3.31 + 1.79)/36.
SIX = (
    (0.5, 0.3, 0.2),
    (0.61, 0.29, 0.1),
    (0.7, 0.1, 0.2),
    (0.4, 0.35, 0.25),
    (0.8, 0.15, 0.05),
    (0.3, 0.6, 0.1),
)
# In token order expert 0 takes s0 s1 s2 s3, and s4 overflows. Expert 1 has s5 at 0, then s0 s1 s3
# at 1 2 3, and s4 overflows again: nobody takes it. Expert 2 has s2. s5 -> 0: position 5, overflow.
BY_POSITION = Example(
    SIX,
    (0.99,) * 6,
    4,
    attempted=((T, T),) * 6,
    slots=((0, 1), (1, 2), (2, 0), (3, 3), (None, None), (0, None)),
    weights=((0.5, 0.3), (0.61, 0.29), (0.7, 0.2), (0.4, 0.35), (0, 0), (0.6, 0)),
    aux_loss=29.71 / 36 / 3,
)
# By gate the order is s4 s2 s1 s5 s0 s3: expert 0 takes s4 s2 s1 s0 and s3, the least sure,
# overflows. Expert 1 has s5 at 0, then s4 s1 s0 at 1 2 3, and s3 overflows again.
BY_GATE = dataclasses.replace(
    BY_POSITION,
    slots=((3, 3), (2, 2), (1, 0), (None, None), (0, 1), (0, None)),
    weights=((0.5, 0.3), (0.61, 0.29), (0.7, 0.2), (0, 0), (0.8, 0.15), (0.6, 0)),
)

# Five tokens; C = 2 * ceil(5/3) = 4. Experts 0 and 1, s2 instead of 1 expert 2; s4 overflows at
# position 4 of expert 0, and its second expert has weight 1 (Algorithm 1: .15/.95). Second choices:
# s0 s1 s3 s4 at 0 1 2 3 of expert 1. m = (3.01, ...)/5, c = (5, 0, 0); aux = 1/3 * .602
FAIRSEQ = Example(
    SIX[:5],
    (0.99,) * 5,
    4,
    attempted=((T, T),) * 5,
    slots=((0, 0), (1, 1), (2, 0), (3, 2), (None, 3)),
    weights=((5 / 8, 3 / 8), (61 / 90, 29 / 90), (7 / 9, 2 / 9), (8 / 15, 7 / 15), (0, 1)),
    aux_loss=0.602 / 3,
)

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
}


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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", EXAMPLES)
def test_worked_by_hand(preset, place):
    moe, want = layer(preset, place), EXAMPLES[preset][PLACES.index(place)]
    logits = np.log(np.array([want.gates], np.float32))
    _, tokens, experts = logits.shape
    assert moe.gating.capacity(tokens, experts, moe.train_capacity_factor) == want.capacity
    route = jax.jit(moe.gating, static_argnums=2)
    uniform = np.array([want.rnd], np.float32)
    out = route(logits, np.ones((1, tokens), bool), want.capacity, uniform)
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
    got = [
        None if factor is None else moe.gating.capacity(tokens, experts, factor)
        for tokens, experts in ((64, 4), (100, 64))
        for factor in factors
    ]
    assert tuple(got) == CAPACITIES[preset]


@pytest.mark.parametrize("preset", EXAMPLES)
def test_losses_have_the_weights_of_the_source(preset):
    assert model(preset).aux_loss_factor == 0.01
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
    for preset in found - {"gshard", "switch"}:
        header = (folder / f"{preset}.gin").read_text().split("from __gin__")[0]
        assert "# Source: " in header and "# Departs from Algorithm 1" in header
