# SPDX-License-Identifier: Apache-2.0
"""What a length predictor said, kept by request: the newest, what is learnt, and the journal."""

import json

import numpy as np
import pytest

from spexis.core.endings import EndCalibration
from spexis.core.lengths import THRESHOLDS
from spexis.core.predictions import LEARN_EVERY, Predictions, Told, learn, rounded

M = np.array(THRESHOLDS)


def said_of(length: int, answered: int, rng) -> np.ndarray:
    """[5] right more often than not, and far too sure."""
    sure = np.where(length - answered < M, 4.0, -4.0) + rng.normal(0, 4, len(M))
    return rounded(np.maximum.accumulate(1 / (1 + np.exp(-sure))))


def serve(predictions: Predictions, lengths, limit=10_000, seed=0) -> list[dict]:
    """Answers one after the other; the journal's entries of what was learnt."""
    rng, entries = np.random.default_rng(seed), []
    for i, length in enumerate(lengths):
        for answered in range(length):
            predictions.note(str(i), answered, said_of(length, answered, rng))
        learnt = predictions.ended(str(i), length, limit)
        entries.append({"ended": length, "learnt": learnt})
    return entries


def test_the_newest_of_each_request_in_the_order_asked():
    predictions = Predictions()
    assert predictions.of([]) is None and predictions.of(["a"]) is None
    rows = rounded(np.linspace(0.1, 0.9, 15).reshape(3, 5))
    predictions.note("a", 3, rows[0])
    predictions.note("b", 8, rows[1])
    predictions.note("a", 4, rows[2])
    told = predictions.of(["b", "c", "a"])
    assert told.at.tolist() == [8, 0, 4]
    assert (told.said[[0, 2]] == rows[[1, 2]]).all() and np.isnan(told.said[1]).all()
    assert predictions.of(["c"]) is None
    calibrated = predictions.calibrated(told)
    assert np.allclose(calibrated[[0, 2]], told.said[[0, 2]])  # nothing has been learnt yet
    assert np.isnan(calibrated[1]).all()


def test_who_left_is_forgotten_and_only_ends_are_learnt_from():
    predictions = Predictions()
    row = rounded(np.full((1, 5), 0.5))[0]
    for answered in range(9):
        predictions.note("a", answered, row)
        predictions.note("b", answered, row)
    predictions.forget("a")
    assert predictions.calibration.num_observed == 0
    learnt = predictions.ended("b", 9, 100)
    assert learnt["at"] == [0, LEARN_EVERY, 2 * LEARN_EVERY] and learnt["limit"] == 100
    assert predictions.calibration.num_observed == 1
    assert len(predictions) == 0 and predictions.ended("b", 9, 100) == {}


def test_an_overconfident_predictor_is_brought_down_to_what_came_true():
    predictions = Predictions()
    lengths = np.random.default_rng(1).integers(4, 120, 600)
    serve(predictions, lengths[:400])
    rng, said, true = np.random.default_rng(2), [], []
    for length in lengths[400:]:
        for answered in range(0, length, 7):
            said.append(said_of(length, answered, rng))
            true.append(length - answered < M)
    said, true = np.array(said), np.array(true)
    calibrated = predictions.calibration.calibrated(said)

    def loss(p):
        return -np.where(true, np.log(p), np.log1p(-p)).mean(axis=0)

    assert (loss(calibrated) < 0.8 * loss(said.clip(1e-4, 1 - 1e-4))).all()
    assert (predictions.calibration.theta[:, 1] < 0.8).all()


def test_the_journal_read_back_gives_the_same_probabilities():
    predictions = Predictions()
    entries = serve(predictions, [30, 7, 61, 1, 90], limit=90)
    rng = np.random.default_rng(3)
    for i in (0, 2):
        predictions.note(f"r{i}", 12, said_of(40, 12, rng))
    told = predictions.of(["r0", "r1", "r2"])
    text = json.dumps([*entries, told.described()], allow_nan=False)
    *entries, described = json.loads(text)
    calibration = EndCalibration()
    for entry in entries:
        learn(calibration, entry["ended"], entry["learnt"])
    again = Told.read(described)
    assert (calibration.theta == predictions.calibration.theta).all()
    assert (again.at == told.at).all()
    same = calibration.calibrated(again.said), predictions.calibrated(told)
    assert np.array_equal(*same, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounded_is_short_in_json_and_keeps_what_matters(dtype):
    ends = np.array([[1e-6, 0.12345678, 0.5, 0.99999, 1.0]], dtype)
    assert json.dumps(rounded(ends)[0].tolist()) == "[0.0, 0.1235, 0.5, 1.0, 1.0]"
