"""Say how many slots an expert has: the capacity C of a group, and the ways it is rounded."""

import math
from fractions import Fraction
from typing import Literal, get_args

from gshard_exp.errors import SettingError

Rounding = Literal[
    "ceil", "floor", "nearest", "floor_then_four", "ceil_then_four", "ceil_per_choice"
]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)


def slots_per_expert(
    num_choices: int,
    group_size: int,
    num_experts: int,
    factor: float,
    minimum: int = 1,
    rounding: Rounding = "ceil",
) -> int:
    """Return C, the slots one expert has for the tokens of one group.

    C = ceil(K * S / E * factor), then at least `minimum` and at most S. A group's experts hold all
    K * S choices at factor 1 when the load is even, hence the ceiling and not the floor; no expert
    can be chosen twice by a token, hence S. The product is taken in exact arithmetic on the decimal
    that was written: 1.1 * 100 / 10 is 11, where floats give 11.000000000000002 and so 12.

    Source: the paper's C = 2S/E (section 2.2), always whole there. Departures: public code rounds
    in many ways and often raises a small C to 4; `rounding` names those ways. Public code has its
    factor times S/E, whatever K; a factor of 2.0 there is 1.0 here if K = 2.

    Args:
        num_choices: K.
        group_size: S, padding included: C is a shape and cannot depend on the data.
        num_experts: E.
        factor: capacity factor, slots per choice at an even load.
        minimum: the fewest slots, where S allows.
        rounding: of K * S / E * factor. "ceil"; "floor" (mesh-tensorflow); "nearest", halves to
            even (flaxformer); "floor_then_four", down, raised to `minimum`, then up to a multiple
            of 4 (lingvo, praxis); "ceil_then_four", up, then up to a multiple of 4 (V-MoE);
            "ceil_per_choice", K * ceil(S / E * factor) (fairseq).

    Raises:
        SettingError: factor is not a positive finite number, or S or E is below 1.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise SettingError(
            f"The expert capacity factor is {factor}; it must be a positive number.",
            hint="1.0 is the capacity of the paper; 1.25 to 2.0 drop fewer tokens.",
        )
    if group_size < 1 or num_experts < 1:
        raise SettingError(
            f"There is no capacity for {num_experts} experts and groups of {group_size} tokens; "
            "both numbers must be at least 1."
        )
    of_choice = Fraction(str(factor)) * group_size / num_experts
    exact = num_choices * of_choice
    whole = {
        "ceil": math.ceil(exact),
        "floor": math.floor(exact),
        "nearest": round(exact),
        "floor_then_four": 4 * math.ceil(Fraction(max(math.floor(exact), minimum), 4)),
        "ceil_then_four": 4 * math.ceil(Fraction(math.ceil(exact), 4)),
        "ceil_per_choice": num_choices * math.ceil(of_choice),
    }[rounding]
    return min(max(whole, minimum), group_size)
