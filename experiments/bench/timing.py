"""Timing in turn: each thing once a round, so that a slow moment of the machine hits all alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the rounds of one thing."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(high - low) / 2 / self.median

    def json(self) -> dict[str, float]:
        return {
            "median_s": self.median,
            "spread": self.spread,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "rounds": len(self.seconds),
        }


def in_turn(
    things: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 1
) -> dict[str, Timing]:
    """Time things that do not return before they are done.

    Args:
        things: by name; a thing that works asynchronously has to wait for itself.
        rounds: times that each is measured.
        warm_up: rounds before, not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in things}
    for round_ in range(warm_up + rounds):
        for name, thing in things.items():
            began = time.perf_counter()
            thing()
            if round_ >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return {name: Timing(tuple(of_thing)) for name, of_thing in seconds.items()}
