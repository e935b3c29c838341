"""A value is checked against the annotation of its parameter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Protocol, TypeVar, Union

import gin_toys
import pytest

from gshard_exp.config.check import describe, matches

T = TypeVar("T")


class Step(Protocol):
    def __call__(self, x: int) -> int: ...


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (3, int),
        (3, float),
        (0.5, float),
        ("x", str),
        (True, bool),
        (None, None),
        (None, int | None),
        (3, Optional[int]),  # noqa: UP045
        ("x", Union[int, str]),  # noqa: UP007
        ("all", Literal["all", "random"]),
        ((), tuple[int, ...]),
        ((1, 2), tuple[int, ...]),
        ((1, "x"), tuple[int, str]),
        ([1], Sequence[int]),
        ((1,), Sequence[int]),
        ({"a": 1}, Mapping[str, int]),
        ({"a": 1}, dict),
        (len, Callable[[Any], int]),
        (int, type[int]),
        (3, Any),
        (3, T),
        (len, Step),
        (3, Annotated[int, "tokens"]),
        (3, "Unresolved"),
    ],
)
def test_a_value_fits(value, hint):
    assert matches(value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (3.0, int),
        (True, int),
        (True, float),
        ("3", int),
        (1, bool),
        (None, int),
        (0, None),
        ("x", int | None),
        ("none", Literal["all", "random"]),
        (1, Literal[True]),
        ([1], tuple[int, ...]),
        ((1, "x"), tuple[int, ...]),
        ((1,), tuple[int, str]),
        ("abc", Sequence[str]),
        ("abc", Sequence),
        ({"a": "b"}, Mapping[str, int]),
        (3, Callable[[Any], int]),
        (str, type[int]),
        ("3", Annotated[int, "tokens"]),
    ],
)
def test_a_value_does_not_fit(value, hint):
    assert not matches(value, hint)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "int"),
        (int | None, "int | None"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Mapping[str, int], "Mapping[str, int]"),
        (Literal["all", "random"], "'all' or 'random'"),
        (gin_toys.Model, "Model"),
    ],
)
def test_an_annotation_is_described_in_words(hint, text):
    assert describe(hint) == text


@pytest.mark.parametrize(
    ("setting", "said", "hint"),
    [
        ("count = 3.0", "Typed.count is 3.0, of type float. It must be of type int.", "try: 3"),
        ("count = '3'", "Typed.count is '3', of type str.", "3 without quotes"),
        ("count = True", "Typed.count is True, of type bool.", "a value of type int"),
        ("rate = 'fast'", "Typed.rate is 'fast'", "a value of type float"),
        ("flag = 'true'", "Typed.flag is 'true'", "try: True"),
        ("shape = [1, 2]", "Typed.shape is [1, 2], of type list.", "try: (1, 2)"),
        ("shape = 3", "Typed.shape is 3", "try: (3,)"),
        ("names = 'a'", "Typed.names is 'a'", "try: ('a',)"),
        ("policy = 'none'", "It must be of type 'all' or 'random'.", "try: "),
        ("maybe = 1.5", "It must be of type int | None.", "try: "),
        ("model = @gin_toys.Model", "Typed.model is Model (a class)", "with parentheses"),
        ("model = @gin_toys.Mlp()\ngin_toys.Mlp.width = 3", "It must be of type Model | None", ""),
    ],
)
def test_a_wrong_type_names_value_type_rule_place_and_remedy(complaint, setting, said, hint):
    text = complaint(f"gin_toys.Experiment.typed = @gin_toys.Typed()\ngin_toys.Typed.{setting}\n")
    assert said in text
    assert "set at: run.gin:4" in text
    assert hint in text


def test_a_wrong_type_through_a_macro_names_the_line_of_the_macro(complaint):
    body = "COUNT = 1.5\ngin_toys.Experiment.train_steps = %COUNT"
    assert "set at: run.gin:3 (%COUNT read at run.gin:4)" in complaint(body)


def test_an_unquoted_string_in_a_flag_for_a_number_is_a_wrong_type(complaint):
    text = complaint("STEPS = 1\ngin_toys.Experiment.train_steps = %STEPS", "STEPS=many")
    assert "Experiment.train_steps is 'many', of type str" in text
    assert "command line: --gin.STEPS=many" in text


def test_an_annotation_that_cannot_be_evaluated_is_not_checked(build):
    body = "gin_toys.Experiment.typed = @gin_toys.Typed()\ngin_toys.Typed.unknown = 3"
    assert build(body).tree.typed.unknown == 3


def test_an_annotation_that_its_own_default_breaks_is_not_checked(build):
    body = "gin_toys.Experiment.typed = @gin_toys.Typed()\ngin_toys.Typed.dtype = @gin_toys.Model"
    assert build(body).tree.typed.dtype is gin_toys.Model


def test_arguments_of_functions_are_checked_too(complaint):
    body = "gin_toys.Experiment.pair = @gin_toys.Pair()\n"
    body += "gin_toys.Pair.left = @gin_toys.top2\ngin_toys.top2.jitter = 'much'\n"
    assert "gin_toys.top2.jitter is 'much'" in complaint(body)
