# SPDX-License-Identifier: Apache-2.0
"""How long a pipeline stage takes for a step: the measured curve, corrected while it runs.

    cost = CostModel.from_profile(ProfileFile.load(path).stage_profile())
    cost.stages[0].seconds(rows=64, prefill_tokens=0, kv_tokens=64 * 500)
    cost.stages[0].observe(64, 0, 32_000, measured_seconds)
    cost.step_table(256)           # seconds between two steps, by number of decode rows

A stage's step of `rows` decode rows and `prefill_tokens` prompt tokens over `kv_tokens` of context:

    seconds = a0*u + a1*base(rows) + a2*k*kv_tokens + a3*(chunk(prefill_tokens))

base() is the measured curve itself: padded to the captured graph size where graphs are captured,
else linear between measured points, so a step of the curve stays a step. u is the curve at one row.
a = (0, 1, 1, 1) until observe() corrects it by recursive least squares on relative errors, with
forgetting, single outliers cut, a1..a3 kept positive. Times are seconds, sizes counts.

Invariant: for any observations, seconds() is finite, positive, and rises with kv_tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spexis.core.stage_profile import StagePoints, StageProfile

START = (0.0, 1.0, 1.0, 1.0)
# Standard deviations the coefficients may be off by before anything is seen, relative to START.
SPREAD = (0.05, 0.15, 0.5, 0.5)
LOWEST = (-0.3, 0.05, 0.05, 0.05)
FORGET = 0.998  # the last 500 steps count
NOISE = 0.03  # of one measured step, relative
OUTLIER = 0.3  # a relative error is cut to this: a pause of the host is not the stage's time


class Curve:
    """Piecewise linear through (x, seconds); beyond the last point its last slope goes on."""

    def __init__(self, points: Sequence[tuple[float, float]]):
        self._cache: dict[float, float] = {}
        merged: dict[float, list[float]] = {}
        for x, seconds in points:
            merged.setdefault(float(x), []).append(seconds)
        self.x = sorted(merged)
        self.y = [sum(merged[x]) / len(merged[x]) for x in self.x]

    def __call__(self, x: float) -> float:
        seconds = self._cache.get(x)
        if seconds is None:
            seconds = self._cache[x] = self._at(x)
        return seconds

    def scale(self, factor: float) -> None:
        self.y = [y * factor for y in self.y]
        self._cache.clear()

    def _at(self, x: float) -> float:
        xs, ys = self.x, self.y
        if not xs:
            return 0.0
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect.bisect_left(xs, x), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[i]:
            slope = max(slope, 0.0)  # noise at the end must not make large steps free
        return ys[i - 1] + slope * (x - xs[i - 1])


class StageCost:
    """One stage. extras: head, drafter, by decode rows; all_reduce: by tokens, all its layers."""

    def __init__(
        self,
        measured: StagePoints,
        extras: Sequence[Curve] = (),
        all_reduce: Curve | None = None,
    ):
        self.graph_sizes = measured.graph_sizes
        self.kv_seconds = _kv_seconds(measured)
        self.curve = Curve([(r, s - self.kv_seconds * r * k) for r, k, s in measured.points])
        self.chunk_curve = None
        if measured.prefill_points:
            # A chunk of one token is a row; smaller chunks than were measured lie in between.
            self.chunk_curve = Curve([(1, self.curve(1)), *measured.prefill_points])
        self.extras = tuple(extras)
        self.all_reduce = all_reduce
        # The measured curve does not change, only the coefficients do.
        self._base_cache: dict[int, float] = {}
        self._chunk_cache: dict[tuple[int, int], float] = {}
        self._base_table = np.zeros(0)
        self.unit = self.base(1)
        self.factor = 1.0  # of all that follows, see scale()
        self.theta = np.array(START)
        self._coefficients = START
        self._covariance = self._start_covariance()
        self.num_observed = 0

    def base(self, rows: int) -> float:
        """Seconds of a decode step at no context, padding included."""
        seconds = self._base_cache.get(rows)
        if seconds is None:
            padded = self.padded(rows)
            seconds = self._base_cache[rows] = self._alone(padded, padded)
        return seconds

    def _alone(self, rows: int, tokens: int) -> float:
        """tokens through the layers, rows of them decode or sample."""
        seconds = self.curve(tokens) + sum(extra(rows) for extra in self.extras)
        return seconds + (self.all_reduce(tokens) if self.all_reduce else 0.0)

    def padded(self, rows: int) -> int:
        """Rows that really run: the smallest captured graph that holds them."""
        i = bisect.bisect_left(self.graph_sizes, rows)
        return self.graph_sizes[i] if i < len(self.graph_sizes) else rows

    def chunk(self, rows: int, prefill_tokens: int) -> float:
        """Seconds that a prompt chunk adds to a step of so many decode rows."""
        if not prefill_tokens:
            return 0.0
        key = (rows, prefill_tokens)
        seconds = self._chunk_cache.get(key)
        if seconds is None:
            if len(self._chunk_cache) > 100_000:
                self._chunk_cache.clear()
            seconds = self._chunk_cache[key] = self._chunk(rows, prefill_tokens)
        return seconds

    def _chunk(self, rows: int, prefill_tokens: int) -> float:
        tokens = rows + prefill_tokens
        if self.chunk_curve is not None:
            alone = self.chunk_curve(prefill_tokens)
            if not rows:
                return max(alone - self.base(0), 0.0)
            # Weights are read once for both; the arithmetic of the chunk is added.
            reduce = self.all_reduce or (lambda tokens: 0.0)
            return max(alone - self.chunk_curve(1), 0.0) + reduce(tokens) - reduce(rows)
        return max(self._alone(self.padded(rows), tokens) - self.base(rows), 0.0)

    def features(self, rows: int, prefill_tokens: int, kv_tokens: float) -> np.ndarray:
        """[4] what the coefficients multiply, in seconds."""
        return self.factor * np.array(
            (
                self.unit,
                self.base(rows),
                self.kv_seconds * kv_tokens,
                self.chunk(rows, prefill_tokens),
            )
        )

    def seconds(self, rows: int, prefill_tokens: int = 0, kv_tokens: float = 0.0) -> float:
        a0, a1, a2, a3 = self._coefficients
        fixed = a0 * self.unit + a1 * self.base(rows)
        return self.factor * (
            max(fixed, 0.05 * self.unit)
            + a2 * self.kv_seconds * kv_tokens
            + a3 * self.chunk(rows, prefill_tokens)
        )

    def table(self, max_rows: int) -> np.ndarray:
        """[max_rows + 1] seconds by decode rows, no prompt tokens, no context."""
        if len(self._base_table) <= max_rows:
            self._base_table = np.array([self.base(rows) for rows in range(max_rows + 1)])
        fixed = self.theta[0] * self.unit + self.theta[1] * self._base_table[: max_rows + 1]
        return self.factor * np.maximum(fixed, 0.05 * self.unit)

    @property
    def kv_price(self) -> float:
        """Seconds that one KV token adds, as corrected."""
        return self.factor * self._coefficients[2] * self.kv_seconds

    def observe(self, rows: int, prefill_tokens: int, kv_tokens: float, seconds: float) -> None:
        """Learn from a measured step. Times that are not positive and finite are left out."""
        predicted = self.seconds(rows, prefill_tokens, kv_tokens)
        if not np.isfinite(seconds) or seconds <= 0 or predicted <= 0:
            return
        # Relative to the prediction: short and long steps then count alike.
        phi = self.features(rows, prefill_tokens, kv_tokens) / predicted
        error = float(np.clip(seconds / predicted - 1.0, -OUTLIER, OUTLIER))
        spread = self._covariance @ phi
        gain = spread / (FORGET * NOISE**2 + phi @ spread)
        self.theta = np.maximum(self.theta + gain * error, LOWEST)
        self._coefficients = tuple(self.theta.tolist())
        covariance = (self._covariance - np.outer(gain, spread)) / FORGET
        # What is not excited must not grow without bound: back to the start's spread at most.
        scale = np.minimum(1.0, np.array(SPREAD) / np.sqrt(np.maximum(np.diag(covariance), 1e-18)))
        self._covariance = covariance * np.outer(scale, scale)
        self.num_observed += 1

    def scale(self, factor: float) -> None:
        """All times by a factor, as if they had been measured so; what was learnt stays."""
        self.factor *= factor

    @staticmethod
    def _start_covariance() -> np.ndarray:
        return np.diag(np.square(SPREAD))


@dataclass
class CostModel:
    """All stages, and what lies between them."""

    stages: list[StageCost]
    link: Curve
    """One hop, by rows."""
    host: Curve = field(default_factory=lambda: Curve(()))
    """The host's work a step, by rows."""
    host_overlaps: bool = False
    """It is done ahead of the step, beside the devices; else behind the verdict of step - N."""
    _between: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)), repr=False)

    @classmethod
    def from_profile(cls, profile: StageProfile, drafter: bool = True) -> CostModel:
        """drafter: whether the first stage runs one (SP) or not (plain PP, TP)."""
        count = profile.num_stages
        reduce = Curve(profile.all_reduce)
        stages = []
        for s in range(count):
            extras = [Curve(profile.drafter)] if drafter and s == 0 and count > 1 else []
            extras += [Curve(profile.head)] if s == count - 1 else []
            whole_stage = None
            if profile.all_reduce and profile.tensor_parallel > 1:
                # Two a layer: behind attention and behind the MLP.
                times = 2 * profile.layers_per_stage[s]
                whole_stage = Curve(
                    [(r, times * t) for r, t in zip(reduce.x, reduce.y, strict=True)]
                )
            stages.append(StageCost(profile.of_stage(s), extras, whole_stage))
        link, host = Curve(profile.hidden_link), Curve(profile.host)
        return cls(stages, link, host, profile.host_overlaps)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def scale(self, factor: float) -> None:
        """All times by a factor: other hardware."""
        for part in (*self.stages, self.link, self.host):
            part.scale(factor)
        self._between = np.zeros((2, 0))

    def step_seconds(self, rows: int, prefill_tokens: int = 0, kv_tokens: float = 0.0) -> float:
        """Seconds from one step to the next when every step is like this one.

        The slowest stage sets the pace, or the host that works ahead, or else the circle first
        stage -> last stage -> verdict (-> host), which N steps go through at a time.
        """
        times = [stage.seconds(rows, prefill_tokens, kv_tokens) for stage in self.stages]
        hops = (self.num_stages - 1) * self.link(rows + prefill_tokens)
        host = self.host(rows)
        behind, ahead = (0.0, host) if self.host_overlaps else (host, 0.0)
        circle = (sum(times) + hops + behind) / self.num_stages
        return max(*times, circle, ahead)

    def step_table(self, max_rows: int, kv_tokens_per_row: float = 0.0) -> np.ndarray:
        """[max_rows + 1] step_seconds by decode rows."""
        rows = np.arange(max_rows + 1)
        times = np.array(
            [s.table(max_rows) + s.kv_price * kv_tokens_per_row * rows for s in self.stages]
        )
        if self._between.shape[1] <= max_rows:
            self._between = np.array(
                [[c(r) for r in rows.tolist()] for c in (self.link, self.host)]
            )
        link, host = self._between[:, : max_rows + 1]
        behind, ahead = (0.0, host) if self.host_overlaps else (host, 0.0)
        circle = (times.sum(axis=0) + (self.num_stages - 1) * link + behind) / self.num_stages
        return np.maximum(np.maximum(times.max(axis=0), circle), ahead)

    @property
    def kv_price(self) -> float:
        """Seconds a step takes longer for one more KV token: the slowest stage's."""
        return max([stage.kv_price for stage in self.stages])  # a list: asked every step


def _kv_seconds(measured: StagePoints) -> float:
    """Slope over context: the median over row counts measured at more than one length."""
    if measured.kv_seconds_per_token is not None:
        return measured.kv_seconds_per_token
    by_rows: dict[int, list[tuple[float, float]]] = {}
    for rows, kv, seconds in measured.points:
        by_rows.setdefault(rows, []).append((rows * kv, seconds))
    slopes = []
    for points in by_rows.values():
        (x0, y0), (x1, y1) = min(points), max(points)
        if x1 > x0:
            slopes.append((y1 - y0) / (x1 - x0))
    return max(float(np.median(slopes)), 0.0) if slopes else 0.0
