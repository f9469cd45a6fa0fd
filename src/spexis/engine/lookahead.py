# SPDX-License-Identifier: Apache-2.0
"""The scheduler's eyes on KV memory: core/memory.py, asked before each of vLLM's steps.

    lookahead = Lookahead(scheduler)
    limit = lookahead.before_schedule()      # requests that may be in `running` after this step
    lookahead.pace.observe(...)              # a step came back
    lookahead.hear(scheduler_output, output)     # and what a length predictor said of its rows
    lookahead.ended(request)                 # a request left

vLLM admits what fits now and, when blocks run out, preempts the newest request. Here a waiting
request is admitted only while the projected peak fits; where blocks are about to be short, some
requests wait a step or one is preempted, whichever gives up fewer tokens. vLLM's own way stays
behind it: what is overlooked here ends as it would have. When requests end is known from those that
did, and from a length predictor where the engine runs one (core/predictions.py).

Two short cuts keep a step's cost at nothing as long as memory is ample: blocks cannot be short if
there are more than any step can take, and the outlook is renewed every few steps only.

Invariant: only vLLM's own means are used (`_preempt_request`, a request's eligible step, the limit
of active requests), so a wrong forecast costs time, never a token. With an iteration log, every
decision goes there with its inputs, so that it can be computed again (core/replay.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from spexis.core import decisions
from spexis.core.law import acceptance_for
from spexis.core.memory import MOST_PREEMPTIONS, MemoryLookahead, Outlook, Running
from spexis.core.pace import Pace
from spexis.core.predictions import Predictions, Told, rounded
from spexis.engine.kv_forecast import ForecastCheck

if TYPE_CHECKING:
    from spexis.engine.scheduler import SpexisScheduler

OUTLOOK_EVERY = 8  # steps
CANDIDATES = 8  # of the queue, looked at together


class Lookahead:
    def __init__(self, scheduler: SpexisScheduler):
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self.block_size = scheduler.block_size
        self.num_blocks = self.pool.num_gpu_blocks - 1  # one is vLLM's null block
        self.memory = MemoryLookahead(
            self.num_blocks * self.block_size, scheduler.num_stages, block_size=self.block_size
        )
        self.pace = Pace(scheduler.num_stages)
        self.predictions = Predictions()
        self.journal: list[dict[str, Any]] | None = None
        """What was decided and from what, and what was learnt, in order; None keeps nothing."""
        if scheduler.spexis_config.iteration_log is not None:
            self.keep_journal()
        self.seconds = 0.0
        """Spent in here, all steps together."""
        self._outlook: Outlook | None = None
        self._outlook_step = -OUTLOOK_EVERY
        self._refused_step = self._outlook_step - 1  # of the newest outlook nothing was refused
        self._seen_running = 0
        self._bonus: dict[str, float] = {}
        self._bonus_step = -OUTLOOK_EVERY
        self.check = ForecastCheck(self)
        self.decision = decisions.NONE
        """The last one, for people to see."""

    def keep_journal(self) -> None:
        setup = {"num_stages": self.scheduler.num_stages, "block_size": self.block_size}
        self.journal = [{"setup": setup}]

    # -- before a step ---------------------------------------------------------------------------

    def before_schedule(self) -> int:
        """Holds and preempts where blocks would be short; how many requests may run then."""
        begin = time.perf_counter()
        evicted = self._relieve()
        s = self.scheduler
        present = len(s.running) + s.num_waiting_for_streaming_input
        if evicted:
            # As vLLM: a request that came back in the step it was preempted in would be taken by
            # the workers for one that never left.
            limit = min(s.max_num_active_reqs, present)
        else:
            limit = self._limit(s.max_num_active_reqs, present)
        self.check.step()
        self.seconds += time.perf_counter() - begin
        return limit

    def _limit(self, most: int, present: int) -> int:
        s = self.scheduler
        if not s.waiting or present >= most:
            return most
        step = s.current_step
        if self._seen_running != len(s.running):  # admitted, ended or preempted since
            self._outlook = None
        recent = step - self._outlook_step < OUTLOOK_EVERY
        if self._outlook is None or not recent:
            self._outlook = self._project(self._running())
            self._outlook_step, self._seen_running = step, len(s.running)
        elif self._refused_step >= self._outlook_step:
            return present
        # Not those whose late outputs are still on their way: vLLM skips them in this step.
        candidates = [
            r
            for r in islice(s.waiting, CANDIDATES)
            if not r.num_stale_output_tokens or r.drop_stale_output
        ]
        kv_tokens = np.array([r.num_tokens - self._shared(r) for r in candidates])
        generated = np.array([r.num_output_tokens for r in candidates])
        max_tokens = np.array([r.max_tokens for r in candidates])
        count = self.memory.admit(self._outlook, kv_tokens, generated, max_tokens, len(s.running))
        if count < len(candidates):
            self._refused_step = step
        self.decision = decisions.WAIT if count < len(candidates) else decisions.ADMIT
        if self.journal is not None:
            self.journal.append(
                {
                    "admit": count,
                    "of": [r.request_id for r in candidates],
                    "waiting": _lists(kv_tokens, generated, max_tokens),
                    "num_running": len(s.running),
                }
            )
        return min(most, present + count)

    def _relieve(self) -> bool:
        """Makes room for the coming step. Was a request preempted?"""
        s, free = self.scheduler, self.pool.get_num_free_blocks()
        budget = s.max_num_scheduled_tokens
        # A row takes one block at most, prompt chunks the budget's worth and one each.
        if free > 2 * len(s.running) + budget // self.block_size:
            return False
        missing = self._missing(s.current_step + 1, budget)
        short = int(missing.sum()) - free
        if short <= 0 or len(s.running) < 2 or s.policy.value == "priority":
            return False
        running, requests = self._running(), list(s.running)
        self._outlook = self._project(running)
        self._outlook_step, self._seen_running = s.current_step, len(requests)
        relief = self.memory.relieve(
            self._outlook,
            running,
            missing > 0,
            float(short * self.block_size),
            self.pace.tokens_per_second,
            self.pace.prefill_seconds_per_token,
            self.pace.step_seconds,
        )
        if self.journal is not None:
            self.journal.append(
                {
                    "hold": relief.hold.tolist(),
                    "evict": relief.evict.tolist(),
                    "of": [r.request_id for r in requests],
                    "wants": (missing > 0).tolist(),
                    "short_tokens": short * self.block_size,
                    "pace": self.pace.described(),
                }
            )
        self.decision = decisions.EVICT if len(relief.evict) else decisions.HOLD
        for i in relief.hold:
            request = requests[i]
            request.next_decode_eligible_step = max(
                request.next_decode_eligible_step, s.current_step + 2
            )
            s.counters.held += 1
        for i in relief.evict:
            s.running.remove(requests[i])
            s._preempt_request(requests[i], time.monotonic())
        return len(relief.evict) > 0

    def finish_bonus(self, req_ids: Sequence[str]) -> np.ndarray | None:
        """[R] tokens that a right row of each running request is worth on top of its own, since a
        request that ends sooner makes room; None while nobody waits for memory."""
        s = self.scheduler
        if not s.waiting or self._refused_step < self._outlook_step:
            return None
        if s.current_step - self._bonus_step >= OUTLOOK_EVERY:  # it changes slowly
            begin = time.perf_counter()
            bonus = self.memory.finish_bonus(self._running(), self.pace.tokens_per_row_step)
            ids = (r.request_id for r in s.running)
            self._bonus = dict(zip(ids, bonus.tolist(), strict=True))
            self._bonus_step = s.current_step
            self.seconds += time.perf_counter() - begin
        return np.array([self._bonus.get(req_id, 0.0) for req_id in req_ids])

    # -- what the policies look at -----------------------------------------------------------------

    def _missing(self, step: int, budget: int) -> np.ndarray:
        """[R] blocks that each running request takes in the coming step, in vLLM's order."""
        found = np.zeros(len(self.scheduler.running), np.int64)
        for i, request in enumerate(self.scheduler.running):
            if step < request.next_decode_eligible_step or budget <= 0:
                continue
            known = request.num_tokens + request.num_output_placeholders
            tokens = min(known - request.num_computed_tokens, budget)
            if tokens <= 0:
                continue
            budget -= tokens
            blocks = -(-(request.num_computed_tokens + tokens) // self.block_size)
            found[i] = max(blocks - len(self.tables.get(request.request_id, ())), 0)
        return found

    def _told(self) -> Told | None:
        """What was said of the running requests, newest."""
        return self.predictions.of([r.request_id for r in self.scheduler.running])

    def _running(self) -> Running:
        """In order of admission: vLLM appends to `running`."""
        requests, told = self.scheduler.running, self._told()
        return Running(
            kv_tokens=np.array([r.num_tokens for r in requests]),
            generated=np.array([r.num_output_tokens for r in requests]),
            max_tokens=np.array([r.max_tokens for r in requests]),
            protected=np.array(
                [
                    r.num_preemptions >= MOST_PREEMPTIONS
                    or not self.scheduler._request_blocks_can_be_freed(r)
                    for r in requests
                ]
            ),
            ends=None if told is None else self.predictions.calibrated(told),
            ends_at=None if told is None else told.at,
        )

    def _project(self, running: Running) -> Outlook:
        # Blocks that several requests hold are counted once per request in what follows, so the
        # room is larger by as much.
        held = sum(len(self.tables.get(r.request_id, ())) for r in self.scheduler.running)
        used = self.num_blocks - self.pool.get_num_free_blocks()
        shared = max(held - used, 0)
        self.memory.capacity = (self.num_blocks + shared) * self.block_size
        n = self.scheduler.num_stages
        acceptance = acceptance_for(self.pace.tokens_per_row_step, n)
        outlook = self.memory.project(running, acceptance)
        if self.journal is not None:
            arrays = (running.kv_tokens, running.generated, running.max_tokens, running.protected)
            entry = {
                "outlook": outlook.upper.tolist(),
                "running": _lists(*arrays),
                "capacity": self.memory.capacity,
                "acceptance": acceptance,
            }
            if running.ends is not None:
                entry["told"] = self._told().described()
            self.journal.append(entry)
        return outlook

    def _shared(self, request: Any) -> int:
        """Tokens of a waiting request that lie in blocks which running ones hold."""
        if not request.block_hashes or not self.scheduler.kv_cache_manager.enable_caching:
            return 0
        blocks, _ = self.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )[:2]
        return sum(block.ref_cnt > 0 for block in blocks[0]) * self.block_size

    # -- what comes back ---------------------------------------------------------------------------

    def hear(self, scheduler_output: Any, output: Any) -> None:
        """What the length predictor said of the rows of a step whose token counts; before vLLM
        takes the tokens in, so that the answer is as long as the predictor saw it.

        output: the step's SpexisOutput (engine/outputs.py), or vLLM's own without predictions.
        """
        ends = getattr(output, "ends", None)
        if ends is None:
            return
        begin = time.perf_counter()
        said, row_of, tokens = rounded(ends), output.req_id_to_index, output.sampled_token_ids
        for req_id in scheduler_output.spexis_rows:
            request, row = self.scheduler.requests.get(req_id), row_of[req_id]
            if not tokens[row] or request is None or request.is_finished():
                continue
            if not request.num_stale_output_tokens:  # else it was preempted since
                self.predictions.note(req_id, request.num_output_tokens, said[row])
        self.seconds += time.perf_counter() - begin

    def ended(self, request: Any) -> None:
        """The request leaves. What was aborted says nothing about when answers end."""
        if request.status is RequestStatus.FINISHED_ABORTED:
            self.predictions.forget(request.request_id)
            return
        begin = time.perf_counter()
        length = request.num_output_tokens
        limit = min(request.max_tokens, self.scheduler.max_model_len - request.num_prompt_tokens)
        self.memory.lengths.observe(length)
        learnt = self.predictions.ended(request.request_id, length, limit)
        if self.journal is not None:
            self.journal.append({"ended": length, **({"learnt": learnt} if learnt else {})})
        self.seconds += time.perf_counter() - begin
        # Not the outlook: it is renewed because there is one less in `running`.

    def take_journal(self) -> list[dict[str, Any]]:
        if self.journal is None:
            return []
        journal, self.journal = self.journal, []
        return journal


def _lists(*arrays: np.ndarray) -> list[list[int]]:
    return [array.tolist() for array in arrays]
