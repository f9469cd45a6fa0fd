# SPDX-License-Identifier: Apache-2.0
"""Look-ahead in turns: whose time is whose, and nothing stays behind."""

from types import SimpleNamespace

import pytest

from spexis.bench import lookahead_turns
from spexis.bench.lookahead_turns import STEPS


class Scheduler:
    """Two steps in flight; one with look-ahead takes 3 s and one without 2, two tokens each."""

    def __init__(self):
        self.lookahead = self.own = SimpleNamespace()
        self.counters = SimpleNamespace(tokens=0)
        self.clock, self.seen, self.cached = 0.0, [], False

    def reset_prefix_cache(self):
        return not self.cached

    def schedule(self, empty=False):
        on = self.lookahead is not None
        self.seen.append(on)
        return SimpleNamespace(total_num_scheduled_tokens=int(not empty), seconds=3 if on else 2)

    def update_from_output(self, scheduler_output, model_runner_output):
        self.clock += scheduler_output.seconds
        self.counters.tokens += 2
        return "outputs"


def run(scheduler, steps):
    flying = [scheduler.schedule()]
    for _ in range(steps - 1):
        flying.append(scheduler.schedule())
        assert scheduler.update_from_output(flying.pop(0), None) == "outputs"
    scheduler.update_from_output(flying.pop(), None)


@pytest.fixture
def scheduler(monkeypatch):
    found = Scheduler()
    monkeypatch.setattr(
        lookahead_turns.Turns, "__init__", with_clock(lookahead_turns.Turns.__init__, found)
    )
    return found


def with_clock(init, scheduler):
    return lambda self, s, first: init(self, s, first, clock=lambda: scheduler.clock)


@pytest.mark.parametrize("first", [True, False])
def test_a_step_counts_for_the_way_it_was_scheduled_in(scheduler, first):
    lookahead_turns.install(scheduler, first)
    run(scheduler, 4 * STEPS)
    turns = [scheduler.seen[i * STEPS] for i in range(4)]
    assert turns == [first, not first] * 2
    taken = lookahead_turns.finish(scheduler)
    # Of the very first step the beginning is not known.
    on, off = 2 * STEPS - first, 2 * STEPS - (not first)
    assert taken == {"on": [3.0 * on, 2 * on], "off": [2.0 * off, 2 * off]}


def test_afterwards_the_scheduler_is_what_it_was(scheduler):
    lookahead_turns.install(scheduler, False)
    run(scheduler, 3)
    assert scheduler.lookahead is None
    lookahead_turns.finish(scheduler)
    assert scheduler.lookahead is scheduler.own
    assert lookahead_turns.finish(scheduler) is None  # no turns were taken
    scheduler.seen.clear()
    run(scheduler, 2 * STEPS)
    assert all(scheduler.seen)


def test_empty_steps_are_no_turns(scheduler):
    lookahead_turns.install(scheduler, True)
    for _ in range(3 * STEPS):
        scheduler.schedule(empty=True)
    assert all(scheduler.seen)


def test_not_while_requests_hold_blocks(scheduler):
    scheduler.cached = True
    with pytest.raises(RuntimeError, match="idle engine"):
        lookahead_turns.install(scheduler, True)
