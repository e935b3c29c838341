"""A step on any mesh, with any dispatch, gives what one device gives, random numbers included.

Compiled quickly, since there are forty: what splits a program comes before what is left out.
tests/test_invariance.py compares some of them as they are compiled for users.
"""

import models
import pytest

from gshard_exp.train.invariance import DISPATCHES, OneDevice, Way
from gshard_exp.train.layouts import factorisations, label

MESHES = factorisations(8)
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def reference():
    """A step on one device of the model of these tests, as an experiment."""
    return OneDevice(models.experiment(), models.batch())


def test_the_meshes_are_all_factorisations_of_eight():
    assert len(set(MESHES)) == 10
    assert {mesh.count for mesh in MESHES} == {8}


@pytest.mark.parametrize("dispatch", DISPATCHES, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("mesh", MESHES, ids=label)
def test_any_mesh_and_dispatch_gives_what_one_device_gives(mesh, dispatch, reference):
    compared = reference.compare(Way(mesh, dispatch))
    assert not compared.skipped
    assert set(compared.worst) == {"loss", "gradients", "metrics", "parameters"}
    assert compared.equal, compared
