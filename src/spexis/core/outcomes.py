# SPDX-License-Identifier: Apache-2.0
"""Which drafts run (SP-alpha), as the scheduler sees it: one step ahead, from outcomes alone.

    chooser = OutcomeChooser(Selection(cost, max_rows=256), num_stages=2)
    each step:
        run = chooser.choose(req_ids, step, kv_tokens, prefill_tokens)
        chooser.ran(req_ids_that_run, step)
        chooser.came(req_ids, good, step)   # outcomes of that step; what it took:
        chooser.observe(seconds, tokens, rows, requests, kv_tokens, prefill_tokens)

The scheduler plans a step before the step's drafts are made, so it knows no confidence. It knows
when each row ran, which of them gave a token, and how often the request's drafts were right so far
(p, shrunk towards all requests'). From a good row two ways lead on: its draft is right (p) and the
next row is good; or it is wrong, and then the first row that runs N steps later or more is good,
since the verdict is in by then, and none before it. Summed over the rows without an outcome this is
the probability that the next row is good.

Invariant: as in chooser.py; outcomes of a request come in the order its rows ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spexis.core.acceptance import HISTORY_MEMORY, PRIOR_DRAFTS
from spexis.core.chooser import Chooser
from spexis.core.selection import Selection

MEMORY = 4000  # drafts that the mean of all requests reaches back


@dataclass(slots=True)
class _Request:
    flying: deque[int] = field(default_factory=deque)
    """Steps of its rows without an outcome."""
    good: int | None = None
    """Step of its newest good row; None before any."""
    broken: bool = False
    """A row behind that one was bad: its draft was wrong."""
    right: float = 0.0
    drafts: float = 0.0
    """Drafts judged, fading."""


class OutcomeChooser(Chooser):
    def __init__(self, selection: Selection, num_stages: int, prior_acceptance: float = 0.6):
        super().__init__(selection, num_stages)
        self.mean = prior_acceptance
        self.requests: dict[str, _Request] = {}
        self._judged: list[float] = []  # what was expected of drafts whose truth is known now

    @classmethod
    def _of(cls, selection: Selection, setup: Mapping[str, Any]) -> OutcomeChooser:
        return cls(selection, setup["num_stages"])

    # -- what happened ---------------------------------------------------------------------------

    def ran(self, req_ids: Sequence[str], step: int) -> None:
        self.note("ran", list(req_ids), step)
        for req_id in req_ids:
            self.requests.setdefault(req_id, _Request()).flying.append(step)

    def came(self, req_ids: Sequence[str], good: Sequence[bool], step: int) -> None:
        """Outcomes of the rows that ran in this step; good: it gave a token."""
        self.note("came", list(req_ids), [bool(g) for g in good], step)
        for req_id, token in zip(req_ids, good, strict=True):
            request = self.requests.get(req_id)
            if request is None:
                continue  # forgotten since it ran
            while request.flying and request.flying[0] < step:
                request.flying.popleft()  # vLLM dropped its output
            if not request.flying or request.flying[0] > step:
                continue
            request.flying.popleft()
            known = request.good is not None and not request.broken
            if known and step < request.good + self.num_stages:  # it ran the good row's draft
                self._judge(request, bool(token))
            if token:
                request.good, request.broken = step, False
            else:
                request.broken = True

    def observe(
        self,
        seconds: float,
        tokens: int,
        rows: int,
        requests: int,
        kv_tokens: float,
        prefill_tokens: int,
    ) -> None:
        """The step of the newest outcomes; seconds: since those before it."""
        self.note("observe", seconds, tokens, rows, requests, kv_tokens, prefill_tokens)
        judged, self._judged = np.array(self._judged), []
        self.learn(seconds, tokens, rows, requests, kv_tokens, prefill_tokens, judged)

    def forget(self, req_id: str) -> None:
        """The request ended or was preempted."""
        self.note("forget", req_id)
        self.requests.pop(req_id, None)

    def _judge(self, request: _Request, right: bool) -> None:
        self._judged.append(self.acceptance(request))
        self.mean += (right - self.mean) / MEMORY
        keep = 1.0 - 1.0 / HISTORY_MEMORY
        request.right = request.right * keep + right
        request.drafts = request.drafts * keep + 1.0

    # -- the decision ----------------------------------------------------------------------------

    def acceptance(self, request: _Request) -> float:
        prior = PRIOR_DRAFTS * self.mean
        return (request.right + prior) / (request.drafts + PRIOR_DRAFTS)

    def good_row(self, req_id: str, step: int) -> float:
        """Probability that a row of the request gives a token if it runs in this step."""
        request = self.requests.get(req_id)
        if request is None or (request.good is None and not request.flying):
            return 1.0  # its first row runs a token of the prompt
        rows = [*request.flying, step]
        mass = [0.0] * (len(rows) + 1)  # the last: later rows
        p = self.acceptance(request)
        if request.good is None:
            mass[0] = 1.0
        else:
            right = 0.0 if request.broken else p
            mass[0] += right
            mass[self._restart(rows, 0, request.good)] += 1.0 - right
        for i in range(len(rows) - 1):
            mass[i + 1] += p * mass[i]
            mass[self._restart(rows, i + 1, rows[i])] += (1.0 - p) * mass[i]
        return min(mass[len(rows) - 1], 1.0)

    def _restart(self, rows: Sequence[int], begin: int, good: int) -> int:
        """The first row from `begin` on that runs once the verdict of the row at `good` is in."""
        while begin < len(rows) and rows[begin] < good + self.num_stages:
            begin += 1
        return begin

    def choose(
        self,
        req_ids: Sequence[str],  # [R] that could run a row
        step: int,
        kv_tokens: np.ndarray,  # [R]
        prefill_tokens: int = 0,
    ) -> np.ndarray:
        """[R] bool: requests whose row runs."""
        self.note("choose", list(req_ids), step, kv_tokens, prefill_tokens)
        joint = np.array([self.good_row(req_id, step) for req_id in req_ids])
        return self.decided(self.select(joint, kv_tokens, prefill_tokens))
