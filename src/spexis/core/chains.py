# SPDX-License-Identifier: Apache-2.0
"""Which drafts run (SP-alpha), as the first stage sees it: chains of drafts without verdict.

    chooser = DraftChooser(Selection(cost, max_rows=256), num_slots=512, num_stages=2)
    each step:
        chooser.verdicts(slots, positions, right)            # of the step N back, as they came
        run = chooser.choose(slots, positions, kv_tokens, seconds, tokens, prefill_tokens)
        chooser.drafted(slots, positions, answered, confidence)       # of the rows that ran

A row's input is the true token if all drafts of its request without a verdict are right. Each
slot remembers the calibrated chance of its newest drafts by position; a verdict makes the chance of
its position 1, also where the draft was wrong, since the true token takes its place there.

The estimate learns from each verdict whether the draft for that position was right, held or not.

Shapes: R rows of a step, S slots, H positions remembered, D verdicts.
Invariant: numpy in, numpy out, nothing random; a row whose input is verified always runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spexis.core.acceptance import AcceptanceEstimator, remember
from spexis.core.chooser import Chooser
from spexis.core.selection import Selection

CALIBRATE_EVERY = 16  # steps between two fits of the estimate


class DraftChooser(Chooser):
    def __init__(self, selection: Selection, num_slots: int, num_stages: int, version: str = ""):
        """version: of the drafter, for the estimate."""
        super().__init__(selection, num_stages)
        self.version = version
        self.estimator = AcceptanceEstimator()
        self.num_remembered = num_stages + 2
        shape = (num_slots, self.num_remembered)
        self.chance = np.ones(shape)  # [S, H] that the token planned at position % H is right
        self._confidence = np.full(shape, np.nan)  # [S, H] as reported
        self._answered = np.zeros(shape)  # [S, H] tokens answered before
        self._right = np.zeros(num_slots)  # [S] history, fading
        self._drafts = np.zeros(num_slots)
        self._seen: list[tuple[np.ndarray, ...]] = []  # verdicts not learnt from yet
        self._num_steps = 0
        self._last: tuple[int, int, float, int] | None = None  # rows, requests, KV, prompt tokens

    @classmethod
    def _of(cls, selection: Selection, setup: Mapping[str, Any]) -> DraftChooser:
        return cls(selection, setup["num_slots"], setup["num_stages"], setup["version"])

    # -- what happened ---------------------------------------------------------------------------

    def bind(self, slot: int) -> None:
        """Another request, or a resumed one, took the slot: nothing of it is without a verdict."""
        self.note("bind", slot)
        self.chance[slot] = 1.0
        self._confidence[slot] = np.nan
        self._right[slot] = self._drafts[slot] = 0.0

    def drafted(
        self,
        slots: np.ndarray,  # [R]
        positions: np.ndarray,  # [R] that the drafts will take
        answered: np.ndarray,  # [R] tokens of the answer before them
        confidence: np.ndarray,  # [R] the drafter's own
    ) -> None:
        self.note("drafted", slots, positions, answered, confidence)
        column = positions % self.num_remembered
        self._confidence[slots, column] = confidence
        self._answered[slots, column] = answered
        self.chance[slots, column] = self.estimator.probability(
            self.version, confidence, answered, self._right[slots], self._drafts[slots]
        )

    def verdicts(
        self,
        slots: np.ndarray,  # [D] of rows that gave a token
        positions: np.ndarray,  # [D] that the token takes
        right: np.ndarray,  # [D] bool: the draft was that token
    ) -> None:
        self.note("verdicts", slots, positions, right)
        column = positions % self.num_remembered
        confidence = self._confidence[slots, column]
        known = ~np.isnan(confidence)
        at = slots[known]
        history = self._right[at], self._drafts[at]
        answered = self._answered[slots, column][known]
        self._seen.append((confidence[known], answered, *history, right[known]))
        self._right[at], self._drafts[at] = remember(*history, right[known])
        self.chance[slots, column] = 1.0

    # -- the decision ----------------------------------------------------------------------------

    def joint(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[R] probability that the token to run at each position is the true one."""
        # The verdict of N steps back is in, so N-1 drafts can be without one. Farther back lie
        # columns that drafts behind a wrong guess have overwritten.
        lags = np.arange(self.num_stages - 1)
        columns = (positions[:, None] - lags) % self.num_remembered
        return self.chance[slots[:, None], columns].prod(axis=1)

    def choose(
        self,
        slots: np.ndarray,  # [R] of decode rows
        positions: np.ndarray,  # [R] of the tokens that they would run
        kv_tokens: np.ndarray,  # [R]
        seconds: float,
        tokens: int,
        prefill_tokens: int = 0,
        full: bool = True,
    ) -> np.ndarray:
        """[R] bool: rows that run.

        seconds: since the step before began; tokens: verdicts with a token since then; full: as of
        learn().
        """
        self.note("choose", slots, positions, kv_tokens, seconds, tokens, prefill_tokens, full)
        confidences = self._calibrate()
        if self._last is not None:
            self.learn(seconds, tokens, *self._last, confidences, full)
        run = self.select(self.joint(slots, positions), kv_tokens, prefill_tokens)
        self._last = (int(run.sum()), len(run), float(kv_tokens[run].sum()), prefill_tokens)
        return self.decided(run)

    def _calibrate(self) -> np.ndarray | None:
        """Learns from the verdicts since the last time; [D] what was expected of them."""
        self._num_steps += 1
        if not self._seen or self._num_steps % CALIBRATE_EVERY:
            return None
        columns = [np.concatenate(c) for c in zip(*self._seen, strict=True)]
        self._seen.clear()
        *features, right = columns
        confidences = self.estimator.probability(self.version, *features)
        self.estimator.observe(self.version, *features, right)
        return confidences
