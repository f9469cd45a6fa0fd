# SPDX-License-Identifier: Apache-2.0
"""The scheduler chooses which drafts run (mode "sp-alpha" where the first stage does not).

    chooser = StepChooser(scheduler)
    chooser.before_schedule()                    # holds requests whose row does not pay
    chooser.scheduled(rows, output)              # the step's decode rows
    chooser.came(outcomes, step, output)         # a step's outcomes
    chooser.observe(...)                         # and what it took

A held request is not scheduled in the coming step and asked again in the next one. That is all: no
worker knows of it, so it runs on every runner. How likely a row is good follows from outcomes
(core/outcomes.py); the drafts' own confidences are not known here (selector.py has them).

Invariant: only a request's eligible step is set, so a wrong guess costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spexis.core.chooser import SchedulerChooser
from spexis.core.outcomes import OutcomeChooser
from spexis.core.profile_file import ProfileFile
from spexis.engine.requests import speculates

if TYPE_CHECKING:
    from spexis.engine.scheduler import SpexisScheduler


class SchedulerSelection:
    """What the scheduler's two ways to select share: how they begin, and what a step took."""

    kind: type[SchedulerChooser]

    def __init__(self, scheduler: SpexisScheduler, **more: Any):
        self.scheduler = scheduler
        self.setup = {
            **more,
            "profile": dict(ProfileFile.load(scheduler.spexis_config.profile).block),
            "num_stages": scheduler.num_stages,
            "tensor_parallel_size": scheduler.parallel_config.tensor_parallel_size,
            "max_rows": scheduler.max_num_running_reqs,
        }
        self.chooser = self.kind.from_setup(self.setup)
        if scheduler.spexis_config.iteration_log is not None:
            self.keep_journal()

    def keep_journal(self) -> None:
        self.chooser.journal = [{"setup": self.setup}]

    def observe(
        self,
        seconds: float,
        tokens: int,
        rows: Mapping[str, bool],
        requests: int,
        prefill: int,
        num_run: int,
        full: bool,
    ) -> None:
        """A step's outputs came `seconds` after those before; num_run of its rows and `prefill`
        prompt tokens ran in it. full: every stage had a step to run (Chooser.learn)."""
        found = self.scheduler.requests
        kv_tokens = sum(found[r].num_computed_tokens for r in rows if r in found)
        kv_tokens *= num_run / max(len(rows), 1)
        self.chooser.observe(seconds, tokens, num_run, requests, float(kv_tokens), prefill, full)


class StepChooser(SchedulerSelection):
    kind = OutcomeChooser

    def before_schedule(self) -> None:
        s = self.scheduler
        step = s.current_step + 1
        requests = [
            r
            for r in s.running
            if not r.is_prefill_chunk
            and not _ends_in_flight(r)
            and r.next_decode_eligible_step <= step
            and not r.use_structured_output
            and speculates(r)
        ]
        if not requests:
            return
        kv_tokens = np.array([r.num_computed_tokens for r in requests])
        prompts = sum(r.num_tokens - r.num_computed_tokens for r in s.running if r.is_prefill_chunk)
        budget = max(s.max_num_scheduled_tokens - len(requests), 0)
        req_ids = [r.request_id for r in requests]
        # Requests that end soon free memory that others wait for.
        bonus = s.lookahead.finish_bonus(req_ids) if s.lookahead else None
        run = self.chooser.choose(req_ids, step, kv_tokens, min(prompts, budget), bonus)
        for request, runs in zip(requests, run, strict=True):
            if not runs:
                request.next_decode_eligible_step = step + 1
                s.counters.held += 1

    def scheduled(self, rows: Mapping[str, bool], scheduler_output) -> None:
        """All of them run."""
        if rows:
            self.chooser.ran(list(rows), self.scheduler.current_step)

    def came(self, outcomes: Mapping[str, bool], step: int, output) -> None:
        """outcomes: of the rows that ran, whether there was a token."""
        if outcomes:
            self.chooser.came(list(outcomes), list(outcomes.values()), step)


def _ends_in_flight(request) -> bool:
    """vLLM schedules no row more where those in flight reach the request's limit."""
    placeholders = request.num_output_placeholders
    known = request.num_computed_tokens + 2 - placeholders
    return placeholders > 0 and known >= request.num_prompt_tokens + request.max_tokens
