# SPDX-License-Identifier: Apache-2.0
"""The engine's own pace: means of what was seen, and a prompt token's price."""

import math
from random import Random

import pytest

from spexis.core.pace import Pace


def test_learns_step_rate_and_prompt_price():
    pace, r = Pace(2), Random(0)
    for i in range(1_000):
        prefill = 256 if i % 5 == 0 else 0
        seconds = (0.02 + 0.0001 * prefill) * r.gauss(1, 0.05)
        pace.observe(seconds, tokens=24, running=32, prefill_tokens=prefill)
    assert pace.step_seconds == pytest.approx(0.02, rel=0.02)
    assert pace.prefill_seconds_per_token == pytest.approx(0.0001, rel=0.05)
    assert pace.tokens_per_row_step == pytest.approx(0.75)
    assert pace.tokens_per_second == pytest.approx(24 / (0.02 + 0.0001 * 256 / 5), rel=0.05)


def test_nothing_seen_and_nonsense_leave_positive_values():
    pace = Pace(4)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        pace.observe(seconds, 1, 1)
    pace.observe(0.02, 0, 0)
    before = pace.described()
    assert before == Pace(4).described()
    pace.observe(0.02, tokens=0, running=3)
    assert all(v > 0 and math.isfinite(v) for v in pace.described().values())
    assert pace.tokens_per_row_step == 0.25  # a request gives a token in N steps, whatever happens
