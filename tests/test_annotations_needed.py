"""How few annotations are enough: which constraints of the MoE layer decide what it sends.

Inputs and weights are annotated always. The smallest set of the layer's seven constraints that
gives the collectives of all seven is both sides of both transpositions: measured once over all
subsets on 2 x 4 devices, none that lacks one of these four gives them; the tests hold the set, and
what leaving out each of the four does.
"""

import jax
import jax.numpy as jnp
import models
import pytest

from gshard_exp.model.contract import axis_names
from gshard_exp.moe import experts, layer
from gshard_exp.sharding import census
from gshard_exp.sharding.annotate import constrain, partitioning
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.train.invariance import quick_compilation

# In the order in which the layer applies them.
CONSTRAINTS = (
    "tokens",
    "sent, by group",
    "sent, by expert",
    "hidden",
    "done, by expert",
    "done, by group",
    "result",
)
TRANSPOSITIONS = tuple(c for c in CONSTRAINTS if "by" in c)
ROWS, LENGTH, WIDTH = 32, 16, 16


@pytest.fixture(scope="module")
def sent():
    """A subset of the constraints -> kind, axes, count and bytes of what a layer sends."""
    mesh, rules = MeshSpec(data=2, expert=4).build(), models.RULES
    moe = models.moe(eval_capacity_factor=1.0, expert_mlp_dim=24)
    how = {
        "valid": jnp.ones((ROWS, LENGTH), bool),
        "rows": jnp.arange(ROWS),
        "deterministic": True,
    }
    shape = (ROWS, LENGTH, WIDTH)
    made = jax.eval_shape(lambda: moe.init(jax.random.key(0), jnp.zeros(shape), **how))

    def on(array_shape, names):
        sharding = rules.sharding(names, shape=array_shape, mesh=mesh, what="an argument")
        return jax.ShapeDtypeStruct(array_shape, jnp.float32, sharding=sharding)

    x = on(shape, ("batch", "length", "activation_embed"))
    params = jax.tree.map(
        lambda leaf, names: on(leaf.shape, names), made["params"], axis_names(made["params_axes"])
    )

    def count(kept):
        seen = []

        def some(value, *names):
            seen.append(names)
            return constrain(value, *names) if CONSTRAINTS[len(seen) - 1] in kept else value

        def loss(params, x):
            with partitioning(mesh, rules):
                return jnp.sum(jnp.sin(moe.apply({"params": params}, x, **how)))

        gradient = jax.value_and_grad(loss, argnums=(0, 1))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, x))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "constrain", some)
            patch.setattr(experts, "constrain", some)
            found = census.take(
                jax.jit(gradient, out_shardings=(None, shardings)),
                params,
                x,
                mesh=mesh,
                compiler_options=quick_compilation(),
            )
        assert len(seen) == len(CONSTRAINTS)
        sums: dict[tuple, tuple[int, int]] = {}
        for row in found.rows:
            times, size = sums.get((row.kind, row.axes), (0, 0))
            sums[row.kind, row.axes] = (times + row.count, size + row.count * row.bytes)
        return sums

    return count


@pytest.fixture(scope="module")
def full(sent):
    return sent(CONSTRAINTS)


def test_both_sides_of_both_transpositions_are_enough(sent, full):
    # E * C * M = 8 * 4 * 16 float32 of each of 4 groups a device, there and back, twice.
    assert full["all-to-all", ("expert",)] == (4, 4 * (4 * 8 * 4 * 16 * 4))
    assert not any(kind == "all-gather" for kind, _ in full)
    assert sent(TRANSPOSITIONS) == full


@pytest.mark.parametrize("left_out", TRANSPOSITIONS)
def test_none_of_the_four_can_be_left_out(left_out, sent, full):
    assert sent([name for name in CONSTRAINTS if name != left_out]) != full


def test_inputs_and_weights_alone_gather_the_weights_of_experts_instead(sent, full):
    # Compiled so, every device computes all experts for its own tokens.
    alone = sent(())
    assert alone["all-gather", ("expert",)] == (2, 2 * (8 * 16 * 24 * 4))
    assert ("all-to-all", ("expert",)) not in alone
