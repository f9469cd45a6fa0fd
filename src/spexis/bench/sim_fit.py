# SPDX-License-Identifier: Apache-2.0
"""Stage times for the simulator: a profile of one stage alone, corrected by a calibration run.

    runs = stage_runs(timeline_prefix, step_log)        # what each stage did in each step
    fitted = fit(stage_profile, runs)                   # .cost for Serving, .error what remains

Two stages on two cores slow each other down, the first one carries a drafter, and a profile knows
neither. So the curve of `spexis profile` is corrected the way a live engine would, by
StageCost.observe() (recursive least squares) with the times of each stage's steps. What lies
between steps is taken from the same run, as medians over the steps in which it can be seen:

- prepare: a stage that is not waited for begins its next step so long after it ended the last one
- link: a waiting second stage begins so long after the first one ended (below 0 where hidden
  states leave before the drafter runs)
- host: a waiting first stage begins so long after the last one ended the step N before

At last all times are scaled so that the run's own steps, put through the simulator's clock, take
as long as they took. Invariant: nothing but the profile and the calibration run is looked at.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from spexis.bench.step_watch import StepSize
from spexis.core.cost_model import CostModel
from spexis.core.stage_profile import StageProfile
from spexis.simulator.clock import PipelineClock

WAITED = 0.002  # seconds: a stage that stood still for longer than that was waiting
THERE = 0.010  # seconds: what was ready so long before needed no waiting for
IDLE = 0.020  # seconds: a pipeline that was empty for longer had nothing to do
MOST_OFF = 0.01  # share of steps in which timeline and scheduler may disagree about the rows
MOST_SCALE = 0.25  # how far the last scaling may go


@dataclass(frozen=True, slots=True)
class StageRun:
    """One step as all stages ran it."""

    size: StepSize
    begin: tuple[float, ...]  # by stage, machine-wide clock
    end: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    cost: CostModel
    steps: int
    stage_seconds: tuple[float, ...]
    """Medians in the calibration run, with what prepares them."""
    link: float
    host: float
    scale: float
    """The last step of the fit; 1: stage times alone explained the run."""

    def described(self) -> dict:
        return {
            "steps": self.steps,
            "stage_ms": [round(1e3 * s, 2) for s in self.stage_seconds],
            "link_ms": round(1e3 * self.link, 2),
            "host_ms": round(1e3 * self.host, 2),
            "scale": round(self.scale, 4),
            "coefficients": [
                [round(a, 3) for a in (s.factor * s.theta).tolist()] for s in self.cost.stages
            ],
        }


def stage_runs(prefix: str, steps: Sequence[Sequence], num_stages: int = 2) -> list[StageRun]:
    """The steps of a log (StepSize, or lists of JSON) with each stage's times beside them.

    Steps that a stage did not finish are left out. Raises ValueError where timeline and scheduler
    do not mean the same steps.
    """
    spans = [_spans(f"{prefix}.stage{stage}") for stage in range(num_stages)]
    runs, off = [], 0
    for size in (StepSize(*step) for step in steps):
        found = [span.get(size.number) for span in spans]
        if any(f is None for f in found):
            continue
        off += found[0][2] != size.num_reqs
        runs.append(StageRun(size, tuple(f[0] for f in found), tuple(f[1] for f in found)))
    if not runs or off > MOST_OFF * len(runs):
        raise ValueError(
            f"{prefix}: {off} of {len(runs)} steps have other rows in the timeline than the "
            "scheduler says, so steps are numbered differently"
        )
    return runs


def _spans(path: str) -> dict[int, tuple[float, float, int]]:
    """By step: begin, end and rows of all its parts together."""
    found: dict[int, tuple[float, float, int]] = {}
    for line in Path(path).read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the stage was killed while it wrote its last line
        if "begin" not in event:
            continue
        begin, end, rows = event["begin"], event["end"], len(event["rows"])
        if event["step"] in found:
            old = found[event["step"]]
            begin, end, rows = min(old[0], begin), max(old[1], end), max(old[2], rows)
        found[event["step"]] = begin, end, rows
    return found


def fit(profile: StageProfile, runs: Sequence[StageRun], seed: int = 0) -> Fitted:
    """profile: of as many stages as the runs have. Its links and host times are replaced."""
    num_stages = len(runs[0].begin)
    prepare, link, host = _between(runs, num_stages)
    profile = replace(profile, hidden_link=((1, link),), host=((1, host),), host_overlaps=False)
    stage_seconds = [
        [run.end[s] - run.begin[s] + prepare[s] for run in runs] for s in range(num_stages)
    ]
    cost = _corrected(profile, runs, stage_seconds, seed)
    # Stages do not wait for each other quite as the clock has it, and times scatter.
    took, scale = max(run.end[-1] for run in runs) - runs[0].begin[0], 1.0
    for _ in range(3):  # links and host stay as they are, so once is not enough
        replayed, idle = replay(cost, runs)
        ratio = (took - idle) / (replayed - idle)
        ratio = min(max(scale * ratio, 1 - MOST_SCALE), 1 + MOST_SCALE) / scale
        scale *= ratio
        for stage in cost.stages:
            stage.scale(ratio)
    medians = tuple(statistics.median(times) for times in stage_seconds)
    return Fitted(cost, len(runs), medians, link, host, scale)


def _corrected(profile, runs, stage_seconds, seed: int) -> CostModel:
    cost = CostModel.from_profile(profile, drafter=False)
    if cost.num_stages != len(runs[0].begin):
        raise ValueError(f"the profile makes {cost.num_stages} stages, not {len(runs[0].begin)}")
    # In mixed order: else the few rows at the end of a run would count most.
    order = list(range(len(runs)))
    Random(seed).shuffle(order)
    for i in order:
        size = runs[i].size
        for s, stage in enumerate(cost.stages):
            stage.observe(size.rows, size.prefill_tokens, size.kv_tokens, stage_seconds[s][i])
    return cost


def _between(runs: Sequence[StageRun], num_stages: int) -> tuple[list[float], float, float]:
    """(seconds of prepare by stage, link, host), the latter two without what prepares a step."""
    prepare, link, host = [[] for _ in range(num_stages)], [], []
    for k in range(1, len(runs)):
        run, last = runs[k], runs[k - 1]
        if run.size.number != last.size.number + 1:
            continue
        for s in range(num_stages):
            # There before the stage was free: the step before it, or the verdict it waits for.
            if s:
                ready = run.end[s - 1]
            elif k >= num_stages and not run.size.alone:
                ready = runs[k - num_stages].end[-1]
            else:
                continue
            if last.end[s] >= ready + THERE:
                prepare[s].append(run.begin[s] - last.end[s])
            elif last.end[s] < ready and run.begin[s] - last.end[s] > WAITED:
                (link if s else host).append((s, run.begin[s] - ready))
    each = [max(_median(values), 0.0) for values in prepare]
    host_seconds = _median([seconds - each[0] for _, seconds in host])
    return each, _median([seconds - each[s] for s, seconds in link]), max(host_seconds, 0.0)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def replay(cost: CostModel, runs: Sequence[StageRun]) -> tuple[float, float]:
    """(seconds from the first step's begin to the last one's end, as the simulator's clock has it;
    of them seconds without anything to do, which are as they were)."""
    clock, back, idle = PipelineClock(cost), 0.0, 0.0
    for k, run in enumerate(runs):
        size = run.size
        if size.alone and k:
            pause = size.at - runs[k - 1].end[-1]
            pause = pause if pause > IDLE else 0.0
            idle += pause
            clock.wait_until(back + pause)
        back = clock.run(k, size.rows, size.prefill_tokens, size.kv_tokens)
    return back - cost.host(1), idle
