"""One training step carried out in many ways, each compared with one device.

The result of a step is a matter of the experiment, not of the mesh that computes it: loss,
gradients, metrics and updated parameters are those of one device up to rounding, on every mesh,
with the layers as a scan or as a loop, by every dispatch method, recomputed or not.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gshard_exp.data.batches import HostBatch, to_mesh
from gshard_exp.errors import SettingError
from gshard_exp.model.contract import Model, moe_layers
from gshard_exp.moe.dispatch import Dispatch, EinsumDispatch, ScatterDispatch
from gshard_exp.moe.gather import GatherDispatch
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.moe.ragged import RaggedDispatch
from gshard_exp.recompute import REMAT_POLICIES
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.layouts import factorisations, label, reason_against
from gshard_exp.train.optimizer import Optimizer
from gshard_exp.train.state import TrainState, plan_state
from gshard_exp.train.step import partitioned_train_step

DISPATCHES: tuple[Dispatch, ...] = (
    EinsumDispatch(),
    ScatterDispatch(),
    GatherDispatch(),
    RaggedDispatch(),
)
PARTS = ("loss", "gradients", "metrics", "parameters")
# In place of a leaf: such a schedule leaves only the gradients to tell.
_UNMOVED = "none moved: the learning rate of the first step is 0"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to carry out a step.

    Attributes:
        mesh: sizes of the mesh.
        dispatch: method of all sparse layers; None leaves each its own.
        loop: layers one after the other instead of a scan; None leaves that as it is.
        remat: a key of `recompute.REMAT_POLICIES`; None leaves it as it is.
    """

    mesh: MeshSpec
    dispatch: Dispatch | None = None
    loop: bool | None = None
    remat: str | None = None

    def __str__(self) -> str:
        """Write the mesh, and what else is said."""
        said = [label(self.mesh)]
        said += [type(self.dispatch).__name__] if self.dispatch is not None else []
        said += ["loop" if self.loop else "scan"] if self.loop is not None else []
        said += [f"remat={self.remat}"] if self.remat is not None else []
        return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a number may be from that of one device.

    Attributes:
        relative: to the number itself.
        of_largest: to the largest number of its array (at least 1e-3).
    """

    relative: float = 2e-5
    of_largest: float = 2e-6


class Worst(NamedTuple):
    """The array of a part that is furthest off.

    Attributes:
        leaf: its path.
        difference: largest absolute difference over the largest absolute number of the array.
        of_tolerance: largest difference in units of what is allowed; above 1 is too much.
    """

    leaf: str
    difference: float
    of_tolerance: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What became of a way.

    Attributes:
        way: as `Way.__str__` writes it.
        skipped: why it cannot be; empty if it was compared.
        worst: of each of `PARTS`.
    """

    way: str
    skipped: str = ""
    worst: Mapping[str, Worst] = dataclasses.field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether everything is within tolerance; of what was skipped too."""
        return all(worst.of_tolerance <= 1 for worst in self.worst.values())


def ways(experiment: Experiment, devices: int) -> Iterator[Way]:
    """List what to compare: every mesh with every dispatch method, and on one mesh the rest.

    That one, of those that the experiment can lie on, splits over the most axes. A model without
    sparse layers of limited capacity has no choice of a dispatch method.
    """
    methods = dispatches(experiment.model)
    meshes = factorisations(devices)
    fitting = [mesh for mesh in meshes if not reason_against(experiment, mesh)]
    for mesh in meshes:
        for dispatch in methods if methods and mesh in fitting else (None,):
            yield Way(mesh, dispatch)
    if fitting:
        mesh = max(fitting, key=lambda mesh: sum(n > 1 for n in dataclasses.astuple(mesh)))
        yield Way(mesh, loop=False)
        yield Way(mesh, loop=True)
        for policy in REMAT_POLICIES:
            yield Way(mesh, remat=policy)


def dispatches(model: Model) -> tuple[Dispatch, ...]:
    """List the methods of dispatch that a model has the choice of; dropless layers have one."""
    sparse = [layer for stack in model.stacks for _, layer in moe_layers(model, stack)]
    limited = any(layer.train_capacity_factor is not None for layer in sparse)
    return DISPATCHES if limited else ()


def compare(
    experiment: Experiment,
    devices: int,
    *,
    tolerance: Tolerance = Tolerance(),
    report: Callable[[Comparison], None] = lambda _: None,
) -> list[Comparison]:
    """Take one step of an experiment in every way and compare it with one device's.

    Args:
        experiment: whose own data gives the batch; its mesh does not matter.
        devices: how many the meshes have.
        tolerance: of each number.
        report: is told each comparison as it is made.
    """
    batches = experiment.data.train_batches(
        batch_size=experiment.batch_size, lengths=experiment.lengths
    )
    one = OneDevice(experiment, next(batches))
    found = []
    for way in ways(experiment, devices):
        found.append(one.compare(way, tolerance))
        report(found[-1])
    return found


class OneDevice:
    """A step of an experiment on one device, and others to compare with it."""

    def __init__(
        self,
        experiment: Experiment,
        batch: HostBatch,
    ) -> None:
        """Take the step.

        Args:
            experiment: what is computed.
            batch: on the host, in the shapes of the model's `batch_entries`.
        """
        self._experiment = experiment
        self._batch = batch
        self._begin = self._initial_state()
        self.outcome = self._step(Way(MeshSpec()))
        before, after = (
            jax.tree.leaves(p) for p in (self._begin.params, self.outcome["parameters"])
        )
        self._moved = any(map(np.any, map(np.not_equal, before, after)))

    def compare(self, way: Way, tolerance: Tolerance = Tolerance()) -> Comparison:
        """Take the step in another way and compare."""
        skipped = reason_against(self._experiment, way.mesh)
        if skipped:
            return Comparison(str(way), skipped)
        try:
            outcome = self._step(way)
        except SettingError as error:  # of what only tracing meets: constraints on activations
            return Comparison(str(way), error.problem)
        worst = {part: _worst(outcome[part], self.outcome[part], tolerance) for part in PARTS}
        if not self._moved:
            worst["parameters"] = worst["parameters"]._replace(leaf=_UNMOVED)
        return Comparison(str(way), worst=worst)

    def _initial_state(self) -> TrainState:
        experiment = self._experiment
        mesh = MeshSpec().build()
        plan = plan_state(
            experiment.model, _Recording(experiment.optimizer), mesh, experiment.rules
        )
        return jax.device_get(plan.init(experiment.seed))

    def _step(self, way: Way) -> dict[str, Any]:
        experiment = self._experiment
        model = carried_out(experiment.model, way)
        mesh = way.mesh.build()
        plan = plan_state(model, _Recording(experiment.optimizer), mesh, experiment.rules)
        entries = model.batch_entries(experiment.batch_size, experiment.lengths)
        names = {key: entry.names for key, entry in entries.items()}
        batch = to_mesh(self._batch, mesh, experiment.rules, names)
        step: Any = partitioned_train_step(
            plan, experiment.rules, experiment.microbatches, experiment.gradient_dtype
        )
        state = jax.device_put(self._begin, plan.shardings)
        compiled = step.lower(state, batch).compile(quick_compilation())
        state, metrics = jax.device_get(compiled(state, batch))
        return {
            "loss": metrics.pop("loss"),
            "gradients": state.opt_state.gradient,
            "metrics": metrics,
            "parameters": state.params,
        }


@functools.cache
def quick_compilation() -> dict[str, Any]:
    """Return options of XLA for little optimisation: one step takes less than compiling it well.

    What is partitioned is the same; what is compiled so computes the same, slowly. An option that
    the platform or a version of XLA does not know is left out.
    """
    options: dict[str, Any] = {}
    for option in (
        {"xla_backend_optimization_level": 0},
        {"xla_llvm_disable_expensive_passes": True},
        {"xla_cpu_use_fusion_emitters": False},
    ):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda x: x).lower(1.0).compile(option)
            options |= option
    return options


def carried_out(model: Model, way: Way) -> Model:
    """Return a model that computes the same in another way."""
    stacks = {}
    for name, stack in model.stacks.items():
        changes: dict[str, Any] = {}
        if way.dispatch is not None:
            changes["pattern"] = tuple(
                block.clone(ffn=block.ffn.clone(dispatch=way.dispatch))
                if isinstance(block.ffn, MoeLayer)
                else block
                for block in stack.pattern
            )
        if way.loop is not None:
            changes["unroll"] = stack.repeats if way.loop else 1
        if way.remat is not None:
            changes["remat"] = way.remat
        stacks[name] = stack.clone(**changes)
    return dataclasses.replace(model, module=model.module.clone(**stacks))  # type: ignore[type-var]


class _Recorded(NamedTuple):
    gradient: Any
    inner: optax.OptState


@dataclasses.dataclass(frozen=True)
class _Recording:
    """An optimizer whose state also holds the gradient of the last step."""

    optimizer: Optimizer

    @property
    def learning_rate(self):
        return self.optimizer.learning_rate

    def make(self, names) -> optax.GradientTransformation:
        inner = self.optimizer.make(names)

        def init(params) -> _Recorded:
            return _Recorded(jax.tree.map(jnp.zeros_like, params), inner.init(params))

        def update(gradient, state, params=None):
            updates, after = inner.update(gradient, state.inner, params)
            return updates, _Recorded(gradient, after)

        return optax.GradientTransformation(init, update)


def _worst(got: Any, expected: Any, tolerance: Tolerance) -> Worst:
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    found = [
        _compared(jax.tree_util.keystr(path, simple=True, separator="/"), leaf, other, tolerance)
        for (path, leaf), other in pairs
    ]
    return max(found, key=lambda worst: worst.of_tolerance)


def _compared(path: str, got: Any, expected: Any, tolerance: Tolerance) -> Worst:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    largest = max(float(np.max(np.abs(expected), initial=0.0)), 1e-3)
    allowed = tolerance.relative * np.abs(expected) + tolerance.of_largest * largest
    difference = np.abs(got - expected)
    # What is finite on one side only is as far off as can be.
    difference = np.where(np.isfinite(got) & np.isfinite(expected), difference, np.inf)
    return Worst(
        path or "loss",
        float(np.max(difference, initial=0.0) / largest),
        float(np.max(difference / allowed, initial=0.0)),
    )


def failures(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that are over tolerance."""
    return [comparison for comparison in found if not comparison.equal]
