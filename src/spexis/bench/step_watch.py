# SPDX-License-Identifier: Apache-2.0
"""What was in each step of an engine, counted on any vLLM scheduler in this process.

    watch = StepWatch.on(scheduler)     # before the engine's first step
    watch.take()                        # steps since the last take(), for JSON: see StepSize

Steps are numbered as the workers' timelines number them (engine/timeline.py), so that a stage's
time can be laid beside the step's size.

Invariant: only non-empty steps count, and the scheduler's own results are passed on untouched.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from spexis.bench.watch import Watch


class StepSize(NamedTuple):
    number: int
    """From 1, since the engine started."""
    num_reqs: int
    rows: int
    """Requests that ran one token behind their known or guessed ones."""
    prefill_tokens: int
    kv_tokens: int
    """Context of the decode rows, together."""
    alone: bool
    """No other step was in flight when it was scheduled."""
    at: float
    """Seconds of the machine-wide monotonic clock when it was scheduled."""


class StepWatch(Watch):
    def __init__(self) -> None:
        self.num_scheduled = self.num_returned = 0
        self._steps: list[StepSize] = []

    def take(self) -> list[StepSize]:
        steps, self._steps = self._steps, []
        return steps

    def _wrap(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def watched_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                self._note(scheduler, output.num_scheduled_tokens)
            return output

        def watched_update(scheduler_output, *args, **kwargs):
            self.num_returned += bool(scheduler_output.num_scheduled_tokens)
            return update(scheduler_output, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update

    def _note(self, scheduler: Any, scheduled: dict[str, int]) -> None:
        rows = prefill = kv = 0
        for req_id, count in scheduled.items():
            request = scheduler.requests[req_id]
            begin = request.num_computed_tokens - count  # schedule() has added them already
            # A prompt, or what is computed again after a preemption, ends before the last token.
            if count == 1 and begin >= request.num_tokens - 1:
                rows, kv = rows + 1, kv + begin
            else:
                prefill += count
        alone = self.num_scheduled == self.num_returned
        self.num_scheduled += 1
        self._steps.append(
            StepSize(self.num_scheduled, len(scheduled), rows, prefill, kv, alone, time.monotonic())
        )
