# SPDX-License-Identifier: Apache-2.0
"""Which mode runs: every draft (SP), selected drafts (SP-alpha), or none (plain PP). Live.

    control = ModeControl(cost_with_drafter, cost_without)
    control.update(requests, histogram, rate)     # now and then; rate: measured tokens per second
    control.mode                                  # Mode.SP, Mode.ALPHA, Mode.PP
    control.probes(request_ids)                   # [R] bool: speculate although the mode is PP

Each mode's rate is predicted from the selective law (law.py), the drafter's confidences and the
step times, and scaled by what was measured against the prediction when the mode last ran. The
mode changes only for a gain of `margin`, seen `looks` times in a row, and not within `dwell` looks
of the last change. Under plain PP a small share of the requests goes on speculating: without their
verdicts nothing would ever show that drafts have become right again.

Invariant: no mode change without the margin; probes are the same requests for a while, so that they
fill the pipeline; deterministic.
"""

from __future__ import annotations

import enum

import numpy as np

from spexis.core.cost_model import CostModel
from spexis.core.selection import ConfidenceHistogram, operating_points

DRIFT = (0.7, 1.4)  # measured / predicted is cut to this


class Mode(enum.StrEnum):
    SP = "sp"
    ALPHA = "sp-alpha"
    PP = "pp"


class ModeControl:
    def __init__(
        self,
        cost: CostModel,
        plain_cost: CostModel | None = None,
        margin: float = 0.03,
        looks: int = 3,
        dwell: int = 8,
        probe_share: float = 0.02,
        mode: Mode = Mode.ALPHA,
    ):
        """plain_cost: step times without a drafter, where that can be left out; default: cost."""
        self.cost, self.plain_cost = cost, plain_cost or cost
        self.margin, self.looks, self.dwell = margin, looks, dwell
        self.probe_share, self.mode = probe_share, mode
        self.num_changes = 0
        self.predicted: dict[Mode, float] = {}
        self._scale: dict[Mode, float] = {}
        self._better = self._since = 0
        self._candidate: Mode | None = None

    def predict(self, requests: int, histogram: ConfidenceHistogram) -> dict[Mode, float]:
        """Tokens per second of each mode by the law."""
        stages = self.cost.num_stages
        points = operating_points(requests, stages, self.cost.step_table(requests), histogram)
        part = -(-requests // stages)
        plain = (requests / stages) / self.plain_cost.step_table(part)[part]
        return {
            Mode.SP: points[0].rate,
            Mode.ALPHA: max(p.rate for p in points),
            Mode.PP: float(plain),
        }

    def update(self, requests: int, histogram: ConfidenceHistogram, rate: float) -> Mode:
        """requests: running now. rate: tokens per second since the last update, 0 if unknown."""
        if requests <= 0:
            return self.mode
        self.predicted = self.predict(requests, histogram)
        self._since += 1
        if rate > 0 and self._since > 1:  # the first look after a change saw both modes
            ratio = float(np.clip(rate / self.predicted[self.mode], *DRIFT))
            old = self._scale.get(self.mode, ratio)
            self._scale[self.mode] = old + 0.25 * (ratio - old)
        present = self._scale.get(self.mode, 1.0)
        # A mode that never ran is taken to be off by what the present one is off.
        rates = {m: r * self._scale.get(m, present) for m, r in self.predicted.items()}
        best = max(rates, key=lambda m: (rates[m], m is Mode.SP))
        if best is self.mode or rates[best] < rates[self.mode] * (1 + self.margin):
            self._candidate, self._better = None, 0
            return self.mode
        self._better = self._better + 1 if best is self._candidate else 1
        self._candidate = best
        if self._better >= self.looks and self._since >= self.dwell:
            self.mode, self._candidate, self._better, self._since = best, None, 0, 0
            self.num_changes += 1
        return self.mode

    def probes(self, request_ids: np.ndarray) -> np.ndarray:
        """request_ids: [R] numbers. [R] bool; all False unless the mode is PP."""
        if self.mode is not Mode.PP or not len(request_ids):
            return np.zeros(len(request_ids), bool)
        # Fibonacci hashing spreads consecutive numbers evenly; the choice moves on slowly.
        key = (request_ids.astype(np.uint64) + np.uint64(self._since // 16)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        chosen = (key >> np.uint64(40)).astype(float) / (1 << 24) < self.probe_share
        if not chosen.any():
            chosen[int(np.argmin(key))] = True
        return chosen
