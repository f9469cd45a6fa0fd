# SPDX-License-Identifier: Apache-2.0
"""Verdicts on vLLM's V2 runner: PPHandler's broadcast with one message a step.

vLLM's handler already returns the last stage's tokens to earlier stages on a communicator and
a side stream of its own, and counts a generation per slot. Spexis keeps that transport, sends
one tensor instead of two (plus the final states, where the drafter asks for them), and decides
itself when a verdict is applied.

A receive on CUDA is a kernel that waits on the device, and while it waits it keeps a
multiprocessor from the model. So with two stages the first one posts the receive of a verdict only
behind the next step, which is the last that it runs before that verdict can arrive. With more
stages receives are posted at once: a broadcast goes through the stages in a ring, so a stage that
has posted waits for one that has not.

Invariants: a verdict never travels on the pipeline's own device group, where opposite
directions could wait for each other in a circle; which steps send one is decided from host
data that all stages share (compute_need_sampled_mask), so sends and receives always pair up;
verdicts are applied in step order, each once; when the pipeline runs empty every receive is
posted: the scheduler owes the workers an empty step then, and a worker posts before it
synchronizes its device. (An engine inside the user's own process takes no such step when it idles.
Its last stage has then sent into NCCL's buffer, and waits there if the states are larger.)
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_pp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PPHandler, compute_need_sampled_mask

from spexis.engine.verdict import Plan, is_due


@dataclass(slots=True)
class PendingVerdict:
    """A step's plan with its verdict, which is on its way to the first stage."""

    plan: Plan | None  # None on middle stages, which only take part in the broadcast
    num_rows: int
    event: torch.cuda.Event | None = None  # recorded once the tensors below are filled
    tokens: torch.Tensor | None = None  # [R] int64, true token or NO_TOKEN; None: not posted
    states: torch.Tensor | None = None  # [R, H]


class VerdictHandler(PPHandler):
    """Takes the place of a PPHandler that vLLM has built (`adopt`)."""

    @classmethod
    def adopt(
        cls, handler: PPHandler, num_slots: int, state_size: int, state_dtype: torch.dtype
    ) -> "VerdictHandler":
        """state_size: hidden size of the final states sent along, 0 for none."""
        handler.__class__ = cls
        group = get_pp_group()
        handler.is_first_rank = group.is_first_rank
        handler.state_size, handler.state_dtype = state_size, state_dtype
        handler.pending = deque()
        # Steps that this stage runs between a step and the post of that step's receive.
        handler.steps_between = 1 if group.world_size == 2 and group.is_first_rank else 0
        handler.num_left = 0  # how many of the latest steps' receives to leave unposted
        handler.unposted = deque()  # of the latest steps; None for one without a verdict
        handler.all_rows = torch.ones(num_slots, dtype=torch.bool, device=handler.device)
        handler.verdict = None  # [R] int64, set by the last stage before broadcast()
        handler.states = None  # [R, H] likewise
        handler.plan = None  # set by the first stage before receive()
        return handler

    # -------------------------------------------------------------- last stage
    def broadcast(
        self,
        sampled_token_ids: torch.Tensor,  # [R, 1], [R] and [R]: the verdict has what is needed
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        input_batch: InputBatch,
    ) -> None:
        if compute_need_sampled_mask(input_batch) is None:
            return
        messages = [self.verdict]
        if self.state_size:
            messages.append(self.states.to(self.state_dtype).contiguous())
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            for message in messages:
                dist.broadcast(message, src=self.last_rank, group=self.broadcast_group)
                # Allocated on the main stream, still read on the side stream.
                message.record_stream(self.broadcast_stream)

    # ------------------------------------------------------------ other stages
    def receive(self, input_batch: InputBatch) -> bool:
        """Notes that this step has a verdict, and posts the receives that are near.

        Returns whether all rows continue with a token of this step (for vLLM's caller).
        """
        needed = compute_need_sampled_mask(input_batch)
        verdict = None
        if needed is not None:
            verdict = PendingVerdict(self.plan, input_batch.num_reqs)
            if self.is_first_rank:
                self.pending.append(verdict)
        self.unposted.append(verdict)
        self._post(self.num_left)
        return needed is not None and bool(needed.all())

    def expect_steps(self, more: bool) -> None:
        """Called before each step. more: it has rows, so that another follows (at least an empty
        one); else nothing is left unposted."""
        self.num_left = self.steps_between if more else 0
        if not more:
            self._post(0)

    def _post(self, leave: int) -> None:
        """Posts the receives of all but the latest steps, behind what is launched by now."""
        while len(self.unposted) > leave:
            verdict = self.unposted.popleft()
            if verdict is not None:
                self._receive(verdict)

    def _receive(self, verdict: PendingVerdict) -> None:
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            tokens = torch.empty(verdict.num_rows, dtype=torch.int64, device=self.device)
            dist.broadcast(tokens, src=self.last_rank, group=self.broadcast_group)
            tokens.record_stream(self.main_stream)
            if self.state_size:
                shape = verdict.num_rows, self.state_size
                states = torch.empty(shape, dtype=self.state_dtype, device=self.device)
                dist.broadcast(states, src=self.last_rank, group=self.broadcast_group)
                states.record_stream(self.main_stream)
                verdict.states = states
            verdict.tokens, verdict.event = tokens, self.broadcast_stream.record_event()

    # ------------------------------------------------------------- first stage
    def make_plan(
        self,
        input_batch: InputBatch,
        call: int,
        step: int,
        positions: torch.Tensor,  # [R] of the tokens that the step samples
    ) -> None:
        """What the next receive() belongs to."""
        slots_np = input_batch.idx_mapping_np
        generation = self.req_idx_gen_np[slots_np]
        self.plan = Plan(call, step, slots_np, generation, input_batch.idx_mapping, positions)

    def take_due(self, call: int, num_stages: int, num_ready: int) -> Iterator[PendingVerdict]:
        """The verdicts to apply before this call runs (rule 6), oldest first, once filled."""
        while self.pending and is_due(self.pending[0].plan, call, num_stages, num_ready):
            pending = self.pending.popleft()
            while pending.tokens is None:  # due early, because steps came with a pause
                self._post(len(self.unposted) - 1)
            if pending.event is not None:  # the CPU stand-in for streams records none
                self.main_stream.wait_event(pending.event)
            yield pending

    def alive(self, plan: Plan) -> torch.Tensor:
        """[R] bool: the slot still belongs to the request that ran (rule 4)."""
        same = self.req_idx_gen_np[plan.slots_np] == plan.generation
        if same.all():
            return self.all_rows[: len(same)]
        return async_tensor_h2d(same, device=self.device)
