# SPDX-License-Identifier: Apache-2.0
"""KV forecasts set against what came, for people to see: one at a time, compared when it is due.

    check = ForecastCheck(lookahead)
    check.step()                                  # before each of vLLM's steps
    check.ahead, check.due, check.came            # tokens; what `spexis top` and /metrics show

A forecast is of the requests that run when it is made; others are admitted afterwards, by the
forecast itself. So what came is what *those* requests hold STEPS non-empty steps later, in blocks,
as vLLM gave them out. An upper quantile of 95 % ought to be exceeded by 5 % of them.

The policy's own outlooks are renewed only when something is to be decided, which with ample memory
is never; therefore these are made apart, one every STEPS steps, and neither the policy nor its
journal (lookahead.py) sees them.

Invariant: reads the scheduler, changes nothing but two of its counters; between two forecasts a
step costs a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spexis.core.law import acceptance_for
from spexis.core.memory import HORIZONS

if TYPE_CHECKING:
    from spexis.engine.lookahead import Lookahead

STEPS = 32  # ahead, of the forecasts that are compared; one of HORIZONS


@dataclass(frozen=True, slots=True)
class _Forecast:
    due: int
    """Non-empty step."""
    tokens: int
    of: frozenset[str]
    """Ids of the requests that it is about."""


class ForecastCheck:
    def __init__(self, lookahead: Lookahead):
        self.lookahead = lookahead
        self.ahead: tuple[int, ...] = (0,) * len(HORIZONS)
        """[K] upper quantile of the KV tokens at each of HORIZONS, as last projected."""
        self.due = self.came = 0
        """KV tokens: of the newest forecast that came due, and what its requests held then."""
        self._pending: _Forecast | None = None

    def step(self) -> None:
        """Before vLLM's step."""
        scheduler = self.lookahead.scheduler
        step = scheduler.num_steps
        if self._pending is not None:
            if step < self._pending.due:
                return
            self._compare(self._pending)
            self._pending = None
        if scheduler.running:
            self._pending = self._forecast(step + STEPS)

    @property
    def kv_tokens(self) -> int:
        """In blocks that are in use now, prefixes kept for later not counted."""
        lookahead = self.lookahead
        used = lookahead.num_blocks - lookahead.pool.get_num_free_blocks()
        return used * lookahead.block_size

    def _forecast(self, due: int) -> _Forecast:
        lookahead = self.lookahead
        scheduler = lookahead.scheduler
        acceptance = acceptance_for(lookahead.pace.tokens_per_row_step, scheduler.num_stages)
        upper = lookahead.memory.project(lookahead._running(), acceptance).upper
        self.ahead = tuple(int(tokens) for tokens in upper)
        tokens = self.ahead[int(np.searchsorted(HORIZONS, STEPS))]
        of = frozenset(request.request_id for request in scheduler.running)
        return _Forecast(due, tokens, of)

    def _compare(self, forecast: _Forecast) -> None:
        lookahead = self.lookahead
        blocks = sum(
            len(lookahead.tables.get(request.request_id, ()))
            for request in lookahead.scheduler.running
            if request.request_id in forecast.of
        )
        self.due, self.came = forecast.tokens, blocks * lookahead.block_size
        counters = lookahead.scheduler.counters
        counters.forecasts += 1
        counters.forecasts_exceeded += self.came > self.due
