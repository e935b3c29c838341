"""Beam search: worked by hand, against a plain reference, and whatever stands beside a sentence."""

import dataclasses
import functools

import beam_oracle
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from gshard_exp.data.batches import to_mesh
from gshard_exp.errors import SettingError
from gshard_exp.model.incremental import StepDecoder
from gshard_exp.model.transformer import Transformer
from gshard_exp.model.unrolled import unroll, unroll_params
from gshard_exp.score.beam import BeamSearch, length_penalty, search
from gshard_exp.score.flat_beam import FlatBeamSearch
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.mesh import MeshSpec

pytestmark = pytest.mark.usefixtures("quick_compilation")
LONGEST = 8
METHODS = (BeamSearch, FlatBeamSearch)


@functools.cache
def fresh():
    """A sparse model and random parameters of it."""
    model = models.model(encoder="s", decoder="s", repeats=(1, 2))
    return model, models.run(lambda key: model.init(key)[0], jax.random.key(3))


def sources(rows=4, length=6, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, models.VOCAB, (rows, length)).astype(np.int32)
    for row, end in enumerate(rng.integers(2, length, rows)):
        tokens[row, end], tokens[row, end + 1 :] = 1, 0
    return tokens


@functools.cache
def compiled(method):
    model, params = fresh()

    def run(params, inputs):
        return method(StepDecoder.of(model, params), inputs, max_length=LONGEST)

    function = models.quick(run)
    return lambda inputs: jax.device_get(function(params, jnp.asarray(inputs)))


def whole_sentences(model, params, inputs, shifted, targets):
    def run(params):
        return model.module.apply(
            {"params": params}, inputs, shifted, targets, enable_dropout=False
        )

    return models.quick(run)(params)


def listed(found, row):
    """The hypotheses of a row as the reference writes them."""
    listed = []
    for j in range(found.tokens.shape[1]):
        if np.isfinite(found.scores[row, j]):
            pieces = tuple(int(piece) for piece in found.tokens[row, j] if piece)
            listed.append((found.scores[row, j], found.log_probs[row, j], pieces))
    return listed


# --- by hand -------------------------------------------------------------------------------------
# Pieces: 0 pad, 1 end, 2 a, 3 b. After nothing: a .6, b .3, end .1. After a: end .5, a .25, b .25.
# After b: end .9, a .05, b .05. Of two pieces, (3 + 4)/6 = 7/6 is the penalty at alpha 1.
TABLE = np.log(
    np.array(
        [[1e-9, 0.1, 0.6, 0.3], [1, 1, 1, 1], [1e-9, 0.5, 0.25, 0.25], [1e-9, 0.9, 0.05, 0.05]]
    )
)


def by_hand(settings, longest, calls=None):
    def feed(memory, tokens, alive, position):
        if calls is not None:
            calls.append(int(position))
        return jnp.asarray(TABLE, jnp.float32)[tokens], memory

    with jax.disable_jit(calls is not None):
        return search(settings, jnp.array([True]), longest, (), feed, lambda memory, *_: memory)


def test_a_search_of_two_by_hand():
    found = by_hand(BeamSearch(beam_size=2, alpha=0.0), 3)
    # a end: .6 * .5 = .30; b end: .3 * .9 = .27; end: .1; a a end: .6 * .25 * .5 = .075
    np.testing.assert_array_equal(found.tokens[0], [[2, 1, 0], [3, 1, 0]])
    np.testing.assert_allclose(found.log_probs[0], np.log([0.30, 0.27]), rtol=1e-5)
    assert found.ended.all()


def test_the_length_penalty_lets_a_longer_hypothesis_win_by_hand():
    # After two pieces a a and a b go on, .15 each. "a b end" has .15 * .9 = .135, log -2.00, over
    # (8/6)^20 = 315; "a a end" .075 and -2.59; "a end", log .3 = -1.20, over (7/6)^20 = 21.8.
    found = by_hand(BeamSearch(beam_size=2, alpha=20.0), 3)
    np.testing.assert_array_equal(found.tokens[0], [[2, 3, 1], [2, 2, 1]])
    np.testing.assert_allclose(found.scores[0, 0], np.log(0.135) / (8 / 6) ** 20, rtol=1e-4)
    assert float(length_penalty(1, 0.7)) == 1.0


def test_a_search_stops_when_nothing_could_become_better():
    calls = []
    by_hand(BeamSearch(beam_size=2, alpha=0.0), 50, calls)
    # After two pieces .30 and .27 have ended; the best that goes on has .15, and can only fall.
    assert calls == [0, 1]


def test_a_greedy_search_stops_at_its_first_end():
    calls = []
    found = by_hand(BeamSearch(beam_size=1, alpha=5.0), 50, calls)
    assert calls == [0, 1] and found.tokens[0, 0, :3].tolist() == [2, 1, 0]


def test_what_is_cut_off_stands_after_what_ended():
    found = by_hand(BeamSearch(beam_size=3, alpha=0.0), 1)
    assert found.tokens[0, :, 0].tolist() == [1, 2, 3]  # though "end" has the least, .1
    assert found.ended[0].tolist() == [True, False, False]


def test_settings_without_meaning_are_refused():
    for how in ({"beam_size": 0}, {"alpha": -0.1}, {"max_length": 0}):
        with pytest.raises(SettingError):
            BeamSearch(**how)


# --- against the reference -----------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("beams", "alpha"), [(1, 0.6), (4, 1.0)])
def test_hypotheses_are_those_of_the_uncached_reference(method, beams, alpha):
    model, params = fresh()
    found = compiled(method(beams, alpha))(sources())
    scorer, ends = beam_oracle.Scorer(model, params, LONGEST), []
    for row, source in enumerate(sources()):
        expected = beam_oracle.beam_search(
            scorer, source, beams=beams, alpha=alpha, longest=LONGEST
        )
        got = listed(found, row)
        assert [pieces for *_, pieces in got] == [pieces for _, _, pieces, _ in expected]
        for (score, log_prob, _), (wanted, wanted_log_prob, _, _) in zip(
            got, expected, strict=True
        ):
            np.testing.assert_allclose(score, wanted, rtol=1e-5)
            np.testing.assert_allclose(log_prob, wanted_log_prob, rtol=1e-5)
        ends += [ended for *_, ended in expected]
    if beams > 1:
        assert True in ends and False in ends  # both kinds were compared


def test_teacher_forcing_steps_and_search_give_a_hypothesis_the_same_score():
    model, params = fresh()
    inputs = sources()
    found = compiled(BeamSearch(4, 0.6))(inputs)
    targets = np.asarray(found.tokens[:, 0])
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    logits = model.module.apply({"params": params}, inputs, shifted, targets, enable_dropout=False)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    forced = np.sum(np.where(targets > 0, picked, 0), axis=1)
    np.testing.assert_allclose(forced, found.log_probs[:, 0], rtol=1e-5)

    def step_by_step(params, inputs):
        decoder = StepDecoder.of(model, params)
        source = decoder.encode(inputs)

        def step(cache, position):
            tokens = jax.lax.dynamic_slice_in_dim(jnp.asarray(shifted), position, 1, axis=1)
            positions = jnp.full(tokens.shape, position)
            valid = jnp.ones(tokens.shape, bool)
            logits, cache = decoder.step(cache, source, tokens, positions=positions, valid=valid)
            return cache, jax.nn.log_softmax(logits[:, 0])

        cache = decoder.start(source, rows=len(inputs), slots=LONGEST)
        return jax.lax.scan(step, cache, jnp.arange(LONGEST))[1]

    log_probs_LBV = np.asarray(models.quick(step_by_step)(params, inputs))
    picked = np.take_along_axis(log_probs_LBV, targets.T[..., None], axis=-1)[..., 0]
    stepwise = np.sum(np.where(targets.T > 0, picked, 0), axis=0)
    np.testing.assert_allclose(stepwise, forced, rtol=1e-5)


# --- neighbours ----------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_a_sentence_is_translated_alike_alone_and_among_any_neighbours(method):
    """A sparse model whose experts would overflow at the paper's capacity."""
    run = compiled(method(4, 0.6))
    inputs = sources()
    together = run(inputs)
    for row in range(len(inputs)):
        alone = run(inputs[row : row + 1])
        among = np.pad(sources(rows=6, seed=9), ((0, 0), (0, 5)))
        among[2], among[4] = np.pad(inputs[row], (0, 5)), 0
        for found, place in ((alone, 0), (run(among), 2)):
            np.testing.assert_array_equal(found.tokens[place], together.tokens[row])
            np.testing.assert_allclose(found.scores[place], together.scores[row], rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_padding_has_no_hypothesis(method):
    inputs = sources()
    inputs[1] = 0
    found = compiled(method(4, 0.6))(inputs)
    assert np.all(found.scores[1] == -np.inf) and not found.tokens[1].any()
    assert np.isfinite(found.scores[0]).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_mesh_changes_no_hypothesis(method):
    model, params = fresh()
    inputs, settings = sources(rows=8), method(4, 0.6)
    mesh = MeshSpec(data=2, expert=2, model=2).build()

    def run(params, inputs):
        with partitioning(mesh, models.RULES):
            return settings(StepDecoder.of(model, params), inputs, max_length=LONGEST)

    placed = to_mesh({"inputs": inputs}, mesh, models.RULES)["inputs"]
    found = models.run(run, params, placed)
    expected = compiled(settings)(inputs)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)


TOKENS = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")


# --- the cache -----------------------------------------------------------------------------------
def test_the_cache_through_the_scan_gives_the_logits_of_whole_sentences():
    """As t5x drives it: the first call sees no real source, and positions go on by themselves."""
    model, params = fresh()
    inputs = sources()
    targets = np.random.default_rng(1).integers(2, models.VOCAB, (4, LONGEST)).astype(np.int32)
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    module = model.module
    whole = whole_sentences(model, params, inputs, shifted, targets)
    how = {"decode": True, "enable_dropout": False, "mutable": ["cache"]}
    encode = {"method": Transformer.encode, "enable_dropout": False}
    encoded = models.quick(lambda p: module.apply({"params": p}, inputs, **encode))(params)

    def first(params):
        ones = {name: jnp.ones_like(targets) for name in TOKENS[1:]}
        ones["encoder_input_tokens"] = jnp.ones_like(inputs)
        return module.apply({"params": params}, **ones, **how)[1]["cache"]

    def step(cache, tokens):
        logits, variables = module.apply(
            {"params": params, "cache": cache},
            encoded,
            inputs,
            tokens,
            tokens,
            max_decode_length=LONGEST,
            method=Transformer.decode,
            **how,
        )
        return logits, variables["cache"]

    step = models.quick(step)
    cache = models.quick(first)(params)
    assert module.scan_layers  # so t5x knows that a cache has an axis before its rows
    for position in range(LONGEST):
        logits, cache = step(cache, shifted[:, position : position + 1])
        np.testing.assert_allclose(logits[:, 0], whole[:, position], rtol=2e-4, atol=2e-5)
    index = cache["decoder"]["pattern_0"]["attention"]["cache_index"]
    assert index.tolist() == [LONGEST, LONGEST]  # one for each repetition


def test_keys_of_the_source_are_computed_once():
    model, params = fresh()

    def run(params, inputs, scale):
        decoder = StepDecoder.of(model, params)
        source = decoder.encode(inputs)
        cache = decoder.start(source, rows=4, slots=4)
        later = dataclasses.replace(source, encoded=source.encoded * scale)
        tokens = jnp.zeros((4, 1), jnp.int32)
        valid = jnp.ones((4, 1), bool)
        return decoder.step(cache, later, tokens, positions=tokens, valid=valid)[0]

    run = models.quick(run)
    expected, got = (run(params, jnp.asarray(sources()), scale) for scale in (1.0, jnp.nan))
    np.testing.assert_array_equal(got, expected)


def test_an_unrolled_decoder_computes_what_the_stack_does():
    model, params = fresh()
    inputs = sources()
    expected = whole_sentences(model, params, inputs, inputs, inputs)
    unrolled = dataclasses.replace(model, module=unroll(model.module))
    parts = unroll_params(model.module.decoder, params)
    got = whole_sentences(unrolled, parts, inputs, inputs, inputs)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_decoding_has_a_capacity_of_its_own():
    """With one slot an expert, and everybody's token in one group, neighbours matter."""
    tight = {"decode_capacity_factor": 0.01, "group_size": 64}
    model = models.model(encoder="d", decoder="s", sparse=tight)
    params = models.run(lambda key: model.init(key)[0], jax.random.key(3))
    inputs = sources()

    def run(model):
        decoder = StepDecoder.of(model, params)
        return BeamSearch(2, 0.6)(decoder, jnp.asarray(inputs), max_length=4)

    limited, dropless = models.run(lambda: run(model)), models.run(lambda: run(model.dropless()))
    assert not np.allclose(limited.log_probs, dropless.log_probs, rtol=1e-3)
