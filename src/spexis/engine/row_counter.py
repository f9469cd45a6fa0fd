# SPDX-License-Identifier: Apache-2.0
"""The scheduler says how many rows a step runs, the first stage's device which (v2_choice.py).

    counter = RowCounter(scheduler)              # mode "sp-alpha", selection "stage", V2 runner
    run = counter.scheduled(rows, output)        # n; None: all of them
    counter.came(outcomes, step, output)         # a step's outcomes, what it had to choose from
    counter.observe(...)                         # and what it took

It stands where StepChooser does (step_chooser.py) and holds nobody itself: every request is
scheduled, and a row that the device held is taken back like a discarded one.

Invariant: a step that holds anything but one token of each of several requests runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from spexis.core.counts import CountChooser
from spexis.engine.step_chooser import SchedulerSelection

if TYPE_CHECKING:
    from spexis.engine.scheduler import SpexisScheduler


class RowCounter(SchedulerSelection):
    kind = CountChooser

    def __init__(self, scheduler: SpexisScheduler):
        super().__init__(scheduler, kind="counts")
        self._ran: set[str] = set()  # whose row ran in the newest step that came back

    def before_schedule(self) -> None:
        """Nobody is held before the device has chosen."""

    def scheduled(self, rows: Mapping[str, bool], scheduler_output) -> int | None:
        """The step's decode rows; how many of them run."""
        counts, requests = scheduler_output.num_scheduled_tokens, self.scheduler.requests
        if len(rows) < 2 or len(counts) != len(rows) or scheduler_output.scheduled_new_reqs:
            return None
        if scheduler_output.total_num_scheduled_tokens != len(rows):
            return None
        # A grammar was told to expect a token of this very step.
        if any(requests[req_id].use_structured_output for req_id in rows):
            return None
        kv_tokens = sum(requests[req_id].num_computed_tokens for req_id in rows)
        (count,) = self.chooser.choose(len(rows), float(kv_tokens)).tolist()
        return count if count < len(rows) else None

    def came(self, outcomes: Mapping[str, bool], step: int, output) -> None:
        """outcomes: of the rows that ran, whether there was a token."""
        offered = getattr(output, "offered", None)
        if offered is None:
            self._ran = set(outcomes)
            return
        known = [i for i, r in enumerate(output.req_ids) if r in outcomes or r in output.held]
        if known:
            names = [output.req_ids[i] for i in known]
            joint, unverified = offered[:, known]
            self.chooser.came(
                joint,
                unverified,
                np.array([name in self._ran for name in names]),
                np.array([name not in output.held for name in names]),
                np.array([outcomes.get(name, False) for name in names]),
            )
        self._ran = set(outcomes)
