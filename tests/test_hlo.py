"""What a compiled program executes: programs whose work is known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard_exp.sharding import hlo
from gshard_exp.sharding.instructions import Shape


def compiled(function, *arguments, **how):
    return hlo.parse(jax.jit(function, **how).lower(*arguments).compile().as_text())


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


def product(x, w):
    return x @ w


def test_a_product_takes_two_operations_for_each_multiply_add():
    # 3 x 5 results of 4 multiply-adds each.
    assert compiled(product, zeros(3, 4), zeros(4, 5)).flops() == 2 * 3 * 5 * 4


def test_batch_dimensions_count_once():
    def batched(x, y):
        return jnp.einsum("bij,bjk->bik", x, y)

    assert compiled(batched, zeros(7, 3, 4), zeros(7, 4, 5)).flops() == 7 * 2 * 3 * 5 * 4


def loop(x, w, length):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, length=length)[0]


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    module = compiled(lambda x, w: loop(x, w, 5), zeros(8, 16), zeros(5, 16, 16))
    assert module.flops() == 5 * 2 * 8 * 16 * 16
    assert module.unknown_loops() == []


def test_loops_within_loops_multiply():
    def outer(x, w):
        return jax.lax.scan(lambda x, _: (loop(x, w, 5), None), x, None, length=3)[0]

    assert compiled(outer, zeros(8, 16), zeros(5, 16, 16)).flops() == 15 * 2 * 8 * 16 * 16


def test_a_gradient_takes_two_more_products():
    def loss(w, x):
        return jnp.sum(loop(x, w, 5))

    module = compiled(jax.grad(loss, argnums=(0, 1)), zeros(5, 16, 16), zeros(8, 16))
    assert module.flops() == 3 * 5 * 2 * 8 * 16 * 16


def test_a_loop_without_a_known_number_of_trips_is_named():
    def until(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1.0, lambda x: x @ w, x)

    module = compiled(until, zeros(8, 8), zeros(8, 8))
    assert module.flops() == 2 * 8 * 8 * 8
    assert len(module.unknown_loops()) == 1


def test_trips_are_read_from_the_condition_where_xla_does_not_say():
    text = jax.jit(lambda x, w: loop(x, w, 5)).lower(zeros(8, 16), zeros(5, 16, 16)).compile()
    unsaid = text.as_text().replace("known_trip_count", "other")
    assert hlo.parse(unsaid).flops() == 5 * 2 * 8 * 16 * 16


@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_a_convolution_counts_what_xla_counts(strides, padding):
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, strides, padding)

    program = jax.jit(convolve).lower(zeros(2, 3, 9, 8), zeros(4, 3, 3, 5)).compile()
    assert hlo.parse(program.as_text()).flops() == program.cost_analysis()["flops"]


def test_a_product_with_batches_as_a_dilated_convolution_has_no_work_in_the_holes():
    # As a TPU compiles [8, 4, 32] x [8, 32, 16]: the batch is a window over a dilated image.
    text = """HloModule m

ENTRY %main (a: f32[8,4,32], b: f32[8,32,16]) -> f32[8,4,16] {
  %a = f32[8,4,32]{2,1,0:T(8,128)} parameter(0)
  %b = f32[8,32,16]{2,1,0:T(8,128)} parameter(1)
  ROOT %c = f32[8,4,16]{2,1,0:T(8,128)} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""  # noqa: E501
    assert hlo.parse(text).flops() == 8 * 2 * 4 * 16 * 32


def test_a_cublas_product_counts():
    text = """HloModule m

ENTRY %main (a: bf16[4,32], b: bf16[32,16]) -> bf16[4,16] {
  %a = bf16[4,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %g = (bf16[4,16]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %r = bf16[4,16]{1,0} get-tuple-element(%g), index=0
}
"""  # noqa: E501
    module = hlo.parse(text)
    assert module.flops() == 2 * 4 * 16 * 32
    assert module.custom_calls() == {"__cublas$gemm": 1}


@pytest.fixture
def mesh():
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))


def on(mesh, *spec):
    return NamedSharding(mesh, PartitionSpec(*spec))


def test_collectives_come_with_kind_bytes_group_and_times(mesh):
    def steps(x, w):
        def body(x, _):
            return jax.lax.with_sharding_constraint(x @ w, on(mesh, "a", None)), None

        return jax.lax.scan(body, x, None, length=3)[0]

    module = compiled(
        steps,
        zeros(64, 128),
        zeros(128, 128),
        in_shardings=(on(mesh, "a", "b"), on(mesh, "b", None)),
        out_shardings=on(mesh, "a", None),
    )
    reduced = [c for c in module.collectives() if c.kind == "all-reduce"]
    # Each device adds up its 32 x 128 partial results with the 3 others of its row, in each step.
    assert [(c.bytes, c.group, c.times) for c in reduced] == [(32 * 128 * 4, 4, 3)]
    # Of one device: a quarter of the contracted dimension, half of the rows.
    assert module.flops() == 3 * 2 * 32 * 128 * 32


def test_an_asynchronous_all_gather_counts_its_result_once():
    text = """HloModule m

ENTRY %main (a: f32[4,8]) -> f32[16,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %s = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %d = f32[16,8]{1,0} all-gather-done(%s)
}
"""  # noqa: E501
    (gather,) = hlo.parse(text).collectives()
    assert (gather.kind, gather.bytes, gather.group) == ("all-gather", 16 * 8 * 4, 4)


def test_bytes_follow_the_dtype():
    assert Shape("bf16", (3, 5)).bytes == 30
    assert Shape("token", ()).bytes == 0


def test_what_is_not_hlo_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("hello")
