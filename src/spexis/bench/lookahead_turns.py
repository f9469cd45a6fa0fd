# SPDX-License-Identifier: Apache-2.0
"""Look-ahead on and off in turns within one run of one engine: what it costs where it has no use.

    Work(name="turns 0", rows=rows, prepare={"look_ahead_turns": True})     # begins with it on
    Work(name="turns 1", rows=rows, prepare={"look_ahead_turns": False})    # the other way round
    result["turns"]       # {"on": [seconds, tokens], "off": [seconds, tokens]}

Two engines of one kind differ by some 5 % on a small machine, and so do two runs of one engine half
a minute apart: more than what is to be seen. Turns of a second or two see the same machine, and two
runs that begin differently see each step both ways.

Invariant: a step's time goes to the way in which it was scheduled; every run begins with an empty
prefix cache. A length predictor in the workers runs all the time, and is not part of what is seen.
"""

from __future__ import annotations

import time
from typing import Any

STEPS = 32  # of a turn


class Turns:
    """In front of a SpexisScheduler's two methods, from install() to remove()."""

    def __init__(self, scheduler: Any, first: bool, clock=time.monotonic):
        self.scheduler, self.lookahead, self.clock = scheduler, scheduler.lookahead, clock
        self.first = first
        self.num_steps = 0
        self.taken: dict[str, list[float]] = {"on": [0.0, 0], "off": [0.0, 0]}
        """Seconds and tokens."""
        self._last: float | None = None  # when the newest output came
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def schedule(self, *args, **kwargs):
        on = (self.num_steps // STEPS % 2 == 0) == self.first
        self.scheduler.lookahead = self.lookahead if on else None
        output = self._schedule(*args, **kwargs)
        output.bench_turn = "on" if on else "off"
        self.num_steps += output.total_num_scheduled_tokens > 0
        return output

    def update(self, scheduler_output, model_runner_output):
        counters = self.scheduler.counters
        before = counters.tokens
        found = self._update(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            now = self.clock()
            if self._last is not None:  # else there is nothing to count from
                taken = self.taken[scheduler_output.bench_turn]
                taken[0] += now - self._last
                taken[1] += counters.tokens - before
            self._last = now
        return found

    def remove(self) -> None:
        s = self.scheduler
        s.schedule, s.update_from_output = self._schedule, self._update
        s.lookahead = self.lookahead


def install(scheduler: Any, first: bool) -> None:
    """On an idle SpexisScheduler with look-ahead; the driver removes it after the work."""
    if not scheduler.reset_prefix_cache():
        raise RuntimeError("the prefix cache is in use: take turns in an idle engine")
    scheduler.bench_turns = Turns(scheduler, first)


def finish(scheduler: Any) -> dict[str, list[float]] | None:
    """What the turns took, if there were any, of this piece of work."""
    turns = scheduler.__dict__.pop("bench_turns", None)
    if turns is None:
        return None
    turns.remove()
    return turns.taken
