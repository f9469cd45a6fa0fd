# SPDX-License-Identifier: Apache-2.0
"""How many tokens a running request still gives: learnt from the answers that ended.

    lengths = LengthModel()
    lengths.observe(173)                                        # an answer of 173 tokens ended
    lengths.alive(generated, max_tokens, np.array([8, 64]))     # [R, K] P(runs after so many more)
    lengths.alive(generated, max_tokens, more, ends=ends)       # with a predictor's, see below
    growth = Growth.of(acceptance=0.8, num_stages=2, steps=256)
    growth.mean[64], growth.variance[64]                        # tokens of one request in 64 steps

The survival function is the share of ended answers longer than n, old ones fading, mixed with a
geometric prior; so P(ends within m | g given so far) = 1 - S(g+m)/S(g) is calibrated as far as
the future resembles the past, and a request's own max_tokens is a hard end.

A length predictor (lengths/, calibrated by endings.py) says P(fewer than m tokens remain) for
m = 4, 8, 16, 32, 64. These are points on the request's own survival curve; between two of them the
curve falls as the ended answers' does, scaled to meet both, and beyond the last one it falls as
theirs. Where a prediction is missing (NaN) their curve stands in, so a request without any is
judged exactly as without a predictor.

Growth is exact for the pipeline: a token costs one step with probability p, else N (law.py), so the
tokens f(k) of k steps obey f(k) = p(1 + f(k-1)) + (1-p)(1 + f(k-N)), the second term for k >= N
only; likewise the second moment.

Invariant: alive() falls with the number of tokens and is within 0..1, whatever the predictions;
no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LONGEST = 4096  # tokens; an answer longer than that is taken to go on to its own limit
MEMORY = 4000  # answers that count
PRIOR_ANSWERS = 20.0
REFRESH = 64  # answers between two updates of the table, once many were seen
THRESHOLDS = (4, 8, 16, 32, 64)  # a predictor gives P(remaining tokens < m) for each
# Fewer than m remain iff the answer has ended after m - 1 more: tokens at which the curve is known.
KNOTS = np.array((0, *(m - 1 for m in THRESHOLDS)))
EDGE = 1e-4  # predictions are never taken for certain
TINY = 1e-12
LAST = 1 - TINY


class LengthModel:
    def __init__(self, prior_mean: float = 250.0):
        n = np.arange(LONGEST + 1)
        hazard = 1.0 / prior_mean
        self._prior = PRIOR_ANSWERS * hazard * (1 - hazard) ** n  # [L+1] weight of length n+1
        self._longer = PRIOR_ANSWERS * (1 - hazard) ** (LONGEST + 1)
        self._counts = np.zeros(LONGEST + 1)
        self._fresh: list[int] = []
        self.num_observed = 0
        self._tabulate()

    def observe(self, output_tokens: int) -> None:
        """An answer ended by itself or by its limit."""
        self._fresh.append(min(max(output_tokens, 1), LONGEST + 1) - 1)
        self.num_observed += 1
        # The first answers of a server say most, so they count at once.
        if len(self._fresh) >= min(REFRESH, 1 + self.num_observed // 8):
            self._counts *= 0.5 ** (len(self._fresh) / MEMORY)
            np.add.at(self._counts, self._fresh, 1.0)
            self._fresh.clear()
            self._tabulate()

    def _tabulate(self) -> None:
        weight = self._counts + self._prior
        ended = np.concatenate(([0.0], np.cumsum(weight)[:-1]))
        survival = 1.0 - ended / (weight.sum() + self._longer)
        # Above 0, where no answer of that length is expected: it is divided by.
        self.survival = np.maximum(survival, TINY)  # [L+1] P(length > n)
        self._log_survival = np.log(self.survival)
        # Mean of what is still to come after n tokens, in tokens.
        tail = np.cumsum(self.survival[::-1])[::-1]
        self.remaining = tail / self.survival

    def alive(
        self,
        generated: np.ndarray,  # [R] tokens given so far
        max_tokens: np.ndarray,  # [R] limit of each request
        tokens: np.ndarray,  # [K] further tokens
        ends: np.ndarray | None = None,  # [R, 5] P(remaining < THRESHOLDS), NaN where not known
        ends_at: np.ndarray | None = None,  # [R] tokens given where that was said; None: generated
    ) -> np.ndarray:
        """[R, K] probability that the request has not ended after so many further tokens."""
        generated = np.asarray(generated, np.int64)
        later = generated[:, None] + np.ceil(tokens).astype(np.int64)[None, :]
        if ends is None:
            now = self.survival.take(generated, mode="clip")  # no length is below 0
            alive = self.survival.take(later, mode="clip") / now[:, None]
        else:
            at = generated if ends_at is None else np.asarray(ends_at, np.int64)
            curve = self._curve(at, np.asarray(ends, float))
            now = self._log_alive(at, curve, generated[:, None])
            alive = np.exp(np.minimum(self._log_alive(at, curve, later) - now, 0.0))
        return np.where(later >= np.asarray(max_tokens)[:, None], 0.0, alive)

    def _curve(self, at: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[R, 6] log P(not ended KNOTS after `at`): the predictions made to rise with m."""
        model = self._log(at[:, None] + KNOTS[None, 1:]) - self._log(at)[:, None]
        said = np.clip(ends, EDGE, 1 - EDGE)
        lower = np.fmax.accumulate(said, axis=1)  # NaN until the first that is known
        said = np.where(np.isnan(said), np.nan, lower)
        upper = np.fmin.accumulate(said[:, ::-1], axis=1)[:, ::-1]
        filled = np.fmin(np.fmax(-np.expm1(model), lower), upper)  # bounds of NaN do not count
        known = np.where(np.isnan(said), filled, said)
        # Where nothing is known the model's own logarithm, which has lost nothing to rounding.
        curve = np.where(np.isnan(said).all(axis=1)[:, None], model, np.log1p(-known.clip(0, LAST)))
        return np.concatenate((np.zeros((len(at), 1)), curve), axis=1)

    def _log_alive(self, at: np.ndarray, curve: np.ndarray, length: np.ndarray) -> np.ndarray:
        """[R, K] log P(length > `length` [R, K]), given that it was more than `at`."""
        at = at[:, None]
        more = np.clip(length - at, 0, KNOTS[-1])
        place = np.clip(np.searchsorted(KNOTS, more, side="right") - 1, 0, len(KNOTS) - 2)
        left, right = KNOTS[place], KNOTS[place + 1]
        first = self._log(at + left)
        fall = self._log(at + right) - first  # of the ended answers, over this interval
        even = (more - left) / (right - left)  # past the longest answer theirs does not fall
        share = np.where(fall < 0, (self._log(at + more) - first) / np.minimum(fall, -TINY), even)
        left, right = (np.take_along_axis(curve, place + i, axis=1) for i in (0, 1))
        beyond = self._log(np.maximum(length, at + KNOTS[-1])) - self._log(at + KNOTS[-1])
        return left + np.clip(share, 0.0, 1.0) * (right - left) + beyond

    def _log(self, length: np.ndarray) -> np.ndarray:
        """log P(length > n), as np.int64 of any shape."""
        return self._log_survival[np.clip(length, 0, LONGEST)]

    def expected_remaining(
        self,
        generated: np.ndarray,  # [R]
        max_tokens: np.ndarray,  # [R]
        ends: np.ndarray | None = None,  # [R, 5] as for alive()
        ends_at: np.ndarray | None = None,  # [R]
    ) -> np.ndarray:
        """[R] tokens."""
        generated = np.asarray(generated, np.int64)
        most = np.maximum(np.asarray(max_tokens) - generated, 1)
        if ends is None:
            return np.minimum(self.remaining[np.minimum(generated, LONGEST)], most)
        ahead = 0 if ends_at is None else int(np.max(np.asarray(ends_at) - generated, initial=0))
        last = int(KNOTS[-1]) + max(ahead, 0)  # from there on the model's own mean
        alive = self.alive(generated, max_tokens, np.arange(last + 1), ends, ends_at)
        beyond = self.remaining[np.minimum(generated + last, LONGEST)]
        return np.clip(alive[:, :-1].sum(axis=1) + alive[:, -1] * beyond, 1.0, most)


@dataclass(frozen=True, slots=True)
class Growth:
    """Tokens that one request returns in k steps, k = 0..len-1."""

    mean: np.ndarray
    variance: np.ndarray

    @staticmethod
    def of(acceptance: float, num_stages: int, steps: int) -> Growth:
        """From the exact recurrence. The acceptance is rounded to a hundredth."""
        return _growth(round(min(max(acceptance, 0.0), 1.0), 2), num_stages, steps)


@lru_cache(maxsize=256)
def _growth(p: float, stages: int, steps: int) -> Growth:
    first, second = [0.0] * (steps + 1), [0.0] * (steps + 1)
    for k in range(1, steps + 1):
        one, two = first[k - 1], second[k - 1]
        mean, square = p * (1 + one), p * (1 + 2 * one + two)
        if k >= stages:
            one, two = first[k - stages], second[k - stages]
            mean += (1 - p) * (1 + one)
            square += (1 - p) * (1 + 2 * one + two)
        first[k], second[k] = mean, square
    mean = np.array(first)
    return Growth(mean, np.maximum(np.array(second) - mean**2, 0.0))
