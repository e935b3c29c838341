"""Compiles the training step of an experiment ahead of time, for a machine that is only described.

The step, its rules and its optimizer are those of a run: `plan_experiment`, on a mesh of described
devices.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from gshard_exp.errors import SettingError
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.plan.apart import Report, apart
from gshard_exp.plan.topology import Topology, parse_topology, require_compiler
from gshard_exp.sharding.mesh import FILL, MeshSpec
from gshard_exp.sharding.rules import shard_bytes
from gshard_exp.train.experiment import Experiment, batch_on, plan_experiment
from gshard_exp.train.layouts import label, most_ways

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "gshard_exp")


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler made of a step, or why it did not.

    Attributes:
        topology: name of the machine.
        mesh: size of each mesh axis.
        text: the optimised module; if it did not fit, as it was when the compiler gave up, which
            shows what is large.
        error: what the compiler said if the program does not fit in memory; else empty.
        memory_bytes: of one device, by XLA: `argument`, `output`, `alias`, `temp`,
            `generated_code`, `peak` (alive at once, arguments included; what is allocated is more,
            for holes between buffers); empty if the program does not fit.
        state_bytes: of one device: `parameters` and `optimizer`.
        lower_seconds: tracing and lowering.
        compile_seconds: wall clock of the compiler.
        compile_cpu_seconds: processor time of the compiler, over its threads.
        versions: of the packages that had a part in it.
    """

    topology: str
    mesh: Mapping[str, int]
    text: str
    error: str
    memory_bytes: Mapping[str, int]
    state_bytes: Mapping[str, int]
    lower_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    versions: Mapping[str, str]

    def save(self, folder: Path, name: str) -> None:
        """Write `name.hlo` and, with all the rest, `name.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.hlo").write_text(self.text, encoding="utf-8")
        rest = {key: value for key, value in vars(self).items() if key != "text"}
        (folder / f"{name}.json").write_text(json.dumps(rest, indent=1), encoding="utf-8")


def load_program(folder: Path, name: str) -> Program:
    """Read what `Program.save` wrote."""
    rest = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return Program(text=(folder / f"{name}.hlo").read_text(encoding="utf-8"), **rest)


def compile_step(
    experiment: Experiment, topology: Topology, report: Report = lambda line: None
) -> Program:
    """Compile one step in a process of its own.

    Args:
        experiment: its mesh has the size of the machine.
        topology: the machine.
        report: is told every ten seconds that the compiler works.

    Raises:
        SettingError: libtpu is missing or does not take the topology, or something does not divide.
        RuntimeError: the compiler failed; with what it said.
    """
    require_compiler(topology)
    what = f"{topology.name}: compiling"
    return apart(_compile_named, experiment, topology.name, what=what, report=report)


def _compile_named(experiment: Experiment, topology: str) -> Program:
    return compile_here(experiment, parse_topology(topology))


def require_machines(topologies: Sequence[Topology], report: Report = lambda line: None) -> None:
    """Refuse what the compiler knows no machine for, before anything is compiled.

    Raises:
        SettingError: libtpu is missing or does not take a topology.
    """
    for topology in topologies:
        require_compiler(topology)
    names = [topology.name for topology in topologies if topology.chip]
    if names:
        apart(_describe, names, what=f"{', '.join(names)}: describing", report=report)


def _describe(names: Sequence[str]) -> None:
    for name in names:
        parse_topology(name).devices()


def compile_here(experiment: Experiment, topology: Topology) -> Program:
    """Compile in this process, whose platform is the CPU; see `compile_step`."""
    began = time.monotonic()
    experiment = dataclasses.replace(experiment, evaluators=())  # they take no part in a step
    planned = plan_experiment(experiment, topology.devices())
    plan, step = planned[0], cast(Any, planned[1])
    lowered = step.lower(plan.abstract, batch_on(experiment, plan.mesh))
    lower_seconds = time.monotonic() - began
    began, began_cpu = time.monotonic(), time.process_time()
    text, error, memory = optimised(lowered, topology)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - began_cpu
    return Program(
        topology=topology.name,
        mesh=dict(plan.mesh.shape),
        text=text,
        error=error,
        memory_bytes=memory,
        state_bytes={
            "parameters": shard_bytes(plan.abstract.params),
            "optimizer": shard_bytes(plan.abstract.opt_state),
        },
        lower_seconds=lower_seconds,
        compile_seconds=seconds,
        compile_cpu_seconds=cpu_seconds,
        versions=dict(_versions()),
    )


def optimised(lowered: jax.stages.Lowered, topology: Topology) -> tuple[str, str, dict[str, int]]:
    """Compile; return `text`, `error` and `memory_bytes` of a `Program`."""
    if topology.chip is None:
        compiled = lowered.compile()
        return compiled.as_text() or "", "", _memory(compiled)
    # libtpu writes its module to a file: jaxlib's `as_text` refuses v5p's and v6e's, whose gathers
    # on the sparse cores it cannot read, and there is none where a program does not fit.
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        error, memory = "", {}
        try:
            memory = _memory(lowered.compile(compiler_options=options))
        except jax.errors.JaxRuntimeError as refusal:
            if "RESOURCE_EXHAUSTED" not in str(refusal):
                raise
            error = str(refusal)
        written = Path(folder).glob(f"*.{'after_optimizations' if error else 'after_codegen'}.txt")
        return next(written).read_text(encoding="utf-8"), error, memory


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    sizes = {kind: getattr(analysis, f"{kind}_size_in_bytes") for kind in kinds}
    return sizes | {"peak": analysis.peak_memory_in_bytes}


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)


def fit_to(
    experiment: Experiment,
    topology: Topology,
    *,
    mesh: str = "auto",
    tokens_per_core: int | None = None,
) -> tuple[Experiment, str]:
    """Give an experiment the size of a machine.

    Args:
        experiment: as its files describe it.
        topology: the machine.
        mesh: `file`: the experiment's own; `DxExM`: sizes of `data`, `expert` and `model`; `auto`:
            the experiment's own if it has as many cores as the machine, else the paper's layout:
            `model` as it is, experts over as many of the other cores as divide them, and `data`
            the rest.
        tokens_per_core: source tokens in a batch for each core (as the paper counts them); None
            leaves the batch as it is.

    Returns:
        The experiment, and a sentence that says what mesh and batch it has and why.

    Raises:
        SettingError: the mesh does not have the machine's cores, or the batch no whole rows.
    """
    seq2seq_model(experiment)
    spec, why = _mesh_for(experiment, topology, mesh)
    sizes = dataclasses.astuple(spec)
    given = math.prod(size for size in sizes if size != FILL)
    if topology.cores % given if FILL in sizes else given != topology.cores:
        raise SettingError(
            f"the mesh {label(spec)} does not fit {topology.name}, which has {topology.cores} "
            "cores: a plan uses all of them.",
            settings=("mesh.data", "mesh.expert", "mesh.model"),
            hint="Leave --mesh out to have sizes chosen, or set sizes that multiply to "
            f"{topology.cores}.",
        )
    spec = spec.filled(topology.cores)
    batch_size = experiment.batch_size
    if tokens_per_core is not None:
        tokens, length = tokens_per_core * topology.cores, experiment.lengths["inputs"]
        if tokens % length or tokens < length:
            raise SettingError(
                f"--tokens_per_core={tokens_per_core} on {topology.cores} cores is {tokens} "
                f"tokens, no whole number of rows of {length}.",
                hint=f"Set a multiple of {length}.",
            )
        batch_size = tokens // length
    fitted = dataclasses.replace(experiment, mesh=spec, batch_size=batch_size, evaluators=())
    tokens = batch_size * experiment.lengths["inputs"]
    return fitted, (
        f"mesh {label(spec)} ({why}), {batch_size} rows, {tokens / topology.cores:.0f} source "
        "tokens a core"
    )


def seq2seq_model(experiment: Experiment) -> Seq2SeqModel:
    """Return the model of an experiment that can be planned.

    Raises:
        SettingError: it is another kind of model.
    """
    if isinstance(experiment.model, Seq2SeqModel):
        return experiment.model
    raise SettingError(
        "plans are for encoder-decoder models, whose useful operations are known.",
        settings=("model",),
        hint="gshard-exp inspect lists what a step of any model sends.",
    )


def _mesh_for(experiment: Experiment, topology: Topology, mesh: str) -> tuple[MeshSpec, str]:
    own = experiment.mesh
    if mesh not in ("auto", "file"):
        words = mesh.split("x")
        if len(words) != 3 or not all(size.isdecimal() and int(size) for size in words):
            raise SettingError(
                f"--mesh={mesh} is neither auto, file nor DATAxEXPERTxMODEL.",
                hint="For example --mesh=1x128x1.",
            )
        return MeshSpec(*map(int, words)), "--mesh"
    sizes = dataclasses.astuple(own)
    if mesh == "file" or FILL in sizes or math.prod(sizes) == topology.cores:
        return own, "of the gin file"
    rest, left = divmod(topology.cores, own.model)
    if left:
        raise SettingError(
            f"model={own.model} does not divide the {topology.cores} cores of {topology.name}.",
            settings=("mesh.model",),
            hint="Set a divisor, or sizes of all axes by --mesh.",
        )
    expert = most_ways(experiment, rest)
    why = f"chosen: the gin file's {label(own)} is another size"
    return MeshSpec(rest // expert, expert, own.model), why
