# SPDX-License-Identifier: Apache-2.0
"""The measured stage curve and the law's limit from it."""

import pytest

from spexis.core.profile_file import FORMAT
from spexis.core.stage_curve import StageCurve, law_limit

PROFILE = {
    "format": FORMAT,
    "layers": 40,
    "points": [
        {"rows": 64, "context": 128, "seconds": 0.020},
        {"rows": 1, "context": 128, "seconds": 0.018},
        {"rows": 128, "context": 128, "seconds": 0.024},
        {"rows": 64, "context": 2048, "seconds": 0.022},
    ],
    "head_seconds": {"128": 0.0006, "1": 0.0004},
}


def test_between_points_linear_below_flat_above_refused():
    curve = StageCurve.from_profile(PROFILE)
    assert curve.context == 128 and curve.max_rows == 128
    assert curve.seconds(0.5) == 0.018
    assert curve.seconds(64) == 0.020
    assert curve.seconds(96) == pytest.approx(0.022)
    assert curve.head_seconds(128) == 0.0006
    with pytest.raises(ValueError, match="129 rows were not measured; the most is 128"):
        curve.seconds(129)


@pytest.mark.parametrize(("context", "seconds"), [(1, 0.020), (900, 0.020), (1500, 0.022)])
def test_nearest_context(context, seconds):
    assert StageCurve.from_profile(PROFILE, context).seconds(64) == seconds


def test_costs_of_a_layer_and_of_the_extras():
    costs = StageCurve.from_profile(PROFILE).costs(64, drafter_seconds=0.001)
    assert costs.layer == pytest.approx(0.0005)
    assert costs.first == 0.001
    assert costs.of_split([40, 40])[0] == pytest.approx(0.021)


def test_a_drafter_is_read_where_it_was_measured():
    assert StageCurve.from_profile(PROFILE).drafter_seconds(64) == 0.0
    measured = {**PROFILE, "drafter_seconds": {"1": 0.0004, "128": 0.0007}}
    assert StageCurve.from_profile(measured).drafter_seconds(1) == 0.0004
    assert StageCurve.from_profile(measured).drafter_seconds(128) == 0.0007


@pytest.mark.parametrize("bad", [{}, {**PROFILE, "format": "other"}, {**PROFILE, "points": []}])
def test_other_files_are_refused(bad):
    with pytest.raises(ValueError, match=r"spexis profile|no points"):
        StageCurve.from_profile(bad)


def test_the_slowest_stage_sets_the_limit():
    # N=2, p=.785: r = 1/1.215
    assert law_limit(64, 0.785, [0.020, 0.0206]) == pytest.approx(64 / 1.215 / 0.0206)
    assert law_limit(64, 1.0, [0.020, 0.010, 0.010]) == pytest.approx(3200)
