# SPDX-License-Identifier: Apache-2.0
"""Plain requests keep their distance, and their phases level out."""

from random import Random

import pytest

from spexis.core.cadence import Cadence


def test_one_plain_request_keeps_stock_pace():
    cadence = Cadence(2)
    assert cadence.next_step("a", 7, plain=True) == 9
    assert cadence.next_step("a", 9, plain=True) == 11


def test_requests_that_become_plain_in_one_step_share_the_phases():
    cadence = Cadence(3)
    steps = [cadence.next_step(str(i), 10, plain=True) for i in range(9)]
    assert sorted(steps) == [13] * 3 + [14] * 3 + [15] * 3
    assert cadence.load == [3, 3, 3]


def test_speculating_requests_never_wait_and_count_nowhere():
    cadence = Cadence(2)
    cadence.next_step("a", 4, plain=True)
    assert cadence.next_step("a", 6, plain=False) == 0
    assert cadence.load == [0, 0]


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_any_history(steps):
    """Rows are far enough apart, no request waits for twice its time, and phases stay level."""
    r, cadence = Random(steps), Cadence(steps)
    due: dict[str, int] = {}
    moves = 0
    for step in range(600):
        if r.random() < 0.3 and len(due) < 40:
            due[f"new{step}"] = step
        if step % 50 < 4 and due:  # some end together
            gone = r.choice(list(due))
            due.pop(gone)
            cadence.forget(gone)
        for name in [n for n, at in due.items() if at <= step]:
            due[name] = cadence.next_step(name, step, plain=True)
            assert step + steps <= due[name] < step + 2 * steps
            moves += due[name] != step + steps
    assert max(cadence.load) - min(cadence.load) <= 2
    assert steps == 1 or moves > 0
