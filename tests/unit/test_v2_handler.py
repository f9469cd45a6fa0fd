# SPDX-License-Identifier: Apache-2.0
"""When a stage posts the receives of verdicts: pure order, the transport is left out.

That verdicts arrive and are right is tests/engine/test_v2_interpreter.py and tests/gpu.
"""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from spexis.engine.verdict import Plan

v2_handler = pytest.importorskip("spexis.engine.v2_handler", reason="needs vLLM")


@pytest.fixture
def stage(monkeypatch):
    """stage(steps_between) -> a handler that notes what it posts; the batch says what it needs."""
    monkeypatch.setattr(v2_handler, "compute_need_sampled_mask", lambda batch: batch.needed)

    def make(steps_between: int, is_first_rank: bool = True):
        handler = object.__new__(v2_handler.VerdictHandler)
        handler.is_first_rank, handler.steps_between = is_first_rank, steps_between
        handler.num_left, handler.pending, handler.unposted = 0, deque(), deque()
        handler.plan, handler.posted, handler.waited = None, [], []
        handler.main_stream = SimpleNamespace(wait_event=handler.waited.append)

        def receive(verdict):
            handler.posted.append(verdict.num_rows)
            verdict.tokens, verdict.event = "tokens", f"event {verdict.num_rows}"

        handler._receive = receive
        return handler

    return make


def run(handler, step: int, needed: bool = True) -> None:
    """One step whose number of rows is its own number."""
    handler.expect_steps(more=True)
    nothing = np.empty(0, dtype=np.int64)
    handler.plan = Plan(step, step, nothing, nothing, None, None)
    mask = np.ones(step, dtype=bool) if needed else None
    assert handler.receive(SimpleNamespace(needed=mask, num_reqs=step)) is needed


@pytest.mark.parametrize("steps_between", [0, 1, 3])
def test_a_receive_follows_the_last_step_before_its_verdict(stage, steps_between):
    handler = stage(steps_between)
    for step in range(1, 7):
        run(handler, step)
        assert handler.posted == list(range(1, step - steps_between + 1))


def test_steps_without_a_verdict_count_as_steps(stage):
    """Else a later stage could wait for a receive that only a step behind it would post."""
    handler = stage(2, is_first_rank=False)
    run(handler, 1)
    run(handler, 2, needed=False)
    assert handler.posted == []
    run(handler, 3, needed=False)
    assert handler.posted == [1]


def test_nothing_is_left_when_no_step_follows(stage):
    """Else the last stage would wait in its send for as long as the server is idle."""
    handler = stage(3)
    for step in range(1, 4):
        run(handler, step)
    assert handler.posted == []
    handler.expect_steps(more=False)
    assert handler.posted == [1, 2, 3]
    mask = np.ones(4, dtype=bool)  # as in vLLM's warm-up: a step that none may follow
    handler.receive(SimpleNamespace(needed=mask, num_reqs=4))
    assert handler.posted == [1, 2, 3, 4]


def test_a_verdict_that_is_due_is_posted_first(stage):
    """After a pause the scheduler knows of steps whose receives were left for later."""
    handler = stage(1)
    run(handler, 1)
    run(handler, 2)
    assert handler.posted == [1]
    due = list(handler.take_due(call=3, num_stages=2, num_ready=2))
    assert [verdict.plan.step for verdict in due] == [1, 2]
    assert handler.posted == [1, 2]
    assert handler.waited == ["event 1", "event 2"]
    assert not handler.pending and not handler.unposted
