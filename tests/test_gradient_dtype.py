"""Gradients in bfloat16: which, and what a step makes of them."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.errors import SettingError
from gshard_exp.paths import parameter_path
from gshard_exp.train.invariance import quick_compilation
from gshard_exp.train.state import plan_state
from gshard_exp.train.step import partitioned_train_step, rounded

MODEL = models.model(encoder="ds", decoder="s", repeats=(2, 1), dtype="bfloat16", dropout=0.0)


@pytest.fixture(scope="module")
def plan():
    return plan_state(MODEL, models.Sgd(), models.devices(), models.RULES)


@pytest.fixture(scope="module")
def begin():
    return models.start(MODEL)


def outcome(plan, begin, **how):
    step = partitioned_train_step(plan, models.RULES, **how)
    host = models.batch()
    # The step donates its state.
    state, batch = jax.device_put(begin, plan.shardings), models.on_mesh(host, plan.mesh)
    # By default XLA may leave a rounding out.
    options = quick_compilation() | {"xla_allow_excess_precision": False}
    return models.outcome(step.lower(state, batch).compile(options)(state, batch))


def test_matrices_of_stacks_are_rounded_and_routers_gains_and_embeddings_are_not(plan):
    found = jax.eval_shape(
        lambda params: rounded(params, plan.names, "bfloat16"), plan.abstract.params
    )
    kinds = {
        parameter_path(path): str(leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }
    layer = "encoder/pattern_1"
    assert kinds[f"{layer}/ffn/wi"] == "bfloat16"
    assert kinds[f"{layer}/attention/query"] == "bfloat16"
    assert kinds[f"{layer}/ffn/router"] == "float32"
    assert kinds[f"{layer}/ffn_norm/scale"] == "float32"
    assert kinds["source_embedding/embedding"] == "float32"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_with_rounded_gradients_is_that_with_float32_gradients_up_to_their_rounding(
    plan, begin, microbatches
):
    exact = outcome(plan, begin, microbatches=microbatches)
    coarse = outcome(plan, begin, microbatches=microbatches, gradient_dtype="bfloat16")
    models.assert_trees_close(coarse["params"], exact["params"], rtol=0, atol=2**-6)
    gradient = coarse["gradients"]["encoder"]["pattern_1"]["ffn"]["wi"]
    assert gradient.dtype == np.float32
    as_bfloat16 = np.asarray(jnp.asarray(gradient, jnp.bfloat16), np.float32)
    if microbatches == 1:
        np.testing.assert_array_equal(gradient, as_bfloat16)
    else:  # parts are added in float32
        assert (gradient != as_bfloat16).any()
    router = coarse["gradients"]["encoder"]["pattern_1"]["ffn"]["router"]
    assert (router != np.asarray(jnp.asarray(router, jnp.bfloat16), np.float32)).any()


def test_another_dtype_is_refused():
    with pytest.raises(SettingError, match=r"gradient_dtype.*float32"):
        models.experiment(gradient_dtype="float16")
