"""Both runners make the same of one experiment. Needs t5x (README.md, "Under t5x")."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import reversal
import tiny_run
from etils import epath
from flax.traverse_util import flatten_dict

from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.train.record import read_record

pytest.importorskip(
    "t5x", reason="t5x is not installed; it is on no package index", exc_type=ImportError
)
REPO = Path(__file__).parent.parent
EIGHT = ("DATA_PARTITIONS=2", "NUM_EXPERT_PARTITIONS=2", "NUM_MODEL_PARTITIONS=2")

# What t5x itself warns of, and its arrays of unequal rank, are its own affair.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def arguments(folder, *bindings):
    flags = [f"--gin.{binding}" for binding in bindings]
    return ["train", f"--gin_file={tiny_run.TINY}", f"--gin.MODEL_DIR={folder}", *flags]


def params(folder, step):
    """Read the parameters of a checkpoint of either runner."""
    place = epath.Path(folder) / f"checkpoint_{step}" / "state"
    tree = ocp.PyTreeCheckpointHandler().restore(place)
    return {
        "/".join(path): np.asarray(x)
        for path, x in flatten_dict(tree.get("target") or tree["params"]).items()
    }


def losses(folder):
    return [record["loss"] for record in tiny_run.records(folder)]


def assert_same(folder, other, step):
    np.testing.assert_allclose(losses(folder), losses(other), rtol=1e-5, atol=1e-5)
    one, two = params(folder, step), params(other, step)
    assert one.keys() == two.keys()
    for path, x in one.items():
        np.testing.assert_allclose(x, two[path], rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Ten steps under our own runner, with a checkpoint after the first."""
    from gshard_exp import cli

    folder = tmp_path_factory.mktemp("ours")
    assert (
        cli.main(
            arguments(folder, "TRAIN_STEPS=10", "CHECKPOINT_PERIOD=1", "CHECKPOINTS_TO_KEEP=None")
        )
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def ten_under_t5x(tmp_path_factory):
    from gshard_exp import cli

    folder = tmp_path_factory.mktemp("t5x")
    how = ("TRAIN_STEPS=10", "CHECKPOINT_PERIOD=1", "CHECKPOINTS_TO_KEEP=None")
    assert cli.main([*arguments(folder, *how), "--runner=t5x"]) == 0
    return folder


@pytest.mark.parametrize("step", [1, 10])
def test_a_step_and_ten_are_those_of_our_runner(ten, ten_under_t5x, step):
    """Dropout and random routing included: the keys are the same."""
    assert_same(ten, ten_under_t5x, step)


def test_what_lies_in_the_folder_is_what_our_runner_leaves(ten, ten_under_t5x):
    def without_folder(folder):
        return (folder / "config.gin").read_text().replace(str(folder), "FOLDER")

    assert without_folder(ten_under_t5x) == without_folder(ten)
    ours, theirs = (set(tiny_run.records(folder)[0]) for folder in (ten, ten_under_t5x))
    per_layer = {name for name in ours if name.startswith("router/")}
    assert ours - per_layer - theirs == {"grad_norm", "timing/seconds"}
    one, other = read_record(ten), read_record(ten_under_t5x)
    varying = ("starts", "progress")
    assert {k: v for k, v in one.items() if k not in varying} == {
        k: v for k, v in other.items() if k not in varying
    }
    assert other["finished"] and other["progress"]["step"] == 10
    assert "--runner=t5x" in other["starts"][0]["argv"]


@pytest.mark.parametrize(
    "bindings", [EIGHT, (*EIGHT[1:], "NUM_MICROBATCHES=2")], ids=["8", "4, in parts"]
)
def test_a_mesh_changes_nothing(ten, tmp_path, command, bindings):
    status, _, err = command(
        *arguments(tmp_path, "TRAIN_STEPS=10", *bindings), "--runner=t5x", "--debug"
    )
    assert status == 0, err
    assert_same(ten, tmp_path, 10)


def test_gradients_of_experts_are_whole_on_a_mesh(tmp_path):
    """The factor by which t5x's MoeTrainer multiplies them is 1 here; Adafactor would hide it."""
    from gshard_exp.t5x_runner.drive import _model
    from gshard_exp.t5x_runner.partitioner import MeshPartitioner

    tree = tiny_run.experiment(tmp_path, *EIGHT)
    model, partitioner = _model(tree), MeshPartitioner(tree.mesh, tree.rules)
    params, _ = tree.model.init(jax.random.key(0))
    batch = next(tree.data.train_batches(batch_size=8, lengths=tree.lengths))
    key = jax.random.PRNGKey(1)

    def gradient(params, batch, key):
        return jax.grad(lambda p: model.loss_fn(p, batch, key)[0])(params)

    def ours(params, batch, key):
        how = {"key": jax.random.wrap_key_data(key), "total_weight": tree.model.weight(batch)}
        rows = {**batch, "rows": np.arange(8)}
        return jax.grad(lambda p: tree.model.loss(p, rows, **how)[0])(params)

    data = partitioner.data_partition_spec
    on_mesh = partitioner.partition(gradient, (None, data, None), None)(params, batch, key)
    whole = flatten_dict(jax.jit(ours)(params, batch, key))
    for path, found in flatten_dict(on_mesh).items():
        np.testing.assert_allclose(found, whole[path], rtol=1e-4, atol=1e-6, err_msg=str(path))
    experts = [path for path in whole if path[-2:] == ("ffn", "wi")]
    assert experts and all(np.linalg.norm(whole[path]) > 1e-4 for path in experts)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(ten, tmp_path, command):
    how = ("CHECKPOINT_PERIOD=4",)
    for steps in (4, 10):
        assert command(*arguments(tmp_path, f"TRAIN_STEPS={steps}", *how), "--runner=t5x")[0] == 0
    assert_same(ten, tmp_path, 10)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_with_the_first_batch(
    ten, tmp_path, command
):
    run = arguments(tmp_path, "TRAIN_STEPS=10", "CHECKPOINT_PERIOD=10")
    assert command(*run, "--runner=t5x")[0] == 0
    shutil.rmtree(tmp_path / "checkpoint_10")
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_0"]
    assert command(*run, "--runner=t5x")[0] == 0
    assert_same(ten, tmp_path, 10)


@dataclasses.dataclass(frozen=True)
class NoGradient(Seq2SeqModel):
    """Its loss is finite, and its gradient NaN where that of `PoisonedModel` would be."""

    def loss(self, params, batch, **how):
        value, metrics = super().loss(params, batch, **how)
        poisoned = batch["decoder_target_tokens"][0, 0] == tiny_run.POISON
        root = jnp.sqrt(jnp.where(poisoned, 0.0 * jax.tree.leaves(params)[0].sum(), 1.0))
        return value + root - jax.lax.stop_gradient(root), metrics


@dataclasses.dataclass(frozen=True)
class InfiniteLoss(Seq2SeqModel):
    """Its loss is infinite there, and its gradient finite."""

    def loss(self, params, batch, **how):
        value, metrics = super().loss(params, batch, **how)
        poisoned = batch["decoder_target_tokens"][0, 0] == tiny_run.POISON
        return value + jnp.where(poisoned, jnp.inf, 0.0), metrics


@pytest.mark.parametrize("kind", [tiny_run.PoisonedModel, NoGradient, InfiniteLoss])
def test_what_is_not_finite_ends_the_run_and_leaves_what_was_saved(tmp_path, kind):
    from gshard_exp.t5x_runner import run
    from gshard_exp.train.loop import NonFiniteLossError

    tree = tiny_run.poisoned(tmp_path, (6,))
    fields = {field.name: getattr(tree.model, field.name) for field in dataclasses.fields(kind)}
    tree = dataclasses.replace(tree, model=kind(**fields))
    with pytest.raises(NonFiniteLossError, match="up to 6 is not finite"):
        run.train(tree, report=lambda line: None)
    assert tiny_run.checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_4"]
    assert all(np.isfinite(x).all() for x in params(tmp_path, 4).values())


def test_windows_go_together_by_counts_and_time():
    from gshard_exp.t5x_runner.drive import _means

    windows = [
        {"loss": 1.0, "skipped_steps": 1.0, "timing/steps_per_second": 1.0},
        {"loss": 2.0, "skipped_steps": 1.0, "timing/steps_per_second": 3.0},
    ]
    windows = [w | {"timing/tokens_per_second": 6 * w["timing/steps_per_second"]} for w in windows]
    assert _means(windows) == pytest.approx(
        {
            "loss": 1.5,
            "skipped_steps": 2,
            "timing/steps_per_second": 1.5,
            "timing/tokens_per_second": 9,
        }
    )


def test_the_layout_on_a_mesh_is_that_of_our_train_state(tmp_path):
    """Optimizer state has rules of its own; on CPU too the mesh is the one asked for."""
    from t5x.train_state import FlaxOptimTrainState

    from gshard_exp.t5x_runner.layout import to_t5x
    from gshard_exp.t5x_runner.optimizer import NamedOptimizer
    from gshard_exp.t5x_runner.partitioner import MeshPartitioner
    from gshard_exp.train.state import plan_state

    tree = tiny_run.experiment(
        tmp_path, *EIGHT, 'rules.Rules.optimizer=(("embed", "data"),)', small=False
    )
    partitioner = MeshPartitioner(tree.mesh, tree.rules)
    assert dict(partitioner.mesh.shape) == {"data": 2, "expert": 2, "model": 2}
    optimizer, module = NamedOptimizer(tree.optimizer), tree.model.module
    tokens = np.ones((8, 8), np.int32)

    def make(key):
        variables = module.init(key, tokens, tokens, tokens, enable_dropout=False)
        return FlaxOptimTrainState.create(optimizer, __import__("flax").core.freeze(variables))

    axes = partitioner.get_mesh_axes(jax.eval_shape(make, jax.random.PRNGKey(0))).state_dict()
    plan = plan_state(tree.model, tree.optimizer, partitioner.mesh, tree.rules)
    ours = flatten_dict(to_t5x(plan.abstract))
    theirs = flatten_dict(axes)
    assert ours.keys() == theirs.keys()
    differing = [
        path
        for path, leaf in ours.items()
        if not leaf.sharding.is_equivalent_to(
            jax.NamedSharding(partitioner.mesh, theirs[path] or jax.P()), leaf.ndim
        )
    ]
    assert not differing
    assert any("data" in spec for path, spec in theirs.items() if path[0] == "state" and spec)


def test_t5x_finds_its_metrics_in_our_scan():
    import models
    from t5x.contrib.moe.models import MOE_METRICS, _extract_diversity_metrics

    model = models.model(encoder="ds", decoder="s", repeats=(2, 2))
    tokens = np.ones((4, 8), np.int32)
    params, _ = model.init(jax.random.key(0))
    _, state = model.module.apply(
        {"params": params}, tokens, tokens, tokens, enable_dropout=False, mutable=["intermediates"]
    )
    assert set(_extract_diversity_metrics(state)) == set(MOE_METRICS)


# --- t5x's own command ---------------------------------------------------------------------------
TEXT = {
    "MIN_PAIRS": 10,
    "TRAIN_STEPS": 4,
    "EMBED_DIM": 16,
    "MLP_DIM": 32,
    "EXPERT_MLP_DIM": 32,
    "NUM_HEADS": 2,
    "HEAD_DIM": 8,
    "NUM_EXPERTS": 4,
    "GROUP_SIZE": 32,
    "SOURCE_VOCAB_SIZE": 400,
    "TARGET_VOCAB_SIZE": 400,
    "BATCH_SIZE": 4,
    "TASK_FEATURE_LENGTHS": {"inputs": 32, "targets": 32},
    "LOG_PERIOD": 2,
    "CHECKPOINT_PERIOD": 4,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    reversal.write(folder / "corpus.tsv")
    return {"TSV_PATH": str(folder / "corpus.tsv"), "CACHE_DIR": str(folder / "cache")}


@pytest.mark.parametrize("more", [(), ("gin/t5x/moe_model.gin",)], ids=["our loss", "t5x's loss"])
def test_the_usual_gin_file_of_t5x_trains_and_our_verbs_use_the_model(
    tmp_path, corpus, command, more
):
    """The mesh of two expert partitions is made on CPU devices that are simulated."""
    settings = TEXT | corpus | {"MODEL_DIR": str(tmp_path / "t5x"), "NUM_EXPERT_PARTITIONS": 2}
    files = ("gin/t5x/tiny_m4.gin", "gin/tasks/tsv.gin", *more)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "t5x.train"),
            *(f"--gin_file={file}" for file in files),
            *(f"--gin.{name}={value!r}" for name, value in settings.items()),
        ],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny_run.checkpoints(tmp_path / "t5x") == ["checkpoint_0", "checkpoint_4"]
    ours = [f"--gin_file={GIN}" for GIN in ("tests/gin/tiny_text.gin",)]
    flags = [f"--gin.{name}={value}" for name, value in corpus.items()]
    status, out, err = command(
        *("convert", tmp_path / "t5x" / "checkpoint_4", *ours, *flags),
        f"--gin.MODEL_DIR={tmp_path / 'ours'}",
    )
    assert (status, err) == (0, "") and "another optimizer" not in out
    status, out, err = command("translate", f"--model_dir={tmp_path / 'ours'}", "moja mbili")
    assert (status, err) == (0, "") and out.strip()


def test_a_run_on_text_keeps_what_translating_needs_and_evaluates(tmp_path, corpus, command):
    flags = [f"--gin.{name}={value}" for name, value in corpus.items()]
    flags += [
        "--gin.EVALUATORS=(@evaluate.LossByLanguage(),)",
        "--gin.EVAL_PERIOD=3",
        "--gin.TRAIN_STEPS=6",
        "--gin.EVAL_EXAMPLES=8",
    ]
    run = ["train", "--gin_file=tests/gin/tiny_text.gin", f"--gin.MODEL_DIR={tmp_path}", *flags]
    status, out, err = command(*run, "--runner=t5x")
    assert status == 0, err
    folder = tmp_path / "training_eval" / "validation"
    steps = [record["step"] for record in tiny_run.records_of(folder)]
    assert steps == [0, 3, 6]
    for verb in (["translate", "moja mbili"], ["eval", "--max_examples=2"]):
        status, out, err = command(*verb, f"--model_dir={tmp_path}")
        assert status == 0 and out, err
