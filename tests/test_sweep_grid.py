"""The grid of a sweep: which points it has, what they set and what they are called."""

import pytest

from gshard_exp.errors import SettingError
from gshard_exp.sweep.grid import Axis, Sweep, points_of

LAYERS = Axis("layers", ("NUM_ENCODER_LAYERS", "NUM_DECODER_LAYERS"), (12, 36))
EXPERTS = Axis("experts", "NUM_EXPERTS", (128, 512))


def sweep(*axes, **fields):
    return Sweep(**{"name": "s", "folder": "runs/s", "base": ("a.gin",), "axes": axes, **fields})


def names(*axes, **fields):
    return [point.name for point in points_of(sweep(*axes, **fields))]


def test_a_product_has_every_combination_named_by_what_differs():
    assert names(LAYERS, EXPERTS) == ["l12-e128", "l12-e512", "l36-e128", "l36-e512"]


def test_a_point_knows_its_values_and_sets_each_name_of_an_axis():
    point = points_of(sweep(LAYERS, EXPERTS))[1]
    assert point.axes == {"layers": 12, "experts": 512}
    assert point.bindings == ["NUM_ENCODER_LAYERS=12", "NUM_DECODER_LAYERS=12", "NUM_EXPERTS=512"]


def test_zipped_axes_go_through_their_values_together():
    assert names(LAYERS, EXPERTS, combine="zip") == ["l12-e128", "l36-e512"]


def test_zipped_axes_of_unequal_length_are_refused():
    with pytest.raises(SettingError, match="layers has 2, experts has 1"):
        names(LAYERS, Axis("experts", "NUM_EXPERTS", (4,)), combine="zip")


def test_a_list_has_its_points_alone_and_further_points_join_a_product():
    listed = ({"layers": 60, "experts": 2048}, {"layers": 12})
    assert names(LAYERS, EXPERTS, combine="list", points=listed) == ["l60-e2048", "l12"]
    assert names(LAYERS, points=({"layers": 60},)) == ["l12", "l36", "l60"]


def test_an_axis_that_a_point_leaves_out_stays_as_the_base_has_it():
    (point,) = points_of(sweep(LAYERS, EXPERTS, combine="list", points=({"layers": 12},)))
    assert point.axes == {"layers": 12}
    assert not any("EXPERTS" in text for text in point.bindings)


def test_exclusions_leave_out_combinations_of_one_or_several_values():
    assert names(LAYERS, EXPERTS, exclude=({"layers": 36, "experts": 512},)) == [
        "l12-e128",
        "l12-e512",
        "l36-e128",
    ]
    assert names(LAYERS, EXPERTS, exclude=({"experts": [128, 512], "layers": 36},)) == [
        "l12-e128",
        "l12-e512",
    ]


def test_an_exclusion_that_excludes_nothing_is_taken_for_a_mistake():
    with pytest.raises(SettingError, match="excludes nothing") as caught:
        names(LAYERS, exclude=({"layers": 13},))
    assert caught.value.settings == ("exclude[0]",)


ROUTING = Axis("routing", values={"gshard": ("gin/moe/gshard.gin",), "flat": ("A=1", "b.gin")})


def test_a_value_may_be_gin_files_and_settings_under_a_label():
    first, second = points_of(sweep(ROUTING))
    assert (first.name, first.files, first.bindings) == ("gshard", ["gin/moe/gshard.gin"], [])
    assert (second.name, second.files, second.bindings) == ("flat", ["b.gin"], ["A=1"])


def test_a_label_may_stand_for_a_value_of_what_the_axis_sets():
    axis = Axis("languages", "LANGUAGES", {"high": ["de", "fr"], 4: None})
    points = points_of(sweep(axis))
    assert [point.name for point in points] == ["high", "l4"]
    assert points[0].bindings == ["LANGUAGES=['de', 'fr']"]


@pytest.mark.parametrize(
    ("axis", "value", "part"),
    [
        (Axis("learning_rate", "LR"), 0.5, "lr0.5"),
        (Axis("learning_rate", "LR"), 1e-5, "lr1e-05"),
        (Axis("capacity factor", "C"), None, "cfnone"),
        (Axis("shared", "S"), True, "strue"),
        (Axis("dispatch", "D"), "scatter", "scatter"),
        (Axis("languages", "L"), ["de", "zh-Hant"], "lde+zh-Hant"),
        (Axis("file", "F", short=""), "a/b c", "a_b_c"),
        (Axis("seed", "S", short="seed"), 3, "seed3"),
        (Axis("dispatch", "D", short="by_"), "scatter", "by_scatter"),
        (Axis("seed", "S", short="../x"), 3, "x3"),
        (Axis("seed", "S", short="a/b "), 3, "a_b_3"),
    ],
)
def test_names_are_readable_and_good_for_folders(axis, value, part):
    assert axis.part(value) == part


def test_a_new_value_renames_no_point():
    more = Axis("experts", "NUM_EXPERTS", (2, 128, 512, 2048))
    assert set(names(LAYERS, EXPERTS)) < set(names(LAYERS, more))
    one = Axis("experts", "NUM_EXPERTS", (128,))
    assert set(names(LAYERS, one)) < set(names(LAYERS, EXPERTS))


def test_two_points_with_one_name_are_refused_with_what_both_set():
    axis = Axis("path", "TSV_PATH", ("a/b", "a_b"))
    with pytest.raises(
        SettingError, match=r"two points are called 'a_b': path='a/b' and path='a_b'"
    ):
        names(axis)


def test_names_that_differ_in_case_alone_are_one_folder_on_some_machines():
    with pytest.raises(SettingError, match="two points are called 'AB'"):
        names(Axis("path", "TSV_PATH", ("ab", "AB")))


@pytest.mark.parametrize("name", ["report", "Report", "sweep.json"])
def test_a_point_is_not_called_as_other_things_in_the_folder_of_a_sweep_are(name):
    with pytest.raises(SettingError, match=f"a point is called '{name}' .path='{name}'."):
        names(Axis("path", "TSV_PATH", ("a", name)))


@pytest.mark.parametrize(
    ("axes", "fields", "why"),
    [
        ((), {}, "it has no axes"),
        ((LAYERS, Axis("experts", "NUM_EXPERTS")), {}, "the axis 'experts' has no values"),
        ((LAYERS,), {"combine": "list"}, "points is empty"),
        ((LAYERS,), {"exclude": ({"layers": [12, 36]},)}, "exclusions leave out all 2"),
    ],
)
def test_an_empty_grid_is_refused_with_the_reason(axes, fields, why):
    with pytest.raises(SettingError, match="has no point") as caught:
        names(*axes, **fields)
    assert why in caught.value.problem


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Axis("experts", values=(1, 2)), "does not say what its values are values of"),
        (lambda: Axis("routing", values={"a": "x.gin"}), "a list of settings and gin files"),
        (lambda: Axis("", "A", (1,)), "name is empty"),
        (lambda: sweep(LAYERS, LAYERS), "two axes are called 'layers'"),
        (lambda: sweep(LAYERS, base=()), "changes one of them"),
        (lambda: sweep(LAYERS, fiddle="quickstart"), "changes one of them"),
        (lambda: sweep(LAYERS, combine="all"), "combine='all' is not known"),
        (lambda: sweep(LAYERS, points=({"depth": 1},)), "names the axis 'depth'; there are layers"),
        (lambda: sweep(LAYERS, exclude=({"depth": 1},)), "exclude.0. names the axis 'depth'"),
        (
            lambda: sweep(ROUTING, points=({"routing": "x"},)),
            "no value 'x': it has 'gshard', 'flat'",
        ),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(SettingError, match=said):
        make()
