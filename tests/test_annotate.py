"""The paper's annotations: where they place the parts of a value, in programs and between them."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from gshard_exp.errors import SettingError
from gshard_exp.sharding import hlo
from gshard_exp.sharding.annotate import constrain, partitioning, replicate, shard, split
from gshard_exp.sharding.assignment import mesh_in_order
from gshard_exp.sharding.mesh import MeshSpec

# Figure 10: a split of 2 x 4 with communication along rows, on a grid of devices and on a tree.
GRID = [[0, 1, 5, 4], [2, 3, 7, 6]]
TREE = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def mesh():
    """Enters a mesh of 2 x 4 x 1 devices."""
    with partitioning(MeshSpec(data=2, expert=4).build()) as entered:
        yield entered


def count(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def parts(x):
    """The part of each device, by id."""
    return {part.device.id: part.data for part in x.addressable_shards}


def in_program(annotation):
    return jax.jit(lambda x: annotation(x * 1))


WAYS = {
    "between programs": lambda annotation: annotation,
    "in jit": in_program,
    "in grad": lambda annotation: jax.grad(lambda x: jnp.sum(jnp.square(annotation(x)) / 2)),
    "in jit and grad": lambda annotation: jax.jit(WAYS["in grad"](annotation)),
    "in checkpoint": lambda annotation: jax.jit(WAYS["in grad"](jax.checkpoint(annotation))),
    "in scan": lambda annotation: (
        lambda x: jax.lax.scan(lambda x, _: (annotation(x), None), x, None, length=2)[0]
    ),
    "in vmap": lambda annotation: lambda x: jax.vmap(annotation)(np.stack([-x, x]))[1],
    "in jit and vmap": lambda annotation: (
        lambda x: jax.jit(jax.vmap(annotation))(np.stack([-x, x]))[1]
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("shape", [(16,), (3, 8), (2, 3, 24)], ids=str)
def test_split_cuts_one_dimension_in_order_of_the_devices_and_changes_no_value(way, shape, mesh):
    x = count(*shape)
    y = way(lambda x: split(x, -1, 8))(x)
    np.testing.assert_array_equal(y, x)
    assert y.shape == shape
    width = shape[-1] // 8
    assert sorted(parts(y)) == list(range(8))
    for device, part in parts(y).items():
        np.testing.assert_array_equal(part, x[..., device * width : (device + 1) * width])


def test_a_batched_split_cuts_the_dimension_of_each_element(mesh):
    y = jax.jit(jax.vmap(lambda x: split(x, 0, 8)))(count(3, 16))
    assert {part.shape for part in parts(y).values()} == {(3, 2)}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_replicate_leaves_a_value_of_any_rank_whole_on_every_device(way, shape, mesh):
    y = way(replicate)(count(*shape))
    assert y.sharding.is_fully_replicated
    assert len(parts(y)) == 8
    np.testing.assert_array_equal(y, count(*shape))


@pytest.mark.parametrize(
    ("num_partitions", "first_rows"),
    [
        (1, [0, 0, 0, 0, 0, 0, 0, 0]),
        (2, [0, 0, 0, 0, 4, 4, 4, 4]),  # over data
        (4, [0, 2, 4, 6, 0, 2, 4, 6]),  # over expert
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_split_takes_axes_whose_sizes_multiply(num_partitions, first_rows, mesh):
    y = split(count(8), 0, num_partitions)
    assert [int(parts(y)[device][0]) for device in range(8)] == first_rows


def test_one_axis_is_taken_rather_than_two():
    sizes = {"data": 2, "expert": 2, "model": 4}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3)
    with partitioning(mesh):
        (annotation,) = jax.make_jaxpr(lambda x: split(x, 0, 4))(count(8)).eqns
    assert annotation.params["sharding"].spec == PartitionSpec(("model",))


def test_among_axes_of_one_size_split_takes_the_first():
    with partitioning(MeshSpec(data=2, expert=2, model=2).build()):
        y = split(count(4), 0, 4)
    assert [int(parts(y)[device][0]) for device in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("size", "partitions"), [(15, 2), (15, 8), (3, 8), (9, 4)], ids=lambda n: str(n)
)
def test_a_size_that_does_not_divide_is_padded_and_masked_within_a_program(size, partitions, mesh):
    x = count(size) + np.float32(1)

    def largest_negative(x):
        # The identity of max is -inf: padding that were not masked would win with its 0.
        return jnp.max(-split(x, 0, partitions))

    program = jax.jit(largest_negative).lower(x).compile()
    assert program(x) == -1
    assert [c.kind for c in hlo.parse(program.as_text()).collectives()] == ["all-reduce"]


def test_a_gradient_outside_of_jit_goes_through_sizes_that_do_not_divide(mesh):
    got = jax.grad(lambda x: jnp.sum(jnp.square(split(x, 0, 8))))(count(15))
    assert got.tolist() == (2 * count(15)).tolist()


def test_between_programs_a_size_that_does_not_divide_is_refused(mesh):
    with pytest.raises(SettingError, match=r"\(15,\) does not divide into 8 .*the size 16\.$"):
        split(count(15), 0, 8)


def test_a_split_within_a_program_reaches_values_that_nobody_annotated(mesh):
    hidden = jax.jit(lambda x, w: jax.nn.relu(split(x, 0, 8) @ w))(count(16, 4), count(4, 6))
    assert {part.shape for part in parts(hidden).values()} == {(2, 6)}


def test_the_example_of_the_paper_has_parts_of_3_8_16(mesh):
    y = in_program(lambda x: shard(x, count(1, 2, 4).astype(int)))(count(3, 16, 64))
    assert {part.shape for part in parts(y).values()} == {(3, 8, 16)}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("assignment", [GRID, TREE], ids=["grid", "tree"])
def test_the_assignments_of_figure_10_put_each_part_on_its_device(way, assignment):
    x = count(4, 8)
    with partitioning(mesh_in_order(MeshSpec(data=2, expert=4).build(), assignment)):
        y = way(lambda x: shard(x, assignment))(x)
    np.testing.assert_array_equal(y, x)
    for row, devices in enumerate(assignment):
        for column, device in enumerate(devices):
            want = x[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            np.testing.assert_array_equal(parts(y)[device], want)


@pytest.mark.parametrize("assignment", [GRID, TREE], ids=["grid", "tree"])
def test_sums_along_the_rows_of_figure_10_are_exchanged_by_the_devices_of_a_row(assignment):
    with partitioning(mesh_in_order(MeshSpec(data=2, expert=4).build(), assignment)):
        program = jax.jit(lambda x: jnp.sum(shard(x, assignment), axis=1)).lower(count(4, 8))
        compiled = program.compile()
    (reduced,) = hlo.parse(compiled.as_text()).collectives()
    assert (reduced.kind, reduced.group) == ("all-reduce", 4)
    y = compiled(count(4, 8))
    for row, devices in enumerate(assignment):
        for device in devices:
            assert y.sharding.devices_indices_map((4,))[y_device(y, device)] == (
                slice(2 * row, 2 * row + 2, None),
            )


def y_device(y, number):
    return next(device for device in y.sharding.device_set if device.id == number)


def test_an_assignment_may_count_the_devices_along_columns(mesh):
    columns = np.asarray(TREE).T
    y = in_program(lambda x: shard(x, columns))(count(4, 2))
    assert all(parts(y)[columns[place]] == count(4, 2)[place] for place in np.ndindex(4, 2))


def test_a_second_order_of_devices_is_refused_with_the_remedy(mesh):
    with pytest.raises(
        SettingError,
        match=r"the order \[0, 1, 5, 4, 2, 3, 7, 6\] and the mesh in the order \[0, 1, 2, 3, 4, 5"
        r".*JAX gives a program one order of devices.*mesh_in_order\(mesh, device_assignment\)",
    ):
        in_program(lambda x: shard(x, GRID))(count(4, 8))


def test_between_programs_shard_sends_the_parts_to_another_order(mesh):
    x = in_program(lambda x: shard(x, TREE))(count(4, 8))
    y = shard(x, GRID)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(parts(y)[5], count(4, 8)[:2, 4:6])


def test_annotations_need_a_mesh():
    for annotation in (replicate, lambda x: split(x, 0, 8), lambda x: shard(x, range(8))):
        with pytest.raises(SettingError, match=r"has no mesh .*Enter partitioning\(mesh\)"):
            annotation(count(8))


def test_names_need_rules(mesh):
    with pytest.raises(SettingError, match=r"'batch', None.*no rules.*partitioning\(mesh, rules\)"):
        constrain(count(8, 8), "batch", None)


REFUSED = {
    "a split larger than the devices": (
        lambda x: split(x, 0, 16),
        r"num_partitions=16 is no product of axes of the mesh data=2 x expert=4 x model=1, more "
        r"than its 8 devices\. Choose one of 1, 2, 4, 8,",
    ),
    "a split that no axes make": (
        lambda x: split(x, 0, 3),
        r"num_partitions=3 is no product .*model=1\. Choose one of 1, 2, 4, 8,",
    ),
    "a dimension that is not there": (
        lambda x: split(x, 2, 8),
        r"split_dimension=2 is not a dimension of an array of shape \(8, 8\).*one of 0 to 1",
    ),
    "a dimension of a scalar": (
        lambda x: split(x[0, 0], 0, 8),
        r"of shape \(\)\. A scalar can be replicated only",
    ),
    "a device id twice": (
        lambda x: shard(x, [[0, 1, 2, 3], [4, 5, 6, 6]]),
        r"names device 6 twice: a device holds one partition",
    ),
    "a device that is not there": (
        lambda x: shard(x, [[0, 1, 2, 3], [4, 5, 6, 8]]),
        r"names device 8, which is not in the mesh of 8",
    ),
    "a device left out": (
        lambda x: shard(x, [[0, 1], [2, 3]]),
        r"makes 4 partitions and leaves out device 4 of the mesh's 8",
    ),
    "an assignment of another rank": (
        lambda x: shard(x, range(8)),
        r"of shape \(8,\) has 1 dimensions and the array 2",
    ),
    "an assignment of fractions": (
        lambda x: shard(x, np.full((2, 4), 0.5)),
        r"is of float64: device ids are integers",
    ),
}


@pytest.mark.parametrize(("annotation", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("way", [jax.eval_shape, lambda f, x: f(x)], ids=["traced", "at once"])
def test_is_refused_before_anything_is_compiled(way, annotation, message, mesh):
    with pytest.raises(SettingError, match=message):
        way(annotation, count(8, 8))


def test_names_without_a_rule_and_axes_used_twice_are_refused_before_anything_is_compiled():
    with partitioning(MeshSpec(data=2, expert=2, model=2).build(), models.RULES):
        for names, message in (
            (
                ("width", None),
                r"an activation \('width', None\) names the logical axis 'width', for",
            ),
            (("heads", "mlp"), r"'model' twice, by 'heads' and 'mlp'"),
        ):
            with pytest.raises(SettingError, match=message):
                jax.eval_shape(functools.partial(constrain_to, names), count(8, 8))


def constrain_to(names, x):
    return constrain(x, *names)
