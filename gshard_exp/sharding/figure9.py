"""Figure 9 of the paper: times of AllReduce and AllToAll on TPU v3."""

from collections.abc import Mapping

from gshard_exp.sharding.primitives import log_log_slope

SOURCE = "arXiv 2006.16668v1, Figure 9, TPU v3, read off the vector figure to +-2%"
PARTITIONS = (16, 32, 64, 128, 256, 512, 1024, 2048)
# (primitive, bytes of each partition) -> microseconds.
_MICROSECONDS = {
    ("all-to-all", 8 * 2**20): (285, 295, 548, 732, 1227, 1295, 2416, 2364),
    ("all-to-all", 32 * 2**20): (1106, 1149, 2189, 2589, 4984, 5095, 10346, 10631),
    ("all-reduce", 8 * 2**20): (284, 170, 234, 175, 274, 185, 210, 212),
    ("all-reduce", 32 * 2**20): (1133, 617, 921, 554, 952, 589, 529, 609),
}
# Exponent of the number of partitions D in the time, at a fixed size of each: Table 4 and what it
# refers to. An all-gather has 1 there, for fixed parts; we fix its result, so it has 0 here.
EXPONENTS = {"all-reduce": 0.0, "all-gather": 0.0, "all-to-all": 0.5, "collective-permute": 0.0}


def published() -> Mapping[tuple[str, int], Mapping[int, float]]:
    """Return (primitive, bytes) -> partitions -> seconds."""
    return {
        curve: dict(zip(PARTITIONS, (time * 1e-6 for time in times), strict=True))
        for curve, times in _MICROSECONDS.items()
    }


def published_slopes() -> Mapping[tuple[str, int], float | None]:
    """Return (primitive, bytes) -> slope of the published curve."""
    return {curve: log_log_slope(points) for curve, points in published().items()}
