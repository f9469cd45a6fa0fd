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
from functools import lru_cache
from typing import Any

import numpy as np

from spexis.core.acceptance import HISTORY_MEMORY, PRIOR_DRAFTS
from spexis.core.chooser import SchedulerChooser
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


class OutcomeChooser(SchedulerChooser):
    def __init__(self, selection: Selection, num_stages: int, prior_acceptance: float = 0.6):
        super().__init__(selection, num_stages)
        self.mean = prior_acceptance
        self.requests: dict[str, _Request] = {}

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

    def forget(self, req_id: str) -> None:
        """The request ended or was preempted."""
        self.note("forget", req_id)
        self.requests.pop(req_id, None)

    def _judge(self, request: _Request, right: bool) -> None:
        self._confidences.append(self.acceptance(request))
        self.mean += (right - self.mean) / MEMORY
        keep = 1.0 - 1.0 / HISTORY_MEMORY
        request.right = request.right * keep + right
        request.drafts = request.drafts * keep + 1.0

    # -- the decision ----------------------------------------------------------------------------

    def acceptance(self, request: _Request) -> float:
        prior = PRIOR_DRAFTS * self.mean
        return (request.right + prior) / (request.drafts + PRIOR_DRAFTS)

    def good_rows(self, req_ids: Sequence[str], step: int) -> np.ndarray:
        """[R] probability that each request's row gives a token if it runs in this step."""
        found = [self.requests.get(req_id) for req_id in req_ids]
        seen = [self._seen_from(request, step) for request in found]
        # Polynomials are as long as each has rows, so they are looked up once for each shape.
        number = {shape: i for i, shape in enumerate(dict.fromkeys(seen))}
        rows = [_polynomial(*shape) for shape in number]
        polynomials = np.zeros((len(rows), max(map(len, rows), default=1)))
        for i, row in enumerate(rows):
            polynomials[i, : len(row)] = row
        p = np.array([self.mean if r is None else self.acceptance(r) for r in found])
        powers = p[:, None] ** np.arange(polynomials.shape[1])
        chosen = polynomials[[number[shape] for shape in seen]]
        return np.clip((chosen * powers).sum(axis=1), 0.0, 1.0)

    def _seen_from(self, request: _Request | None, step: int) -> tuple:
        """What the probability depends on beside p: how long ago its rows ran."""
        if request is None:
            return (), None, False, self.num_stages
        ages = tuple(step - ran for ran in request.flying)
        good = None
        if request.good is not None:  # longer ago makes no difference
            good = min(step - request.good, self.num_stages + (ages[0] if ages else 0))
        return ages, good, request.broken, self.num_stages

    def choose(
        self,
        req_ids: Sequence[str],  # [R] that could run a row
        step: int,
        kv_tokens: np.ndarray,  # [R]
        prefill_tokens: int = 0,
        bonus: np.ndarray | None = None,  # [R] tokens that a good row is worth on top
    ) -> np.ndarray:
        """[R] bool: requests whose row runs."""
        self.note("choose", list(req_ids), step, kv_tokens, prefill_tokens, bonus)
        joint = self.good_rows(req_ids, step)
        return self.decided(self.select(joint, kv_tokens, prefill_tokens, bonus))


@lru_cache(maxsize=8192)  # few shapes come again and again
def _polynomial(
    ages: tuple[int, ...], good: int | None, broken: bool, num_stages: int
) -> tuple[float, ...]:
    """Coefficients in p, lowest first, of the probability that a row running now is good.

    ages: steps since each row without an outcome ran, oldest first; good: since the newest good
    row, None before any; broken: a row behind that one was bad.
    """
    rows = [*ages, 0]
    # By row, the last: rows yet to come. Each is a polynomial as long as there are rows.
    mass = np.zeros((len(rows) + 1, len(rows) + 2))

    def restart(begin: int, since: int) -> int:
        """The first row from `begin` on that ran once the verdict of the row at `since` was in."""
        while begin < len(rows) and since - rows[begin] < num_stages:
            begin += 1
        return begin

    def lead_on(weight: np.ndarray, begin: int, since: int) -> None:
        """From a good row that ran `since` steps ago: its draft is right (p), or it is not."""
        right = np.roll(weight, 1)  # times p; the highest coefficient is 0
        mass[begin] += right
        mass[restart(begin, since)] += weight - right

    one = np.zeros(len(rows) + 2)
    one[0] = 1.0
    if good is None:
        mass[0] += one  # its first row runs a token of the prompt
    elif broken:
        mass[restart(0, good)] += one
    else:
        lead_on(one, 0, good)
    for i, age in enumerate(ages):
        lead_on(mass[i].copy(), i + 1, age)
    return tuple(mass[len(rows) - 1].tolist())
