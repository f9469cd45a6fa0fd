# SPDX-License-Identifier: Apache-2.0
"""A pipeline of N stages without a model: the real verdict rules over a fake target.

    Pipeline(num_stages=2, steps_in_flight=2, scheduler=..., seed=0).run()

Drives engine/verdict.py exactly as engine/runner_v1.py does, with Python lists in place of
keys and values and a hash of the tokens that a row *reads* in place of the model. Any stale
cell, misplaced row or unverified commit therefore changes the text, and plain decoding is
known without running it. The scheduler side (scheduler_sim.py's mirror, or vLLM's real one)
hands over Steps and takes verdicts back, in any order the engine core allows.

Checked at every row: a row that counts read the verified text on every stage; it extends the
text by one; the first stage never runs beyond the scheduler's count or the allocated blocks;
a request at stock cadence never runs a guess. Checked at the end: nothing is left behind.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import numpy as np
import torch

from spexis.engine import verdict

CPU = torch.device("cpu")
# What mutations replace one at a time (histories.py).
RULES = SimpleNamespace(
    FirstStage=verdict.FirstStage,
    LastStage=verdict.LastStage,
    SlotTable=verdict.SlotTable,
    is_due=verdict.is_due,
    take_back=verdict.take_back,
)


class BrokenError(AssertionError):
    """An invariant does not hold; `model` tells which history broke it."""

    def __init__(self, message: str, model: "Target | None" = None):
        super().__init__(message)
        self.model = model


class Target:
    """The fake model of one history: next token, and drafts of a given acceptance."""

    def __init__(self, seed: int, vocab_size: int, acceptance: float):
        self.seed, self.vocab_size, self.acceptance = seed, vocab_size, acceptance
        self.random = Random(seed)

    def next(self, tokens: list[int]) -> int:
        return hash((self.seed, *tokens)) % self.vocab_size

    def draft(self, tokens: list[int]) -> int:
        """Right with probability `acceptance`, given that the tokens before it are right."""
        right = self.next(tokens)
        if self.random.random() < self.acceptance:
            return right
        return (right + 1 + self.random.randrange(self.vocab_size - 1)) % self.vocab_size


class Row:
    """One request in one step."""

    __slots__ = (
        "differs",
        "held",
        "is_decode",
        "num_computed",
        "num_scheduled",
        "read",
        "req_id",
        "stock",
        "table",
        "target",
    )

    def __init__(self, req_id, target, num_computed, num_scheduled, table, is_decode, stock):
        self.req_id, self.target = req_id, target
        self.num_computed, self.num_scheduled = num_computed, num_scheduled
        self.table = table  # block ids at the time of scheduling
        self.is_decode = is_decode  # the scheduler expects a token (spexis_rows)
        self.stock = stock  # must not run a guess
        self.read: list[int] = []  # tokens read on the first stage
        self.differs = False  # a later stage read something else
        self.held = False  # the first stage left it out of its step


@dataclass(slots=True)
class Step:
    call: int  # the scheduler's calls, empty ones included
    number: int = 0  # of non-empty steps, 0 for an empty one
    num_ready: int = 0  # outputs that the scheduler had seen
    finished: list[str] = field(default_factory=list)
    bound: list[tuple[str, list[int]]] = field(default_factory=list)  # new or resumed: tokens
    rows: list[Row] = field(default_factory=list)
    origin: object = None  # the scheduler's own record

    # Filled while the step travels.
    start: torch.Tensor | None = None  # [R] position of each row's first token
    token: torch.Tensor | None = None  # [R] decode rows' input
    outputs: list[int] | None = None  # [R] the verdict


class Stage:
    """A stage's own copy of what its worker process keeps."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, rules):
        self.inbox: deque[Step] = deque()
        self.slots = rules.SlotTable(num_slots)
        self.block_size = block_size
        self.kv = [[-1] * block_size for _ in range(num_blocks)]

    def bind(self, step: Step) -> None:
        for req_id in step.finished:
            self.slots.release(req_id)
        for req_id, tokens in step.bound:
            self.slots.bind(req_id, len(tokens))

    def arrays(self, step: Step):
        rows = step.rows
        slots = np.array([self.slots.slot_of[r.req_id] for r in rows])
        computed = np.array([r.num_computed for r in rows])
        scheduled = np.array([r.num_scheduled for r in rows])
        prefill_len = self.slots.prefill_len[slots]
        is_prefill = torch.from_numpy(computed < prefill_len)
        samples = torch.from_numpy(computed + scheduled >= prefill_len)
        held = np.array([r.held for r in rows])
        samples &= torch.from_numpy(~held)
        return slots, computed, np.where(held, 0, scheduled), is_prefill, samples

    def run_row(self, row: Row, start: int, tokens: list[int]) -> list[int]:
        """Writes the row's tokens, returns what attention reads: positions 0 .. its last."""
        size, table = self.block_size, row.table
        end = start + len(tokens)
        if end > size * len(table):
            raise BrokenError(f"position {end - 1} has no block", row.target)
        for position, token in enumerate(tokens, start):
            self.kv[table[position // size]][position % size] = token
        read: list[int] = []
        for block in table[: -(-end // size)]:
            read += self.kv[block]
        del read[end:]
        return read


class Pipeline:
    def __init__(
        self,
        *,
        num_stages: int,
        steps_in_flight: int,
        scheduler,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        seed: int,
        stall: float = 0.2,
        eager: float = 0.7,
        hold: float = 0.0,
        rules=RULES,
    ):
        """scheduler: schedule() -> Step, update(Step), events(), busy (bool), done().

        stall: chance that a stage does nothing in a tick. eager: chance that the engine
        schedules before it collects. hold: chance that the first stage leaves out a row that may
        run a guess.
        """
        self.num_stages, self.steps_in_flight = num_stages, steps_in_flight
        self.scheduler, self.rules = scheduler, rules
        self.random, self.stall, self.eager = Random(seed), stall, eager
        self.hold = hold
        self.num_slots = num_slots
        self.stages = [Stage(num_slots, num_blocks, block_size, rules) for _ in range(num_stages)]
        self.first = rules.FirstStage(num_slots, num_stages, CPU)
        self.last = rules.LastStage(num_slots, CPU)
        self.plans: deque[verdict.Plan] = deque()
        self.verdicts: deque[torch.Tensor] = deque()  # sent, not yet taken by the first stage
        self.num_judged = 0  # non-empty steps that left the last stage
        self.known: dict[str, list[int]] = {}  # first stage: tokens of the bound request
        self.verified: dict[str, list[int]] = {}  # last stage: the text so far
        self.num_rows = self.num_good = self.num_wrong = self.num_steps = self.num_held = 0

    # ------------------------------------------------------------ engine core
    def run(self, max_calls: int = 20_000) -> None:
        """To the end of all histories, then checks that nothing is left."""
        for number, _ in enumerate(self.calls()):
            if number >= max_calls:
                raise BrokenError(f"no end after {max_calls} calls", self.scheduler.stuck())
        self._check_nothing_left()

    def calls(self) -> Iterator[None]:
        """The engine core's loop: schedules a step, or takes the oldest one's output."""
        in_flight: deque[Step] = deque()
        while self.scheduler.busy or in_flight:
            may_schedule = self.scheduler.busy and len(in_flight) < self.steps_in_flight
            if may_schedule and (not in_flight or self.random.random() < self.eager):
                step = self.scheduler.schedule()
                self.stages[0].inbox.append(step)
                in_flight.append(step)
                self._tick()
            else:
                step = in_flight.popleft()
                self._finish(step)
                self.scheduler.events()  # aborts are taken between a step and its output
                self.scheduler.update(step)
            yield

    def _tick(self) -> None:
        """Every stage may run one step, the last one first as if they ran side by side."""
        for index in reversed(range(self.num_stages)):
            if self.random.random() >= self.stall:
                self._run_stage(index)

    def _finish(self, step: Step) -> None:
        for index in range(self.num_stages):
            while step in self.stages[index].inbox:
                self._run_stage(index)

    def _run_stage(self, index: int) -> None:
        stage = self.stages[index]
        if not stage.inbox:
            return
        step = stage.inbox.popleft()
        stage.bind(step)
        if index == 0:
            self.known.update(step.bound)
        if index == self.num_stages - 1:
            for req_id in step.finished:
                self.verified.pop(req_id, None)
            self.verified.update((r, list(tokens)) for r, tokens in step.bound)
        if step.rows:
            if index == 0:
                self._run_first(stage, step)
            else:
                self._run_later(stage, step)
            if index == self.num_stages - 1:
                self._judge(stage, step)
        if index + 1 < self.num_stages:
            self.stages[index + 1].inbox.append(step)

    # ------------------------------------------------------------- first stage
    def _run_first(self, stage: Stage, step: Step) -> None:
        self.num_steps += 1
        self._apply_verdicts(stage, step)
        self._hold(stage, step)
        slots_np, computed, scheduled, is_prefill, samples = stage.arrays(step)
        slots = torch.from_numpy(slots_np)
        step.token = self.first.token[slots]
        step.start = torch.where(is_prefill, torch.from_numpy(computed), self.first.position[slots])
        positions = step.start + torch.from_numpy(scheduled)
        guesses = [
            self._run_first_row(stage, *item)
            for item in zip(
                step.rows,
                step.start.tolist(),
                step.token.tolist(),
                is_prefill.tolist(),
                samples.tolist(),
                strict=True,
            )
        ]
        self.first.propose(slots, positions, torch.tensor(guesses), samples)
        generation = stage.slots.generation[slots_np].copy()
        self.plans.append(
            verdict.Plan(step.call, step.number, slots_np, generation, slots, positions)
        )

    def _hold(self, stage: Stage, step: Step) -> None:
        """Leaves out rows at random, as a policy would that chooses drafts."""
        if not self.hold:
            return
        for row in step.rows:
            prefill_len = stage.slots.prefill_len[stage.slots.slot_of[row.req_id]]
            may = row.num_computed >= prefill_len and not row.stock
            row.held = may and self.random.random() < self.hold
            self.num_held += row.held

    def _run_first_row(self, stage, row, start, token, is_prefill, samples) -> int:
        if row.held:
            return 0
        if is_prefill:
            tokens = self.known[row.req_id][start : start + row.num_scheduled]
        else:
            tokens = [token]
            if row.num_scheduled != 1:
                raise BrokenError(f"decode row of {row.num_scheduled} tokens", row.target)
            if start > row.num_computed:
                raise BrokenError(
                    f"device at {start}, scheduler counts {row.num_computed}", row.target
                )
        row.read = stage.run_row(row, start, tokens)
        return row.target.draft(row.read) if samples else 0

    def _apply_verdicts(self, stage: Stage, step: Step) -> None:
        due = lambda plan: self.rules.is_due(  # noqa: E731
            plan, step.call, self.num_stages, step.num_ready
        )
        while self.plans and due(self.plans[0]):
            plan = self.plans.popleft()
            while self.num_judged < plan.step:
                for index in reversed(range(1, self.num_stages)):
                    self._run_stage(index)
            tokens = self.verdicts.popleft()
            alive = torch.from_numpy(plan.generation == stage.slots.generation[plan.slots_np])
            wrong = self.first.apply_verdict(plan.slots, plan.positions, tokens, alive)
            self.num_wrong += int(wrong.sum())

    # ------------------------------------------------------------ later stages
    def _run_later(self, stage: Stage, step: Step) -> None:
        for row, start in zip(step.rows, step.start.tolist(), strict=True):
            if row.held:
                continue
            tokens = row.read[start:]  # activations of these tokens, whatever lies before
            if stage.run_row(row, start, tokens) != row.read:
                row.differs = True

    def _judge(self, stage: Stage, step: Step) -> None:
        slots_np, _, scheduled, is_prefill, samples = stage.arrays(step)
        slots, positions = torch.from_numpy(slots_np), step.start + torch.from_numpy(scheduled)
        good = self.last.judge(slots, step.start, step.token, is_prefill, samples)
        sampled = torch.tensor([row.target.next(row.read) for row in step.rows])
        tokens = self.last.expect(slots, positions, sampled, good)
        self.verdicts.append(tokens)
        self.num_judged += 1
        step.outputs = tokens.tolist()
        for row, token in zip(step.rows, step.outputs, strict=True):
            if row.held:
                continue
            self.num_rows += row.is_decode
            if token != verdict.NO_TOKEN:
                self._check_good(row, token)
            elif row.stock and row.is_decode:
                raise BrokenError("a row at stock cadence ran a guess", row.target)

    def _check_good(self, row: Row, token: int) -> None:
        self.num_good += 1
        text = self.verified[row.req_id]
        if row.differs or row.read != text:
            raise BrokenError(f"a row that counts read {row.read}, not {text}", row.target)
        text.append(token)

    # ------------------------------------------------------------------- end
    def _check_nothing_left(self) -> None:
        step = self.scheduler.done()  # raises if blocks or requests are left
        for stage in self.stages:
            while stage.inbox:
                self._run_stage(self.stages.index(stage))
            stage.bind(step)
            if stage.slots.slot_of or len(set(stage.slots._free)) != self.num_slots:
                raise BrokenError(f"slots left: {stage.slots.slot_of}")
