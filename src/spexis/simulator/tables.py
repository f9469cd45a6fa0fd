# SPDX-License-Identifier: Apache-2.0
"""Tables that `spexis simulate --table` makes: selection rules, where they decide, published rows,
measured rates.

    selection_table(progress)     # gain of Selection over none and over a fixed drop ratio
    chooser_table(progress)       # by confidences on the first stage, by outcomes one step ahead
    published_table(progress)     # SP against TP with presets, and what was published
    measured_table(profile, record, progress)     # PP2 and SP2 against `spexis bench --preset gpu2`

Invariant: every figure is the outcome of fixed_batch.run() with the policies of core/; nothing is
looked up but the published or measured figures to compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from spexis.core.cost_model import CostModel
from spexis.core.counts import CountChooser
from spexis.core.outcomes import OutcomeChooser
from spexis.core.presets import HARDWARE, MEASURED, MODELS, STACKS, estimate_profile
from spexis.core.profile_file import ProfileFile
from spexis.core.selection import Selection
from spexis.core.stage_profile import ProfileError, StageProfile
from spexis.simulator import fixed_batch
from spexis.simulator.drafts import DraftSource
from spexis.simulator.rows import Rows

BATCHES = (64, 96, 128, 192, 256)
ACCEPTANCES = (0.55, 0.65, 0.8)
DROP_RATIO = 0.15
# (hardware, model): tokens/s of SP and of TP only; batch 64, eight GPUs.
PUBLISHED = {
    ("h100", "llama-70b"): (3587, 3652),
    ("h100", "qwen3-32b"): (2402, 5068),
    ("a100", "llama-70b"): (1228, 966),
    ("a100", "qwen3-32b"): (1454, 2058),
    ("rtx-pro-6000", "llama-70b"): (1492, 1236),
}


class SelectionRule:
    """Selection as fixed_batch.run() wants a rule: both ends of one policy object."""

    def __init__(self, cost: CostModel, batch: int):
        self.policy, self.batch = Selection(cost, batch), batch
        self._confidence: np.ndarray | None = None

    def __call__(self, step: int, rows: Rows) -> np.ndarray:
        newest = rows.confidence[(step - 1) % rows.num_stages, : rows.size]
        self._confidence = newest[newest < 1.0]
        return self.policy.select(rows.joint())

    def on_step(self, seconds: float, tokens: int, rows: int) -> None:
        if seconds > 0:
            self.policy.observe(seconds, tokens, rows, self.batch, self._confidence)


class OutcomeRule:
    """OutcomeChooser likewise: what the scheduler would choose.

    lag: steps that a step's outcomes are known later than its verdict is back at the first stage;
    with async scheduling the host is one behind.
    """

    def __init__(self, cost: CostModel, batch: int, lag: int = 0):
        self.chooser = OutcomeChooser(Selection(cost, batch), cost.num_stages)
        self.batch, self.delay = batch, cost.num_stages + lag
        self._ids = [str(i) for i in range(batch)]
        self._ran: dict[int, np.ndarray] = {}  # by step: indices of its rows
        self._held: dict[int, np.ndarray] = {}  # by step: [size] tokens held when it was planned
        self._no_context = np.zeros(batch)

    def __call__(self, step: int, rows: Rows) -> np.ndarray:
        size, n = rows.size, self.chooser.num_stages
        # The verdicts of step j are in once step j + N begins.
        self._held[step] = rows.held[:size].copy()
        known = step - self.delay
        ran, after = self._ran.pop(known, None), self._held.get(known + n)
        before = self._held.pop(known + n - 1, None)
        if ran is not None and after is not None and before is not None:
            good = after[ran] > before[ran]
            self.chooser.came([self._ids[i] for i in ran], good.tolist(), known)
        run = self.chooser.choose(self._ids[:size], step, self._no_context[:size])
        self._ran[step] = np.flatnonzero(run)
        self.chooser.ran([self._ids[i] for i in self._ran[step]], step)
        return run

    def on_step(self, seconds: float, tokens: int, rows: int) -> None:
        self.chooser.observe(seconds, tokens, rows, self.batch, 0.0, 0)


class CountRule:
    """CountChooser likewise: it says how many rows run, from what the step `delay` steps ago had to
    choose from, and the device which."""

    def __init__(self, cost: CostModel, batch: int, lag: int = 1):
        self.chooser = CountChooser(Selection(cost, batch), cost.num_stages)
        self.batch, self.delay = batch, cost.num_stages + lag
        self._past: dict[int, tuple[np.ndarray, ...]] = {}  # by step: joint, unverified, run, held

    def __call__(self, step: int, rows: Rows) -> np.ndarray:
        size, n = rows.size, self.chooser.num_stages
        joint = rows.joint()
        unverified = (rows.confidence[:, :size] < 1.0).sum(axis=0)
        known = self._past.get(step - self.delay)
        later, earlier = (self._past.get(step - self.delay + n - back) for back in (0, 1))
        if step - self.delay + n == step:  # this very step
            later = (joint, unverified, None, rows.held[:size].copy())
        if known is not None and later is not None and earlier is not None:
            good = known[2] & (later[3] > earlier[3])
            before = self._past.get(step - self.delay - 1)
            fresh = np.ones(size, bool) if before is None else before[2]
            self.chooser.came(known[0], known[1], fresh, known[2], good)
        self._past.pop(step - self.delay - 2, None)
        (count,) = self.chooser.choose(size, 0.0)
        worth = joint + (unverified == 0) * (step - rows.last_fed[:size])  # longest waiting first
        run = np.zeros(size, bool)
        run[np.argsort(-worth, kind="stable")[:count]] = True
        self._past[step] = joint.copy(), unverified, run, rows.held[:size].copy()
        return run

    def on_step(self, seconds: float, tokens: int, rows: int) -> None:
        self.chooser.observe(seconds, tokens, rows, self.batch, 0.0, 0)


def selection_cases(stages: Iterable[int] = (2, 4)) -> list[tuple[int, bool, int, float]]:
    """(stages, steps of the curve kept, batch, acceptance)"""
    return [
        (n, steps, batch, p)
        for n in stages
        for steps in (False, True)
        for batch in BATCHES
        for p in ACCEPTANCES
    ]


def selection_row(
    stages: int,
    graph_steps: bool,
    batch: int,
    acceptance: float,
    sharpness: float = 1.5,
    steps: int = 2000,
    seed: int = 0,
    profile: StageProfile | None = None,
) -> dict:
    """Tokens per second without selection, with a fixed drop ratio, with Selection, plain PP.

    profile: of `spexis profile`, with its drafter, head, links and host; None: the bare stage that
    was measured first.
    """
    profile = _of_stages(profile, stages)
    if not graph_steps:
        points = tuple(dataclasses.replace(s, graph_sizes=()) for s in profile.stages)
        profile = dataclasses.replace(profile, stages=points)
    cost = CostModel.from_profile(profile)

    def rate(rule, on_step=None, warm_up=200, cost=cost) -> float:
        drafts = DraftSource(acceptance, sharpness, seed=seed)
        run = fixed_batch.run(cost, batch, drafts, rule, steps, warm_up, on_step=on_step)
        return run.tokens_per_second

    chosen = SelectionRule(cost, batch)
    none = rate(None)
    dropped = rate(fixed_batch.FixedDropRatio(DROP_RATIO))
    selected = rate(chosen, chosen.on_step, 1000)
    plain = rate(fixed_batch.plain, cost=CostModel.from_profile(profile, drafter=False))
    return {
        "stages": stages,
        "graph_steps": graph_steps,
        "batch": batch,
        "acceptance": acceptance,
        "none": round(none, 1),
        "drop": round(dropped, 1),
        "selection": round(selected, 1),
        "pp": round(plain, 1),
        "over_none": round(selected / none, 3),
        "over_drop": round(selected / dropped, 3),
        "over_pp": round(selected / plain, 3),
    }


def _of_stages(profile: StageProfile | None, stages: int) -> StageProfile:
    if profile is None:
        return MEASURED[f"h200-llama-70b-pp{stages}"]
    split = profile.split(stages, 1)
    if split is None:
        raise ProfileError(f"the profile cannot be split into {stages} stages of one device")
    return split


def chooser_cases() -> list[tuple[int, int, float]]:
    """(stages, batch, acceptance) where graph sizes make a step dear, and one where they do not."""
    return [(n, batch, p) for n in (2, 4) for batch in (128, 192, 256) for p in ACCEPTANCES]


def chooser_row(
    stages: int,
    batch: int,
    acceptance: float,
    sharpness: float = 1.5,
    steps: int = 2000,
    seed: int = 0,
    profile: StageProfile | None = None,
) -> dict:
    """Tokens per second over those without selection: chosen on the first stage by confidences; on
    its device, where the scheduler says how many; in the scheduler by outcomes, and one step late.

    All requests' drafts are equally good, so outcomes say less than where requests differ.
    """
    profile = _of_stages(profile, stages)
    cost = CostModel.from_profile(profile)

    def outcomes(lag: int) -> OutcomeRule:
        # It corrects its cost model by what steps take; the clock's stays as it is.
        return OutcomeRule(CostModel.from_profile(profile), batch, lag)

    counts = CountRule(CostModel.from_profile(profile), batch)

    def rate(rule=None) -> float:
        drafts = DraftSource(acceptance, sharpness, seed=seed)
        on_step = rule.on_step if rule else None
        run = fixed_batch.run(cost, batch, drafts, rule, steps, 1000, on_step=on_step)
        return run.tokens_per_second

    none = rate()
    rates = {
        "stage": rate(SelectionRule(cost, batch)),
        "device": rate(counts),
        "scheduler": rate(outcomes(lag=0)),
        "scheduler_late": rate(outcomes(lag=1)),
    }
    over = {name: round(found / none, 3) for name, found in rates.items()}
    case = {"stages": stages, "batch": batch, "acceptance": acceptance}
    return {**case, "none": round(none, 1), **over}


def published_row(hardware: str, model: str, stack: str = "published", steps: int = 1500) -> dict:
    """Best SP split of eight GPUs against TP8, batch 64, both simulated."""
    batch, gpus = 64, 8
    machine, network = HARDWARE[hardware], MODELS[model]
    rates = {}
    for stages in (2, 4):
        acceptance = network.acceptance(1 / stages)
        if acceptance is not None:
            profile = estimate_profile(machine, network, gpus // stages, stages, STACKS[stack])
            rates[f"SP {stages} stages TP{gpus // stages}"] = fixed_batch.run(
                CostModel.from_profile(profile), batch, DraftSource(acceptance), None, steps
            ).tokens_per_second
    profile = estimate_profile(machine, network, gpus, 1, STACKS[stack])
    alone = CostModel.from_profile(profile)
    tensor = fixed_batch.run(alone, batch, DraftSource(1.0), None, 200).tokens_per_second
    best = max(rates, key=rates.get)
    sp, tp = PUBLISHED[hardware, model]
    return {
        "hardware": hardware,
        "model": model,
        "sp": round(rates[best], 1),
        "sp_split": best,
        "tp": round(tensor, 1),
        "ratio": round(rates[best] / tensor, 3),
        "published_sp": sp,
        "published_tp": tp,
        "published_ratio": round(sp / tp, 3),
        "same_winner": (rates[best] > tensor) == (sp > tp),
    }


def measured_cells(record: Mapping[str, Any]) -> list[dict]:
    """What fixed_batch can predict of a result of `spexis bench --preset gpu2`."""
    return [c for c in record["cells"] if c["engine"] in ("pp2", "sp2", "sp2_no_p2p")]


def measured_row(file: ProfileFile, cell: Mapping[str, Any], rows_run: int = 6400) -> dict:
    """The steady decode rate that the profile's times give, against the measured one.

    The synthetic drafter takes no time, so none is simulated; drafts are right as often as was
    counted. rows_run: of the simulation, in 200 to 3000 steps.
    """
    batch, speculative = cell["rows"], cell["engine"] != "pp2"
    profile = file.stage_profile(p2p=not cell["engine"].endswith("no_p2p")).split(2, 1)
    run = fixed_batch.run(
        CostModel.from_profile(profile, drafter=False),
        batch,
        DraftSource(cell["acceptance"] if speculative else 0.5),
        None if speculative else fixed_batch.plain,
        steps=min(max(200, rows_run // batch), 3000),
        warm_up=50,
        kv_tokens_per_row=cell["context"],
    )
    return {
        "engine": cell["engine"],
        "batch": batch,
        "acceptance": round(cell["acceptance"], 3) if speculative else None,
        "measured": round(cell["rate"], 1),
        "simulated": round(run.tokens_per_second, 1),
        "error": round(run.tokens_per_second / cell["rate"] - 1, 4),
    }


def measured_table(
    file: ProfileFile, record: Mapping[str, Any], progress: Callable[[], None] = lambda: None
) -> list[dict]:
    rows = []
    for cell in measured_cells(record):
        rows.append(measured_row(file, cell))
        progress()
    return rows


def selection_table(progress: Callable[[], None] = lambda: None, **settings: Any) -> list[dict]:
    """settings: of selection_row."""
    return _rows(selection_row, selection_cases(), progress, **settings)


def chooser_table(progress: Callable[[], None] = lambda: None, **settings: Any) -> list[dict]:
    """settings: of chooser_row."""
    return _rows(chooser_row, chooser_cases(), progress, **settings)


def published_table(progress: Callable[[], None] = lambda: None) -> list[dict]:
    return _rows(published_row, PUBLISHED, progress)


def _rows(
    row: Callable[..., dict], cases: Iterable[tuple], progress: Callable[[], None], **settings: Any
) -> list[dict]:
    rows = []
    for case in cases:
        rows.append(row(*case, **settings))
        progress()
    return rows
