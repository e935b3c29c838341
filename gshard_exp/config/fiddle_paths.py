"""Sets one value of a fiddle config by its path, as `--fdl_set` asks."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import fiddle as fdl

from gshard_exp.config import signatures
from gshard_exp.config.assemble import short_name
from gshard_exp.config.errors import ConfigError, one_of
from gshard_exp.config.provenance import steps_of

# A value that opens like this was meant as a literal; anything else that is none is a string.
_OPENINGS = ("[", "(", "{", '"', "'")
_WORDS = {"true": True, "false": False}  # fiddle's own flags take these too


def set_at(config: fdl.Config, assignment: str) -> tuple[int, Any]:
    """Set what `PATH=VALUE` says.

    A default on the way (`mesh.data=2` where nothing sets `mesh`) becomes a config of its own.

    Args:
        config: changed in place.
        assignment: the path as in fiddle, `model.module.encoder.pattern[1].dropout_rate=0.2`.

    Returns:
        The id of the config or container that was changed, and the argument or key.

    Raises:
        ConfigError: no such path (with the three nearest), or a value that cannot be read.
    """
    path, equals, text = assignment.partition("=")
    at = [f"command line: --fdl_set={assignment}"]
    *parents, last = steps_of(path.strip()) or [""]
    if not equals or last == "":
        raise ConfigError(
            f"'{assignment}' sets nothing.",
            rule="It is one word with a path and a value.",
            at=at,
            hint="--fdl_set=PATH=VALUE",
        )
    owner: Any = config
    for step in parents:
        owner = _open(owner, step, _wrong_path(config, path, at))
    if isinstance(owner, tuple):
        raise ConfigError(
            f"{path} is an item of a tuple.",
            rule="A tuple is set as a whole, or something within its items.",
            at=at,
            hint=_nearest(path, config),
        )
    _child(owner, last, _wrong_path(config, path, at))  # there, whether set or not
    value = _literal(text.strip(), at)
    if isinstance(owner, fdl.Buildable):
        setattr(owner, last, value)
    else:
        owner[last] = value
    return id(owner), last


def _open(owner: Any, step: Any, refusal: ConfigError) -> Any:
    """Return a child that can be changed."""
    child = _child(owner, step, refusal)
    if isinstance(child, type) or not dataclasses.is_dataclass(child):
        return child
    opened = fdl.Config(type(child))
    for field in dataclasses.fields(child):
        own = signatures.is_linens_own(type(child), field.name)
        if field.init and not own:
            value = getattr(child, field.name)
            if value != signatures.default_of(type(child), field.name):
                setattr(opened, field.name, value)
    if isinstance(owner, fdl.Buildable):
        setattr(owner, step, opened)
    elif isinstance(owner, tuple):
        raise refusal
    else:
        owner[step] = opened
    return opened


def _child(owner: Any, step: Any, refusal: ConfigError) -> Any:
    if isinstance(owner, fdl.Buildable):
        target = fdl.get_callable(owner)
        if step not in signatures.parameters(target) or signatures.is_linens_own(target, step):
            raise refusal
        given = fdl.ordered_arguments(owner)
        return given[step] if step in given else signatures.default_of(target, step)
    if isinstance(owner, (list, tuple)) and isinstance(step, int) and step < len(owner):
        return owner[step]
    if isinstance(owner, dict) and step in owner:
        return owner[step]
    raise refusal


def _wrong_path(config: fdl.Config, path: str, at: list[str]) -> ConfigError:
    return ConfigError(
        f"{short_name(fdl.get_callable(config))} has no '{path}'.",
        rule="A path leads to an argument, an index or a key that is there.",
        at=at,
        hint=_nearest(path, config),
    )


def _nearest(path: str, config: fdl.Config) -> str:
    """Name three paths that are alike as a whole and in their last part."""

    def distance(other: str) -> tuple[float, str]:
        pairs = ((path, other), (path.rsplit(".", 1)[-1], other.rsplit(".", 1)[-1]))
        ratios = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return -sum(ratios), other

    return one_of(sorted(set(_paths(config)), key=distance)[:3])


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all that can be set."""
    if isinstance(value, fdl.Buildable):
        target = fdl.get_callable(value)
        given = fdl.ordered_arguments(value)
        for name in signatures.parameters(target):
            if not signatures.is_linens_own(target, name):
                inner = f"{path}.{name}" if path else name
                yield inner
                yield from _paths(given.get(name), inner)
    elif isinstance(value, (list, tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if not isinstance(value, tuple):
                yield f"{path}[{key!r}]"
            yield from _paths(item, f"{path}[{key!r}]")


def _literal(text: str, at: list[str]) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        if not text.startswith(_OPENINGS):
            return text
        raise ConfigError(
            f"Cannot read the value {text}.",
            rule="Values are Python literals; anything else is taken as a string.",
            at=at,
            hint="close every bracket and quote, and quote the whole word for the shell",
        ) from error
