"""What the points of a sweep take, before any of them runs: size, work and time.

The time here is measured: a few steps of each point, since points of other sizes use a machine to
another degree (small products less of it), so that no point can stand for the others. Tokens are
random and rows full. Compilation, reading of data and evaluations come on top.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gshard_exp.data.batches import RandomData, to_mesh
from gshard_exp.errors import SettingError, first_line
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.sharding.mesh import simulate_cpu_devices
from gshard_exp.sharding.tables import columns
from gshard_exp.sweep.prepare import Prepared
from gshard_exp.sweep.report import si
from gshard_exp.train.experiment import Experiment, plan_experiment
from gshard_exp.train.metrics import clock
from gshard_exp.train.record import sizes

_LEAST, _MOST = 3, 20  # steps that are measured
_SECONDS = 2.0  # after which no further step is measured
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of a whole training somewhere.

    Attributes:
        step_seconds: of a step; None if it is not known.
        seconds: of all steps.
        note: why it is not known.
    """

    step_seconds: float | None = None
    seconds: float | None = None
    note: str = ""

    @classmethod
    def of(cls, step_seconds: float, steps: int) -> Time:
        """Return the time of so many steps."""
        return cls(step_seconds, step_seconds * steps)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a point takes.

    Attributes:
        name: of the point.
        axes: its values as they are shown.
        params_total: all parameters.
        params_active: those that one token uses.
        flops_per_token: useful operations of a source or target token, forward and backward; None
            if they are not known of such a model.
        train_steps: of the run.
        tokens: positions of all stacks in the whole training.
        times: by place: `here`, and topologies.
    """

    name: str
    axes: Mapping[str, Any]
    params_total: int
    params_active: int
    flops_per_token: float | None
    train_steps: int
    tokens: int
    times: Mapping[str, Time]


def estimate(
    points: Sequence[Prepared],
    *,
    measure: bool = True,
    topologies: Sequence[str] = (),
    report: Say = lambda line: None,
) -> list[Estimate]:
    """Work out what each point takes.

    Args:
        points: that were prepared.
        measure: take a few steps of each on the devices that are here.
        topologies: machines to compile each point for, as of `gshard-exp plan`.
        report: is told what is being done.

    Raises:
        SettingError: there is no such topology, or its compiler is missing.
    """
    from gshard_exp.plan.compile import require_machines
    from gshard_exp.plan.topology import parse_topology

    require_machines([parse_topology(name) for name in topologies], report)
    if measure:  # once for all: JAX, once started, keeps the devices that it has
        simulate_cpu_devices(max(point.assembled.tree.mesh.count for point in points))
    found = []
    for point in points:
        experiment = point.assembled.tree
        known = sizes(experiment)
        times = {}
        if measure:
            report(f"{point.name}: measuring")
            times["here"] = _measured(experiment)
        for name in topologies:
            report(f"{point.name}: compiling for {name}")
            times[name] = _predicted(experiment, name, report)
        found.append(
            Estimate(
                name=point.name,
                axes=point.point.axes,
                params_total=known["params_total"],
                params_active=known["params_active"],
                flops_per_token=known["flops_per_token"],
                train_steps=experiment.train_steps,
                tokens=known["tokens_per_step"] * experiment.train_steps,
                times=times,
            )
        )
    return found


def _measured(experiment: Experiment) -> Time:
    try:
        return Time.of(step_seconds(experiment), experiment.train_steps)
    except SettingError as error:  # its mesh has more devices than there are, for instance
        return Time(note=error.problem)
    except RuntimeError as error:  # of XLA: there is not enough memory, for instance
        return Time(note=first_line(error))


def step_seconds(experiment: Experiment) -> float:
    """Take a few steps and return the median of their times (seconds).

    The first one, with its compilation, does not count. Text is replaced by random tokens: no
    corpus is built, and every position of a batch is filled.

    Raises:
        SettingError: the experiment does not fit the devices that are here.
    """
    experiment = dataclasses.replace(experiment, evaluators=())
    if isinstance(experiment.model, Seq2SeqModel):
        module = experiment.model.module
        embeddings = (module.source_embedding, module.target_embedding)
        random = RandomData(*(embedding.vocab_size for embedding in embeddings))
        experiment = dataclasses.replace(experiment, data=random)
    plan, step = plan_experiment(experiment)
    batches = experiment.data.train_batches(
        batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    entries = experiment.model.batch_entries(experiment.batch_size, experiment.lengths)
    names = {key: entry.names for key, entry in entries.items()}
    batch = to_mesh(next(batches), plan.mesh, experiment.rules, names)
    state, metrics = step(plan.init(experiment.seed), batch)
    jax.block_until_ready(metrics)
    seconds: list[float] = []
    while len(seconds) < _LEAST or (len(seconds) < _MOST and sum(seconds) < _SECONDS):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    del state
    gc.collect()  # the next point may need the memory
    return statistics.median(seconds)


def _predicted(experiment: Experiment, topology: str, report: Say) -> Time:
    from gshard_exp.plan.compile import compile_step, fit_to
    from gshard_exp.plan.plan import make_plan
    from gshard_exp.plan.topology import parse_topology

    machine = parse_topology(topology)
    try:
        fitted, layout = fit_to(experiment, machine)
        program = compile_step(fitted, machine, report)
    except SettingError as error:
        return Time(note=error.problem)
    except RuntimeError as error:  # the compiler's
        return Time(note=first_line(error))
    if program.error:
        return Time(note="does not fit in memory")
    predicted = make_plan("", fitted, program, layout).step_seconds
    if predicted is None:
        return Time(note="no times are predicted for CPUs")
    return Time.of(predicted, experiment.train_steps)


def as_json(found: Sequence[Estimate]) -> list[dict[str, Any]]:
    """Return plain values."""
    return [dataclasses.asdict(one) for one in found]


def table(found: Sequence[Estimate]) -> str:
    """Lay estimates out, with the sum of the times, and say what they are."""
    places = list(found[0].times)
    axes = list(dict.fromkeys(axis for one in found for axis in one.axes))
    heads = ("point", *axes, "params", "active", "FLOPs/token", "steps", "tokens", *places)
    lines: list[tuple[str, ...]] = [heads]
    for one in found:
        values = tuple(str(one.axes.get(axis, "-")) for axis in axes)
        flops = "-" if one.flops_per_token is None else si(one.flops_per_token)
        sums = (si(one.params_total), si(one.params_active), flops)
        amounts = (f"{one.train_steps:,}", si(one.tokens))
        times = tuple(_time(one.times[place]) for place in places)
        lines.append((one.name, *values, *sums, *amounts, *times))
    blank = ("",) * (len(heads) - len(places) - 1)
    if places:
        lines.append(("in all", *blank, *(_sum(found, place) for place in places)))
    said = columns(lines)
    if "here" in places:
        said.append("here: the median of 3 to 20 measured steps of each point, times its steps;")
        said.append("compilation, reading of data and evaluations come on top")
    for one in found:
        said += [f"{one.name} on {p}: {t.note}" for p, t in one.times.items() if t.note]
    return "\n".join(said)


def _time(one: Time) -> str:
    return "-" if one.seconds is None else clock(one.seconds)


def _sum(found: Sequence[Estimate], place: str) -> str:
    times = [one.times[place].seconds for one in found]
    known = [seconds for seconds in times if seconds is not None]
    if not known:
        return "-"
    return f"{'' if len(known) == len(times) else 'over '}{clock(sum(known))}"
