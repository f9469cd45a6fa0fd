# SPDX-License-Identifier: Apache-2.0
"""KV forecasts against what came, over a scheduler of plain numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from spexis.core.memory import HORIZONS, MemoryLookahead, Running
from spexis.engine.kv_forecast import STEPS, ForecastCheck
from spexis.observability.counters import SpexisCounters

BLOCK_SIZE = 4


class Fake:
    """A look-ahead whose requests grow by one token a step; those in `ids` run."""

    num_blocks, block_size = 1000, BLOCK_SIZE

    def __init__(self, num_stages=2, tokens_per_row_step=1.0):
        self.scheduler = SimpleNamespace(
            num_steps=0, num_stages=num_stages, running=[], counters=SpexisCounters(num_stages=2)
        )
        self.memory = MemoryLookahead(4000, num_stages, block_size=BLOCK_SIZE)
        self.pace = SimpleNamespace(tokens_per_row_step=tokens_per_row_step)
        self.tokens: dict[str, int] = {}
        self.pool = SimpleNamespace(
            get_num_free_blocks=lambda: self.num_blocks - sum(map(len, self.tables.values()))
        )
        self.check = ForecastCheck(self)
        self.looks = 0

    @property
    def tables(self):
        return {i: [0] * -(-tokens // BLOCK_SIZE) for i, tokens in self.tokens.items()}

    def _running(self):
        self.looks += 1
        tokens = np.array(list(self.tokens.values()))
        return Running(tokens, tokens - 10, np.full(len(tokens), 10_000))

    def admit(self, name, tokens=20):
        self.tokens[name] = tokens

    def step(self):
        self.scheduler.running = [SimpleNamespace(request_id=name) for name in self.tokens]
        self.check.step()
        if self.tokens:
            self.scheduler.num_steps += 1
        for name in self.tokens:
            self.tokens[name] += 1


def test_a_forecast_is_compared_when_it_is_due_and_with_its_own_requests():
    fake = Fake()
    fake.memory.lengths.survival[:] = 1.0  # no answer ends
    for i in range(4):
        fake.admit(f"a{i}")
    fake.step()
    fake.admit("late", 500)  # admitted after the forecast: none of its business
    for _ in range(STEPS - 1):
        fake.step()
    assert fake.scheduler.counters.forecasts == 0 and fake.check.due == 0
    fake.step()
    assert fake.scheduler.counters.forecasts == 1
    held = 20 + STEPS
    assert fake.check.came == 4 * -(-held // BLOCK_SIZE) * BLOCK_SIZE
    # Every draft is right and nobody ends: the forecast is certain, but for half a block and rows
    # in flight.
    assert fake.check.came <= fake.check.due <= 1.1 * fake.check.came
    assert fake.check.kv_tokens > fake.check.came + 500


def test_what_ended_holds_nothing():
    fake = Fake()
    fake.admit("a")
    fake.admit("b")
    fake.step()
    del fake.tokens["a"]
    for _ in range(STEPS):
        fake.step()
    assert fake.check.came == -(-(20 + STEPS) // BLOCK_SIZE) * BLOCK_SIZE < fake.check.due


def test_a_forecast_that_was_too_low_is_counted():
    fake = Fake(tokens_per_row_step=0.5)  # they will grow twice as fast as measured so far
    fake.admit("a", 8)
    fake.memory.lengths.survival[:] = 1.0  # no answer ends
    for _ in range(2 * STEPS + 1):
        fake.step()
    counters = fake.scheduler.counters
    assert counters.forecasts == counters.forecasts_exceeded == 2


def test_between_forecasts_nothing_is_looked_at():
    fake = Fake()
    fake.step()
    assert fake.looks == 0, "nothing runs"
    fake.admit("a")
    for step in range(1, 5 * STEPS + 1):
        fake.step()
        assert fake.looks == -(-step // STEPS)


def test_an_idle_engine_keeps_its_forecast_until_steps_go_on():
    fake = Fake()
    fake.admit("a")
    fake.step()
    fake.tokens.clear()
    for _ in range(10 * STEPS):
        fake.step()
    assert fake.scheduler.counters.forecasts == 0
    fake.admit("b")
    for _ in range(STEPS + 1):
        fake.step()
    assert fake.scheduler.counters.forecasts == 1 and fake.check.came == 0


def test_one_value_for_each_horizon():
    fake = Fake()
    assert fake.check.ahead == (0,) * len(HORIZONS) and STEPS in HORIZONS
    fake.admit("a")
    fake.step()
    running = Running(np.array([20]), np.array([10]), np.array([10_000]))
    expected = fake.memory.project(running, 1.0).upper
    assert fake.check.ahead == pytest.approx(expected, abs=1)
