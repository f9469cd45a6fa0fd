# SPDX-License-Identifier: Apache-2.0
"""Mode control: changes for a clear gain only, comes back, and probes while it is plain PP."""

import dataclasses

import numpy as np
import pytest

from spexis.core.cost_model import CostModel
from spexis.core.mode import Mode, ModeControl
from spexis.core.presets import MEASURED
from spexis.core.selection import ConfidenceHistogram

PROFILE = MEASURED["h200-llama-70b-pp2"]


def control(drafter_seconds=0.0, **changes) -> ModeControl:
    profile = dataclasses.replace(PROFILE, drafter=((1, drafter_seconds),))
    return ModeControl(
        CostModel.from_profile(profile), CostModel.from_profile(profile, drafter=False), **changes
    )


def confidences(p: float) -> ConfidenceHistogram:
    histogram = ConfidenceHistogram(p)
    rng = np.random.default_rng(0)
    histogram.observe(rng.beta(1.5 * p, 1.5 * (1 - p), 50_000))
    return histogram


def looks(modes: ModeControl, requests: int, p: float, count=20, rate=None, noise=0.0) -> Mode:
    rng, histogram = np.random.default_rng(1), confidences(p)
    for _ in range(count):
        predicted = modes.predict(requests, histogram)[modes.mode]
        measured = (rate or predicted) * (1 + noise * rng.standard_normal())
        modes.update(requests, histogram, measured)
    return modes.mode


def test_predictions_are_ordered_as_the_law_says():
    predicted = control().predict(64, confidences(0.8))
    assert predicted[Mode.SP] > 1.5 * predicted[Mode.PP]
    assert predicted[Mode.ALPHA] >= predicted[Mode.SP]


def test_useless_drafts_lead_to_plain_pp_and_good_ones_back():
    modes = control(drafter_seconds=0.003)
    assert looks(modes, 64, 0.8) in (Mode.ALPHA, Mode.SP)
    assert looks(modes, 64, 0.02) is Mode.PP
    assert looks(modes, 64, 0.8) in (Mode.ALPHA, Mode.SP)
    assert modes.num_changes == 2


def test_noise_does_not_make_it_flap():
    modes = control(drafter_seconds=0.001, mode=Mode.SP)
    looks(modes, 64, 0.7, count=200, noise=0.05)
    assert modes.num_changes == 0


def test_a_small_gain_changes_nothing():
    modes = control(mode=Mode.SP)
    assert looks(modes, 128, 0.8, count=50) is Mode.SP  # selection would give 0 to 1 %


def test_a_change_waits_for_several_looks():
    modes = control(drafter_seconds=0.003, mode=Mode.ALPHA, looks=3, dwell=1)
    assert looks(modes, 64, 0.02, count=2) is Mode.ALPHA
    assert looks(modes, 64, 0.02, count=1) is Mode.PP


def test_a_mode_that_measures_badly_is_left():
    """Prediction says SP, the machine says otherwise: the measured share of it decides."""
    modes = control(mode=Mode.PP, dwell=2)
    histogram = confidences(0.5)
    plain = modes.predict(64, histogram)[Mode.PP]
    for _ in range(30):
        # SP really gives less than plain PP does here.
        modes.update(64, histogram, plain if modes.mode is Mode.PP else 0.6 * plain)
    assert modes.num_changes >= 2
    assert modes.mode is Mode.PP


def test_probes_only_under_plain_pp_few_and_for_a_while():
    ids = np.arange(1000)
    assert not control(mode=Mode.SP).probes(ids).any()
    modes = control(mode=Mode.PP, probe_share=0.02)
    chosen = modes.probes(ids)
    assert chosen.mean() == pytest.approx(0.02, abs=0.015)
    assert (modes.probes(ids) == chosen).all()
    assert modes.probes(ids[:3]).sum() >= 1
    assert len(modes.probes(ids[:0])) == 0
