"""Lists what gin files and fiddle builders can assemble, read from the modules themselves."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from gshard_exp.config import check, signatures
from gshard_exp.config.show import value_text

_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of component and where its members lie.

    Attributes:
        title: heading.
        modules: import paths.
        method: what tells a member from other classes of these modules.
    """

    title: str
    modules: tuple[str, ...]
    method: str


HEAD = """\
Both front ends import the module, and name a.b.Name after it:
  gin     from a import b    @b.Name() builds it, b.Name.parameter = value sets
  fiddle  from a import b    fdl.Config(b.Name, parameter=value) builds it
A function that is passed on with its arguments is @b.name in gin, and
fdl.Partial(b.name, ...) in fiddle."""

DISPATCH = Kind(
    "Dispatch methods",
    tuple(f"gshard_exp.moe.{name}" for name in ("dispatch", "gather", "ragged")),
    "__call__",
)
# A class is listed if it is public, a dataclass, defined in the module and has the method.
KINDS = (
    Kind(
        "Gating functions",
        tuple(f"gshard_exp.moe.{name}" for name in ("gating", "noisy", "expert_choice", "biased")),
        "capacity",
    ),
    DISPATCH,
    Kind(
        "Layers",
        tuple(
            f"gshard_exp.{name}"
            for name in ("moe.layer", "model.layers", "model.transformer", "model.vision")
        ),
        "__call__",
    ),
    Kind("Models", ("gshard_exp.model.seq2seq", "gshard_exp.model.vision"), "loss"),
    Kind("Optimizers", ("gshard_exp.train.optimizer",), "make"),
    Kind("Learning-rate schedules", ("gshard_exp.train.optimizer",), "__call__"),
    Kind("Training data", ("gshard_exp.data.batches", "gshard_exp.data.digits"), "train_batches"),
    Kind("Sources of a corpus", ("gshard_exp.data.sources", "gshard_exp.data.packages"), "pairs"),
    Kind(
        "Evaluators",
        tuple(f"gshard_exp.score.{name}" for name in ("evaluate", "in_training", "images")),
        "__call__",
    ),
    Kind("Searches", ("gshard_exp.score.beam", "gshard_exp.score.flat_beam"), "__call__"),
    Kind("Metrics", ("gshard_exp.score.bleu",), "__call__"),
)


@dataclasses.dataclass(frozen=True)
class Component:
    """A class that gin and fiddle can build.

    Attributes:
        path: import path, `gshard_exp.moe.gating.Top2Gating`.
        parameters: `name: type = default`, in order.
        summary: first line of its docstring.
    """

    path: str
    parameters: tuple[str, ...]
    summary: str

    def text(self) -> str:
        """Write signature and summary; a long signature has one parameter a line."""
        signature = f"{self.path}({', '.join(self.parameters)})"
        if len(signature) > _WIDTH - 2:
            lines = [_wrapped(f"{parameter},") for parameter in self.parameters]
            signature = "\n    ".join([f"{self.path}(", *lines]) + "\n)"
        summary = textwrap.fill(self.summary, _WIDTH - 6)
        return textwrap.indent(f"{signature}\n{textwrap.indent(summary, '    ')}", "  ")


def _wrapped(parameter: str) -> str:
    """Break a parameter that is too long for a line; what follows is indented further."""
    return textwrap.fill(parameter, _WIDTH - 6, subsequent_indent=" " * 8, break_long_words=False)


def components(kind: Kind) -> list[Component]:
    """Describe the members of a kind."""
    return [_component(cls) for cls in members(kind)]


def members(kind: Kind) -> list[type]:
    """List the classes of a kind in the order in which their modules define them."""
    return [cls for module in kind.modules for cls in _members(module, kind.method)]


def listing() -> str:
    """Write how each front end names a component, all components by kind, and fiddle's builders."""
    parts = [HEAD]
    for kind in KINDS:
        members = "\n".join(component.text() for component in components(kind))
        parts.append(f"{kind.title}\n{members}")
    builders = "\n".join(builder.text() for builder in fiddle_builders())
    return "\n\n".join([*parts, f"Builders of fiddle configs (--fdl_config=NAME)\n{builders}"])


def fiddle_builders() -> list[Component]:
    """List the presets that fiddle knows by a bare name."""
    from gshard_exp.config.from_fiddle import presets

    return [
        Component(name, _described(builder), _summary(builder))
        for name, builder in presets().items()
    ]


def _members(module: str, method: str) -> Iterator[type]:
    for name, value in vars(importlib.import_module(module)).items():
        if (
            signatures.is_dataclass_type(value)
            and value.__module__ == module
            and not name.startswith("_")
            and inspect.isfunction(getattr(value, method, None))
        ):
            yield value


def _component(cls: type) -> Component:
    return Component(f"{cls.__module__}.{cls.__qualname__}", _described(cls), _summary(cls))


def _described(target: Callable[..., Any]) -> tuple[str, ...]:
    """Write the parameters of a class or function."""
    hints = signatures.types(target)
    described = []
    for name in signatures.parameters(target):
        if signatures.is_linens_own(target, name):
            continue
        hint = f": {check.describe(hints[name])}" if name in hints else ""
        default = signatures.default_of(target, name)
        value = "" if default is inspect.Parameter.empty else f" = {value_text(default)}"
        described.append(f"{name}{hint}{value}")
    return (*described, *["..."] * signatures.takes_any_keyword(target))


def _summary(target: Callable[..., Any]) -> str:
    return (inspect.getdoc(target) or "").partition("\n")[0]
