# SPDX-License-Identifier: Apache-2.0
"""The ladder's own arithmetic: where to jump, and what a window is held against."""

import pytest

from spexis.bench import ladder
from spexis.config import ConfigError


def test_jumps_where_the_faster_mode_changes():
    rates = {
        "pp": {"1": 8.0, "16": 56.0, "2": 15.0, "32": 70.0},
        "sp": {"1": 10.0, "16": 60.0, "2": 18.0, "32": 66.0},
    }
    assert ladder.switching_loads(rates) == (16, 32)
    rates["sp"]["32"] = 70.5  # as good as equal
    assert ladder.switching_loads(rates) is None
    assert ladder.switching_loads({"pp": rates["pp"]}) is None


PHASE = 20.0


def tokens(phases: int, low: float, high: float, stall: float = 5.0, late: float = 0.0):
    """Seconds of tokens: `low` a second, then `high` after a stall, and so on."""
    times = []
    for index in range(phases):
        rate, begin = (high, index * PHASE + stall + late) if index % 2 else (low, index * PHASE)
        count = int((PHASE * (index + 1) - begin) * rate)
        times += [begin + i / rate for i in range(count)]
    return times


def test_windows_are_held_against_the_slower_mode_after_the_same_jump():
    held = [tokens(4, 10, 50), tokens(4, 8, 60)]
    # As fast as the slower one at each load: the stall after a jump is no fault.
    found = ladder.windows(tokens(7, 8, 50), held, PHASE, 6)
    assert len(found) > 6 * 15 and min(found) > 0.9
    # The first jump is up: one that is slow there only is found, and one that is slow below.
    assert min(ladder.windows(tokens(7, 8, 30), held, PHASE, 6)) == pytest.approx(0.6, abs=0.05)
    assert min(ladder.windows(tokens(7, 4, 50), held, PHASE, 6)) == pytest.approx(0.5, abs=0.05)
    # Coming back a second later passes, three seconds do not.
    assert min(ladder.windows(tokens(7, 8, 50, late=1.0), held, PHASE, 6)) > 0.8
    assert min(ladder.windows(tokens(7, 8, 50, late=3.0), held, PHASE, 6)) < 0.7


def test_windows_are_whole():
    held = [tokens(4, 10, 50)]
    # 20 s after each of two jumps, the last of which has none beyond it.
    assert len(ladder.windows(tokens(3, 10, 50), held, PHASE, 2)) <= 20 + 16


def test_phases_hold_windows():
    with pytest.raises(ConfigError, match="--phase 5: at least 10 s"):
        ladder.main(["--phase", "5"])
