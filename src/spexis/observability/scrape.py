# SPDX-License-Identifier: Apache-2.0
"""Two looks at a server's /metrics and the differences between them. Pure: text and numbers.

    window = Window(parse(text, time=10.0), parse(later_text, time=11.0))
    window.now("vllm:num_requests_running"), window.rate("vllm:generation_tokens_total")
    window.grown_by("spexis:drafts_total", "drafter_version")

A counter that fell means that the server restarted: then the first look says nothing about the
server that answers now, and all is counted from zero, as Prometheus' rate() does.

Invariant: a series that is not there gives None (or nothing in a dict), never 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from spexis.observability.counters import ratio

START = "process_start_time_seconds"
PREFIXES = ("vllm:", "spexis:", START)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    time: float
    """Seconds of any clock that never goes back."""
    series: dict[str, dict[Labels, float]]
    """Sample name -> sorted labels -> value; values that are not finite are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds, of the `count` observations between the looks; None without one."""

    count: float
    mean: float | None
    p50: float | None
    p99: float | None


def parse(text: str, time: float) -> Scrape:
    """Prometheus' text format; ValueError if it is something else."""
    series: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIXES) and math.isfinite(sample.value):
                labels = tuple(sorted(sample.labels.items()))
                series.setdefault(sample.name, {})[labels] = float(sample.value)
    return Scrape(time, series)


class Window:
    def __init__(self, before: Scrape, after: Scrape):
        """ValueError unless `after` is later than `before`."""
        self.seconds = after.time - before.time
        if self.seconds <= 0:
            raise ValueError(f"the second look is not later ({before.time}, {after.time})")
        self.restarted = _restarted(before, after)
        self.before: dict[str, dict[Labels, float]] = {} if self.restarted else before.series
        self.after = after.series

    def now(self, name: str) -> float | None:
        """Sum over all labels at the second look."""
        return sum(self.after[name].values()) if name in self.after else None

    def now_by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for key, value in self.after.get(name, {}).items():
            found[dict(key).get(label, "")] += value
        return dict(found)

    def mean(self, name: str) -> float | None:
        values = self.after.get(name)
        return sum(values.values()) / len(values) if values else None

    def grown_by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Growth by the values of `labels`, summed over the others."""
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for key, value in self.after.get(name, {}).items():
            which = dict(key)
            was = self.before.get(name, {}).get(key, 0.0)
            found[tuple(which.get(label, "") for label in labels)] += value - was
        return dict(found)

    def grown(self, name: str) -> float | None:
        return self.grown_by(name).get(())

    def rate(self, name: str) -> float | None:
        """Growth per second."""
        grown = self.grown(name)
        return None if grown is None else grown / self.seconds

    def latency(self, name: str) -> Latency | None:
        """Of the histogram `name`, in seconds."""
        count, total = self.grown(f"{name}_count"), self.grown(f"{name}_sum")
        if count is None or total is None:
            return None
        grown = self.grown_by(f"{name}_bucket", "le")
        buckets = sorted((float(bound), number) for (bound,), number in grown.items())
        return Latency(
            count=count,
            mean=ratio(total, count),
            p50=quantile(buckets, 0.50),
            p99=quantile(buckets, 0.99),
        )

    def values_of(self, label: str) -> tuple[str, ...]:
        """All values a label has at the second look, sorted."""
        keys = (key for values in self.after.values() for key in values)
        return tuple(sorted({value for key in keys for name, value in key if name == label}))


def quantile(buckets: Iterable[tuple[float, float]], q: float) -> float | None:
    """Of cumulative counts, (upper bound, count) by rising bound; evenly spread inside a bucket, as
    in Prometheus' histogram_quantile. Above the last finite bound: that bound. None if empty."""
    buckets = list(buckets)
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank, below, low = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return (
                low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            )
        below, low = count, bound
    return None  # cannot be: the last count is at least `rank`, and above `below` at some bucket


def _restarted(before: Scrape, after: Scrape) -> bool:
    starts = (before.series.get(START), after.series.get(START))
    if None not in starts and starts[0] != starts[1]:
        return True
    return any(
        value > after.series.get(name, {}).get(key, 0.0)
        for name, values in before.series.items()
        if name.endswith(("_total", "_count"))
        for key, value in values.items()
    )
