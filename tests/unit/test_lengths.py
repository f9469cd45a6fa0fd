# SPDX-License-Identifier: Apache-2.0
"""Predicted ends in the survival curve, and their calibration while serving."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spexis.core.endings import EndCalibration
from spexis.core.lengths import EDGE, LONGEST, THRESHOLDS, LengthModel
from spexis.core.memory import MemoryLookahead, Running

M = np.array(THRESHOLDS)
FREE = 10**6  # a limit that is never reached


def taught(lengths) -> LengthModel:
    model = LengthModel()
    for n in lengths:
        model.observe(int(n))
    return model


@pytest.fixture(scope="module")
def model() -> LengthModel:
    return taught(np.random.default_rng(0).geometric(1 / 150, 4000))


def limits(count: int) -> np.ndarray:
    return np.full(count, FREE)


def two_kinds(count: int, seed: int = 0):
    """(hazard [n], remaining [n], what a perfect predictor says [n, 5]): answers of two paces."""
    rng = np.random.default_rng(seed)
    hazard = np.where(rng.random(count) < 0.5, 1 / 12, 1 / 300)
    return hazard, rng.geometric(hazard), 1 - (1 - hazard[:, None]) ** (M[None, :] - 1)


# -- the curve ------------------------------------------------------------------------------------


def test_the_curve_passes_through_every_prediction(model):
    ends = np.array([[0.1, 0.2, 0.4, 0.5, 0.9], [0.01, 0.01, 0.02, 0.9, 0.95]])
    alive = model.alive(np.array([20, 500]), limits(2), M - 1, ends)
    np.testing.assert_allclose(alive, 1 - ends, atol=1e-9)


def test_without_predictions_nothing_changes(model):
    generated, more = np.array([0, 30, 900]), np.array([1.0, 3, 5.5, 40, 63, 64, 500])
    nothing = np.full((3, 5), np.nan)
    plain = model.alive(generated, limits(3), more)
    np.testing.assert_allclose(model.alive(generated, limits(3), more, nothing), plain, rtol=1e-9)
    np.testing.assert_allclose(
        model.expected_remaining(generated, limits(3), nothing),
        model.expected_remaining(generated, limits(3)),
        rtol=1e-6,
    )


def test_a_missing_prediction_keeps_between_its_neighbours(model):
    ends = np.array([[np.nan, 0.6, np.nan, 0.6, np.nan], [np.nan, np.nan, 1e-3, np.nan, np.nan]])
    said = 1 - model.alive(np.array([9, 9]), limits(2), M - 1, ends)
    assert said[0, 1:4].tolist() == pytest.approx([0.6] * 3)
    assert 0 < said[0, 0] <= 0.6 <= said[0, 4]
    assert (said[1, :2] <= 1e-3 + 1e-12).all() and said[1, 2] == pytest.approx(1e-3)
    own = 1 - model.alive(np.array([9]), limits(1), M - 1)[0]
    assert said[1, 3:] == pytest.approx(own[3:])


def test_beyond_the_last_threshold_ended_answers_decide(model):
    ends = np.array([[0.0, 0.0, 0.0, 0.1, 0.5]])
    at, far = np.array([40]), np.array([63, 200])
    alive = model.alive(at, limits(1), far, ends)[0]
    of_the_model = model.alive(at + 63, limits(1), far - 63)[0]
    assert alive[1] / alive[0] == pytest.approx(of_the_model[1])


def test_an_older_prediction_is_conditioned_on_what_came_since(model):
    """Said after 50 tokens, asked after 58: divided by the chance of having come that far."""
    ends = np.array([[0.2, 0.4, 0.6, 0.7, 0.8]])
    before = model.alive(np.array([50]), limits(1), np.array([8, 15, 31, 100]), ends)[0]
    later = model.alive(np.array([58]), limits(1), np.array([7, 23, 92]), ends, np.array([50]))[0]
    np.testing.assert_allclose(later, before[1:] / before[0])
    # A row that ran ahead of the verified tokens: until there the answer is taken to go on.
    ahead = model.alive(np.array([48]), limits(1), np.array([2, 5]), ends, np.array([50]))[0]
    assert ahead.tolist() == pytest.approx([1.0, 0.8])


def test_nobody_running_is_no_special_case(model):
    nobody, ends = np.zeros(0, int), np.zeros((0, 5))
    assert model.alive(nobody, nobody, M, ends, nobody).shape == (0, 5)
    assert model.expected_remaining(nobody, nobody, ends, nobody).shape == (0,)
    assert EndCalibration().calibrated(ends).shape == (0, 5)


def test_the_requests_own_limit_still_ends_it(model):
    ends = np.zeros((1, 5))
    alive = model.alive(np.array([90]), np.array([100]), np.array([5, 10]), ends)[0]
    assert alive[0] > 0.9 and alive[1] == 0
    assert model.expected_remaining(np.array([90]), np.array([100]), ends)[0] <= 10


def test_expected_remaining_sums_the_curve(model):
    ends = np.array([[0.3, 0.5, 0.7, 0.8, 0.9], [0.0, 0.0, 0.01, 0.02, 0.03]])
    at = np.array([10, 10])
    grid = np.arange(LONGEST - 100)
    for shift in (-3, 0, 5):
        total = model.alive(at, limits(2), grid, ends, at + shift).sum(axis=1)
        mean = model.expected_remaining(at, limits(2), ends, at + shift)
        np.testing.assert_allclose(mean, total, rtol=0.01)


entry = st.one_of(st.just(np.nan), st.floats(-0.5, 1.5))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2 * LONGEST),
            st.integers(-80, 80),
            st.lists(entry, min_size=5, max_size=5),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_predicted_the_curve_falls_within_0_and_1(rows):
    model = LengthModel()
    generated, shift, ends = (np.array(x) for x in zip(*rows, strict=True))
    at, more = np.maximum(generated + shift, 0), np.arange(0, 300)
    with np.errstate(all="raise"):
        alive = model.alive(generated, limits(len(rows)), more, ends, at)
        mean = model.expected_remaining(generated, limits(len(rows)), ends, at)
    assert (alive >= 0).all() and (alive <= 1).all() and np.isfinite(mean).all()
    assert (np.diff(alive, axis=1) <= 1e-9).all()
    assert np.allclose(alive[:, 0], 1)


def test_predictions_are_calibrated_and_tell_more_than_ended_answers_alone():
    hazard, remaining, ends = two_kinds(20_000)
    model = taught(two_kinds(4000, seed=1)[1])
    at = np.zeros(len(hazard), np.int64)
    for more in (5, 20, 63, 120):
        lives = remaining > more
        with_ends = model.alive(at, limits(len(at)), np.array([more]), ends)[:, 0]
        without = model.alive(at, limits(len(at)), np.array([more]))[:, 0]
        for kind in (1 / 12, 1 / 300):
            mine = hazard == kind
            if more < 64:
                assert with_ends[mine].mean() == pytest.approx(lives[mine].mean(), abs=0.03)
        assert ((with_ends - lives) ** 2).mean() < ((without - lives) ** 2).mean() - 0.01


# -- memory ---------------------------------------------------------------------------------------


def running(generated, ends=None) -> Running:
    count = len(generated)
    kv, limit = np.full(count, 700), np.full(count, FREE)
    return Running(kv, np.asarray(generated), limit, ends=ends)


def test_requests_said_to_end_make_room(model):
    memory = MemoryLookahead(10_000, 2, model)
    arguments = np.array([4000]), np.zeros(1, int), np.array([FREE]), 8
    soon, late = np.full((8, 5), 0.999), np.full((8, 5), 0.001)
    assert memory.admit(memory.project(running([50] * 8), 0.8), *arguments) == 0
    assert memory.admit(memory.project(running([50] * 8, soon), 0.8), *arguments) == 1
    assert memory.admit(memory.project(running([50] * 8, late), 0.8), *arguments) == 0


def test_who_is_said_to_end_is_kept_and_preferred(model):
    memory = MemoryLookahead(2500, 2, model)
    ends = np.full((3, 5), np.nan)
    ends[1] = 0.99
    now = running([50, 50, 50], ends)
    relief = memory.relieve(memory.project(now, 0.8), now, np.ones(3, bool), 64.0, 2e3, 1e-6, 0.02)
    assert relief.evict.tolist() == [2]
    bonus = memory.finish_bonus(now, pace=0.8)
    assert bonus[1] > 3 * bonus[0] and bonus[0] == pytest.approx(bonus[2])


# -- calibration ----------------------------------------------------------------------------------


def distorted(ends: np.ndarray, shift: float, slope: float) -> np.ndarray:
    logit = np.log(ends / (1 - ends))
    return 1 / (1 + np.exp(-(shift + slope * logit)))


def serve(calibration, count, seed, shift, slope, limit=FREE):
    """Requests one after the other, each with predictions at every token."""
    hazard, lengths, ends = two_kinds(count, seed)
    said = distorted(ends, shift, slope)
    for i in range(count):
        answered = np.arange(min(lengths[i], limit))
        length = int(min(lengths[i], limit))
        calibration.observe(answered, np.tile(said[i], (length, 1)), length, limit)
    return hazard


def test_before_any_request_a_report_is_taken_as_it_is():
    said = np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [np.nan, 0.2, np.nan, 0.1, np.nan]])
    ends = EndCalibration().calibrated(said)
    np.testing.assert_allclose(ends[0], said[0])
    assert np.isnan(ends[1]).tolist() == [True, False, True, False, True]
    assert ends[1, 3] == pytest.approx(0.2)  # never less than at a smaller m


@pytest.mark.parametrize("limit", [FREE, 100])
def test_calibration_undoes_a_distortion_even_where_answers_are_cut(limit):
    calibration = EndCalibration()
    serve(calibration, 1500, 3, shift=1.2, slope=0.7, limit=limit)
    for hazard in (1 / 12, 1 / 300):
        true = 1 - (1 - hazard) ** (M - 1)
        said = distorted(true, 1.2, 0.7)
        got = calibration.calibrated(said[None])[0]
        assert np.abs(got - true).max() < 0.08
        assert np.abs(said - true).max() > 0.1
    assert calibration.calibration_error().max() < 0.1


def test_what_was_learnt_fades():
    """The predictor's reports change: the calibration follows."""
    calibration = EndCalibration()
    true = 1 - (1 - 1 / 12) ** (M - 1)
    said = distorted(true, -1.0, 1.0)[None]
    serve(calibration, 400, 3, shift=1.0, slope=1.0)
    before = np.abs(calibration.calibrated(said)[0] - true).max()
    serve(calibration, 1200, 4, shift=-1.0, slope=1.0)
    assert np.abs(calibration.calibrated(said)[0] - true).max() < 0.5 * before


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(entry, min_size=5, max_size=5), min_size=0, max_size=8),
    st.integers(1, 80),
    st.integers(0, 40),
)
def test_calibration_never_raises_and_keeps_order(rows, length, spare):
    calibration = EndCalibration()
    said = np.array(rows, float).reshape(-1, 5)
    with np.errstate(all="raise"):
        calibration.observe(np.arange(len(said)), said, length, length + spare)
        ends = calibration.calibrated(said)
    assert (np.isnan(ends) == np.isnan(said)).all()
    for row in ends:
        row = row[~np.isnan(row)]
        assert (np.diff(row) >= 0).all() and ((row >= EDGE) & (row <= 1 - EDGE)).all()
