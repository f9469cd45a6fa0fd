# SPDX-License-Identifier: Apache-2.0
"""KV memory looked at before it runs out: who is admitted, who waits, who is evicted.

    memory = MemoryLookahead(capacity_tokens=400_000, num_stages=2)
    outlook = memory.project(running, acceptance)
    memory.admit(outlook, candidates)                # how many of the queue, in order
    memory.relieve(outlook, running, short_tokens, ...)   # who waits, who is evicted
    memory.finish_bonus(...)                         # for Selection.select

For k = 1, 8, 32 .. 256 steps ahead (and others between, where a predictor spoke) request i holds
L_i + f(k) tokens if it still runs, which has probability A_i(k) (lengths.py; Running.ends if a
predictor spoke), else none. Requests end independently, so the sum has

    mean(k) = sum A (L + f)        variance(k) = sum A(1-A)(L + f)^2 + A var f

and the outlook is mean + z*sqrt(variance), an upper quantile; where a predictor spoke, the variance
has an error of the model in addition, which all requests share. A prompt is admitted while the
largest outlook over all k, with it, fits. That holds for a request that was evicted too: it comes
back only where it can go on.

When blocks are short now, waiting is weighed against evicting, both in tokens not answered:
who waits loses its pace until others have ended; who is evicted must have its tokens computed
again. A victim is the request that gives most block-steps for its recomputing.

Invariant: deterministic; the request that ran longest is never evicted nor held for others, so
something always goes on; admission falls with what is held (more running never admits more).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spexis.core.lengths import Growth, LengthModel

HORIZONS = np.array((1, 8, 32, 64, 128, 256))
# Ends that are known make edges: the most that is held may lie between those above.
WITH_ENDS = np.array((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256))
QUANTILE = 1.645  # standard deviations: 95 %
# Share of what is held by which the mean is off, as a standard deviation: the pace, holds, what is
# not modelled. Counted where a predictor spoke; without one, when requests end is so uncertain that
# nothing else matters.
MODEL_ERROR = 0.02
BLOCK_SIZE = 16
MOST_PREEMPTIONS = 2  # of one request, as long as there is another choice


@dataclass(frozen=True, slots=True)
class Running:
    """The requests that hold KV, in order of admission (oldest first)."""

    kv_tokens: np.ndarray
    """[R] tokens held; of a request whose prompt is running: the whole prompt."""
    generated: np.ndarray
    """[R] tokens answered."""
    max_tokens: np.ndarray
    """[R] limit of the answer."""
    cached: np.ndarray | None = None
    """[R] tokens that a prefix cache would give back."""
    protected: np.ndarray | None = None
    """[R] bool: evicted only where no other request is left (it was often enough already)."""
    ends: np.ndarray | None = None
    """[R, 5] calibrated P(fewer than lengths.THRESHOLDS tokens remain), NaN where not known."""
    ends_at: np.ndarray | None = None
    """[R] tokens answered where `ends` was predicted; None: at `generated`."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """KV tokens held at each of some horizons."""

    mean: np.ndarray  # [K]
    variance: np.ndarray  # [K]
    growth: Growth
    horizons: np.ndarray  # [K] steps ahead

    @property
    def more(self) -> np.ndarray:
        """[K] tokens that a request gives until then."""
        return self.growth.mean[self.horizons]

    @property
    def upper(self) -> np.ndarray:
        """[K] upper quantile."""
        return self.mean + QUANTILE * np.sqrt(self.variance)

    @property
    def peak(self) -> float:
        return float(self.upper.max())


@dataclass(frozen=True, slots=True)
class Relief:
    """What to do about blocks that are short. Indices into Running."""

    hold: np.ndarray
    evict: np.ndarray


class MemoryLookahead:
    def __init__(
        self,
        capacity_tokens: int,
        num_stages: int,
        lengths: LengthModel | None = None,
        block_size: int = BLOCK_SIZE,
    ):
        self.capacity = capacity_tokens
        self.num_stages = num_stages
        self.lengths = lengths or LengthModel()
        # What a request holds beyond its tokens: half a block, and rows in flight.
        self.overhead = (block_size - 1) / 2 + num_stages

    def project(self, running: Running, acceptance: float) -> Outlook:
        """acceptance: of the drafts, as it limits growth (law.acceptance_for of the real pace)."""
        growth = Growth.of(acceptance, self.num_stages, int(HORIZONS[-1]))
        horizons = HORIZONS if running.ends is None else WITH_ENDS
        alive = self._alive(running, growth.mean[horizons])
        mean, variance = self._moments(running.kv_tokens, alive, growth, horizons)
        mean, variance = mean.sum(axis=0), variance.sum(axis=0)
        if running.ends is not None:
            variance += (MODEL_ERROR * mean) ** 2
        return Outlook(mean, variance, growth, horizons)

    def _moments(self, kv_tokens, alive, growth, horizons) -> tuple[np.ndarray, np.ndarray]:
        """([R, K], [R, K])"""
        more = growth.mean[horizons]
        held = np.asarray(kv_tokens, float)[:, None] + self.overhead + more[None, :]
        mean = alive * held
        return mean, mean * (1 - alive) * held + alive * growth.variance[horizons][None, :]

    def _alive(self, running: Running, more: np.ndarray) -> np.ndarray:
        """[R, K] after so many more tokens, [K]."""
        return self.lengths.alive(
            running.generated, running.max_tokens, more, running.ends, running.ends_at
        )

    def admit(
        self,
        outlook: Outlook,
        kv_tokens: np.ndarray,  # [C] prompt, and what was answered before an eviction
        generated: np.ndarray,  # [C] answered before an eviction
        max_tokens: np.ndarray,  # [C]
        num_running: int,
    ) -> int:
        """How many of the waiting requests are admitted, in their order.

        Where nothing runs the first one is admitted if it fits by itself: waiting would not help.
        """
        if not len(kv_tokens):
            return 0
        alive = self.lengths.alive(generated, max_tokens, outlook.more)
        mean, variance = self._moments(kv_tokens, alive, outlook.growth, outlook.horizons)
        mean = outlook.mean[None, :] + mean.cumsum(axis=0)
        variance = outlook.variance[None, :] + variance.cumsum(axis=0)
        peaks = (mean + QUANTILE * np.sqrt(variance)).max(axis=1)
        # Also what they hold at once, before anything ended.
        now = outlook.mean[0] + (np.asarray(kv_tokens) + self.overhead).cumsum()
        fits = np.maximum(peaks, now) <= self.capacity
        count = int(np.argmin(fits)) if not fits.all() else len(fits)
        if count == 0 and num_running == 0 and self.can_ever_run(int(kv_tokens[0])):
            return 1
        return count

    def surely_fits(self, kv_tokens: np.ndarray, acceptance: float) -> bool:
        """Whether requests that hold so many tokens ([R]) fit whatever lengths turn out to be.

        A bound, far cheaper than project() and admit(): nobody ends and all have grown to the last
        horizon, with the largest variance that "ends or not" can have. Where it holds, admit()
        admits all of them.
        """
        growth = Growth.of(acceptance, self.num_stages, int(HORIZONS[-1]))
        held = kv_tokens + (self.overhead + float(growth.mean[-1]))  # [R]
        # alive (1 - alive) is a quarter at most.
        variance = float(held @ held) / 4 + len(held) * float(growth.variance.max())
        return float(held.sum()) + QUANTILE * math.sqrt(variance) <= self.capacity

    def can_ever_run(self, kv_tokens: int) -> bool:
        """False: not even alone, with one token more."""
        return kv_tokens + 1 + self.num_stages <= self.capacity

    def relieve(
        self,
        outlook: Outlook,
        running: Running,
        wants: np.ndarray,  # [R] bool: needs a block to run its next row
        short_tokens: float,  # tokens' worth of blocks missing in this step
        tokens_per_second: float,
        recompute_seconds_per_token: float,
        step_seconds: float,
    ) -> Relief:
        """Hold or evict, so that what runs in this step has its blocks."""
        none = np.zeros(0, np.int64)
        count = len(running.kv_tokens)
        if short_tokens <= 0 or count <= 1:
            return Relief(none, none)
        remaining = self.lengths.expected_remaining(
            running.generated, running.max_tokens, running.ends, running.ends_at
        )
        pace = max(tokens_per_second * step_seconds / count, 1e-9)  # of one request, tokens a step
        protected = np.zeros(count, bool) if running.protected is None else running.protected.copy()
        protected[0] = True

        # Holding: those furthest from their end wait, a block each.
        waiting = np.flatnonzero(wants & ~protected)
        waiting = waiting[np.argsort(-remaining[waiting], kind="stable")]
        block = max(short_tokens / max(int(np.count_nonzero(wants)), 1), 1.0)
        hold = waiting[: int(np.ceil(short_tokens / block))]
        steps = self._steps_until_freed(running, outlook, short_tokens, hold)
        held_cost = len(hold) * pace * steps
        can_hold = len(hold) * block >= short_tokens

        # Evicting: most block-steps for the recomputing.
        computed = np.asarray(running.kv_tokens, float)
        again = computed - (0 if running.cached is None else running.cached)
        worth = computed * np.minimum(remaining / pace, HORIZONS[-1])
        score = np.where(protected, np.inf, (again + 1.0) / worth)
        order = np.argsort(score, kind="stable")[: count - 1]
        # More than this step's shortage, or the next step would evict again; but not a large
        # request for a small shortage, where one of the better half suffices.
        target = max(short_tokens, 0.01 * self.capacity)
        better = order[: max(count // 2, 1)]
        enough = better[computed[better] >= target]
        if len(enough):
            evict = enough[[int(np.argmin(again[enough]))]]
        else:
            evict = order[: int(np.searchsorted(np.cumsum(computed[order]), target)) + 1]
        evict_cost = again[evict].sum() * recompute_seconds_per_token * tokens_per_second
        if can_hold and np.isfinite(steps) and held_cost < evict_cost:
            return Relief(hold, none)
        return Relief(none, evict)

    def _steps_until_freed(self, running, outlook, tokens: float, hold: np.ndarray) -> float:
        """Steps until those that go on have freed so much, surely enough; inf: not in sight."""
        ended = 1.0 - self._alive(running, outlook.more)
        ended[hold] = 0.0
        held = np.asarray(running.kv_tokens, float)[:, None]
        mean = (ended * held).sum(axis=0)
        spread = np.sqrt((ended * (1 - ended) * held**2).sum(axis=0))
        enough = np.flatnonzero(mean - spread >= tokens)
        return float(outlook.horizons[enough[0]]) if len(enough) else np.inf

    def finish_bonus(
        self,
        running: Running,
        pace: float,  # tokens a request gives in a step
        within: int = 16,
    ) -> np.ndarray:
        """[R] tokens that a right row is worth on top of its own, while requests wait for memory.

        A request that ends a step sooner frees its tokens for that step, in which others of mean
        size would have given their pace. Counted for those that are likely to end soon.
        """
        ends = 1.0 - self._alive(running, np.array((float(within),)))
        kv_tokens = np.asarray(running.kv_tokens)
        mean = float(np.add.reduce(kv_tokens)) / max(len(kv_tokens), 1)
        share = kv_tokens / max(mean, 1.0)
        return ends[:, 0] * share * pace
