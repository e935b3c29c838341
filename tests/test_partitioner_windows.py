"""Windows over a dimension that is cut: halos from the neighbours, and nothing else.

Source: section 3.3 and appendix A.4 of the paper. Bytes are those that one device sends for a halo
element: [N, C] of them, float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import partitioned
import pytest
from partitioned import values

BATCH, CHANNELS, FEATURES = 2, 3, 4
ELEMENT = 4 * BATCH * CHANNELS


def convolution(image, kernel, *, stride=1, padding=(0, 0), dilation=1, window_dilation=1):
    return jax.lax.conv_general_dilated(
        image,
        kernel,
        (stride,),
        [padding],
        lhs_dilation=(dilation,),
        rhs_dilation=(window_dilation,),
        dimension_numbers=("NCW", "OIW", "NCW"),
    )


def convolve(width, window, *, parts=8, **how):
    operands = values(BATCH, CHANNELS, width), values(FEATURES, CHANNELS, window)
    function = functools.partial(convolution, **how)
    return partitioned.run(function, operands, (2, None), 2, parts=parts)


def halos(*elements):
    return [("collective-permute", count * ELEMENT) for count in elements]


@pytest.mark.parametrize(
    ("window", "how", "exchanged"),
    [
        (1, {}, []),
        (3, {"padding": (1, 1)}, halos(1, 1)),
        (5, {"padding": (2, 2)}, halos(2, 2)),
        (3, {"padding": (2, 0)}, halos(2)),
        (3, {"padding": (0, 2)}, halos(2)),
        (3, {"padding": (0, 0)}, halos(2)),  # 62 results: parts of 8, the last of 6
        (2, {"stride": 2}, []),
        (3, {"stride": 2, "padding": (1, 1)}, halos(1)),
        (3, {"stride": 2, "padding": (0, 1)}, halos(1)),
        (3, {"window_dilation": 2, "padding": (2, 2)}, halos(2, 2)),
        (3, {"window_dilation": 4, "padding": (4, 4)}, halos(4, 4)),
        (3, {"stride": 2, "window_dilation": 2, "padding": (2, 2)}, halos(2, 1)),
    ],
    ids=str,
)
def test_a_convolution_exchanges_the_elements_that_its_windows_reach_over_the_edge(
    window, how, exchanged
):
    assert convolve(64, window, **how).exchanged == exchanged


def test_a_halo_wider_than_a_part_comes_in_steps():
    # Parts of one element, and windows that reach two of them in either direction.
    assert convolve(8, 5, padding=(2, 2)).exchanged == halos(1, 1, 1, 1)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_width_of_15_is_convolved_as_16_are(parts):
    assert convolve(15, 3, padding=(1, 1), parts=parts).exchanged == halos(1, 1)


def test_the_example_of_figure_11():
    # 12 elements in parts of 3, 6 results in parts of 2 (the last part has none), stride 2, padding
    # 1 and 1: part i reaches 1 - i elements to the left and 1 + i to the right. Of what it reaches,
    # part 0's 1 to the left is padding and so is what part 3's 4 to the right ends in, so no part
    # needs anything from its left, and 3 from its right is enough for all, as in figure 12.
    assert convolve(12, 3, stride=2, padding=(1, 1), parts=4).exchanged == halos(3)


def case_of_base_dilation(width, window, stride, padding, dilation, parts=4):
    """Which of the three cases of appendix A.4 it is, by the results of one part."""
    results = ((width - 1) * dilation + 1 + sum(padding) - window) // stride + 1
    count = -(-results // parts)
    if stride * count % dilation == 0:
        return 1
    return 2 if stride == 1 else 3


# Case, width, window, stride, padding, halo elements; base dilation 3, as in the figures.
DILATED = [
    (1, 12, 5, 3, (1, 3), (1,)),
    (1, 12, 4, 1, (2, 3), (1,)),
    (1, 12, 3, 1, (2, 2), ()),  # a window of 3 holds one element wherever it lies
    (2, 8, 3, 1, (2, 6), (1,)),
    (2, 12, 3, 1, (2, 3), (1,)),
]


@pytest.mark.parametrize(("case", "width", "window", "stride", "padding", "reached"), DILATED)
def test_base_dilation_exchanges_halos(case, width, window, stride, padding, reached):
    assert case_of_base_dilation(width, window, stride, padding, 3) == case
    how = {"stride": stride, "padding": padding, "dilation": 3, "parts": 4}
    assert convolve(width, window, **how).exchanged == halos(*reached)


# Window 3, stride 2, low padding 2, as in the figure of the third case: 150 results in parts of 38,
# and 2 * 38 is no multiple of 3.
THIRD = {"stride": 2, "padding": (2, 2), "dilation": 3}


def test_the_third_case_of_base_dilation_gathers_the_image():
    # Here the paper's partitioner pads the window as well. XLA's gathers the image, 100 elements
    # where a halo is one: not as good, and worse the wider the image is.
    assert case_of_base_dilation(100, 3, 2, (2, 2), 3) == 3
    assert convolve(100, 3, parts=4, **THIRD).exchanged == [("all-gather", 100 * ELEMENT)]


def test_results_that_are_sliced_off_again_make_the_third_case_the_first():
    # The way around: padding for 156 results, 39 a part, of which the first 150 are kept.
    more = THIRD | {"padding": (2, 14)}
    assert case_of_base_dilation(100, 3, 2, (2, 14), 3) == 1

    def sliced(image, kernel):
        return convolution(image, kernel, **more)[..., :150]

    operands = values(BATCH, CHANNELS, 100), values(FEATURES, CHANNELS, 3)
    outcome = partitioned.run(sliced, operands, (2, None), 2, parts=4)
    assert set(outcome.kinds) == {"collective-permute"}
    assert outcome.bytes <= 10 * ELEMENT
    np.testing.assert_array_equal(sliced(*operands), convolution(*operands, **THIRD))


def test_an_image_may_be_cut_along_both_dimensions():
    def image(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")

    grid = [[[[0, 1, 2, 3], [4, 5, 6, 7]]]]
    outcome = partitioned.run(
        image, (values(1, 1, 8, 16), values(1, 1, 3, 3)), (grid, None), grid, parts=4
    )
    # Parts of 4 x 4: rows of 4 first, then columns of 4 + 2, the corners with them.
    assert sorted(outcome.exchanged) == [("collective-permute", 4 * n) for n in (4, 4, 6, 6)]


def test_gradients_of_a_convolution_exchange_halos_and_sum_up_the_kernel():
    def loss(image, kernel):
        return jnp.sum(jnp.sin(convolution(image, kernel, padding=(1, 1))))

    operands = values(BATCH, CHANNELS, 64), values(FEATURES, CHANNELS, 3)
    of_image = partitioned.run(jax.grad(loss), operands, (2, None), 2)
    # The image again for the sines, and the cotangents of FEATURES channels.
    assert of_image.exchanged == [
        *halos(1, 1),
        *[("collective-permute", 4 * BATCH * FEATURES)] * 2,
    ]
    of_kernel = partitioned.run(jax.grad(loss, argnums=1), operands, (2, None), None)
    assert set(of_kernel.kinds) == {"collective-permute", "all-reduce"}
    assert of_kernel.exchanged[-1] == ("all-reduce", 4 * FEATURES * CHANNELS * 3)


def reduced(x, window, stride, padding, **how):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (window,), (stride,), [padding], **how)


@pytest.mark.parametrize(
    ("width", "window", "stride", "padding", "how", "elements"),
    [
        (64, 3, 1, (1, 1), {}, (1, 1)),
        (64, 2, 2, (0, 0), {}, ()),
        (64, 3, 2, (0, 1), {}, (1,)),
        (64, 3, 1, (2, 2), {"window_dilation": (2,)}, (2, 2)),
        (64, 3, 1, (2, 2), {"base_dilation": (3,)}, ()),
        (15, 3, 1, (1, 1), {}, (1, 1)),
        (15, 2, 2, (0, 0), {}, ()),
        (12, 3, 1, (1, 1), {}, (1, 1)),
    ],
    ids=str,
)
def test_a_reduce_window_exchanges_halos_and_masks_what_lies_outside(
    width, window, stride, padding, how, elements
):
    # Values below 0: padding that were not masked would win with its 0.
    x = -1 - values(width) ** 2
    function = functools.partial(reduced, window=window, stride=stride, padding=padding, **how)
    outcome = partitioned.run(function, (x,), (0,), 0)
    assert outcome.exchanged == [("collective-permute", 4 * n) for n in elements]
