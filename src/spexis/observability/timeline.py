# SPDX-License-Identifier: Apache-2.0
"""Reads the stages' timelines back: busy shares, step times, and the picture of the stages.

    trace = read("run.tl", num_stages=2)
    trace.busy_share(0), trace.step_seconds(0)
    draw([("stock", stock_trace), ("Spexis", trace)], "timeline.svg")

Invariant: nothing is interpolated; each bar is one recorded piece of work of a stage, and each
colour says what became of the row in it (real, draft kept, draft discarded).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REAL, KEPT, DISCARDED = "real token", "draft, kept", "draft, discarded"
COLOURS = {REAL: "#3b6fb6", KEPT: "#4caf7a", DISCARDED: "#d9695f"}


@dataclass(frozen=True, slots=True)
class Work:
    step: int
    begin: float  # seconds, machine-wide monotonic clock
    end: float
    rows: int


@dataclass(frozen=True, slots=True)
class Trace:
    stages: list[list[Work]]
    kinds: dict[int, str]  # by step; what became of its (first) row

    def window(self, begin: float, end: float) -> Trace:
        """The part of the trace inside a time span."""
        stages = [[w for w in s if begin <= w.begin and w.end <= end] for s in self.stages]
        return Trace(stages, self.kinds)

    @property
    def span(self) -> tuple[float, float]:
        works = [w for stage in self.stages for w in stage]
        return min(w.begin for w in works), max(w.end for w in works)

    def busy_share(self, stage: int) -> float:
        """Busy time of a stage over the trace's span, 0 to 1."""
        begin, end = self.span
        return sum(w.end - w.begin for w in self.stages[stage]) / (end - begin)

    def step_seconds(self, stage: int) -> float:
        """Median busy time of a stage per step, all parts of the step together."""
        by_step: dict[int, float] = defaultdict(float)
        for work in self.stages[stage]:
            by_step[work.step] += work.end - work.begin
        return statistics.median(by_step.values())


def read(path: str, num_stages: int) -> Trace:
    """Timelines of all stages, PATH.stage0, PATH.stage1, ..."""
    stages: list[list[Work]] = []
    good: dict[int, bool] = {}
    for stage in range(num_stages):
        works = []
        for line in Path(f"{path}.stage{stage}").read_text().splitlines():
            event = json.loads(line)
            if "good" in event:
                good[event["step"]] = bool(event["good"])
            else:
                rows = len(event["rows"])
                works.append(Work(event["step"], event["begin"], event["end"], rows))
        stages.append(works)
    return Trace(stages, _kinds(good))


def _kinds(good: dict[int, bool]) -> dict[int, str]:
    """One request's steps in order: a token after a discard is the restart from the truth."""
    kinds, after_discard = {}, True  # the first token follows the prompt, no guess
    for step in sorted(good):
        kinds[step] = (REAL if after_discard else KEPT) if good[step] else DISCARDED
        after_discard = not good[step]
    return kinds


def draw(traces: Sequence[tuple[str, Trace]], path: str, seconds: float) -> None:
    """Saves the first `seconds` of each trace as a picture (format by the path's ending)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "spexis"  # the same picture gives the same file
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        len(traces),
        1,
        figsize=(10, 1.2 + 1.1 * len(traces)),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, (title, trace) in zip(axes[:, 0], traces, strict=True):
        zero = trace.span[0]
        for stage, works in enumerate(trace.stages):
            axis.barh(stage, seconds * 1e3, color="#eeeeee", height=0.8)
            for work in works:
                if work.begin - zero < seconds:
                    axis.barh(
                        stage,
                        (min(work.end, zero + seconds) - work.begin) * 1e3,
                        left=(work.begin - zero) * 1e3,
                        color=COLOURS[trace.kinds.get(work.step, REAL)],
                        height=0.8,
                        edgecolor="white",
                        linewidth=0.6,
                    )
        axis.set_yticks(range(len(trace.stages)), [f"stage {s}" for s in range(len(trace.stages))])
        axis.invert_yaxis()
        axis.set_xlim(0, seconds * 1e3)
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axis.set_xlabel("milliseconds")
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    patches.append(Patch(color="#eeeeee", label="idle"))
    figure.legend(handles=patches, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith("svg") else None)
    plt.close(figure)
