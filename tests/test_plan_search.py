"""The search tries what divides, one choice after another, and ranks by time."""

import types

import models
import planned

from gshard_exp.errors import SettingError
from gshard_exp.moe.dispatch import ScatterDispatch
from gshard_exp.plan.search import search, summary
from gshard_exp.sharding.mesh import MeshSpec


def fake(seconds, *, fits=True, total=1):
    return types.SimpleNamespace(step_seconds=seconds, fits=fits, memory={"total": total})


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

    found = search(planned.experiment(mesh=MeshSpec(expert=8)), attempt)
    names = [name for name, _ in tried]
    assert names[0] == "mesh data=1 expert=8 model=1"
    assert {one.mesh for _, one in tried} == {
        *(MeshSpec(1, 8, 1), MeshSpec(2, 4, 1), MeshSpec(4, 2, 1), MeshSpec(8, 1, 1)),
        *(MeshSpec(1, 4, 2), MeshSpec(2, 2, 2), MeshSpec(4, 1, 2), MeshSpec(1, 2, 4)),
        *(MeshSpec(2, 1, 4), MeshSpec(1, 1, 8)),
    }
    on_best = "mesh data=2 expert=4 model=1"
    for method in ("ScatterDispatch", "GatherDispatch", "RaggedDispatch"):
        assert f"{on_best} {method}" in names
    assert f"{on_best} ScatterDispatch remat full" in names
    assert len(names) == len(set(names)) == len(found)
    assert [one.plan.step_seconds for one in found][:2] == [5.0, 5.0]
    assert found[-1].plan.fits is False


def test_where_nothing_fits_the_one_that_was_asked_for_comes_first():
    found = search(
        planned.experiment(mesh=MeshSpec(expert=2)), lambda name, experiment: fake(None, fits=False)
    )
    assert found[0].name == "mesh data=1 expert=2 model=1"
    assert not any(one.plan.fits for one in found)


def test_where_nothing_fits_the_smallest_comes_first_and_what_is_not_known_last():
    sizes = {"mesh data=1 expert=2 model=1": None, "mesh data=2 expert=1 model=1": 7}

    def attempt(name, experiment):
        return fake(None, fits=False, total=sizes.get(name, 9))

    found = search(planned.experiment(mesh=MeshSpec(expert=2)), attempt)
    assert found[0].name == "mesh data=2 expert=1 model=1"
    assert found[-1].name == "mesh data=1 expert=2 model=1"


def test_experts_are_split_as_far_as_they_can_be_beside_each_width_of_model():
    tried = []

    def attempt(name, experiment):
        tried.append(experiment.mesh)
        return fake(1.0)

    experts = models.model(sparse={"num_experts": 64, "group_size": 8})
    search(planned.experiment(experts, batch_size=64, mesh=MeshSpec(expert=64)), attempt)
    assert {MeshSpec(1, 64 // width, width) for width in (1, 2, 4, 8)} <= set(tried)


def test_what_cannot_be_compiled_is_listed_with_its_reason_and_ends_nothing():
    def attempt(name, experiment):
        if experiment.mesh.model > 1:
            raise SettingError("heads=8 do not divide.", hint="Set 16.")
        if "Scatter" in name:
            raise RuntimeError("INTERNAL: the compiler gave up\n  at line 7")
        return fake(1.0)

    found = search(planned.experiment(mesh=MeshSpec(expert=2)), attempt)
    reasons = {one.name: one.reason for one in found if one.plan is None}
    assert reasons == {
        "mesh data=1 expert=1 model=2": "heads=8 do not divide.",
        "mesh data=1 expert=2 model=1 ScatterDispatch": "INTERNAL: the compiler gave up",
    }
    assert {one.name for one in found[-2:]} == set(reasons)  # after all that have a plan
    assert [one.name for one in found if "remat full" in one.name]  # it went on
    refused = [one for one in found if one.plan is None]
    assert summary(refused).splitlines()[1:] == [
        f"not compiled  {name}: {reason}" for name, reason in reasons.items()
    ]
