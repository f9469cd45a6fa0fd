# SPDX-License-Identifier: Apache-2.0
"""Simulated drafts: how sure the drafter is of each, and whether it is right.

    drafts = DraftSource(acceptance=0.65, sharpness=1.5, seed=0)
    confidence, right = drafts.take(64)

The chance c of a draft is drawn from Beta(s*p, s*(1-p)): its mean is the acceptance p, and of the
variance of "right or wrong" c explains the share 1/(1+s). So a small sharpness s is a drafter that
knows when it is wrong (s -> 0: always), a large one knows only its average. The drafter reports
sigmoid(distortion * logit(c)): 1 is calibrated, 2 overconfident.

Invariant: right with probability c whatever is reported; the same seed gives the same drafts.
"""

from __future__ import annotations

import numpy as np

POOL = 1 << 18


class DraftSource:
    def __init__(
        self, acceptance: float, sharpness: float = 1.5, distortion: float = 1.0, seed: int = 0
    ):
        if not 0 <= acceptance <= 1 or sharpness <= 0:
            raise ValueError(f"acceptance {acceptance} or sharpness {sharpness} is out of range")
        rng = np.random.default_rng(seed)
        self._rng = rng
        if 0 < acceptance < 1:
            self._chance = rng.beta(sharpness * acceptance, sharpness * (1 - acceptance), POOL)
        else:
            self._chance = np.full(POOL, acceptance)
        clipped = np.clip(self._chance, 1e-4, 1 - 1e-4)
        odds = (clipped / (1 - clipped)) ** distortion
        self._reported = (odds / (1 + odds)).astype(np.float32)
        self._refill()

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """([count] reported confidence, [count] bool right). Views: not to be written to."""
        if self._next + count > POOL:
            self._refill()
        begin, self._next = self._next, self._next + count
        return self._reported[begin : self._next], self._right[begin : self._next]

    def _refill(self) -> None:
        # The pool's confidences come again from another beginning and with fresh draws.
        shift = int(self._rng.integers(POOL))
        self._chance = np.roll(self._chance, shift)
        self._reported = np.roll(self._reported, shift)
        self._right = self._rng.random(POOL) < self._chance
        self._next = 0
