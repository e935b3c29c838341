"""The verb `invariance`: what it compares, what it skips, and that it sees a difference."""

import dataclasses
import json
import re

import jax
import models
import numpy as np
import pytest
import tiny_run

from gshard_exp import cli
from gshard_exp.moe.dispatch import EinsumDispatch, ScatterDispatch
from gshard_exp.moe.gather import GatherDispatch
from gshard_exp.moe.ragged import RaggedDispatch
from gshard_exp.recompute import REMAT_POLICIES
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train import invariance
from gshard_exp.train.invariance import OneDevice, Tolerance, Way, ways
from gshard_exp.train.layouts import factorisations, reason_against, spread


@dataclasses.dataclass(frozen=True)
class Forgetful(EinsumDispatch):
    """Loses one part in a thousand of each token on the way back."""

    def __call__(self, x, routing, experts, capacity):
        return 0.999 * super().__call__(x, routing, experts, capacity)


@pytest.fixture(scope="module")
def reference():
    return OneDevice(models.experiment(model=models.model(repeats=(1, 1))), models.batch())


def test_a_difference_is_found_and_its_worst_leaf_named(reference):
    found = reference.compare(Way(MeshSpec(data=2), Forgetful()))
    assert not found.equal
    assert found.worst["gradients"].of_tolerance > 10
    assert "/" in found.worst["gradients"].leaf


def test_a_loop_over_layers_with_recomputation_gives_what_one_device_gives(reference):
    found = reference.compare(Way(MeshSpec(expert=2), loop=True, remat="full"))
    assert found.worst and found.equal, found


def test_the_ways_are_all_meshes_with_each_dispatch_and_the_rest_on_one_mesh():
    experiment = models.experiment()
    found = list(ways(experiment, 8))
    meshes = factorisations(8)
    rest = -2 - len(REMAT_POLICIES)
    dispatches = (EinsumDispatch(), ScatterDispatch(), GatherDispatch(), RaggedDispatch())
    assert found[:rest] == [Way(mesh, dispatch) for mesh in meshes for dispatch in dispatches]
    assert {way.mesh for way in found[rest:]} == {MeshSpec(2, 2, 2)}
    assert [(way.loop, way.remat) for way in found[rest:]] == [
        (False, None),
        (True, None),
        *((None, policy) for policy in REMAT_POLICIES),
    ]


def test_a_model_without_sparse_layers_has_no_choice_of_a_dispatch():
    dense = models.experiment(model=models.model(encoder="d"))
    assert {way.dispatch for way in ways(dense, 4)} == {None}


def test_a_mesh_that_does_not_fit_is_skipped_with_the_reason(reference):
    # 16 rows do not divide over 3 partitions.
    found = reference.compare(Way(MeshSpec(data=3)))
    assert "16 rows at once, which do not divide over the 3" in found.skipped
    assert found.equal and not found.worst


def test_nan_on_one_side_is_no_agreement():
    expected = {"w": np.ones(3, np.float32)}
    got = {"w": np.asarray([1, np.nan, 1], np.float32)}
    assert invariance._worst(got, expected, Tolerance()).of_tolerance == np.inf


def test_the_worst_leaf_is_the_one_that_is_furthest_off():
    expected = {"near": np.ones(3, np.float32), "in": {"far": np.ones(3), "nearer": np.ones(3)}}
    got = {"near": expected["near"] + 1e-6, "in": {"far": np.asarray([1, 1.5, 1]), "nearer": 1}}
    worst = invariance._worst(got, expected, Tolerance())
    assert (worst.leaf, worst.difference) == ("in/far", 0.5)


def test_devices_are_spread_as_in_the_paper():
    # 8 experts on 8 devices; 4 experts leave two ways over data.
    assert spread(models.experiment(), 8).mesh == MeshSpec(1, 8, 1)
    four = models.model(sparse={"num_experts": 4})
    assert spread(models.experiment(model=four), 8).mesh == MeshSpec(2, 4, 1)
    own = models.experiment(mesh=MeshSpec(4, 1, 2))
    assert spread(own, 8) is own
    assert not reason_against(own, MeshSpec(4, 1, 2))


@pytest.mark.parametrize(("allowed", "status"), [(Tolerance(), 0), (Tolerance(0, 1e-12), 1)])
def test_the_verb_prints_a_line_for_each_way_and_says_whether_all_agree(
    allowed, status, tmp_path, capsys, monkeypatch
):
    compare = invariance.compare
    monkeypatch.setattr(
        invariance, "compare", lambda *args, **how: compare(*args, tolerance=allowed, **how)
    )
    monkeypatch.setattr(invariance, "ways", lambda *_: [Way(MeshSpec(3)), Way(MeshSpec(2))])
    outcomes = []

    class Kept(OneDevice):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            outcomes.append(self.outcome)

    monkeypatch.setattr(invariance, "OneDevice", Kept)
    out = tmp_path / "found.json"
    small = [f"--gin.{binding}" for binding in tiny_run.SMALL]
    arguments = [f"--gin_file={tiny_run.TINY}", "--devices=2", f"--json={out}", *small]
    assert cli.main(["invariance", *arguments]) == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("skipped  data=3 expert=1 model=1: batch_size=8 makes 8 rows")
    assert printed[1].startswith("OVER " if status else "ok ")
    assert f"1 compared with one device, {status} over tolerance, 1 skipped" in printed
    rows = json.loads(out.read_text())
    named = re.findall(r"(\w+) [-+.\de]+ \(([^)]+)\)", printed[1])
    assert [part for part, _ in named] == ["loss", "gradients", "metrics", "parameters"]
    assert dict(named) == {part: row["leaf"] for part, row in rows[1]["worst"].items()}
    assert all(leaf in leaves(outcomes[0][part]) for part, leaf in named)


def leaves(tree):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "loss" for path in paths]
