# SPDX-License-Identifier: Apache-2.0
"""The ladder's own arithmetic: where to jump, and what a window is held against."""

import pytest

from spexis.bench import ladder


def test_jumps_where_the_faster_mode_changes():
    rates = {
        "pp": {"1": 8.0, "16": 56.0, "2": 15.0, "32": 70.0},
        "sp": {"1": 10.0, "16": 60.0, "2": 18.0, "32": 66.0},
    }
    assert ladder.switching_loads(rates) == (16, 32)
    rates["sp"]["32"] = 70.5  # as good as equal
    assert ladder.switching_loads(rates) is None
    assert ladder.switching_loads({"pp": rates["pp"]}) is None


def test_windows_are_held_against_the_lower_bound_they_touch():
    # 10 tokens a second for 20 s, then 4 a second for 20 s.
    times = [i / 10 for i in range(200)] + [20 + i / 4 for i in range(80)]
    found = ladder.windows(times, [(16, 20.0), (2, 20.0)], {16: 10.0, 2: 4.0})
    assert len(found) == 31  # from 5 s on, one a second, all whole
    assert found[0] == pytest.approx(1.0, rel=0.05)  # 5 to 10 s: load 16 alone
    assert found[13] == pytest.approx((2 * 10 + 3 * 4) / 5 / 4, rel=0.05)  # 18 to 23 s: both
    assert found[-1] == pytest.approx(1.0, rel=0.06)
    gap = [t for t in times if not 8 <= t < 12]
    assert min(ladder.windows(gap, [(16, 20.0), (2, 20.0)], {16: 10.0, 2: 4.0})) < 0.3
