# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the pipeline simulator, without vLLM: many histories in one pipeline.

A history is a few requests that share a block pool, with arrivals, holds, chunked prefill,
preemptions, aborts and stops at random times. MirrorScheduler keeps the counts that
engine/scheduler.py and vLLM 0.32's AsyncScheduler keep, under vLLM's names, and takes
discarded rows back with the same function. Histories share steps and slots but nothing else,
so that one tensor operation serves all of them.

Checked at every commit: the token is the one that plain decoding gives.
"""

from dataclasses import dataclass, replace
from random import Random

from spexis.bench.pipeline import RULES, BrokenError, Row, Step, Target
from spexis.engine.verdict import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What happens in one history; everything random follows from the seed."""

    seed: int
    acceptance: float = 0.6
    vocab_size: int = 6
    num_requests: int = 3
    max_prompt: int = 8
    min_tokens: int = 1
    max_tokens: int = 12
    max_running: int = 3
    num_blocks: int = 16
    block_size: int = 2
    token_budget: int = 16
    stop: float = 0.3  # share of requests with a stop token
    stock: float = 0.1  # share of requests at stock cadence (structured output)
    arrive: float = 0.5  # chances per call or row
    hold: float = 0.1
    abort: float = 0.01
    preempt: float = 0.01  # of the newest running request, its late outputs delivered
    flush: float = 0.01  # of all running ones, late outputs dropped, resumed in the same step
    pause: float = 0.02  # of the whole history, for a few calls


def random_history(seed: int) -> History:
    """Different enough that each kind of event meets each other one."""
    r = Random(seed)
    some = lambda *chances: r.choice(chances)  # noqa: E731
    history = History(
        seed=seed,
        acceptance=some(0.0, 0.3, 0.6, 0.8, 0.95, 1.0),
        vocab_size=r.randrange(2, 9),
        num_requests=r.randrange(1, 7),
        max_prompt=r.randrange(1, 14),
        max_tokens=r.randrange(1, 26),
        max_running=r.randrange(1, 4),
        token_budget=some(1, 3, 8, 32),
        stop=some(0.0, 0.3),
        stock=some(0.0, 0.0, 0.3),
        arrive=some(0.2, 1.0),
        hold=some(0.0, 0.1, 0.4),
        abort=some(0.0, 0.0, 0.01, 0.05),
        preempt=some(0.0, 0.0, 0.02, 0.1),
        flush=some(0.0, 0.0, 0.0, 0.02, 0.1),
        pause=some(0.0, 0.0, 0.1),
        block_size=2,
    )
    # From just enough for one request to plenty for all.
    need = -(-(history.max_prompt + history.max_tokens) // history.block_size)
    return replace(history, num_blocks=r.randrange(need, 1 + need * (1 + history.max_running)))


class Request:
    """vLLM's counters of a request, under vLLM's names."""

    def __init__(self, req_id: str, prompt: list[int], max_tokens: int, stop: set[int], stock):
        self.id, self.tokens, self.num_prompt_tokens = req_id, prompt, len(prompt)
        self.max_tokens, self.stop, self.stock = max_tokens, stop, stock
        self.blocks: list[int] = []
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.drop_stale_output = False
        self.is_prefill_chunk = False
        self.next_decode_eligible_step = 0


class MirrorScheduler:
    """One history."""

    def __init__(
        self,
        name: str,  # unlike any other in the group
        history: History,
        first_block: int,
        stock_cadence: int,
        rules,
    ):
        self.name, self.h, self.rules = name, history, rules
        self.random = Random(history.seed)
        self.target = Target(history.seed, history.vocab_size, history.acceptance)
        self.stock_cadence = stock_cadence
        self.free = [first_block + i for i in range(history.num_blocks)]
        self.blocks = frozenset(self.free)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished: list[str] = []
        self.num_arrived = self.paused = 0
        self.disturbances = 10
        self.num_preemptions = self.num_aborts = self.num_stops = self.num_tokens = 0

    @property
    def busy(self) -> bool:
        return self.num_arrived < self.h.num_requests or bool(self.requests)

    # ------------------------------------------------------------------ events
    def events(self) -> None:
        """Things that happen to the scheduler from outside."""
        r, h = self.random, self.h
        if self.num_arrived < h.num_requests and r.random() < h.arrive:
            self._arrive()
        if self.requests and r.random() < h.abort:
            self._end(self.requests[r.choice(list(self.requests))])
            self.num_aborts += 1

    def _arrive(self) -> None:
        r, h, req_id = self.random, self.h, f"{self.name}.{self.num_arrived}"
        prompt = [r.randrange(h.vocab_size) for _ in range(r.randrange(1, h.max_prompt + 1))]
        stop = {r.randrange(h.vocab_size)} if r.random() < h.stop else set()
        length = r.randrange(h.min_tokens, h.max_tokens + 1)
        request = Request(req_id, prompt, length, stop, r.random() < h.stock)
        self.requests[req_id] = request
        self.waiting.append(request)
        self.num_arrived += 1

    def _end(self, request: Request) -> None:
        del self.requests[request.id]
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._free_blocks(request)
        self.finished.append(request.id)

    def _free_blocks(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []

    def _preempt(self, request: Request, drop: bool = False) -> None:
        self._free_blocks(request)
        stale = request.num_stale_output_tokens > 0
        request.drop_stale_output = drop or (request.drop_stale_output and stale)
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_computed_tokens = request.num_output_placeholders = 0
        self.waiting.insert(0, request)
        self.num_preemptions += 1

    # -------------------------------------------------------------- scheduling
    def schedule(self, step: Step) -> None:
        r, h = self.random, self.h
        self.events()
        # vLLM tells workers of requests that ended with the next step, empty or not.
        step.finished += self.finished
        self.finished = []
        self.paused = max(0, self.paused - 1)
        if r.random() < h.pause:
            self.paused = r.randrange(1, 8)
        if self.paused:
            return
        self._disturb()
        self.budget = h.token_budget
        self.scheduled: list[tuple[Request, int]] = []
        if self._schedule_running(step):
            self._schedule_waiting(step)
        for request, num_tokens in self.scheduled:
            self._add_row(step, request, num_tokens)

    def _disturb(self) -> None:
        """Preemptions beyond those for want of blocks; not for ever, so that all ends."""
        r, h = self.random, self.h
        if self.running and self.disturbances and r.random() < h.flush:
            self.disturbances -= 1
            while self.running:
                self._preempt(self.running.pop(), drop=True)
        if self.running and self.disturbances and r.random() < h.preempt:
            self.disturbances -= 1
            self._preempt(self.running.pop())

    def _schedule_running(self, step: Step) -> bool:
        """False if a request was preempted: then nothing is admitted."""
        admit, index = True, 0
        while index < len(self.running) and self.budget > 0:
            request = self.running[index]
            index += 1
            if self._certain_to_end(request) or self.random.random() < self.h.hold:
                continue
            if step.call < request.next_decode_eligible_step:
                continue
            wanted = len(request.tokens) + request.num_output_placeholders
            num_tokens = min(wanted - request.num_computed_tokens, self.budget)
            if num_tokens <= 0:
                continue
            while not self._allocate(request, num_tokens):
                victim, admit = self.running.pop(), False
                self._preempt(victim)
                if victim is request:
                    return False
            self.scheduled.append((request, num_tokens))
            self.budget -= num_tokens
        return admit

    def _certain_to_end(self, request: Request) -> bool:
        """The steps in flight end it by length, if one of them counts (vLLM's rule)."""
        placeholders = request.num_output_placeholders
        return placeholders > 0 and (
            request.num_computed_tokens + 2 - placeholders
            >= request.num_prompt_tokens + request.max_tokens
        )

    def _schedule_waiting(self, step: Step) -> None:
        for request in list(self.waiting):
            if self.budget <= 0 or len(self.running) >= self.h.max_running:
                return
            if request.num_stale_output_tokens and not request.drop_stale_output:
                continue  # its late outputs are still delivered
            num_tokens = min(len(request.tokens), self.budget)
            if not self._allocate(request, num_tokens):
                return
            self.waiting.remove(request)
            self.running.append(request)
            step.bound.append((request.id, list(request.tokens)))
            self.scheduled.append((request, num_tokens))
            self.budget -= num_tokens

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        total = request.num_computed_tokens + num_tokens
        missing = -(-total // self.h.block_size) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop(self.random.randrange(len(self.free))))
        return True

    def _add_row(self, step: Step, request: Request, num_tokens: int) -> None:
        computed = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        request.num_in_flight_tokens += num_tokens
        all_tokens = len(request.tokens) + request.num_output_placeholders
        request.is_prefill_chunk = request.num_computed_tokens < all_tokens
        if not request.is_prefill_chunk:
            request.num_output_placeholders += 1
            if request.stock:
                request.next_decode_eligible_step = step.call + self.stock_cadence
        step.rows.append(
            Row(
                request.id,
                self.target,
                computed,
                num_tokens,
                list(request.blocks),
                not request.is_prefill_chunk,
                request.stock,
            )
        )

    # ----------------------------------------------------------------- outputs
    def update(self, row: Row, token: int) -> None:
        request = self.requests.get(row.req_id)
        if request is None:
            return
        stale = request.num_stale_output_tokens > 0
        if row.is_decode and not stale and token == NO_TOKEN:
            self.rules.take_back(request)
        request.num_in_flight_tokens -= row.num_scheduled
        if stale:
            request.num_stale_output_tokens -= row.num_scheduled
            self._check(request.num_stale_output_tokens >= 0, "stale outputs below 0")
            if request.drop_stale_output:
                return
        if token == NO_TOKEN:
            return
        right = self.target.next(request.tokens)
        self._check(token == right, f"{row.req_id} got {token}, plain decoding gives {right}")
        request.tokens.append(token)
        self.num_tokens += 1
        if not stale:
            request.num_output_placeholders -= 1
            self._check(request.num_output_placeholders >= 0, "placeholders below 0")
        num_output = len(request.tokens) - request.num_prompt_tokens
        if token in request.stop or num_output >= request.max_tokens:
            self._end(request)
            self.num_stops += 1

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise BrokenError(message, self.target)

    def done(self) -> None:
        self._check(not self.requests, "requests left")
        self._check(
            len(self.free) == len(self.blocks) and set(self.free) == self.blocks, "blocks leaked"
        )


class Group:
    """Many histories at once, each with blocks of its own: the scheduler that Pipeline sees."""

    def __init__(self, histories: list[History], num_stages: int, in_flight: int, rules=RULES):
        self.members: list[MirrorScheduler] = []
        first_block = 0
        cadence = max(num_stages, in_flight - 1)
        for i, history in enumerate(histories):
            self.members.append(MirrorScheduler(str(i), history, first_block, cadence, rules))
            first_block += history.num_blocks
        self.by_target = {id(m.target): m for m in self.members}
        self.num_blocks = first_block
        self.num_slots = sum(h.num_requests for h in histories)
        self.active = list(self.members)
        self.num_calls = self.num_steps = self.num_verdicts = 0

    @property
    def busy(self) -> bool:
        self.active = [m for m in self.active if m.busy or m.finished]
        return bool(self.active)

    def schedule(self) -> Step:
        self.num_calls += 1
        step = Step(call=self.num_calls)
        for member in self.active:
            member.schedule(step)
        if step.rows:
            self.num_steps += 1
            step.number, step.num_ready = self.num_steps, self.num_verdicts
        return step

    def events(self) -> None:
        for member in self.active:
            member.events()

    def update(self, step: Step) -> None:
        self.num_verdicts += bool(step.rows)
        for row, token in zip(step.rows, step.outputs or (), strict=True):
            self.by_target[id(row.target)].update(row, token)

    def stuck(self) -> Target | None:
        return self.active[0].target if self.active else None

    def done(self) -> Step:
        """Checks every history's end; the step that tells workers of the last ended requests."""
        step = Step(call=self.num_calls + 1)
        for member in self.members:
            member.done()
            step.finished += member.finished
        return step
