# SPDX-License-Identifier: Apache-2.0
"""Which drafts run (SP-alpha): those whose expected tokens are worth their time.

    selection = Selection(cost, max_rows=256)
    run = selection.select(joint, kv_tokens)      # each step: [R] bool
    selection.observe(seconds, tokens, rows, requests, confidence)

Let X be the tokens per second now. Time costs tokens: a step of T seconds costs X*T. A row whose
whole chain of drafts is right with probability q brings its request forward by one step, else
nothing. One step ahead is worth

    kappa = (X*T + w*(B - n)) / B        tokens

the request's own share of a step's tokens, and the row it then need not run later (price w, n of
the B requests run a row in a step). So rows are taken in the order of q*kappa - X*(seconds of
their context), and their number n maximises

    sum of these values - X*T(n)

with T the measured step table. Where T rises smoothly this is "q > X dT/dB / kappa".

*Steps of T* (graph sizes, tiles) part the row counts into levels. Within one, n is free; which
level to be in is a question of the steady state and is answered by the selective law (law.py) over
the drafter's own confidences, checked by what was measured in each level, and changed only for a
clear gain. A pipeline is also slowed by steps of unequal size, since a step waits for the verdict
N steps back; so n moves away from its median only for a gain that pays for it.

Who holds keeps its rows in flight and its verdict, and is asked again in the next step, when
the verdict of its oldest row has raised its joint confidence.

Invariant: nothing is random; at least one row runs; where T is flat and context costs nothing
every row runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spexis.core.cost_model import CostModel
from spexis.core.law import selective

BINS = 32
JUMP = 0.02  # a rise of the step table from one row count to the next that counts as a step
STANDS_OUT = 4.0  # times the mean rise
LEVEL_GAIN = 0.015  # predicted gain for which the level is changed
LEVEL_EVERY = 64  # steps between two looks at the level
MEMORY = 200  # steps that averages reach back
STEADY = 0.5  # weight of keeping n steady


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A steady state: what a share of held drafts gives."""

    dropped: float
    tokens: float
    """Per step, all requests."""
    rows: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class ConfidenceHistogram:
    """The calibrated confidences of single drafts, old ones fading."""

    def __init__(self, prior_acceptance: float = 0.6):
        centres = (np.arange(BINS) + 0.5) / BINS
        self.centres = centres
        weight = np.where(centres < 0.5, 1 - prior_acceptance, prior_acceptance)
        self.weight = weight * 20.0 / weight.sum()

    def observe(self, confidence: np.ndarray) -> None:
        """confidence: [D]"""
        bins = np.minimum((np.asarray(confidence) * BINS).astype(np.int64), BINS - 1)
        self.weight *= 0.5 ** (len(bins) / 4000)
        self.weight += np.bincount(bins, minlength=BINS)

    @property
    def mean(self) -> float:
        return float(self.weight @ self.centres / self.weight.sum())

    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """([P] share dropped, [P] acceptance of what is kept) of every threshold, rising."""
        order = self.weight > 0
        kept = np.cumsum((self.weight[order])[::-1])[::-1]
        good = np.cumsum((self.weight * self.centres)[order][::-1])[::-1]
        dropped = np.maximum(1.0 - kept / kept[0], 0.0)
        return np.append(dropped, 1.0), np.append(good / kept, 0.0)


def operating_points(
    requests: int, num_stages: int, table: np.ndarray, histogram: ConfidenceHistogram
) -> list[OperatingPoint]:
    """The steady states of all thresholds: SP first, plain PP last. table: [>=requests + 1] s."""
    dropped, acceptance = histogram.kept()
    tokens, rows = selective(acceptance, dropped, num_stages)
    rows = rows * requests
    low = np.minimum(rows.astype(np.int64), len(table) - 2)
    rise = table[low + 1] - table[low]
    seconds = table[low] + np.clip(rows - low, 0, 1) * rise
    # On the edge of a step the next graph runs half the time.
    seconds = np.where((rise > JUMP * table[low]) & (rows > low), table[low + 1], seconds)
    columns = (dropped, tokens * requests, rows, seconds)
    return [OperatingPoint(*point) for point in zip(*(c.tolist() for c in columns), strict=True)]


class Selection:
    def __init__(self, cost: CostModel, max_rows: int, prior_acceptance: float = 0.6):
        self.cost, self.max_rows, self.num_stages = cost, max_rows, cost.num_stages
        self.histogram = ConfidenceHistogram(prior_acceptance)
        self.num_steps = 0
        self.mean_tokens = self.mean_seconds = self.mean_rows = 0.0
        self.mean_prefill_seconds = 0.0  # of a step, beside its decode rows
        self._median_rows = float(max_rows)
        self._cap: int | None = None
        self._measured: dict[int, float] = {}  # level's upper end -> measured / predicted
        self._since_change = 0
        self.refresh()

    def refresh(self) -> None:
        """Take over what the cost model learnt."""
        self.table = self.cost.step_table(self.max_rows)
        self._chunk_rows: dict[tuple[int, int], float] = {}
        rises = np.diff(self.table[1:])
        # A step stands out from its neighbours too: few rows of a steep line are no steps.
        least = np.maximum(JUMP * self.table[1:-1], STANDS_OUT * rises.mean() if len(rises) else 0)
        jumps = np.flatnonzero(rises > least) + 1
        self._edges = [*jumps.tolist(), self.max_rows]  # upper ends of the levels

    @property
    def rate(self) -> float:
        """Tokens per second now; 0 before anything was seen."""
        return self.mean_tokens / self.mean_seconds if self.mean_seconds > 0 else 0.0

    def observe(
        self,
        seconds: float,
        tokens: int,
        rows: int,
        requests: int,
        confidence: np.ndarray | None = None,  # [D] calibrated, of single drafts
        prefill_tokens: int = 0,
    ) -> None:
        """A step as it was: seconds since the step before began, tokens it returned."""
        self.num_steps += 1
        self._since_change += 1
        if confidence is not None and len(confidence):
            self.histogram.observe(confidence)
        share = 1.0 / min(self.num_steps, MEMORY)
        self.mean_tokens += share * (tokens - self.mean_tokens)
        self.mean_seconds += share * (seconds - self.mean_seconds)
        self.mean_rows += share * (rows - self.mean_rows)
        prefill = max(seconds - float(self.table[min(rows, self.max_rows)]), 0.0)
        prefill *= prefill_tokens > 0
        self.mean_prefill_seconds += share * (prefill - self.mean_prefill_seconds)
        if self.num_steps % LEVEL_EVERY == 0 and requests:
            self.refresh()
            self._choose_level(min(requests, self.max_rows))

    def select(
        self,
        joint: np.ndarray,  # [R] probability that the row's input is the true token
        kv_tokens: np.ndarray | None = None,  # [R] context of each row
        prefill_tokens: int = 0,
        bonus: np.ndarray | None = None,  # [R] tokens that a right row is worth on top
    ) -> np.ndarray:
        """[R] bool: rows that run in this step."""
        count = len(joint)
        rate = self.rate
        if count == 0 or rate <= 0:
            return np.ones(count, bool)
        if count > self.max_rows:
            self.max_rows = 2 * count
            self.refresh()
        seconds = self.table
        if prefill_tokens:
            # Beside a prompt chunk no graph runs: every row costs what a token of the chunk does.
            row_price = rate * self._chunk_row_seconds(count, prefill_tokens)
        else:
            real = min(max(int(np.count_nonzero(joint >= 0.9999)), 1), count)
            row_price = rate * (seconds[count] - seconds[real]) / max(count - real, 1)
        saved = row_price
        if kv_tokens is not None:
            kv_price = rate * self.cost.kv_price
            saved += kv_price * float(kv_tokens.sum()) / count
        ahead = rate * self.mean_seconds + saved * (count - min(self.mean_rows, count))
        value = joint * (ahead / count)
        if bonus is not None:
            value = value + joint * bonus
        if kv_tokens is not None:
            value = value - kv_price * kv_tokens
        if prefill_tokens:
            run = value >= row_price
            run[int(value.argmax())] = True
            return run
        low, high = self._level(count)
        if high == count and seconds[low] == seconds[count] and value.min() >= 0:
            self._median_rows = float(count)
            return np.ones(count, bool)  # one step costs what the other does
        order = (-value).argsort(kind="stable")
        level = seconds[low : high + 1]
        net = value[order].cumsum()[low - 1 : high]
        net -= rate * level
        free = low + _last_argmax(net)
        # The median follows where n would go by itself.
        if free != self._median_rows:
            pace = max(0.01 * count, 0.5)
            self._median_rows += pace if free > self._median_rows else -pace
        middle = int(min(max(self._median_rows, low), high))
        net -= STEADY * rate * np.abs(level - seconds[middle])
        run = np.zeros(count, bool)
        run[order[: low + _last_argmax(net)]] = True
        return run

    def _chunk_row_seconds(self, count: int, prefill_tokens: int) -> float:
        key = (count, prefill_tokens)
        if key not in self._chunk_rows:
            none = self.cost.step_seconds(0, prefill_tokens)
            self._chunk_rows[key] = (self.cost.step_seconds(count, prefill_tokens) - none) / count
        return self._chunk_rows[key]

    # -- levels ------------------------------------------------------------------------------------

    def _level(self, count: int) -> tuple[int, int]:
        """The row counts that the present level allows."""
        cap = count if self._cap is None else min(self._cap, count)
        below = [edge for edge in self._edges if edge < cap]
        return (below[-1] + 1 if below else 1), cap

    def _choose_level(self, requests: int) -> None:
        points = operating_points(requests, self.num_stages, self.table, self.histogram)
        # Prompt chunks take their time whatever the level is.
        prefill = self.mean_prefill_seconds
        predicted, below = {}, 0
        for edge in self._edges:
            end = min(edge, requests)
            inside = [p for p in points if below < p.rows <= end]
            if inside and end == requests:
                predicted[edge] = max(p.tokens / (p.seconds + prefill) for p in inside)
            elif inside:  # the level is filled up to its end, at the same price
                predicted[edge] = inside[0].tokens / (self.table[end] + prefill)
            elif points[-1].rows > end:  # too few for plain PP: requests wait for one another
                predicted[edge] = end / (self.table[end] + prefill)
            if end == requests:
                break
            below = end
        present = self._edge_of(requests)
        # What was measured long ago, at other batches and acceptances, counts less and less.
        self._measured = {e: 1 + 0.97 * (r - 1) for e, r in self._measured.items()}
        if self._since_change > MEMORY and predicted.get(present):
            ratio = min(max(self.rate / predicted[present], 0.7), 1.4)
            self._measured[present] = ratio
        default = self._measured.get(present, 1.0)
        # A level never tried is taken to be off by as much as the present one.
        rates = {e: r * self._measured.get(e, min(default, 1.0)) for e, r in predicted.items()}
        best = max(rates, key=lambda e: (rates[e], e))
        if present not in rates or rates[best] > rates[present] * (1 + LEVEL_GAIN):
            if best != present:
                self._since_change = 0
            self._cap = None if min(best, requests) == requests else best

    def _edge_of(self, requests: int) -> int:
        cap = requests if self._cap is None else min(self._cap, requests)
        return next((edge for edge in self._edges if edge >= cap), self._edges[-1])


def _last_argmax(values: np.ndarray) -> int:
    """Number of entries up to and with the last maximum, minus one."""
    return len(values) - 1 - int(values[::-1].argmax())
