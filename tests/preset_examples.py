"""Groups of tokens routed by hand as each file of gin/moe/ says. Used by test_routing_presets."""

import dataclasses
import math

import numpy as np

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
    """A group, and what comes of it: per token, a choice after the other."""

    gates: tuple
    rnd: tuple | None
    capacity: int  # in training
    attempted: tuple
    slots: tuple  # None where not kept
    weights: tuple
    aux_loss: float
    experts: tuple | None = None  # where nothing else tells them
    bias: tuple | None = None
    sigmoid: bool = False  # gates are sigmoids of the logits, not a softmax

    @property
    def logits(self):
        gates = np.array([self.gates])
        return np.float32(np.log(gates / (1 - gates) if self.sigmoid else gates))


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

# As FAIRSEQ: C = ceil(2 * 5/3) = 4, at least 4; s4 overflows. The second expert is the largest of
# log g + Gumbel noise, so of g / -ln u. u = exp(-1/8) multiplies a gate by 8, 1/e leaves it.
#   s0 .5 .3 .2    expert 2 times 8: 1.6 > .3, takes 2 instead of 1
#   s1 .61 .29 .1  expert 0 times 8 changes nothing: it is the first choice. Takes 1
#   s2 .7 .1 .2    expert 1 times 8: .8 > .2, takes 1 instead of 2
#   s3 .4 .35 .25  takes 1
#   s4 .8 .15 .05  expert 2 times 8: .4 > .15, takes 2
# Expert 1 has s1 s2 s3 at 0 1 2; expert 2 has s0 s4. Weights over what is kept: s4 has expert 2
# alone.
ONE, EIGHT = math.exp(-1), math.exp(-1 / 8)
DEEPSPEED = Example(
    SIX[:5],
    ((ONE, ONE, EIGHT), (EIGHT, ONE, ONE), (ONE, EIGHT, ONE), (ONE, ONE, ONE), (ONE, ONE, EIGHT)),
    4,
    attempted=((T, T),) * 5,
    slots=((0, 0), (1, 0), (2, 1), (3, 2), (None, 1)),
    weights=((5 / 7, 2 / 7), (61 / 90, 29 / 90), (7 / 8, 1 / 8), (8 / 15, 7 / 15), (0, 1)),
    aux_loss=0.602 / 3,
    experts=((0, 2), (0, 1), (0, 1), (0, 1), (0, 2)),
)


def normal_cdf(z):
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


# Five tokens; C = ceil(1.05 * 2 * 5/3 = 3.5) = 4. Noise of deviation 1/3 that doubles a gate is
# ln 2 = (1/3) * 3 ln 2, so u is the normal distribution at 3 ln 2; u = 1/2 is no noise.
#   s0 .5 .3 .2    expert 2 doubled: .5 .3 .4, sum 1.2: experts 0, 2 with 5/12, 4/12
#   s1 .61 .29 .1  experts 0, 1
#   s2 .7 .1 .2    experts 0, 2
#   s3 .4 .35 .25  expert 1 doubled: .4 .7 .25, sum 1.35: experts 1, 0 with 14/27, 8/27
#   s4 .8 .15 .05  experts 0, 1
# Expert 0: s0 s1 s2 s4 at 0 1 2 3, then s3, second choice, overflows. Expert 1: s3, then s1 s4.
# Expert 2: s0 s2.
# Importance, without noise: (3.01, 1.19, .8), mean 5/3; mean square 11.1162/3;
# variance / mean^2 = 11.1162/3 / (25/9) - 1.
# Load: the second largest noisy gates are .4 .29 .2 .4 .15; a gate g wins with probability
# cdf(3 ln(g / that)).
HALF, TWICE = 0.5, normal_cdf(3 * math.log(2))
WINS = np.sum(
    [
        [normal_cdf(3 * math.log(gate / second)) for gate in gates]
        for gates, second in zip(SIX[:5], (0.4, 0.29, 0.2, 0.4, 0.15), strict=True)
    ],
    axis=0,
)
VMOE_BY_POSITION = Example(
    SIX[:5],
    ((HALF, HALF, TWICE), (HALF,) * 3, (HALF,) * 3, (HALF, TWICE, HALF), (HALF,) * 3),
    4,
    attempted=((T, T),) * 5,
    slots=((0, 0), (1, 1), (2, 1), (0, None), (3, 2)),
    weights=((5 / 12, 4 / 12), (0.61, 0.29), (0.7, 0.2), (14 / 27, 0), (0.8, 0.15)),
    aux_loss=(11.1162 / 3 / (25 / 9) - 1 + WINS.var() / WINS.mean() ** 2) / 9,
)
# Largest first: s4 s2 s1 s3 s0. The same tokens are kept, at other slots.
VMOE_BY_GATE = dataclasses.replace(
    VMOE_BY_POSITION, slots=((3, 1), (2, 2), (1, 0), (0, None), (0, 1))
)

# C = round(.5 * 2 * 6 / 3) = 2, at least 4.
#   expert 0 of .5 .61 .7 .4 .8 .3: s4 s2 s1 s0
#   expert 1 of .3 .28 .08 .35 .15 .6: s5 s3 s0 s1
#   expert 2 of .2 .11 .22 .25 .05 .1: s3 s2 s0 s1
# Of each token, those that took it come first, by gate.
EXPERT_CHOICE = Example(
    ((0.5, 0.3, 0.2), (0.61, 0.28, 0.11), (0.7, 0.08, 0.22), *SIX[3:]),
    None,
    4,
    attempted=((T, T, T), (T, T, T), (T, T, F), (T, T, F), (T, F, F), (T, F, F)),
    slots=((3, 2, 2), (2, 3, 3), (1, 1, None), (1, 0, None), (0, None, None), (0, None, None)),
    weights=(
        (0.5, 0.3, 0.2),
        (0.61, 0.28, 0.11),
        (0.7, 0.22, 0),
        (0.35, 0.25, 0),
        (0.8, 0, 0),
        (0.6, 0, 0),
    ),
    aux_loss=0.0,
    experts=((0, 1, 2), (0, 1, 2), (0, 2, 1), (1, 2, 0), (0, 1, 2), (1, 0, 2)),
)

# Scores, and scores + bias (-.35, 0, .1). Weights are the scores over their sum, times 2.5.
#   s0 .9 .6 .3  .55 .6 .4   experts 1, 0: .6/1.5, .9/1.5
#   s1 .8 .2 .4  .45 .2 .5   experts 2, 0: .4/1.2, .8/1.2
#   s2 .5 .5 .5  .15 .5 .6   experts 2, 1
#   s3 .7 .1 .1  .35 .1 .2   experts 0, 2: .7/.8, .1/.8
# Without a capacity every one of 4 positions is a slot. First choices: expert 0 has s3, expert 1
# s0, expert 2 s1 s2. Then expert 0: s0 s1, expert 1: s2, expert 2: s3. c = (3, 2, 3).
# m: scores over their sums, 1.8 1.4 1.5 .9, in sixty-thirds: 4 m = (137.5, 58, 56.5)/63
DEEPSEEK = Example(
    ((0.9, 0.6, 0.3), (0.8, 0.2, 0.4), (0.5, 0.5, 0.5), (0.7, 0.1, 0.1)),
    None,
    4,
    attempted=((T, T),) * 4,
    slots=((0, 1), (0, 2), (1, 1), (0, 2)),
    weights=((1.0, 1.5), (2.5 / 3, 5 / 3), (1.25, 1.25), (2.1875, 0.3125)),
    aux_loss=(3 * 137.5 + 2 * 58 + 3 * 56.5) / 63 / 16 / 3,
    experts=((1, 0), (2, 0), (2, 1), (0, 2)),
    bias=(-0.35, 0.0, 0.1),
    sigmoid=True,
)

# As BY_POSITION with 6 positions: expert 0 has s0 ... s4 and then s5, expert 1 s5 and then s0 s1 s3
# s4, expert 2 s2.
DROPLESS = dataclasses.replace(
    BY_POSITION,
    capacity=6,
    slots=((0, 1), (1, 2), (2, 0), (3, 3), (4, 4), (0, 5)),
    weights=((0.5, 0.3), (0.61, 0.29), (0.7, 0.2), (0.4, 0.35), (0.8, 0.15), (0.6, 0.3)),
)
