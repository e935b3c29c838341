"""Fitted power laws: known laws come back, with honest intervals; too few points are refused."""

import numpy as np
import pytest

from gshard_exp.sweep.fits import TooFewPoints, fit

TOKENS = np.geomspace(1e5, 1e9, 40)
SIZES = np.geomspace(1e5, 1e7, 5)


def noise(count, seed=0, scale=0.01):
    return np.exp(scale * np.random.default_rng(seed).normal(size=count))


def test_a_law_without_asymptote_comes_back_exactly():
    found = fit({"tokens": TOKENS}, 300 * TOKENS**-0.4, asymptote=False)
    np.testing.assert_allclose(found.law.exponents, [0.4], rtol=1e-10)
    np.testing.assert_allclose(found.law.coefficients, [300], rtol=1e-9)
    assert found.law.asymptote is None
    assert found.error < 1e-12 and found.held_out < 1e-12


def test_a_law_with_asymptote_comes_back():
    found = fit({"tokens": TOKENS}, 1.7 + 300 * TOKENS**-0.4, asymptote=True)
    np.testing.assert_allclose(found.law.exponents, [0.4], rtol=1e-4)
    np.testing.assert_allclose(found.law.asymptote, 1.7, rtol=1e-4)


def test_a_law_of_parameters_and_tokens_comes_back():
    sizes, tokens = np.repeat(SIZES, 40), np.tile(TOKENS, 5)
    loss = 1.5 + 40 * sizes**-0.3 + 300 * tokens**-0.35
    found = fit({"active": sizes, "tokens": tokens}, loss, asymptote=True, groups=list(sizes))
    np.testing.assert_allclose(found.law.exponents, [0.3, 0.35], rtol=1e-3)
    np.testing.assert_allclose(found.law.asymptote, 1.5, rtol=1e-3)
    assert found.law.names == ("active", "tokens")
    at = np.array([[3e5, 1e10]])
    np.testing.assert_allclose(found.law(at), 1.5 + 40 * 3e5**-0.3 + 300 * 1e10**-0.35, rtol=1e-3)


def test_more_loss_with_more_of_a_variable_is_a_negative_exponent():
    found = fit({"x": TOKENS}, 2 * TOKENS**0.1, asymptote=False)
    np.testing.assert_allclose(found.law.exponents, [-0.1], rtol=1e-9)


@pytest.mark.parametrize("asymptote", [False, True])
def test_intervals_hold_the_truth_about_as_often_as_they_say(asymptote):
    """40 draws: a 95 % interval misses some 2 of them, and hardly ever more than 8."""
    truth = (2.0 if asymptote else 0.0) + 300 * TOKENS**-0.4
    held = 0
    for seed in range(40):
        loss = truth * noise(40, seed)
        found = fit({"tokens": TOKENS}, loss, asymptote=asymptote, resamples=60, seed=seed)
        low, high = found.intervals["tokens"]
        held += low <= 0.4 <= high
    assert 32 <= held < 40


def test_noise_widens_intervals_and_the_same_seed_gives_the_same():
    quiet = fit({"tokens": TOKENS}, 300 * TOKENS**-0.4 * noise(40, scale=0.002), asymptote=False)
    loud = fit({"tokens": TOKENS}, 300 * TOKENS**-0.4 * noise(40, scale=0.02), asymptote=False)
    again = fit({"tokens": TOKENS}, 300 * TOKENS**-0.4 * noise(40, scale=0.02), asymptote=False)
    wide = [np.ptp(found.intervals["tokens"]) for found in (quiet, loud)]
    assert wide[1] > 5 * wide[0]
    assert loud.intervals == again.intervals


def test_the_held_out_error_tells_a_law_of_the_wrong_form():
    """A curve that levels off: the straight line misses the end, the asymptote does not."""
    loss = (2.0 + 300 * TOKENS**-0.4) * noise(40, scale=0.002)
    errors = [
        fit({"tokens": TOKENS}, loss, asymptote=asymptote, extrapolate=0.2).held_out
        for asymptote in (False, True)
    ]
    assert errors[0] > 10 * errors[1]
    assert errors[1] < 0.01


def test_leaving_out_is_by_group():
    """One size lies off the law of the others: left out as a whole, nothing foretells it."""
    sizes, tokens = np.repeat(SIZES, 8), np.tile(np.geomspace(1e6, 1e8, 8), 5)
    loss = 40 * sizes**-0.3 + 300 * tokens**-0.35
    loss = np.where(sizes == SIZES[-1], 0.9 * loss, loss)
    x = {"active": sizes, "tokens": tokens}
    alone = fit(x, loss, asymptote=False, resamples=1)
    grouped = fit(x, loss, asymptote=False, groups=[f"{size}" for size in sizes], resamples=1)
    assert grouped.law == alone.law
    assert grouped.held_out > 1.3 * alone.held_out


@pytest.mark.parametrize(
    ("points", "asymptote", "needed"), [(3, False, 4), (4, True, 5), (2, False, 4)]
)
def test_too_few_points_are_refused_with_how_many_it_takes(points, asymptote, needed):
    tokens = TOKENS[:: len(TOKENS) // points][:points]
    with pytest.raises(TooFewPoints, match=f"^{points} points .* at least {needed}"):
        fit({"tokens": tokens}, 300 * tokens**-0.4, asymptote=asymptote)


def test_many_points_of_two_sizes_are_too_few():
    sizes = np.repeat([1e5, 1e6], 10)
    with pytest.raises(TooFewPoints, match=r"2 different values of active .* at least 3"):
        fit({"active": sizes}, 40 * sizes**-0.3 * noise(20), asymptote=False)


def test_points_that_lie_too_close_are_refused():
    sizes = np.linspace(1e6, 1.2e6, 10)
    with pytest.raises(TooFewPoints, match=r"active lie within a factor of 1\.20"):
        fit({"active": sizes}, 40 * sizes**-0.3, asymptote=False)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_what_no_power_law_has_is_refused(bad):
    loss = 300 * TOKENS**-0.4
    loss[3] = bad
    with pytest.raises(TooFewPoints, match="above 0"):
        fit({"tokens": TOKENS}, loss, asymptote=False)


def test_a_law_reads_as_a_formula():
    law = fit({"tokens": TOKENS}, 1.7 + 300 * TOKENS**-0.4, asymptote=True).law
    assert str(law) == "1.700 + 300 tokens^-0.400"


def test_runs_that_lie_above_or_below_the_law_widen_its_intervals():
    """Many points of few runs do not make a law of sizes surer."""
    sizes, tokens = np.repeat(SIZES, 40), np.tile(TOKENS, 5)
    offsets = np.repeat(noise(5, 1, scale=0.02), 40)
    loss = (40 * sizes**-0.3 + 300 * tokens**-0.35) * noise(200, 2, scale=0.002) * offsets
    names = [f"{size}" for size in sizes]

    def width(groups):
        x = {"active": sizes, "tokens": tokens}
        found = fit(x, loss, asymptote=False, groups=groups, resamples=60)
        low, high = found.intervals["active"]
        return high - low

    assert width(names) > 2 * width(None)
