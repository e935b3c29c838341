"""Loss by language."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.score.evaluate import LossByLanguage, summarise

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
    *table, said = text.splitlines()
    assert said.startswith("2 languages")
    assert len(table) > 3
    assert len({len(line) for line in table}) == 1  # columns stand under their heads


def test_the_number_of_rows_at_once_changes_no_average(dense, tmp_path):
    model, params = dense
    how = {"model": model, "mesh": MESH, "rules": models.RULES, "folder": tmp_path}
    one, _ = evaluator(batch_size=1)(params, **how)
    other, _ = evaluator(batch_size=4)(params, **how)
    assert one == pytest.approx(other, rel=1e-5)
