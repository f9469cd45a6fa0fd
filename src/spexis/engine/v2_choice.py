# SPDX-License-Identifier: Apache-2.0
"""The first stage's device chooses which drafts run (mode "sp-alpha", selection "stage"); V2.

A CUDA graph has its size before the step's drafts exist. So the scheduler says how many rows a step
runs (core/counts.py), and the device, where the drafts' confidences are, which: those whose input
is verified, who waited longest first, then the likeliest. Nobody waits for the choice: it is an
index of the step's requests on the device, by which vLLM's own kernels gather positions, tokens and
blocks. It travels with the rows, and every stage runs the same ones.

Two batches a step: vLLM's forward pass sees one of as many rows as run, whose requests the host
does not know; everything that keeps books by request (sampling, verdict, output) sees one of all
the step's requests. A held one shows the last stage a position that it expects of nobody, and is
discarded by the rules there are.

    Chains            what the device knows of each slot's unverified guesses
    RowChoiceMixin    mixed into the V2 runner (runner_v2.py)

Invariants: only steps of one token a request choose; nothing here waits for the device, and no size
depends on data. Shapes: B requests of a step, n rows that run, S slots, H positions remembered.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    prepare_pos_seq_lens,
)

from spexis.engine.verdict import NO_TOKEN

HELD = -1  # in place of a held row's position: nobody expects it
PLAIN_LINES, CHOICE_LINES = 2, 4  # of what travels: position, token; worth, unverified guesses


class Chains:
    """Of each slot: its guesses' confidences, how far its tokens are verified, when it last ran."""

    def __init__(self, num_slots: int, num_remembered: int, device: torch.device):
        self.num_remembered, self.dummy_slot = num_remembered, num_slots

        def zeros() -> torch.Tensor:
            return torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

        # [S+1, H] of the guess at each position, by position % H
        self.confidence = torch.ones(num_slots + 1, num_remembered, device=device)
        self.verified = zeros()  # [S+1] position of the newest token that is known to be true
        self.ran = zeros()  # [S+1] step of the newest row
        self._back = torch.arange(num_remembered, device=device)

    def guessed(
        self,
        slots: torch.Tensor,  # [R] int64
        positions: torch.Tensor,  # [R] of the guesses
        confidence: torch.Tensor,  # [R] float32
    ) -> None:
        self.confidence[slots, positions % self.num_remembered] = confidence

    def begun(
        self,
        slots: torch.Tensor,  # [R]
        ends: torch.Tensor,  # [R] position that the row's guess will take
        is_prefill: torch.Tensor,  # [R] bool
    ) -> None:
        """Rows of prompts: all their tokens are true."""
        self.verified[slots] = torch.where(is_prefill, ends - 1, self.verified[slots])

    def verdict(
        self,
        slots: torch.Tensor,  # [R]
        positions: torch.Tensor,  # [R] of the verdict's tokens
        tokens: torch.Tensor,  # [R] true token or NO_TOKEN
        alive: torch.Tensor,  # [R] bool
    ) -> None:
        """Behind the same call of the rules, which restart a slot whose guess was wrong."""
        known = torch.where(alive & (tokens != NO_TOKEN), slots, self.dummy_slot)
        self.verified[known] = positions

    def worth(
        self,
        slots: torch.Tensor,  # [B]
        position: torch.Tensor,  # [B] of the next row's input
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([B] float32 product of the confidences of all unverified guesses up to the row's input,
        [B] int64 how many those are)"""
        at = position.unsqueeze(1) - self._back  # [B, H]
        unverified = at > self.verified[slots].unsqueeze(1)
        confidence = self.confidence[slots.unsqueeze(1), at % self.num_remembered]
        joint = torch.where(unverified, confidence, 1.0).prod(dim=1)
        return joint, unverified.sum(dim=1)

    def hold(
        self,
        slots: torch.Tensor,  # [B]
        joint: torch.Tensor,  # [B]
        unverified: torch.Tensor,  # [B]
        num_rows: int,  # n
        step: int,
    ) -> torch.Tensor:
        """[B] bool: all but the n that are worth most are held."""
        waited = (step - self.ran[slots]).to(joint.dtype)
        rank = torch.where(unverified == 0, 1.0 + waited, joint)
        best = torch.argsort(rank, descending=True, stable=True)[:num_rows]
        held = torch.ones_like(rank, dtype=torch.bool)
        return held.index_fill_(0, best, False)


@dataclass(slots=True)
class Choice:
    """One step's, the same on every stage."""

    req_ids: list[str]  # of all B requests
    slots_np: np.ndarray  # [B]
    slots: torch.Tensor  # [B] int64
    chosen: torch.Tensor  # [n] int64, of the B, rising
    place: torch.Tensor  # [B] int64, of each request's row among the n; 0 where it is held

    @classmethod
    def of(cls, req_ids, slots_np, slots, held: torch.Tensor, num_rows: int) -> Choice:
        """held: [B] bool, false for num_rows of them."""
        chosen = torch.argsort(held.to(torch.uint8), stable=True)[:num_rows]
        place = torch.zeros_like(slots)
        place[chosen] = torch.arange(num_rows, device=slots.device)
        return cls(req_ids, slots_np, slots, chosen, place)


def first_rows(scheduler_output, num_rows: int):
    """The step as if it were of its first n requests: whose rows run is not known here."""
    run = copy.copy(scheduler_output)
    items = itertools.islice(scheduler_output.num_scheduled_tokens.items(), num_rows)
    run.num_scheduled_tokens = dict(items)
    run.total_num_scheduled_tokens = num_rows
    return run


class RowChoiceMixin:
    selecting = False
    chains: Chains | None = None  # on the first stage, where it chooses
    asked: list[str] | None = None  # the step's requests, where it is chosen among them
    choice: Choice | None = None

    def init_choice(self) -> None:
        config = self.spexis_config
        self.selecting = config.mode == "sp-alpha" and config.selection == "stage"
        self.row_lines = CHOICE_LINES if self.selecting else PLAIN_LINES
        if self.selecting and self.pp.is_first_rank:
            self.chains = Chains(self.num_slots, self.first_stage.num_remembered, self.device)

    def num_rows_to_run(self, scheduler_output) -> int | None:
        """None: all. What all stages know alike decides."""
        num_rows = getattr(scheduler_output, "spexis_run", None)
        if num_rows is None or scheduler_output.scheduled_new_reqs:
            return None
        cached, states = scheduler_output.scheduled_cached_reqs, self.req_states
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if num_computed < states.prefill_len.np[states.req_id_to_index[req_id]]:
                return None  # the end of a prompt
        return num_rows

    def begin_choice(self, scheduler_output):
        """What vLLM is to run of the step."""
        num_rows = self.num_rows_to_run(scheduler_output)
        if num_rows is None:
            return scheduler_output
        self.asked = list(scheduler_output.num_scheduled_tokens)
        return first_rows(scheduler_output, num_rows)

    def choose_rows(self, batch: InputBatch) -> None:
        """Puts the chosen requests into vLLM's batch, which was made for the first n."""
        states, buffers = self.req_states, self.input_buffers
        count, num_rows = len(self.asked), batch.num_reqs
        slots_np = np.fromiter(map(states.req_id_to_index.get, self.asked), np.int64, count)
        slots = async_tensor_h2d(slots_np, device=self.device, dtype=torch.int64)
        if self.pp.is_first_rank:
            self.offered = self.chains.worth(slots, self.first_stage.position[slots])
            held = self.chains.hold(slots, *self.offered, num_rows, self.step)
        else:
            held = self._received_rows()[0] == HELD
        self.choice = Choice.of(self.asked, slots_np, slots, held, num_rows)
        run = slots[self.choice.chosen]
        if not (self.pp.is_first_rank or self.pp.is_last_rank):
            # A middle stage has positions from the rows alone.
            positions = self._received_rows()[0, self.choice.chosen]
            states.num_computed_tokens.gpu.index_copy_(0, run, positions)
        batch.idx_mapping = batch.expanded_idx_mapping = run
        prepare_pos_seq_lens(
            run,
            batch.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        batch.logits_indices = combine_sampled_and_draft_tokens(
            buffers.input_ids,
            run,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            num_rows,
        )
        # Any of the requests may be among them.
        longest = int(states.num_computed_tokens_np[slots_np].max()) + 1
        batch.seq_lens_cpu_upper_bound[:num_rows] = longest

    def rows_to_send(self, batch: InputBatch, sent: torch.Tensor) -> torch.Tensor:
        """[4, B] int32 of [2, n], positions and tokens of the rows that run (n = B: all)."""
        if self.choice is None:
            if batch.has_prefill:  # nobody looks at the other lines
                return torch.cat([sent, torch.zeros_like(sent)])
            joint, unverified = self.chains.worth(batch.idx_mapping, sent[0].long())
            offered = joint.view(torch.int32), unverified.to(torch.int32)
            return torch.stack([*sent, *offered])
        joint, unverified = self.offered
        rows = torch.empty(CHOICE_LINES, len(joint), dtype=torch.int32, device=self.device)
        rows[0] = HELD
        rows[:2, self.choice.chosen] = sent
        rows[2], rows[3] = joint.view(torch.int32), unverified
        return rows

    def see_all_requests(self) -> InputBatch:
        """From here on the step's batch is that of all its requests, whoever's row ran."""
        state, choice, states = self.execute_model_state, self.choice, self.req_states
        count, at = len(choice.req_ids), choice.slots_np
        num_computed = states.num_computed_tokens_np[at]
        ends = np.arange(count + 1, dtype=np.int32)
        ends_on_device = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        whole = dataclasses.replace(
            state.input_batch,
            req_ids=choice.req_ids,
            num_reqs=count,
            num_reqs_after_padding=count,
            idx_mapping=choice.slots,
            idx_mapping_np=at,
            expanded_idx_mapping=choice.slots,
            expanded_local_pos=torch.zeros(count, dtype=torch.int32, device=self.device),
            num_scheduled_tokens=np.ones(count, np.int32),
            query_start_loc=ends_on_device,
            query_start_loc_np=ends,
            seq_lens=(states.num_computed_tokens.gpu[choice.slots] + 1).to(torch.int32),
            seq_lens_cpu_upper_bound=torch.from_numpy(num_computed + 1),
            num_computed_tokens_np=num_computed,
            prefill_len_np=states.prefill_len.np[at],
            num_computed_prefill_tokens_np=states.num_computed_prefill_tokens[at],
            is_prefilling_np=np.zeros(count, bool),
            logits_indices=choice.place,
            cu_num_logits=ends_on_device,
            cu_num_logits_np=ends,
        )
        self.execute_model_state = state._replace(input_batch=whole)
        return whole

    def positions_of_all(self, positions: torch.Tensor) -> torch.Tensor:
        """[B] int64 of [n]; 0 for held rows, whose verdict holds no token."""
        found = torch.zeros_like(self.choice.slots)
        found[self.choice.chosen] = positions
        return found
