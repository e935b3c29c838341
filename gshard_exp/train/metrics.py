"""Metrics of a run: averaged over a window of steps, written through clu's interface.

clu writes TensorBoard files. It has no JSON lines and no line for a person that says the time left:
`JsonLines` and `Console` are that, with the methods of clu's writers.
"""

import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from gshard_exp.data.tensorflow_import import load_tensorflow
from gshard_exp.model.contract import Model

Scalars = Mapping[str, float]
MANY_EXPERTS = 64  # a number for each up to here, deciles beyond


class Writer(Protocol):
    """The part of `clu.metric_writers.MetricWriter` that a run uses."""

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Write the values of one step."""
        ...

    def flush(self) -> None:
        """Put everything on disk."""
        ...


class JsonLines:
    """One JSON object a line: {"step": 100, "loss": 4.2, ...}.

    Lines that a killed run left behind its last checkpoint are removed when opened (all of them if
    there is no checkpoint): the file says what the run that goes on has seen. A value that is not
    finite is null.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _whole_lines(path) if start_step > 0 else []
        kept = [line for line in lines if json.loads(line)["step"] <= start_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._path = path

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Append a line."""
        values = {
            name: float(value) if np.isfinite(value) else None for name, value in scalars.items()
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")

    def flush(self) -> None:
        """Nothing is held back."""


class Console:
    """One line for a person: step, loss, accuracy, speed and time left."""

    def __init__(self, report: Callable[[str], None], train_steps: int) -> None:
        self._report, self._train_steps = report, train_steps

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Print the line."""
        remaining = (self._train_steps - step) / scalars["timing/steps_per_second"]
        self._report(
            f"step {step:>6}/{self._train_steps}  loss {scalars['loss']:.3f}  "
            f"accuracy {scalars['accuracy']:.3f}  "
            f"{scalars['timing/tokens_per_second']:,.0f} tokens/s  ETA {clock(remaining)}"
        )

    def flush(self) -> None:
        """Nothing is held back."""


def open_writers(
    folder: Path, *, start_step: int, console: Console | None = None
) -> tuple[Writer, ...]:
    """Open TensorBoard and JSON lines in a folder, and the console.

    clu's TensorBoard writer needs TensorFlow, which the core install does not bring: without it
    metrics go to the other writers only.
    """
    writers: list[Writer] = [JsonLines(folder / "metrics.jsonl", start_step)]
    if importlib.util.find_spec("tensorflow") and importlib.util.find_spec("tensorboard"):
        load_tensorflow()
        from clu import metric_writers

        writers.append(metric_writers.SummaryWriter(str(folder)))
    if console is not None:
        writers.append(console)
    return tuple(writers)


class Window:
    """Metrics of the steps since the last line."""

    def __init__(self, model: Model, learning_rate: Callable) -> None:
        self._model, self._learning_rate = model, learning_rate
        self._open()

    def _open(self) -> None:
        self._steps: list[dict] = []
        self._started, self._paused, self._untimed = time.perf_counter(), 0.0, 0

    def add(self, metrics: dict) -> None:
        """Take in a step's metrics, still on the device."""
        self._steps.append(metrics)

    def close(self) -> dict[str, float]:
        """Average, name as t5x users know them, and start anew.

        Of the steps whose loss is finite: what the model makes of sums (`accuracy`, what is
        `per_all_target_tokens`) is of the window as a whole; `loss`, `grad_norm` and router health
        are means over steps.
        """
        fetched = jax.device_get(self._steps)
        steps, rates = fetched, self._rates(fetched)
        skipped = [s for s in steps if not s["finite"]]
        # A window in which no step is finite has nothing better to show.
        steps = [s for s in steps if s["finite"]] or steps
        sums = jax.tree.map(lambda *x: float(np.sum(x)), *[s["sums"] for s in steps])
        means = jax.tree.map(lambda *x: float(np.mean(x)), *[s["means"] for s in steps])
        router = jax.tree.map(lambda *x: np.mean(x, axis=0), *[s["router"] for s in steps])
        scalars = {
            "loss": float(np.mean([s["loss"] for s in steps])),
            **self._model.scalars(sums),
            **means,
            "grad_norm": float(np.mean([s["grad_norm"] for s in steps])),
            "learning_rate": float(self._learning_rate(np.int32(steps[-1]["updates"]))),
            "skipped_steps": float(len(skipped)),
            **rates,
            **router_scalars(self._model, router),
        }
        self._open()
        return scalars

    def pause(self, seconds: float, *, steps: int = 0) -> None:
        """Leave out time that was not spent on steps, such as an evaluation.

        Args:
            seconds: to leave out.
            steps: of the window so far, taken in that time (the first, with its compilation).
        """
        self._paused += seconds
        self._untimed += steps

    def _rates(self, steps: list[dict]) -> dict[str, float]:
        timed, seconds = steps[self._untimed :], time.perf_counter() - self._started
        if timed:
            seconds -= self._paused
        else:  # nothing but the first step: its own time is all there is
            timed = steps
        sums = jax.tree.map(lambda *x: float(np.sum(x)), *[s["sums"] for s in timed])
        amounts = {"steps": len(timed), **self._model.amounts(sums)}
        rates = {f"timing/{unit}_per_second": n / seconds for unit, n in amounts.items()}
        return {"timing/seconds": seconds, **rates}


def router_scalars(model: Model, router: Mapping[str, Mapping]) -> dict[str, float]:
    """Name router health by layer: `router/encoder/layer_1/fraction_dropped_first`.

    Layers count from 0 within their stack, dense ones included. Load per expert becomes
    `.../expert_load/17`, or for more than MANY_EXPERTS of them deciles, `.../expert_load/p90`.
    Means over the sparse layers stand under t5x's plain names.
    """
    scalars: dict[str, float] = {}
    by_metric: dict[str, list[float]] = {}
    for place, health in router.items():
        stack, block = place.split("/")
        pattern = len(model.stacks[stack].pattern)
        for metric, values in health.items():
            for repeat, value in enumerate(np.asarray(values)):
                layer = repeat * pattern + int(block.rsplit("_", 1)[1])
                name = f"router/{stack}/layer_{layer}/{metric}"
                if value.ndim == 0:
                    scalars[name] = float(value)
                    by_metric.setdefault(metric, []).append(float(value))
                elif len(value) <= MANY_EXPERTS:
                    scalars |= {f"{name}/{i}": float(v) for i, v in enumerate(value)}
                else:
                    deciles = np.percentile(value, range(0, 101, 10))
                    scalars |= {f"{name}/p{10 * i}": float(v) for i, v in enumerate(deciles)}
    for metric in ("fraction_tokens_left_behind", "expert_usage", "router_confidence"):
        if metric in by_metric:
            scalars[metric] = float(np.mean(by_metric[metric]))
    return scalars


def _whole_lines(path: Path) -> list[str]:
    """Read complete lines; a killed run may have left half a line at the end."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def clock(seconds: float) -> str:
    """Write a time as 5:09 or 1:05:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
