"""Evaluation by language and greedy decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.errors import SettingError
from gshard_exp.score.evaluate import LossByLanguage, summarise
from gshard_exp.score.greedy import END, GreedySamples, greedy_decode

MESH = models.MeshSpec().build()
LENGTHS = {"inputs": 6, "targets": 6}


@dataclasses.dataclass(frozen=True)
class ToyTasks:
    """Two languages with examples, one without."""

    codes: tuple[str, ...] = ("de", "sw", "xx")

    def token_ids(self, split, language):
        rng = np.random.default_rng(len(language + split))
        sizes = {"de": (3, 5), "sw": (2,), "xx": ()}[language]
        return [
            (rng.integers(2, 9, n, dtype=np.int32), rng.integers(2, 9, n, dtype=np.int32))
            for n in sizes
        ]


def evaluator(**how):
    return LossByLanguage(ToyTasks(), LENGTHS, **({"batch_size": 4, "every_steps": 1} | how))


@pytest.fixture(scope="module")
def dense():
    model = models.model(encoder="d", decoder="d")
    return model, models.run(lambda key: model.init(key)[0], jax.random.key(0))


@pytest.fixture(scope="module")
def sparse():
    model = models.model(encoder="d", decoder="s")
    return model, models.run(lambda key: model.init(key)[0], jax.random.key(0))


def test_averages_by_token_language_and_group_by_hand():
    scalars = summarise(
        ("de", "fr", "sw", "xx"),
        {
            "cross_ent_loss": np.array([8.0, 3.0, 4.0, 0.0]),
            "correct": np.array([1.0, 1.0, 0.0, 0.0]),
            "target_tokens": np.array([4.0, 1.0, 2.0, 0.0]),
        },
    )
    assert scalars["cross_ent_loss"] == 15 / 7
    assert scalars["cross_ent_loss/de"] == 2
    assert scalars["cross_ent_loss/macro"] == (2 + 3 + 2) / 3
    assert scalars["cross_ent_loss/high"] == 2.5  # de and fr
    assert scalars["cross_ent_loss/middle"] == 2
    assert scalars["accuracy/sw"] == 0
    assert "cross_ent_loss/xx" not in scalars and "cross_ent_loss/low" not in scalars


def test_evaluation_equals_scoring_each_sentence_alone(dense, tmp_path):
    model, params = dense
    scalars, text = evaluator()(params, model=model, mesh=MESH, rules=models.RULES, folder=tmp_path)
    tasks, total, tokens = ToyTasks(), 0.0, 0
    for language in tasks.codes:
        for source, target in tasks.token_ids("validation", language):
            shifted = jnp.asarray([[0, *target[:-1]]])
            logits = model.module.apply(
                {"params": params}, source[None], shifted, target[None], enable_dropout=False
            )
            log_probs = jax.nn.log_softmax(logits[0])
            total -= float(jnp.sum(log_probs[np.arange(len(target)), target]))
            tokens += len(target)
    np.testing.assert_allclose(scalars["cross_ent_loss"], total / tokens, rtol=1e-5)
    assert scalars["target_tokens"] == tokens == 10
    assert "2 languages" in text


def test_the_number_of_rows_at_once_changes_no_average(dense, tmp_path):
    model, params = dense
    how = {"model": model, "mesh": MESH, "rules": models.RULES, "folder": tmp_path}
    one, _ = evaluator(batch_size=1)(params, **how)
    other, _ = evaluator(batch_size=4)(params, **how)
    assert one == pytest.approx(other, rel=1e-5)


def test_greedy_output_is_the_likeliest_piece_given_those_before(dense):
    model, params = dense
    source = jnp.asarray([[3, 4, 5, END, 0, 0]])
    (output,) = np.asarray(greedy_decode(model, params, source, max_length=5))
    for length in range(1, len(output) + 1):
        target = jnp.asarray([output[:length]])
        shifted = jnp.asarray([[0, *output[: length - 1]]])
        # All positions are asked for, whatever piece was chosen.
        logits = model.module.apply(
            {"params": params},
            source,
            shifted,
            target,
            decoder_segment_ids=jnp.ones_like(target),
            enable_dropout=False,
        )
        assert int(jnp.argmax(logits[0, -1])) == output[length - 1]
        if output[length - 1] == END:
            break


def test_empty_rows_change_no_greedy_output(sparse):
    """Rows without a source are padding: they take no expert's slots."""
    model, params = sparse
    sources = np.random.default_rng(0).integers(2, 9, (4, 6)).astype(np.int32)
    padded = np.concatenate([np.zeros((12, 6), np.int32), sources])
    alone = greedy_decode(model, params, jnp.asarray(sources), max_length=6)
    among = greedy_decode(model, params, jnp.asarray(padded), max_length=6)
    assert not np.asarray(among[:12]).any()
    np.testing.assert_array_equal(among[12:], alone)


def test_positions_that_are_no_tokens_are_padding_to_the_router(sparse, monkeypatch):
    model, params = sparse
    seen = []

    def record(self, encoded, segments, shifted, known, **how):
        seen.append((shifted, known))
        return jnp.zeros((*shifted.shape, 9)).at[:, :, END].set(1.0)

    monkeypatch.setattr(type(model.module), "decode", record)
    with jax.disable_jit():
        greedy_decode(model, params, jnp.asarray([[3, END], [0, 0]]), max_length=3)
    assert [np.asarray(known).tolist() for _, known in seen] == [[[1, 0, 0], [0, 0, 0]]]


def test_samples_say_so_when_there_is_no_sentence_to_show(dense, tmp_path, monkeypatch):
    model, params = dense
    monkeypatch.setattr(ToyTasks, "models", {"inputs": "", "targets": ""}, raising=False)
    monkeypatch.setattr(ToyTasks, "token_ids", lambda self, split, language: [])
    samples = GreedySamples(ToyTasks(), LENGTHS, batch_size=4, every_steps=1)
    scalars, text = samples(params, model=model, mesh=MESH, rules=models.RULES, folder=tmp_path)
    assert scalars == {} and text.startswith("no sentence of 5 to 14 pieces")


@pytest.mark.parametrize(
    "how", [{"batch_size": 0}, {"every_steps": 0}, {"split": "dev"}, {"batch_size": 2}]
)
def test_settings_without_meaning_are_refused(how):
    settings = {"batch_size": 4, "every_steps": 1} | how
    with pytest.raises(SettingError):
        GreedySamples(ToyTasks(), LENGTHS, **settings)
