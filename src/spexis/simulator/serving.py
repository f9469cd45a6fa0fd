# SPDX-License-Identifier: Apache-2.0
"""A server under a trace: prompts in chunks, KV blocks, queue, and the policies of core/.

    result = Serving(cost, drafts, Settings(policy="sp-alpha")).run(trace)

One loop turn is one engine step, in the order of the engine: verdicts of the step N before, blocks,
which rows run, prompt chunks in what is left of the token budget, then time goes on (clock.py).
policies: sp, sp-alpha, pp (as Spexis runs it: requests spread evenly over the steps), pp-stock (as
vLLM does: micro-batches form as requests come), auto (ModeControl), drop (a fixed share kept out of
speculation).
memory: "lookahead" (core/memory.py) or "stock" (admit what fits now, evict the newest).

Invariant: blocks held never exceed the capacity; every request that can ever run is answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spexis.core.acceptance import AcceptanceEstimator
from spexis.core.cost_model import CostModel
from spexis.core.law import acceptance_for
from spexis.core.memory import MOST_PREEMPTIONS, MemoryLookahead, Outlook, Running
from spexis.core.mode import Mode, ModeControl
from spexis.core.pace import Pace
from spexis.core.selection import Selection
from spexis.simulator import fixed_batch
from spexis.simulator.clock import PipelineClock
from spexis.simulator.drafts import DraftSource
from spexis.simulator.result import Recorder, ServingResult
from spexis.simulator.rows import Rows
from spexis.simulator.trace import Trace

POLICIES = ("sp", "sp-alpha", "pp", "pp-stock", "auto", "drop")
MEMORIES = ("lookahead", "stock")
HISTOGRAM_EVERY = 8  # steps between looks at confidences
MODE_EVERY = 32
OUTLOOK_EVERY = 8
CANDIDATES = 8  # of the queue, looked at together


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    policy: str = "sp-alpha"
    memory: str = "lookahead"
    drop_ratio: float = 0.15
    """For policy "drop"."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_blocks: int = 20_000
    block_size: int = 16
    max_tokens: int | None = None
    """Limit that requests state. None: each states none below the longest answer of the trace."""
    calibrate: bool = False
    """Learn the drafter's calibration; needed where its confidences are distorted."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES or self.memory not in MEMORIES:
            raise ValueError(f"policy {self.policy} or memory {self.memory} is not known")


@dataclass(slots=True)
class Prompt:
    """A request whose prompt is running."""

    request: int
    tokens_left: int
    tokens: int
    blocks: int
    admitted: int


class Serving:
    def __init__(
        self,
        cost: CostModel,
        drafts: DraftSource,
        settings: Settings,
        plain_cost: CostModel | None = None,
    ):
        self.settings, self.cost = settings, cost
        self.num_stages = n = cost.num_stages
        self.rows = Rows(n, drafts)
        # Without a drafter (plain PP throughout) its time is not spent.
        plain = settings.policy in ("pp", "pp-stock")
        self.clock = PipelineClock(plain_cost if plain and plain_cost else cost)
        # Tokens behind the known ones whose blocks the next row needs: rows in flight.
        self.ahead = 0 if plain else n - 1
        self.selection = Selection(cost, settings.max_num_seqs)
        self.modes = ModeControl(cost, plain_cost)
        self.drop = fixed_batch.FixedDropRatio(settings.drop_ratio)
        self.memory = MemoryLookahead(
            settings.kv_blocks * settings.block_size, n, block_size=settings.block_size
        )
        self.estimator = AcceptanceEstimator() if settings.calibrate else None
        if self.estimator is not None:
            self.rows.calibrate = self._calibrated
        self.queue: deque[int] = deque()
        self.prompts: deque[Prompt] = deque()
        self.free_blocks = settings.kv_blocks
        self.step = self.num_admitted = self.last_rows = self.last_prefill = 0
        self.memory_bound = False  # requests wait for memory
        self._outlook: Outlook | None = None
        self._outlook_step = self._refused_step = self._evicted_step = -1
        self._bonus: np.ndarray | None = None
        self._mode_tokens = self._mode_since = 0.0
        self.pace = Pace(n)

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> ServingResult:
        began, cpu = time.perf_counter(), time.process_time()
        self.trace = trace
        self.generated = np.zeros(len(trace), np.int64)  # of requests that were evicted
        self.evictions = np.zeros(len(trace), np.int64)
        limit = self.settings.max_tokens or int(trace.output.max()) + 1
        self.limit = np.maximum(trace.output, limit)
        self.record = record = Recorder(trace, self.settings.kv_blocks)
        self.first_due: deque[tuple[int, int, int]] = deque()  # (step, request, admitted)
        arrived, last, count, done = 0, 0.0, len(trace), 0
        arrivals = trace.arrival.tolist()
        while done < count:
            now = self.clock.next_begin(self.step)
            while arrived < count and arrivals[arrived] <= now:
                # The engine refuses by max_model_len; here a trace's request that never fits is.
                if self.memory.can_ever_run(int(trace.prompt[arrived] + trace.output[arrived])):
                    self.queue.append(arrived)
                else:
                    record.refused += 1
                    done += 1
                arrived += 1
            if not (self.rows.size or self.prompts or self.queue):
                if arrived == count:
                    break
                self.clock.wait_until(arrivals[arrived])
                last = 0.0
                continue
            ended = self._one_step(now, now - last if last else 0.0)
            last = now
            if ended:
                done += ended
                if progress:
                    progress(ended)
        record.rows, record.wasted = self.rows.num_rows, self.rows.num_wasted
        record.drafts, record.accepted = self.rows.num_drafts, self.rows.num_accepted
        record.mode_changes = self.modes.num_changes
        return record.result(self.step, time.perf_counter() - began, time.process_time() - cpu)

    # -- one step ----------------------------------------------------------------------------------

    def _one_step(self, now: float, since_last: float) -> int:
        rows, step = self.rows, self.step
        token, finished = rows.begin_step(step)
        tokens = int(np.count_nonzero(token))
        self._verdicts(now, tokens, since_last)
        if len(finished):
            self._finish(finished, now)
        held = self._blocks_for_rows()
        kv = rows.held[: rows.size]
        run = self._which_rows(kv, held)
        if held is not None:
            run = ~held if run is None else run & ~held
        count = rows.feed(step, run) if rows.size else 0
        prefill = self._prompt_chunks(self.settings.max_num_batched_tokens - count, now)
        kv_tokens = float(np.add.reduce(kv if run is None else kv[run]))
        self.clock.run(step, count, prefill, kv_tokens, now)
        self.last_rows, self.last_prefill = count, prefill
        self.record.step(
            now,
            tokens,
            self.settings.kv_blocks - self.free_blocks,
            rows.size,
            len(self.queue),
            prefill,
        )
        self.step += 1
        return len(finished)

    def _verdicts(self, now: float, tokens: int, since_last: float) -> None:
        rows, size = self.rows, self.rows.size
        while self.first_due and self.first_due[0][0] <= self.step:
            _, request, _ = self.first_due.popleft()
            self.record.first_token(request, now)
        if not size:
            return
        if rows.judged is not None and self.estimator is not None and self.step % 8 == 0:
            _, confidence, right = rows.judged
            zeros = np.zeros(len(right))
            self.estimator.observe("simulated", confidence, zeros, zeros, zeros, right)
        if self.settings.memory == "lookahead":
            self.pace.observe(since_last, tokens, size, self.last_prefill)
        if self.settings.policy in ("sp-alpha", "auto"):
            confidence = None
            if self.step % HISTOGRAM_EVERY == 0 and self.num_stages > 1:
                newest = rows.confidence[(self.step - 1) % self.num_stages, :size]
                confidence = newest[newest < 1.0]
            if since_last > 0:
                self.selection.observe(
                    since_last, tokens, self.last_rows, size, confidence, self.last_prefill
                )
        if self.settings.policy == "auto":
            self._mode_tokens += tokens
            if self.step % MODE_EVERY == 0:
                elapsed = now - self._mode_since
                rate = self._mode_tokens / elapsed if elapsed > 0 else 0.0
                self.modes.update(size, self.selection.histogram, rate)
                self._mode_tokens, self._mode_since = 0.0, now

    def _which_rows(self, kv: np.ndarray, held: np.ndarray | None) -> np.ndarray | None:
        """[size] bool, or None for all. held: [size] bool, who waits for memory."""
        rows, policy = self.rows, self.settings.policy
        if self.num_stages == 1 or not rows.size or policy == "sp":
            return None
        if policy == "pp":
            return fixed_batch.plain(self.step, rows, held)
        if policy == "pp-stock":
            return rows.known(self.step)
        if policy == "drop":
            return self.drop(self.step, rows)
        if policy == "auto" and self.modes.mode is not Mode.ALPHA:
            if self.modes.mode is Mode.SP:
                return None
            probes = self.modes.probes(rows.request[: rows.size])
            return fixed_batch.plain(self.step, rows, held) | probes
        bonus = self._finish_bonus()
        # Prompts under way take what the rows leave of the budget.
        prefill = bool(self.prompts) * max(self.settings.max_num_batched_tokens - 256, 1)
        return self.selection.select(rows.joint(), kv, prefill, bonus)

    def _finish_bonus(self) -> np.ndarray | None:
        """[size], looked up again every few steps: it changes slowly."""
        if not self.memory_bound or self.settings.memory != "lookahead":
            return None
        if self._bonus is None or len(self._bonus) != self.rows.size or self.step % 8 == 0:
            running = self._running()
            self._bonus = self.memory.finish_bonus(running, self.pace.tokens_per_row_step)
        return self._bonus

    def _calibrated(self, confidence: np.ndarray) -> np.ndarray:
        zeros = np.zeros(len(confidence))
        return self.estimator.probability("simulated", confidence, zeros, zeros, zeros)

    def _finish(self, finished: np.ndarray, now: float) -> None:
        rows = self.rows
        for i in finished.tolist():
            request = int(rows.request[i])
            self.record.finished(request, now)
            self.memory.lengths.observe(int(rows.end[i] - rows.prompt[i]))
            self.free_blocks += int(rows.blocks[i])
        rows.remove(finished)
        self._outlook = self._bonus = None

    # -- memory ------------------------------------------------------------------------------------

    def _blocks_for_rows(self) -> np.ndarray | None:
        """Blocks for what the rows of this step write. Returns [size] bool, who must wait."""
        rows, size = self.rows, self.rows.size
        if not size:
            return None
        missing = self._missing()
        total = int(np.add.reduce(missing))
        held = None
        if total > self.free_blocks:
            held = self._relieve(missing, total - self.free_blocks)
            size = rows.size
            missing = self._missing()
            if held is not None:
                missing[held] = 0
            total = int(missing.sum())
            while total > self.free_blocks:  # what was chosen did not suffice: newest first
                victim = int(np.argmax(rows.admitted[:size]))
                if size == 1 or (
                    self.prompts and self.prompts[-1].admitted > rows.admitted[victim]
                ):
                    if not self.prompts:
                        break
                    self._evict_prompt()
                    continue
                last = size - 1
                missing[victim] = missing[last]
                missing = missing[:last]
                if held is not None:
                    held[victim] = held[last]
                    held = held[:last]
                self._evict(np.array([victim]))
                size, total = rows.size, int(missing.sum())
        if total:
            rows.blocks[:size] += missing
            self.free_blocks -= total
        return held

    def _missing(self) -> np.ndarray:
        """[size] blocks that each request lacks for its rows in flight and the next one."""
        rows, size, block = self.rows, self.rows.size, self.settings.block_size
        need = rows.held[:size] + (self.ahead + block - 1)
        if block & (block - 1):
            need //= block
        else:
            need >>= block.bit_length() - 1  # several times as fast
        need -= rows.blocks[:size]
        return np.maximum(need, 0, out=need)

    def _relieve(self, missing: np.ndarray, short: int) -> np.ndarray | None:
        self.memory_bound = True
        if self.settings.memory == "stock":
            return None
        rows, size = self.rows, self.rows.size
        order = np.argsort(rows.admitted[:size], kind="stable")
        running = self._running(order)
        outlook = self._project(running)
        relief = self.memory.relieve(
            outlook,
            running,
            missing[order] > 0,
            short * self.settings.block_size,
            self.pace.tokens_per_second,
            self.pace.prefill_seconds_per_token,
            self.pace.step_seconds,
        )
        if len(relief.evict):
            self._evict(order[relief.evict])
            return None
        held = np.zeros(size, bool)
        held[order[relief.hold]] = True
        self.record.held_rows += len(relief.hold)
        return held

    def _running(self, order: np.ndarray | None = None) -> Running:
        """order: indices of the requests, None for all of them as they lie."""
        rows = self.rows
        chosen = slice(rows.size) if order is None else order  # views, that nobody writes to
        held, requests = rows.held[chosen], rows.request[chosen]
        often = None if order is None else self.evictions[requests] >= MOST_PREEMPTIONS
        return Running(held, held - rows.prompt[chosen], self.limit[requests], protected=often)

    def _project(self, running: Running | None = None) -> Outlook:
        """Running requests and those whose prompts run."""
        if running is None:
            running = self._running()
        if self.prompts:
            requests = np.array([p.request for p in self.prompts])
            running = Running(
                np.concatenate((running.kv_tokens, [p.tokens for p in self.prompts])),
                np.concatenate((running.generated, self.generated[requests])),
                np.concatenate((running.max_tokens, self.limit[requests])),
            )
        return self.memory.project(running, self._acceptance())

    def _acceptance(self) -> float:
        """As it limits growth: that of the real pace."""
        n = self.num_stages
        return acceptance_for(self.pace.tokens_per_row_step, n) if n > 1 else 1.0

    def _evict(self, indices: np.ndarray) -> None:
        """Their blocks are free at once: what they have in flight is first in, first out."""
        rows = self.rows
        order = np.argsort(-rows.admitted[indices], kind="stable")
        for i in indices[order].tolist():  # the oldest comes to the front last
            request = int(rows.request[i])
            # Tokens in flight still come back; the last one is kept for when it runs again.
            late = min(int(rows.valid[:, i].sum()), int(rows.end[i] - rows.held[i]) - 1)
            self.generated[request] = rows.held[i] - rows.prompt[i] + late
            self.record.tokens += late
            self.free_blocks += int(rows.blocks[i])
            self._evicted(request, int(rows.held[i]))
        gone = {int(r) for r in rows.request[indices] if not self.generated[r]}
        self.first_due = deque(d for d in self.first_due if d[1] not in gone)
        rows.remove(indices)
        self._bonus = None

    def _evict_prompt(self) -> None:
        prompt = self.prompts.pop()
        self.free_blocks += prompt.blocks
        self._evicted(prompt.request, prompt.tokens - prompt.tokens_left)

    def _evicted(self, request: int, computed: int) -> None:
        """computed: tokens that will be computed again."""
        self.queue.appendleft(request)
        self.evictions[request] += 1
        self.record.evictions += 1
        self.record.recomputed_tokens += computed
        self._evicted_step, self._outlook = self.step, None

    # -- prompts -----------------------------------------------------------------------------------

    def _prompt_chunks(self, budget: int, now: float) -> int:
        """Runs prompt chunks within the budget. Returns their tokens."""
        ran = 0
        for prompt in list(self.prompts):
            if ran >= budget:
                return ran
            ran += self._chunk(prompt, budget - ran)
        while self.queue and ran < budget:
            admitted = self._admit(budget - ran)
            if not admitted:
                break
            for prompt in admitted:
                self.prompts.append(prompt)
                if ran < budget:
                    ran += self._chunk(prompt, budget - ran)
        return ran

    def _chunk(self, prompt: Prompt, budget: int) -> int:
        tokens = min(prompt.tokens_left, budget)
        prompt.tokens_left -= tokens
        if not prompt.tokens_left:
            self.prompts.remove(prompt)
            request = prompt.request
            generated = int(self.generated[request])
            self.rows.add(
                self.step,
                request,
                int(self.trace.prompt[request]),
                int(self.trace.output[request]),
                generated,
                prompt.blocks,
                prompt.admitted,
            )
            if not generated:
                self.first_due.append((self.step + self.num_stages, request, prompt.admitted))
        return tokens

    def _admit(self, budget: int) -> list[Prompt]:
        """The next ones of the queue that may start now, with tokens for each of them."""
        settings, rows = self.settings, self.rows
        room = settings.max_num_seqs - rows.size - len(self.prompts)
        # As vLLM: nobody comes in a step in which somebody had to go.
        if room <= 0 or self._evicted_step == self.step or self._just_refused():
            return []
        candidates = [self.queue[i] for i in range(min(CANDIDATES, len(self.queue), room))]
        tokens = self.trace.prompt[candidates] + self.generated[candidates]
        need = (tokens + settings.block_size - 1) // settings.block_size
        fit = int(need.cumsum().searchsorted(self.free_blocks, side="right"))
        count = fit
        if fit and settings.memory == "lookahead":
            count = min(fit, self._admit_by_outlook(candidates, tokens))
        if count < len(candidates):
            self.memory_bound = True
        elif len(candidates) == len(self.queue):
            self.memory_bound = False
        count = min(count, int((tokens.cumsum() - tokens).searchsorted(budget)))
        started = []
        for request, length, blocks in zip(
            candidates[:count], tokens.tolist(), need.tolist(), strict=False
        ):
            self.queue.popleft()
            self.free_blocks -= blocks
            self.num_admitted += 1
            started.append(Prompt(request, length, length, blocks, self.num_admitted))
        if started:
            self._outlook = None
        return started

    def _admit_by_outlook(self, candidates: list[int], tokens: np.ndarray) -> int:
        rows, size = self.rows, self.rows.size
        # The bound says nothing new where requests wait for memory.
        if self._outlook is None and not self.memory_bound:
            everyone = np.concatenate((rows.held[:size], [p.tokens for p in self.prompts], tokens))
            if self.memory.surely_fits(everyone, self._acceptance()):
                return len(candidates)
        if self._outlook is None or self.step - self._outlook_step >= OUTLOOK_EVERY:
            self._outlook, self._outlook_step = self._project(), self.step
        count = self.memory.admit(
            self._outlook,
            tokens,
            self.generated[candidates],
            self.limit[candidates],
            size + len(self.prompts),
        )
        if count < len(candidates):
            self._refused_step = self.step
        return count

    def _just_refused(self) -> bool:
        """The look-ahead said no in this step, or lately and nothing ended since."""
        if self._refused_step == self.step:
            return True
        lately = self.step - self._outlook_step < OUTLOOK_EVERY
        return self._outlook is not None and lately and self._refused_step >= self._outlook_step
