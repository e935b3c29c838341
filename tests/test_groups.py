"""Which devices exchange with one another, in every form that XLA writes; worked by hand."""

import pytest

from gshard_exp.sharding.groups import mesh_axes, read_groups

MESH = {"data": 2, "expert": 2, "model": 2}
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))  # over `model`, the last axis
STRIDE_2 = ((0, 2), (1, 3), (4, 6), (5, 7))  # over `expert`
STRIDE_4 = ((0, 4), (1, 5), (2, 6), (3, 7))  # over `data`


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{4,5},{2,3},{6,7}}, dimensions={0}", PAIRS),
        ("replica_groups={{4,0},{1,5},{2,6},{3,7}}", STRIDE_4),
        ("replica_groups=[4,2]<=[8], use_global_device_ids=true", PAIRS),
        # iota(8) as [2, 4], transposed: rows 0 4, 1 5, 2 6, 3 7.
        ("replica_groups=[4,2]<=[2,4]T(1,0)", STRIDE_4),
        # iota(8) as [2, 2, 2] with the last two exchanged: 0 2 1 3 4 6 5 7.
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", STRIDE_2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%add", STRIDE_4),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2] {'c'}", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        # The minor part of size 2 of b, and the major one.
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", STRIDE_2),
        # Devices in the order 0 2 4 6 1 3 5 7: neighbours in b are 2 apart.
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, channel_id=1",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", STRIDE_4),
        ("replica_groups=@mesh<a=2,b=4>([4,2]T(1,0)) {a}", PAIRS),
        ("source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}", STRIDE_4),
        # A ring, written in no order, and a chain that does not come back.
        ("source_target_pairs={{2,4},{0,2},{6,0},{4,6},{1,3}}", ((0, 2, 4, 6), (1, 3))),
        ("replica_groups={}, to_apply=%add", ()),
        ("dimensions={0}", ()),
    ],
)
def test_groups_are_read_in_every_form(text, groups):
    assert sorted(read_groups(f", channel_id=3, {text}, metadata={{}}")) == sorted(groups)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="unknown form: 'all'"):
        read_groups("replica_groups=all")


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (PAIRS, ("model",)),
        (STRIDE_2, ("expert",)),
        (STRIDE_4, ("data",)),
        (((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "expert")),
        ((), ("data", "expert", "model")),  # all devices
        (((0,), (1,)), ()),
    ],
)
def test_axes_are_those_along_which_members_differ(groups, axes):
    assert mesh_axes(groups, MESH) == axes


def test_a_part_of_an_axis_is_said_to_be_one():
    assert mesh_axes(((0, 1), (2, 3)), {"data": 1, "expert": 4}) == ("expert[2 of 4]",)


def test_a_device_beyond_the_mesh_is_refused():
    with pytest.raises(ValueError, match="device 8 is not in a mesh of 8"):
        mesh_axes(((0, 8),), MESH)
