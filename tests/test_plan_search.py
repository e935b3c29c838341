"""The search tries what divides, one choice after another, and ranks by time."""

import types

import planned

from gshard_exp.moe.dispatch import ScatterDispatch
from gshard_exp.plan.search import search
from gshard_exp.plan.topology import parse_topology
from gshard_exp.sharding.mesh import MeshSpec


def fake(seconds, *, fits=True):
    return types.SimpleNamespace(step_seconds=seconds, fits=fits, memory={"total": 1})


def test_choices_are_made_one_after_another_and_ranked():
    tried = []

    def attempt(name, experiment):
        tried.append((name, experiment))
        module = experiment.model.module
        spent = 8.0 - 2.0 * (experiment.mesh == MeshSpec(2, 4, 1))
        spent -= isinstance(module.encoder.pattern[1].ffn.dispatch, ScatterDispatch)
        # Fast, but too large.
        return fake(
            spent - 3.0 * (module.decoder.remat == "dots"), fits=module.encoder.remat != "dots"
        )

    experiment = planned.experiment(mesh=MeshSpec(expert=8))
    plans = search(experiment, parse_topology("cpu:8"), attempt)
    names = [name for name, _ in tried]
    assert names[0] == "mesh 1x8x1"
    assert {"mesh 2x4x1", "mesh 1x4x2", "mesh 8x1x1", "mesh 1x2x4", "mesh 1x1x8"} <= set(names)
    assert "mesh 2x4x1 ScatterDispatch" in names
    assert "mesh 2x4x1 ScatterDispatch remat full" in names
    assert len(names) == len(set(names))
    assert [plan.step_seconds for plan in plans][:2] == [5.0, 5.0]
    assert plans[-1].fits is False
    # 8 heads do not split 3, 5, 6 or 7 ways.
    assert {experiment.mesh.model for _, experiment in tried} == {1, 2, 4, 8}


def test_where_nothing_fits_the_smallest_comes_first():
    plans = search(
        planned.experiment(mesh=MeshSpec(expert=2)),
        parse_topology("cpu:2"),
        lambda name, experiment: fake(None, fits=False),
    )
    assert plans
    assert not any(plan.fits for plan in plans)
