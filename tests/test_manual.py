"""Programs that are manual in part, and the dispatch that is written as one."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp import axes, cli
from gshard_exp.errors import SettingError
from gshard_exp.moe.dispatch import EinsumDispatch, ScatterDispatch
from gshard_exp.moe.gather import GatherDispatch
from gshard_exp.sharding import hlo
from gshard_exp.sharding.annotate import constrain, partitioning
from gshard_exp.sharding.manual import manual
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules

MESH = MeshSpec(data=2, expert=2, model=2)
# Rows over data x expert, columns over model.
RULES = Rules(models.table(activation_embed="model"))
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def test_a_function_sees_its_part_along_manual_axes_and_the_whole_along_the_others():
    seen = []

    def local(x):
        seen.append(x.shape)
        return 2 * x - jnp.mean(x, axis=1, keepdims=True)  # over all columns, however split

    def program(x):
        x = constrain(x, axes.GROUP, axes.ACTIVATION_EMBED)
        names = (axes.GROUP, axes.ACTIVATION_EMBED)
        y = manual(local, {"x": (x, names)}, result=names, over=(axes.GROUP,))
        return constrain(y, *names)

    with partitioning(MESH.build(), RULES):
        got = jax.jit(program)(X)
    assert seen == [(2, 6)]
    np.testing.assert_allclose(got, 2 * X - X.mean(axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert {part.data.shape for part in got.addressable_shards} == {(2, 3)}


def test_without_over_every_axis_is_manual():
    seen = []

    def local(x):
        seen.append(x.shape)
        return jax.lax.psum(jnp.sum(x, axis=1), axes.MODEL)

    with partitioning(MESH.build(), RULES):
        names = (axes.GROUP, axes.ACTIVATION_EMBED)
        got = manual(local, {"x": (X, names)}, result=(axes.GROUP,))
    assert seen == [(2, 3)]
    np.testing.assert_allclose(got, X.sum(axis=1), rtol=1e-5)


def test_several_results_have_names_in_the_same_tree():
    def local(x):
        return {"rows": x + 1, "sums": (jnp.sum(x, axis=1), x * 2)}

    names = (axes.GROUP, None)
    with partitioning(MESH.build(), RULES):
        got = manual(
            local,
            {"x": (X, names)},
            result={"rows": names, "sums": ((axes.GROUP,), names)},
            over=(axes.GROUP,),
        )
    models.assert_trees_close(got, local(X), rtol=1e-6)


def test_gradients_go_through_scanned_and_recomputed_manual_functions():
    def program(x):
        def body(x, _):
            names = (axes.GROUP, axes.ACTIVATION_EMBED)
            return manual(jnp.sin, {"x": (x, names)}, result=names, over=(axes.GROUP,)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0])

    want = jax.grad(program)(X)
    with partitioning(MESH.build(), RULES):
        got = jax.jit(jax.grad(program))(X)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("over", [(axes.KV,), ()], ids=["replicated", "nothing"])
def test_where_nothing_is_manual_the_partitioner_splits_as_around_it(over):
    names = (axes.GROUP, axes.ACTIVATION_EMBED)
    seen = []

    def double(x):
        seen.append(x.shape)
        return x * 2

    def program(x):
        x = constrain(x, *names)
        y = manual(double, {"x": (x, names)}, result=names, over=over)
        return constrain(y, *names)

    with partitioning(MESH.build(), RULES):
        compiled = models.compiled(program, X)
    assert seen == [X.shape]
    assert hlo.parse(compiled.as_text()).collectives() == []


def test_outside_of_partitioning_it_is_the_plain_call():
    assert manual(lambda x: x, {"x": (X, ("any", "name"))}, result=("any", "name")) is X


@pytest.mark.parametrize(
    ("names", "result", "message"),
    [
        (("width", None), (None, None), r"an activation, tokens names the logical axis 'width'"),
        (("group", None), ("width", None), r"an activation, the result names .*'width'"),
        (("heads", "mlp"), (None, None), r"tokens .*'model' twice, by 'heads' and 'mlp'"),
        (("group", "group"), (None, None), r"tokens .*'data' twice"),
        (("group",), (None, None), r"tokens has 2 dimensions and 1 logical axes"),
    ],
)
def test_wrong_names_are_refused_with_the_argument(names, result, message):
    with (
        partitioning(MESH.build(), models.RULES),
        pytest.raises(SettingError, match=message),
    ):
        manual(lambda x: x, {"tokens": (np.ones((8, 8)), names)}, result=result)


def test_a_size_that_does_not_divide_is_refused():
    with (
        partitioning(MESH.build(), models.RULES),
        pytest.raises(SettingError, match=r"tokens has size 6 on 'group'"),
    ):
        manual(lambda x: x, {"tokens": (X.T, ("group", None))}, result=("group", None))


def test_names_need_rules():
    with (
        partitioning(MESH.build()),
        pytest.raises(SettingError, match=r"no rules .*Enter partitioning\(mesh, rules\)"),
    ):
        manual(lambda x: x, {"x": (X, ("group", None))}, result=("group", None))


# The dispatch. Against loops, on one device: test_dispatch.py.


def step(mesh, dispatch):
    model = models.model(
        repeats=(1, 1), sparse={"dispatch": dispatch, "train_capacity_factor": 0.5}
    )
    begin = models.start(model)
    return models.outcome(models.step_function(model, mesh, begin)(models.batch()))


@pytest.fixture(scope="module")
def one_device():
    return step(models.devices(), EinsumDispatch())


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_step_with_local_gathers_is_one_with_one_hot_einsums(sizes, one_device):
    models.assert_trees_close(step(MeshSpec(*sizes).build(), GatherDispatch()), one_device)


def test_a_layer_with_local_gathers_sends_what_the_others_send():
    sent = {}
    for dispatch in (EinsumDispatch(), ScatterDispatch(), GatherDispatch()):
        layer = models.moe(dispatch=dispatch)
        x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)
        how = {"valid": np.ones((16, 16), bool), "rows": np.arange(16), "deterministic": False}

        def loss(params, x, layer=layer, how=how):
            x = constrain(x, axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
            rngs = {"routing": jax.random.key(1)}
            return jnp.sum(jnp.square(layer.apply({"params": params}, x, rngs=rngs, **how)))

        with partitioning(MESH.build(), models.RULES):
            params = jax.eval_shape(
                lambda x, layer=layer, how=how: layer.init(
                    {"params": jax.random.key(0), "routing": jax.random.key(1)}, x, **how
                )["params"],
                x,
            )
            program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
        found = hlo.parse(program.as_text()).collectives()
        sent[type(dispatch).__name__] = sorted((c.kind, c.bytes, c.group, c.times) for c in found)
    assert "all-to-all" in {kind for kind, *_ in sent["GatherDispatch"]}
    assert sent["GatherDispatch"] == sent["ScatterDispatch"] == sent["EinsumDispatch"]


def test_a_gin_file_chooses_local_gathers(tmp_path, capsys):
    file = tmp_path / "local.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "from gshard_exp.moe import gather\n"
        "DISPATCH = @gather.GatherDispatch()\n"
    )
    small = "tests/gin/tiny.gin"
    assert cli.main(["show", f"--gin_file={small}", f"--gin_file={file}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    lines = [line.split() for line in shown if ".dispatch = " in line]
    assert lines and {line[2] for line in lines} == {"@gather.GatherDispatch()"}
