# SPDX-License-Identifier: Apache-2.0
"""How many tokens a running request still gives: learnt from the answers that ended.

    lengths = LengthModel()
    lengths.observe(173)                                        # an answer of 173 tokens ended
    lengths.alive(generated, max_tokens, np.array([8, 64]))     # [R, K] P(runs after so many more)
    growth = Growth.of(acceptance=0.8, num_stages=2, steps=256)
    growth.mean[64], growth.variance[64]                        # tokens of one request in 64 steps

The survival function is the share of ended answers longer than n, old ones fading, mixed with a
geometric prior; so P(ends within m | g given so far) = 1 - S(g+m)/S(g) is calibrated as far as
the future resembles the past, and a request's own max_tokens is a hard end.

Growth is exact for the pipeline: a token costs one step with probability p, else N (law.py), so the
tokens f(k) of k steps obey f(k) = p(1 + f(k-1)) + (1-p)(1 + f(k-N)), the second term for k >= N
only; likewise the second moment.

Invariant: alive() falls with the number of tokens and is within 0..1; no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LONGEST = 4096  # tokens; an answer longer than that is taken to go on to its own limit
MEMORY = 4000  # answers that count
PRIOR_ANSWERS = 20.0
REFRESH = 64  # answers between two updates of the table, once many were seen


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
        # Above 0, where no answer of that length is expected: both uses divide by it.
        self.survival = np.maximum(survival, 1e-12)  # [L+1] P(length > n)
        # Mean of what is still to come after n tokens, in tokens.
        tail = np.cumsum(self.survival[::-1])[::-1]
        self.remaining = tail / self.survival

    def alive(
        self,
        generated: np.ndarray,  # [R] tokens given so far
        max_tokens: np.ndarray,  # [R] limit of each request
        tokens: np.ndarray,  # [K] further tokens
    ) -> np.ndarray:
        """[R, K] probability that the request has not ended after so many further tokens."""
        generated = np.asarray(generated, np.int64)
        later = generated[:, None] + np.ceil(tokens).astype(np.int64)[None, :]
        now = self.survival[np.minimum(generated, LONGEST)]
        alive = self.survival[np.minimum(later, LONGEST)] / now[:, None]
        return np.where(later >= np.asarray(max_tokens)[:, None], 0.0, alive)

    def expected_remaining(self, generated: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """[R] tokens."""
        generated = np.asarray(generated, np.int64)
        return np.minimum(
            self.remaining[np.minimum(generated, LONGEST)], np.maximum(max_tokens - generated, 1)
        )


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
