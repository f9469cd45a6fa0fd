# SPDX-License-Identifier: Apache-2.0
"""What preemption costs: tokens computed again, on any vLLM scheduler in this process.

    watch = Recomputed.on(scheduler)         # once for a scheduler
    watch.tokens, watch.preemptions          # since then; preemptions by request

A token is computed again if it is scheduled after its request was preempted and had been computed
before that; what the prefix cache gave back is not scheduled, so it does not count.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from spexis.bench.watch import Watch


class Recomputed(Watch):
    def __init__(self) -> None:
        self.tokens = 0
        self.preemptions: Counter[str] = Counter()
        self._known: dict[str, int] = {}  # tokens computed before the last preemption

    def reset(self) -> None:
        self.tokens = 0
        self.preemptions.clear()

    def _wrap(self, scheduler: Any) -> None:
        preempt, after = scheduler._preempt_request, scheduler._update_after_schedule

        def _preempt_request(request, *args, **kwargs):
            # Rows of guesses count as computed, but only tokens can be computed again.
            computed = min(request.num_computed_tokens, request.num_tokens)
            known = self._known.get(request.request_id, 0)
            self._known[request.request_id] = max(known, computed)
            self.preemptions[request.request_id] += 1
            return preempt(request, *args, **kwargs)

        def _update_after_schedule(scheduler_output):
            for req_id, count in scheduler_output.num_scheduled_tokens.items():
                known = self._known.get(req_id)
                if known is None:
                    continue
                begin = scheduler.requests[req_id].num_computed_tokens
                self.tokens += max(min(begin + count, known) - begin, 0)
                if begin + count >= known:
                    del self._known[req_id]
            return after(scheduler_output)

        scheduler._preempt_request = _preempt_request
        scheduler._update_after_schedule = _update_after_schedule
