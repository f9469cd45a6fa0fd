# SPDX-License-Identifier: Apache-2.0
"""A length predictor that is never wrong, for benchmarks: the most that one could be worth.

    rows = [{"prompt_token_ids": ..., "params": {"extra_args": {ANSWER_TOKENS: 87}}}, ...]
    Work(name="...", rows=rows, prepare={"oracle_lengths": {}})    # driver.py installs it

A request says how long its answer will be, and the oracle tells the scheduler's look-ahead whether
fewer than 4, 8, 16, 32, 64 tokens remain: what a trained predictor is asked, answered rightly. The
engine knows nothing of it; nothing outside this file reads ANSWER_TOKENS.

Invariant: a request without ANSWER_TOKENS is one of which nothing was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spexis.core.lengths import THRESHOLDS
from spexis.core.predictions import Predictions, Told

ANSWER_TOKENS = "bench_answer_tokens"


class OraclePredictions(Predictions):
    """In the place of a Lookahead's predictions."""

    def __init__(self, requests: dict[str, Any]):
        """requests: the scheduler's own, by id."""
        super().__init__()
        self.requests = requests

    def of(self, req_ids: Sequence[str]) -> Told | None:
        lengths = np.array([self._length(self.requests[r]) for r in req_ids], float)  # [R]
        given = np.array([self.requests[r].num_output_tokens for r in req_ids], np.int64)
        if not len(lengths) or np.isnan(lengths).all():
            return None
        within = ((lengths - given)[:, None] < THRESHOLDS).astype(float)
        return Told(np.where(np.isnan(lengths)[:, None], np.nan, within), given)

    @staticmethod
    def _length(request: Any) -> float:
        params = request.sampling_params
        return (params.extra_args or {}).get(ANSWER_TOKENS, np.nan) if params else np.nan


def install(scheduler: Any, argument: dict) -> None:
    """On a SpexisScheduler with look-ahead, whose workers run no predictor."""
    scheduler.lookahead.predictions = OraclePredictions(scheduler.requests)
