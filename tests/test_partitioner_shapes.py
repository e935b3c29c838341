"""Slice, Pad, Reverse, Reshape and Sort where parts differ in size, and 15 elements on 2 or 8."""

import jax
import jax.numpy as jnp
import numpy as np
import partitioned
import pytest
from partitioned import values

PERMUTE = "collective-permute"


def run(function, *shape, parts=8, **how):
    return partitioned.run(function, (values(*shape),), (0,), 0, parts=parts, **how)


def floats(*counts):
    return [(PERMUTE, 4 * count) for count in counts]


# 64 elements are parts of 8; 15 are seven parts of 2 and one of 1; 12 are six parts of 2.
MOVES = {
    "slice, 64": (lambda x: x[3:], 64, (3,)),
    "slice, 64, both ends": (lambda x: x[1:-1], 64, (1,)),
    # 12 elements are left, parts of 2: part i is 3 + 2 i and the next, of parts i + 1 and i + 2.
    "slice, 15": (lambda x: x[3:], 15, (1, 1)),
    "slice, 15, both ends": (lambda x: x[1:-1], 15, (1,)),
    "slice, 12, both ends": (lambda x: x[1:-1], 12, (1,)),
    "slice, 64, every other": (lambda x: x[::2], 64, ()),
    "slice, 15, every other": (lambda x: x[::2], 15, ()),
    # 69 elements, parts of 9: the further right, the more a part has moved.
    "pad, 64": (lambda x: jnp.pad(x, (2, 3), constant_values=7), 64, (1, 5)),
    # 20 elements, parts of 3.
    "pad, 15": (lambda x: jnp.pad(x, (2, 3), constant_values=7), 15, (2, 2, 1, 1)),
    "pad between, 64": (lambda x: jax.lax.pad(x, np.float32(7), [(1, 0, 1)]), 64, ()),
    "pad between, 15": (lambda x: jax.lax.pad(x, np.float32(7), [(1, 0, 1)]), 15, None),
    # Whole parts change places; what is padding then stands first, and all move by it.
    "reverse, 64": (lambda x: x[::-1], 64, (8,)),
    "reverse, 15": (lambda x: x[::-1], 15, (2, 1)),
    "reverse, 12": (lambda x: x[::-1], 12, (2, 2)),
}


@pytest.mark.parametrize("name", MOVES)
def test_an_operation_that_moves_elements_permutes_parts_of_them(name):
    function, width, elements = MOVES[name]
    outcome = run(function, width)
    if elements is None:
        assert set(outcome.kinds) <= {PERMUTE}
    else:
        assert outcome.exchanged == floats(*elements)


def test_a_reshape_keeps_its_parts_where_they_divide():
    assert run(lambda x: x.reshape(32), 16, 2).exchanged == []
    assert run(lambda x: x.reshape(8, 8), 64).exchanged == []


def test_the_reshape_of_the_paper_moves_one_element():
    # [3, 2] in parts of [2, 2] and [1, 2]; [6] in two parts of 3: the fourth element moves.
    assert run(lambda x: x.reshape(6), 3, 2, parts=2).exchanged == floats(1)


def test_a_reshape_of_uneven_parts_permutes_halos():
    # [12, 2] in six parts of [2, 2]; [24] in eight parts of 3: up to 7 elements of the left.
    assert run(lambda x: x.reshape(24), 12, 2).exchanged == floats(4, 2, 1)


def test_a_sort_along_another_dimension_needs_no_exchange():
    assert run(lambda x: jnp.sort(x, axis=1), 64, 4).exchanged == []
    assert run(lambda x: jnp.sort(x, axis=1), 15, 4).exchanged == []


@pytest.mark.parametrize("rows", [64, 15, 12])
def test_a_sort_along_its_parts_turns_them_and_back_where_another_dimension_divides(rows):
    padded = rows + -rows % 8
    # Columns of 16 / 8 that are whole: the same two all-to-alls for whatever the sizes of parts.
    all_to_all = ("all-to-all", 4 * padded * 16 // 8)
    outcome = run(lambda x: jnp.sort(x, axis=0), rows, 16)
    assert outcome.exchanged == [all_to_all, all_to_all]


@pytest.mark.parametrize("width", [64, 15, 12])
def test_a_sort_of_all_that_there_is_gathers_it(width):
    # Any element may go to any part: at least as many bytes have to be received, but for one part.
    assert run(jnp.sort, width).exchanged == [("all-gather", 4 * (width + -width % 8))]


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min, jnp.prod], ids=lambda f: f.__name__)
def test_15_elements_are_reduced_without_their_padding(parts, reduce):
    # All above 1, or all below -1, so that a padding of 0 would show in max, min and prod.
    for x in (1.1 + values(15) ** 2, -1.1 - values(15) ** 2):
        outcome = partitioned.run(reduce, (x,), (0,), None, parts=parts)
        assert outcome.exchanged == [("all-reduce", 4)]


@pytest.mark.parametrize("parts", [2, 8])
def test_15_elements_are_contracted_without_their_padding(parts):
    operands = (values(3, 15), values(15, 5))
    outcome = partitioned.run(lambda x, y: x @ y, operands, (1, 0), None, parts=parts)
    assert outcome.exchanged == [("all-reduce", 4 * 3 * 5)]
    # Each device multiplies the 8 or 2 columns of the largest part.
    assert outcome.flops == 2 * 3 * 5 * -(-15 // parts)
