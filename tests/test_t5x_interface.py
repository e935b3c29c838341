"""What t5x drives of our module, held to its source (t5x/models.py) without t5x."""

import inspect
import sys

import flax
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import tiny_run
from flax.traverse_util import flatten_dict

from gshard_exp import cli
from gshard_exp.config import assemble
from gshard_exp.errors import SettingError
from gshard_exp.model.transformer import Transformer
from gshard_exp.t5x_runner import flags, run
from gshard_exp.train.experiment import Experiment

SPARSE = models.model(encoder="ds", decoder="s", repeats=(2, 3))
# t5x/contrib/moe/models.py, MOE_METRICS.
T5X_METRICS = (
    "auxiliary_loss",
    "router_z_loss",
    "fraction_tokens_left_behind",
    "expert_usage",
    "router_confidence",
)


def tokens(rows=4, length=8, seed=0):
    return np.random.default_rng(seed).integers(1, models.VOCAB, (rows, length), dtype=np.int32)


# The calls of t5x's EncoderDecoderModel: of `_compute_logits` and `get_initial_variables`, of
# `_compute_kv_cache`, of `predict_batch_with_aux`, and of `_compute_logits_from_slice`.
TRAINING = dict.fromkeys(
    (
        "encoder_segment_ids",
        "decoder_segment_ids",
        "encoder_positions",
        "decoder_positions",
        "decode",
        "enable_dropout",
    )
)
CACHE = dict.fromkeys(
    (
        "encoder_input_tokens",
        "decoder_input_tokens",
        "decoder_target_tokens",
        "decode",
        "enable_dropout",
    )
)
STEP = dict.fromkeys(("enable_dropout", "decode", "max_decode_length"))


@pytest.mark.parametrize(
    ("method", "positional", "keywords"),
    [
        (Transformer.__call__, 3, TRAINING),
        (Transformer.__call__, 0, CACHE),
        (Transformer.encode, 1, {"enable_dropout": None}),
        (Transformer.decode, 4, STEP),
    ],
)
def test_a_method_takes_what_t5x_gives(method, positional, keywords):
    inspect.signature(method).bind(None, *[None] * positional, **keywords)


def test_no_prefix_is_filled_in_at_once():
    """t5x asks for `prefill` before it gives a prompt; ours are decoded from their start."""
    assert "prefill" not in inspect.signature(Transformer.decode).parameters


def test_every_parameter_has_names_in_params_axes():
    variables = jax.eval_shape(
        lambda: SPARSE.module.init(
            jax.random.PRNGKey(0), *[jnp.ones((4, 8), jnp.int32)] * 3, enable_dropout=False
        )
    )
    assert set(variables) == {"params", "params_axes"}
    params = flatten_dict(variables["params"])
    axes = flatten_dict(flax.core.unfreeze(variables["params_axes"]))
    assert {(*path[:-1], f"{path[-1]}_axes") for path in params} == set(axes)


@pytest.fixture(scope="module")
def sown():
    params, _ = SPARSE.init(jax.random.key(0))

    def collect(params, enable_dropout, rngs):
        apply = SPARSE.module.apply
        ids = tokens(seed=1), tokens(seed=2), tokens(seed=3)
        how = {"enable_dropout": enable_dropout, "decode": False, "mutable": ["intermediates"]}
        return apply({"params": params}, *ids, rngs=rngs, **how)[1]["intermediates"]

    # As t5x gives keys: raw, and of dropout alone.
    rngs = {"dropout": jax.random.PRNGKey(1)}
    return {
        "evaluation": models.quick(lambda p: collect(p, False, None))(params),
        "training": models.quick(lambda p: collect(p, True, rngs))(params),
    }


@pytest.mark.parametrize("when", ["evaluation", "training"])
@pytest.mark.parametrize("metric", T5X_METRICS)
def test_the_metrics_of_t5x_survive_the_scan(sown, when, metric):
    """t5x takes all whose path ends in the name; a value for each repetition of each block."""
    found = {
        path: np.asarray(value)
        for path, value in flatten_dict(sown[when]).items()
        if path[-1] == metric
    }
    assert {path[0]: value.shape for path, value in found.items()} == {
        "encoder": (1, 2),
        "decoder": (1, 3),
    }
    if metric in ("fraction_tokens_left_behind", "expert_usage", "router_confidence"):
        for path, value in found.items():
            health = flatten_dict(sown[when])[(*path[:-1], "health")][0][metric]
            np.testing.assert_array_equal(value[0], health)


# --- the flag ------------------------------------------------------------------------------------
def test_without_t5x_one_line_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    argv = ("train", "--runner=t5x", "--gin_file=tests/gin/tiny.gin", f"--gin.MODEL_DIR={tmp_path}")
    status, _, err = command(*argv)
    assert status == 2
    assert err.count("\n") == 1 and 'README.md, "Under t5x"' in err
    assert not list(tmp_path.iterdir())


def test_what_t5x_imports_and_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(run, "load_tensorflow", lambda: None)
    monkeypatch.setitem(sys.modules, "gshard_exp.t5x_runner.drive", None)
    with pytest.raises(SettingError, match=r't5x_runner\.drive.*README\.md, "Under t5x"'):
        run.load_drive()


@pytest.mark.parametrize("verb", ["show", "inspect", "plan", "diff", "check", "invariance"])
def test_only_train_asks_for_a_runner(verb, capsys):
    given = {"diff": ["a.gin", "b.gin"], "check": []}.get(verb, ["--gin_file=a.gin"])
    given += ["--topology=cpu:8"] * (verb == "plan")
    cli._parse([verb, *given])
    with pytest.raises(SystemExit) as refused:
        cli._parse([verb, *given, f"--runner={flags.T5X}"])
    assert refused.value.code == 2
    assert "--runner" in capsys.readouterr().err


def test_no_setting_of_an_experiment_is_about_the_runner():
    assert not [name for name in Experiment.__dataclass_fields__ if "runner" in name]


@pytest.fixture
def as_if_installed(monkeypatch):
    """Refusals come before t5x is imported; without it they come first of all."""
    monkeypatch.setattr(run, "require_t5x", lambda: None)


@pytest.mark.parametrize(
    ("binding", "said"),
    [
        ("MAX_SKIPPED_STEPS=3", "max_skipped=3: t5x's loop does not count"),
        ("GRADIENT_DTYPE='bfloat16'", "gradient_dtype='bfloat16': t5x's step takes"),
    ],
)
def test_a_policy_that_t5x_has_not_is_refused(tmp_path, as_if_installed, binding, said):
    tree = tiny_run.experiment(tmp_path, binding)
    with pytest.raises(SettingError, match=said):
        run.train(tree)


def test_a_model_that_does_not_translate_is_refused(tmp_path, as_if_installed):
    files = ["experiments/vision_moe/vision_moe.gin"]
    tree = assemble(Experiment, files, [f"MODEL_DIR={tmp_path}"]).tree
    with pytest.raises(SettingError, match="this experiment has a ImageClassifier"):
        run.train(tree)
