# SPDX-License-Identifier: Apache-2.0
"""One JSON line per scheduler step, written as the step's output comes back.

    --additional-config '{"spexis": {"iteration_log": "steps.jsonl"}}'

    {"step": 7, "time": 1764400000.123456, "rows": {"prompt": 0, "token": 3, "discarded": 1,
     "stale": 0}, "held": 0, "scheduled_tokens": 4, "drafts": 2, "accepted": 1, "running": 4,
     "waiting": 0, "kv_usage": 0.012, "mode": "sp"}

With look-ahead also its decisions since the last line, with mode "auto" what it saw of the step;
with mode "sp-alpha" which rows were chosen from what, or the first stage writes that to
steps.jsonl.selection. All of it can be computed again (core/replay.py).

Invariant: lines are in step order, and the sums over a file equal the scheduler's counters. A log
that was not asked for costs one method call a step.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, TextIO

_WATCHED = (
    "tokens",
    "discarded_rows",
    "stale_rows",
    "held",
    "drafts",
    "accepted",
    "preemptions",
)


class IterationLog:
    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._last = dict.fromkeys(_WATCHED, 0)

    @classmethod
    def open(cls, path: str | None) -> IterationLog:
        """A log to `path` (its folder is made), or one that writes nothing for None."""
        if path is None:
            return cls()
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        # Line-buffered: the last step before a crash is the one wanted.
        return cls(open(path, "w", buffering=1, encoding="utf-8"))

    def write(self, scheduler: Any, scheduler_output: Any) -> None:
        """`scheduler` is the SpexisScheduler, after its counters took in this step's verdicts."""
        if self._file is None:
            return
        counters = scheduler.counters
        grown = {}
        for name in _WATCHED:
            value = getattr(counters, name)
            grown[name], self._last[name] = value - self._last[name], value
        num_rows = len(scheduler_output.num_scheduled_tokens)
        line = {
            "step": scheduler.num_verdicts,
            "time": round(time.time(), 6),
            "rows": {
                "prompt": num_rows - len(scheduler_output.spexis_rows),
                "token": grown["tokens"],
                "discarded": grown["discarded_rows"],
                "stale": grown["stale_rows"],
            },
            "held": grown["held"],
            "scheduled_tokens": scheduler_output.total_num_scheduled_tokens,
            "drafts": grown["drafts"],
            "accepted": grown["accepted"],
            "preemptions": grown["preemptions"],
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": round(scheduler.kv_cache_manager.usage, 4),
            "mode": str(scheduler.mode),
        }
        if scheduler.live_mode is not None:
            line["live_mode"] = scheduler.live_mode.last
        if scheduler.lookahead is not None:
            line["lookahead"] = scheduler.lookahead.take_journal()
        if scheduler.chooser is not None:
            line["selection"] = scheduler.chooser.chooser.take_journal()
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
