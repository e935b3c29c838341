"""How the memory of a core is spent, and what to change where it does not suffice."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from gshard_exp import axes
from gshard_exp.errors import SettingError
from gshard_exp.plan.compile import Program, seq2seq_model
from gshard_exp.plan.topology import Topology
from gshard_exp.sharding.rules import shard_bytes
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.layouts import reason_against
from gshard_exp.train.state import abstract_params, placed_params
from gshard_exp.train.step import rounded


def memory_of(
    experiment: Experiment, program: Program, topology: Topology
) -> dict[str, int | None]:
    """Split the memory of a core.

    Returns:
        `parameters` and `optimizer`: exactly. `gradients`: all of them are alive at the end of the
        backward pass, since a step whose gradient is not finite changes nothing; see
        `_gradient_bytes`. `activations`: what is left of the peak (among them copies of weights in
        bfloat16, which the TPU compiler makes before its loops). Where the peak is at the start of
        the backward pass, the last two together are right and each alone is not. `other`: the
        batch, tile padding of what is given, results beside the state, code, and holes between
        buffers. `total`: their sum, which has to fit into `limit` (None on CPU). `peak`: what is
        alive at once, holes and code left out.
    """
    state = program.state_bytes
    sizes = program.memory_bytes
    if not sizes:
        wanted = _wanted_bytes(program.error)
        parts = ("gradients", "activations", "other")
        rest: dict[str, int | None] = dict.fromkeys(parts)
        return {**state, **rest, "total": wanted, "limit": topology.available, "peak": None}
    held = sum(state.values())
    made = max(0, sizes["output"] - sizes["alias"])
    given = max(0, sizes["argument"] - held)
    allocated = sizes["argument"] + sizes["temp"] + made
    total = allocated + sizes["generated_code"]
    # XLA on CPU knows no peak: all that it allocates counts.
    peak = allocated if topology.chip is None else sizes["peak"]
    gradients = min(_gradient_bytes(experiment, program), max(0, peak - held - given - made))
    activations = max(0, peak - held - given - made - gradients)
    return {
        **state,
        "gradients": gradients,
        "activations": activations,
        "other": total - held - gradients - activations,
        "total": total,
        "limit": topology.available,
        "peak": peak,
    }


def _gradient_bytes(experiment: Experiment, program: Program) -> int:
    """Sum the gradients on a core, each in the dtype in which it is kept.

    That is the dtype of what `train.step.rounded` makes of its parameter, unless a batch is
    computed in parts: those are added up in float32.
    """
    dtype = experiment.gradient_dtype
    if dtype == "float32" or experiment.microbatches > 1:
        return program.state_bytes["parameters"]
    mesh = AbstractMesh(tuple(program.mesh.values()), tuple(program.mesh))
    params, names = abstract_params(experiment.model)
    kept = jax.eval_shape(lambda params: rounded(params, names, dtype), params)
    placed = placed_params(experiment.model, mesh, experiment.rules)
    return shard_bytes(
        jax.tree.map(
            lambda leaf, kept: jax.ShapeDtypeStruct(leaf.shape, kept.dtype, sharding=leaf.sharding),
            placed,
            kept,
        )
    )


def require_parameters_fit(experiment: Experiment, topology: Topology) -> None:
    """Refuse what no compiler can make fit.

    Raises:
        SettingError: a core's parameters alone are more than a program may take.
    """
    mesh = AbstractMesh(dataclasses.astuple(experiment.mesh), axes.MESH_AXES)
    held = shard_bytes(placed_params(experiment.model, mesh, experiment.rules))
    if topology.available is not None and held > topology.available:
        raise SettingError(
            f"parameters alone take {held / 1e9:.4g} GB of a core, of which a program may take "
            f"{topology.available / 1e9:.4g} GB.",
            settings=("mesh.expert", "mesh.model"),
            hint="Split them over more cores.",
        )


def _wanted_bytes(error: str) -> int | None:
    """Read how much memory a program wanted that did not fit: `(19.33G)`."""
    found = re.search(r"\((\d+(?:\.\d+)?)([KMGT])\)|Used (\d+(?:\.\d+)?)([KMGT]) of", error)
    if not found:
        return None
    number, unit = found.group(1) or found.group(3), found.group(2) or found.group(4)
    return round(float(number) * 1024 ** ("KMGT".index(unit) + 1))


@dataclasses.dataclass(frozen=True)
class _Change:
    """Something to try: what for, the gin name to bind, the fields that it sets, their value."""

    why: str
    name: str
    fields: tuple[str, ...]
    value: Any

    def flags(self, *, fiddle: bool) -> str:
        """Return the flags of the front end that make the change."""
        if not fiddle:
            return f"--gin.{self.name}={shlex.quote(json.dumps(self.value))}"
        return " ".join(f"--fdl_set={shlex.quote(f'{f}={self.value}')}" for f in self.fields)


def advice(experiment: Experiment, *, fiddle: bool) -> str:
    """Say what to change in an experiment that does not fit, by flags of its front end.

    Args:
        experiment: that does not fit.
        fiddle: it is a fiddle config; else it is made of gin files.
    """
    tries = [f"{one.why}: {one.flags(fiddle=fiddle)}" for one in _changes(experiment)]
    return "; ".join([*tries, "compute fewer rows: --tokens_per_core"])


def _changes(experiment: Experiment) -> Iterator[_Change]:
    module = seq2seq_model(experiment).module
    remats = {module.encoder.remat, module.decoder.remat}
    remat = ("model.module.encoder.remat", "model.module.decoder.remat")
    if remats & {"none", "dots"}:
        yield _Change("keep less for the backward pass", "REMAT_POLICY", remat, "products")
    if remats != {"full"}:
        yield _Change("recompute activations", "REMAT_POLICY", remat, "full")
    parts = 2 * experiment.microbatches
    if _lies(experiment, microbatches=parts):
        yield _Change("compute a batch in parts", "NUM_MICROBATCHES", ("microbatches",), parts)
    if module.dtype == "float32":
        dtype = ("model.module.dtype",)
        yield _Change("halve activations", "ACTIVATION_DTYPE", dtype, "bfloat16")
    if experiment.gradient_dtype == "float32" and experiment.microbatches == 1:
        yield _Change("halve gradients", "GRADIENT_DTYPE", ("gradient_dtype",), "bfloat16")
    # Every core of `data` holds the same state; so does every core of `expert` of what Adafactor
    # averages over the experts.
    split = (("embed", "data"),) if experiment.mesh.data > 1 else (("expert_mlp", "expert"),)
    rules = dataclasses.replace(experiment.rules, optimizer=split)
    if not experiment.rules.optimizer and _lies(experiment, rules=rules):
        where = ("rules.optimizer",)
        why = "split the optimizer's state (may take more for temporary arrays)"
        yield _Change(why, "rules.Rules.optimizer", where, split)


def _lies(experiment: Experiment, **changes: Any) -> bool:
    """Tell whether an experiment still lies evenly on its mesh with these fields changed."""
    changed = dataclasses.replace(experiment, **changes)
    return experiment.mesh.count > 1 and not reason_against(changed, experiment.mesh)
