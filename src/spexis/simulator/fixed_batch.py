# SPDX-License-Identifier: Apache-2.0
"""A fixed batch that decodes without end: the throughput law, and selection rules side by side.

    result = run(cost, batch=64, drafts=DraftSource(0.785), rule=None, steps=4000)
    result.tokens_per_second, result.rows_per_token

rule: None runs every request in every step (SP); else rule(step, rows) -> [size] bool.
Invariant: the first `warm_up` steps do not count; the batch never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spexis.core.cost_model import CostModel
from spexis.simulator.clock import PipelineClock
from spexis.simulator.drafts import DraftSource
from spexis.simulator.rows import Rows

Rule = Callable[[int, Rows], np.ndarray | None]
ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class FixedBatchResult:
    batch: int
    steps: int
    tokens: int
    rows: int
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Of one request: the law's r."""
        return self.tokens / (self.steps * self.batch)

    @property
    def rows_per_token(self) -> float:
        return self.rows / self.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run(
    cost: CostModel,
    batch: int,
    drafts: DraftSource,
    rule: Rule | None = None,
    steps: int = 4000,
    warm_up: int = 200,
    kv_tokens_per_row: float = 0.0,
    on_step: Callable[[float, int, int], None] | None = None,
) -> FixedBatchResult:
    """on_step(seconds since the last step began, tokens returned, rows run): what a policy sees."""
    rows, clock = Rows(cost.num_stages, drafts, batch), PipelineClock(cost)
    tokens = num_rows = 0
    begin = last = 0.0
    for step in range(warm_up + steps):
        at = clock.next_begin(step)
        if step == warm_up:
            begin, tokens, num_rows = at, 0, 0
        returned, _ = rows.begin_step(step)
        tokens += int(returned.sum())
        if step < cost.num_stages:
            # In N parts, as requests come into a pipeline.
            for i in range(step, batch, cost.num_stages):
                rows.add(step, i, 0, ENDLESS)
            count = rows.size
        else:
            count = rows.feed(step, rule(step, rows) if rule else None)
        num_rows += count
        if on_step:
            on_step(at - last, int(returned.sum()), count)
        last = at
        clock.run(step, count, 0, count * kv_tokens_per_row)
    end = clock.next_begin(warm_up + steps)
    return FixedBatchResult(batch, steps, tokens, num_rows, end - begin)


def plain(step: int, rows: Rows, held: np.ndarray | None = None) -> np.ndarray:
    """Plain PP: only true tokens, at most a N-th of the batch in a step, longest waiting first.

    held: [size] bool, who must not run; else those that were held longest would keep all others
    from running.
    """
    known = rows.known(step)
    if held is not None:
        known &= ~held
    limit = -(-rows.size // rows.num_stages)
    if np.count_nonzero(known) > limit:
        order = np.argsort(np.where(known, rows.last_fed[: rows.size], ENDLESS), kind="stable")
        known = np.zeros(rows.size, bool)
        known[order[:limit]] = True
    return known


class FixedDropRatio:
    """The published selection: a fixed share of the running requests is kept out of speculation.

    allowed = B - int(B * ratio) - (requests with a true token); of the others those of the highest
    joint confidence pass; who does not waits until all its rows in flight have returned.
    """

    def __init__(self, ratio: float):
        self.ratio = ratio
        self._until = np.zeros(0, np.int64)  # by request: last step of its wait

    def __call__(self, step: int, rows: Rows) -> np.ndarray:
        size, known, ids = rows.size, rows.known(step), rows.request[: rows.size]
        if size and ids.max() >= len(self._until):
            more = np.full(2 * int(ids.max()) + 2 - len(self._until), -1)
            self._until = np.concatenate((self._until, more))
        self._until[ids[known]] = -1  # a restart ends the wait
        run = known.copy()
        candidates = np.flatnonzero(~known & (self._until[ids] < step))
        allowed = max(size - int(size * self.ratio) - int(np.count_nonzero(known)), 0)
        order = candidates[np.argsort(-rows.joint()[candidates], kind="stable")]
        run[order[:allowed]] = True
        dropped = order[allowed:]
        self._until[ids[dropped]] = rows.last_fed[:size][dropped] + rows.num_stages - 1
        return run
