# SPDX-License-Identifier: Apache-2.0
"""What a simulated server did: throughput, latencies, memory over time; as figures and picture.

    result.summary()            # plain numbers for JSON
    result.draw("run.svg")

Latencies are seconds: TTFT from arrival to the first token, TPOT the mean gap between the tokens of
one answer, E2E from arrival to the last token. Invariant: requests that were refused are in none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spexis.simulator.trace import Trace

PERCENTILES = (50, 90, 99)
MAX_POINTS = 4000  # of the series over time


class Recorder:
    def __init__(self, trace: Trace, kv_blocks: int):
        self.trace, self.kv_blocks = trace, kv_blocks
        self.first = np.full(len(trace), np.nan)
        self.last = np.full(len(trace), np.nan)
        self.refused = self.evictions = self.recomputed_tokens = self.held_rows = 0
        self.rows = self.wasted = self.drafts = self.accepted = self.mode_changes = 0
        self.tokens = self.prefill_tokens = 0
        self._series: list[tuple[float, int, int, int, int]] = []
        self._every, self._count = 1, 0

    def first_token(self, request: int, now: float) -> None:
        self.first[request] = now

    def finished(self, request: int, now: float) -> None:
        self.last[request] = now

    def step(
        self, now: float, tokens: int, blocks: int, running: int, waiting: int, prefill: int
    ) -> None:
        self.tokens += tokens
        self.prefill_tokens += prefill
        self._count += 1
        if self._count % self._every == 0:
            self._series.append((now, self.tokens, blocks, running, waiting))
            if len(self._series) >= 2 * MAX_POINTS:
                self._series = self._series[::2]
                self._every *= 2

    def result(self, steps: int, wall_seconds: float, cpu_seconds: float) -> ServingResult:
        return ServingResult(self, steps, wall_seconds, cpu_seconds, np.array(self._series, float))


@dataclass(frozen=True, slots=True)
class ServingResult:
    record: Recorder
    steps: int
    wall_seconds: float
    """Of the simulation itself; cpu_seconds: what it used of one core."""
    cpu_seconds: float
    series: np.ndarray
    """[P, 5] seconds, tokens so far, blocks held, running, waiting."""

    @property
    def seconds(self) -> float:
        """Simulated time up to the last answer's end."""
        return float(np.nanmax(self.record.last))

    @property
    def tokens_per_second(self) -> float:
        done = ~np.isnan(self.record.last)
        return float(self.record.trace.output[done].sum() / self.seconds)

    def latencies(self) -> dict[str, np.ndarray]:
        r = self.record
        done = ~np.isnan(r.last)
        output = r.trace.output[done]
        several = output > 1
        gaps = (r.last[done] - r.first[done])[several] / (output[several] - 1)
        return {
            "ttft": r.first[done] - r.trace.arrival[done],
            "tpot": gaps,
            "e2e": r.last[done] - r.trace.arrival[done],
        }

    def summary(self) -> dict:
        r = self.record
        values = {
            "requests": len(r.trace),
            "answered": int((~np.isnan(r.last)).sum()),
            "refused": r.refused,
            "simulated_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "steps": self.steps,
            "evictions": r.evictions,
            "recomputed_tokens": r.recomputed_tokens,
            "held_for_memory_rows": r.held_rows,
            "rows": r.rows,
            "wasted_rows": r.wasted,
            "wasted_share": round(r.wasted / max(r.rows, 1), 4),
            "acceptance": round(r.accepted / max(r.drafts, 1), 4),
            "mode_changes": r.mode_changes,
            "kv_peak": round(float(self.series[:, 2].max()) / r.kv_blocks, 4),
            "kv_mean": round(self._mean(2) / r.kv_blocks, 4),
            "running_mean": round(self._mean(3), 2),
            "wall_seconds": round(self.wall_seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2),
        }
        for name, seconds in self.latencies().items():
            if len(seconds):
                for q in PERCENTILES:
                    values[f"{name}_p{q}"] = round(float(np.percentile(seconds, q)), 5)
        return values

    def _mean(self, column: int) -> float:
        """Over time."""
        times, values = self.series[:, 0], self.series[:, column]
        if len(times) < 2 or times[-1] <= times[0]:
            return float(values.mean())
        return float((values[:-1] * np.diff(times)).sum() / (times[-1] - times[0]))

    def draw(self, path: str, title: str = "") -> None:
        """Saves a picture of the run (format by the path's ending)."""
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "spexis"
        from matplotlib import pyplot as plt

        times = self.series[:, 0]
        figure, axes = plt.subplots(4, 1, figsize=(9, 9), layout="constrained")
        edges = np.linspace(times[0], times[-1], 120)
        so_far = np.interp(edges, times, self.series[:, 1])
        axes[0].plot(edges[1:], np.diff(so_far) / np.maximum(np.diff(edges), 1e-9))
        axes[0].set_ylabel("tokens/s")
        axes[1].plot(times, 100 * self.series[:, 2] / self.record.kv_blocks)
        axes[1].set(ylabel="KV blocks held, %", ylim=(0, 103))
        axes[2].plot(times, self.series[:, 3], label="running")
        axes[2].plot(times, self.series[:, 4], label="waiting")
        axes[2].set(ylabel="requests", xlabel="seconds")
        axes[2].legend(frameon=False)
        for name, seconds in self.latencies().items():
            if len(seconds):
                axes[3].plot(np.sort(seconds), np.linspace(0, 100, len(seconds)), label=name)
        axes[3].set(xscale="log", xlabel="seconds", ylabel="% of requests")
        axes[3].legend(frameon=False)
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith("svg") else None)
        plt.close(figure)
