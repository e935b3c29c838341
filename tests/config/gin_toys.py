"""What the tests of the config room build: small dataclasses, as a gin file would import them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gshard_exp.errors import SettingError


def relu(x: float) -> float:
    return max(x, 0.0)


def top2(logits: float, second_policy: str = "all", jitter: float = 0.0) -> tuple[Any, ...]:
    return (logits, second_policy, jitter)


@dataclasses.dataclass(frozen=True)
class Mlp:
    width: int
    activation: Callable[[float], float] = relu
    dropout_rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class MoE:
    num_experts: int
    gating: Callable[..., Any] = top2
    expert: Mlp = Mlp(3)


@dataclasses.dataclass(frozen=True)
class Model:
    width: int = 8
    heads: int = 4
    layers: tuple[Any, ...] = ()
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is no multiple of heads={self.heads}.")


@dataclasses.dataclass(frozen=True)
class Pair:
    left: Any = None
    right: Any = None


@dataclasses.dataclass(frozen=True)
class Typed:
    count: int = 1
    rate: float = 0.5
    name: str = "x"
    flag: bool = False
    shape: tuple[int, ...] = ()
    names: Sequence[str] = ()
    maybe: int | None = None
    policy: Literal["all", "random"] = "all"
    model: Model | None = None
    dtype: int = None  # type: ignore[assignment]
    unknown: "NotImportedHere" = None  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass(frozen=True)
class Experiment:
    model: Model = Model()
    train_steps: int = 10
    batch_size: int = 8
    model_dir: str = ""
    typed: Typed | None = None
    pair: Pair | None = None
    limit: float = float("inf")

    def __post_init__(self) -> None:
        if self.batch_size % self.model.heads:
            raise SettingError(
                f"A batch of {self.batch_size} rows cannot be dealt to {self.model.heads} heads.",
                settings=("batch_size", "model.heads"),
                hint=f"Set it to {self.model.heads}.",
            )


def small_model(heads: int) -> Model:
    return Model(width=2 * heads, heads=heads)


def broken() -> Model:
    raise AttributeError("a mistake in code")


def takes_anything(**settings: Any) -> dict[str, Any]:
    return settings
