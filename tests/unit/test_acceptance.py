# SPDX-License-Identifier: Apache-2.0
"""The acceptance estimate: calibrated against distorted confidences, per version and request."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spexis.core.acceptance import AcceptanceEstimator, remember
from spexis.simulator.drafts import DraftSource


def teach(estimator, source, version="v1", batches=60, size=100):
    for _ in range(batches):
        confidence, right = source.take(size)
        zeros = np.zeros(size)
        estimator.observe(version, confidence, zeros, zeros, zeros, right)


@pytest.mark.parametrize("distortion", [0.5, 1.0, 2.5])
def test_learns_to_undo_a_drafters_over_and_under_confidence(distortion):
    estimator = AcceptanceEstimator()
    teach(estimator, DraftSource(0.65, 2.0, distortion, seed=1))
    confidence, right = DraftSource(0.65, 2.0, distortion, seed=2).take(40_000)
    zeros = np.zeros(len(right))
    chance = estimator.probability("v1", confidence, zeros, zeros, zeros)
    for low in np.arange(0.1, 0.9, 0.2):
        inside = (chance >= low) & (chance < low + 0.2)
        assert right[inside].mean() == pytest.approx(chance[inside].mean(), abs=0.04)
    assert estimator.acceptance("v1") == pytest.approx(0.65, abs=0.04)
    assert estimator.calibration_error("v1") < 0.04


def test_before_any_verdict_it_is_the_reported_confidence():
    zeros = np.zeros(3)
    given_ = np.array([0.1, 0.5, 0.9])
    chance = AcceptanceEstimator().probability("v1", given_, zeros, zeros, zeros)
    assert chance == pytest.approx(given_)


def test_a_drafter_without_confidence_is_judged_by_the_requests_history():
    rng = np.random.default_rng(0)
    truth = np.array([0.3, 0.9] * 50)
    accepted, drafts = np.zeros(100), np.zeros(100)
    estimator = AcceptanceEstimator()
    for step in range(200):
        right = rng.random(100) < truth
        estimator.observe("v1", None, np.full(100, step), accepted, drafts, right)
        accepted, drafts = remember(accepted, drafts, right)
    chance = estimator.probability("v1", None, np.full(100, 200), accepted, drafts)
    assert chance[truth == 0.3].mean() == pytest.approx(0.3, abs=0.06)
    assert chance[truth == 0.9].mean() == pytest.approx(0.9, abs=0.06)


def test_position_is_learnt():
    rng = np.random.default_rng(0)
    estimator, zeros = AcceptanceEstimator(), np.zeros(200)
    half = np.full(200, 0.5)
    for _ in range(150):
        position = rng.integers(0, 512, 200)
        right = rng.random(200) < 0.3 + 0.4 * position / 512
        estimator.observe("v1", half, position, zeros, zeros, right)
    early, late = estimator.probability("v1", half[:2], np.array([5, 400]), zeros[:2], zeros[:2])
    assert early < 0.4 and late > 0.52


def test_a_new_version_begins_with_the_old_weights_and_learns_its_own():
    estimator = AcceptanceEstimator()
    teach(estimator, DraftSource(0.7, 2.0, 2.5, seed=1), "v1")
    zeros, sure = np.zeros(1), np.array([0.95])
    old = estimator.probability("v1", sure, zeros, zeros, zeros)
    assert estimator.probability("v2", sure, zeros, zeros, zeros) == pytest.approx(old)
    teach(estimator, DraftSource(0.3, 2.0, 1.0, seed=4), "v2")
    assert estimator.acceptance("v2") == pytest.approx(0.3, abs=0.05)
    assert estimator.acceptance("v1") == pytest.approx(0.7, abs=0.05)
    assert estimator.probability("v1", sure, zeros, zeros, zeros) == pytest.approx(old)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.floats(0, 1), st.integers(0, 10**6), st.booleans()),
            min_size=1,
            max_size=20,
        ),
        max_size=20,
    )
)
def test_any_verdicts_leave_probabilities(batches):
    estimator = AcceptanceEstimator()
    for batch in batches:
        confidence, position, right = map(np.array, zip(*batch, strict=True))
        zeros = np.zeros(len(batch))
        estimator.observe("v", confidence, position, zeros, zeros, right)
    chance = estimator.probability(
        "v", np.linspace(0, 1, 11), np.arange(11) * 1000, np.arange(11), np.arange(11)
    )
    assert np.isfinite(chance).all() and (chance > 0).all() and (chance < 1).all()
