"""The measured primitives beside Figure 9 of the paper: as table, JSON and plot."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gshard_exp.errors import SettingError
from gshard_exp.sharding import figure9
from gshard_exp.sharding.mesh import FILL, MeshSpec
from gshard_exp.sharding.primitives import Measurement, log_log_slope, measure, parse_size
from gshard_exp.sharding.tables import columns

Curves = Mapping[tuple[str, int], Mapping[int, float]]


def measured_report(
    devices: int | None, sizes: str, *, runs: int, plot: Path | None = None
) -> dict[str, Any]:
    """Measure, draw if asked to, and return what there is to say as JSON has it.

    Args:
        devices: how many; None: all that JAX finds.
        sizes: `8MB,32MB`.
        runs: of each primitive at each size.
        plot: a file to draw into; its suffix says what kind.

    Raises:
        SettingError: as `measure`, `MeshSpec.build` and `draw`.
    """
    numbers = [parse_size(text) for text in sizes.split(",")]
    if plot is not None:
        _check_drawing(plot)
    mesh = MeshSpec(data=FILL if devices is None else devices).build()
    found = measure(list(mesh.devices.flat), numbers, runs=runs)
    if plot is not None:
        draw(found, plot, title=_hardware(mesh.devices.flat[0]))
    published = figure9.published_slopes()
    return {
        "hardware": _hardware(mesh.devices.flat[0]),
        "note": _note(mesh.devices.flat[0]),
        "measurements": [each.as_json() for each in found],
        "slopes": [
            {
                "primitive": primitive,
                "size": size,
                "slope": log_log_slope(points),
                "published_slope": published.get((primitive, size)),
                "exponent_of_the_paper": figure9.EXPONENTS[primitive],
            }
            for (primitive, size), points in curves(found).items()
        ],
        "published": {
            "source": figure9.SOURCE,
            "curves": [
                {"primitive": primitive, "size": size, "seconds": dict(points)}
                for (primitive, size), points in figure9.published().items()
            ],
        },
    }


def table(report: Mapping[str, Any]) -> str:
    """Lay a report out for people."""
    heads = ("primitive", "size", "partitions", "median us", "spread", "GB/s sent by each")
    rows = [
        (
            row["primitive"],
            _size_text(row["size"]),
            str(row["partitions"]),
            _microseconds(row["median_s"]),
            f"{row['spread']:.0%}",
            f"{row['bytes_per_second'] / 1e9:.2f}",
        )
        for row in sorted(report["measurements"], key=lambda r: (r["primitive"], r["size"]))
    ]
    slopes = [
        (
            row["primitive"],
            _size_text(row["size"]),
            _number(row["slope"]),
            _number(row["published_slope"]),
            _number(row["exponent_of_the_paper"]),
        )
        for row in sorted(report["slopes"], key=lambda r: (r["primitive"], r["size"]))
    ]
    curves_of_paper = [
        (
            row["primitive"],
            _size_text(row["size"]),
            *(f"{t * 1e6:.0f}" for t in row["seconds"].values()),
        )
        for row in report["published"]["curves"]
    ]
    return "\n".join(
        [
            f"{report['hardware']}. {report['note']}",
            "",
            *columns((heads, *rows)),
            "",
            "Growth: the slope of log(time) over log(partitions).",
            *columns((("primitive", "size", "here", "Figure 9", "the paper's O(D^x)"), *slopes)),
            "",
            f"Published, us ({report['published']['source']}):",
            *columns((("primitive", "size", *map(str, figure9.PARTITIONS)), *curves_of_paper)),
        ]
    )


def curves(measurements: Iterable[Measurement]) -> Curves:
    """Return (primitive, size) -> partitions -> median seconds."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for each in measurements:
        found.setdefault((each.primitive, each.size), {})[each.partitions] = each.median
    return found


def draw(measurements: Sequence[Measurement], file: Path, *, title: str) -> None:
    """Plot measured and published times against the number of partitions, both logarithmic.

    Raises:
        SettingError: matplotlib is not installed, or does not know the suffix of the file.
    """
    _check_drawing(file)
    from matplotlib.figure import Figure

    sizes = sorted({each.size for each in measurements})
    figure = Figure(figsize=(5.5 * len(sizes), 5), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for panel, size in zip(panels, sizes, strict=True):
        _draw_size(panel, [each for each in measurements if each.size == size])
        panel.set_title(f"{_size_text(size)} in each partition")
        panel.set_xlabel("partitions")
    panels[0].set_ylabel("time, us")
    figure.suptitle(f"{title}: median and quartiles; dashed: Figure 9 of the paper")
    figure.savefig(file)


def _draw_size(panel: Any, measurements: Sequence[Measurement]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(True, which="major", alpha=0.3)
    size = measurements[0].size
    for index, primitive in enumerate(dict.fromkeys(each.primitive for each in measurements)):
        own = [each for each in measurements if each.primitive == primitive]
        counts = [each.partitions for each in own]
        low, high = zip(*(each.quartiles for each in own), strict=True)
        panel.plot(
            counts,
            [each.median * 1e6 for each in own],
            color=f"C{index}",
            marker="o",
            label=primitive,
        )
        panel.fill_between(
            counts, _micro(low), _micro(high), color=f"C{index}", alpha=0.15, linewidth=0
        )
        published = figure9.published().get((primitive, size))
        if published:
            panel.plot(
                list(published),
                _micro(published.values()),
                color=f"C{index}",
                linestyle="--",
                marker=".",
                label=f"{primitive}, TPU v3",
            )
    panel.legend(fontsize="small")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _micro(seconds: Iterable[float]) -> list[float]:
    return [each * 1e6 for each in seconds]


def _check_drawing(file: Path) -> None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise SettingError(
            "a plot needs matplotlib, which is not installed.",
            ("plot",),
            hint="pip install 'gshard_exp[bench]'",
        ) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lstrip(".") not in known:
        raise SettingError(
            f"the plot {str(file)!r} has a suffix that matplotlib does not know.",
            ("plot",),
            hint="Name it .png or .svg.",
        )
    if not file.parent.is_dir():
        raise SettingError(f"the folder of the plot {str(file)!r} is not there.", ("plot",))


def _hardware(device: jax.Device) -> str:
    processor = (
        f", {platform.processor() or platform.machine()}" if device.platform == "cpu" else ""
    )
    return f"{device.platform} ({device.device_kind}{processor}), jax {jax.__version__}"


def _note(device: jax.Device) -> str:
    if device.platform != "cpu":
        return "Times are from the host's call until all devices are done."
    return (
        "The devices are threads of one host: what is measured is copying in its memory, "
        "not a network."
    )


def _size_text(size: int) -> str:
    for unit, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:g}{unit}"
    return f"{size}B"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
