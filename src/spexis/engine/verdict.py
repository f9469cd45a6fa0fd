# SPDX-License-Identifier: Apache-2.0
"""The verdict rules: what the first stage plans and what the last stage accepts.

Both model runners (V1 on CPU, V2 on CUDA) drive these classes, so each rule exists once.
Stages are FIFO: step j reaches stage s at time j+s, and its verdict is applied at the start
of step j+N on the first stage. A verdict holds, for each row, the token that the target
model sampled, or NO_TOKEN where the row was discarded or samples nothing.

Rules (tests/unit/test_verdict.py removes each one and shows that the text breaks):

1. *Judge*: a decode row is good iff the (position, token) it ran is the one that the last
   stage expects for its slot. Prefill rows run known tokens and are always good. Because
   the pipeline is FIFO no epoch has to travel: a row that was planned behind a wrong guess
   can match in position or in token, never in both.
2. *Expect*: a good row that samples sets the next expectation of its slot.
3. *Restart*: the first stage compares the verdict's token with the one it planned for that
   position, and where they differ continues from the true token.
4. *Generation*: a verdict for a slot that was bound anew since (abort, preemption, reuse)
   is dropped.
5. *Take back*: the scheduler takes a discarded row's counts back (scheduler.py).
6. *Due*: the first stage knows at least the verdicts that the scheduler knew (is_due).

Wrong rows leave wrong keys and values behind. They are never read: the true token runs at
that position later than the wrong one in FIFO order and overwrites them.

Shapes: S slots (plus one dummy slot at index S for padded rows), R rows of a step, H the
number of positions remembered per slot.
"""

from dataclasses import dataclass

import numpy as np
import torch

NO_TOKEN = -1
NO_POSITION = -(1 << 20)  # far from any position, so that no lag matches


def take_back(request) -> None:
    """Rule 5: a discarded decode row gives back the position and the placeholder that it was
    scheduled with. request: vLLM's, whose counters no preemption has reset since."""
    request.num_computed_tokens -= 1
    request.num_output_placeholders -= 1


class SlotTable:
    """Host-side map from request to slot, with the generation of rule 4."""

    def __init__(self, num_slots: int):
        self.slot_of: dict[str, int] = {}
        self.generation = np.zeros(num_slots + 1, dtype=np.int64)
        self.prefill_len = np.zeros(num_slots + 1, dtype=np.int64)
        self._free = list(range(num_slots))[::-1]

    def bind(self, req_id: str, prefill_len: int) -> int:
        """Gives a new or resumed request a slot; verdicts from before no longer count.

        prefill_len: tokens known when it (re)starts; rows below it run known tokens.
        """
        slot = self.slot_of.get(req_id)
        if slot is None:
            slot = self.slot_of[req_id] = self._free.pop()
        self.generation[slot] += 1
        self.prefill_len[slot] = prefill_len
        return slot

    def release(self, req_id: str) -> None:
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self.generation[slot] += 1
            self._free.append(slot)


@dataclass(slots=True)
class Plan:
    """A step whose verdict is pending on the first stage."""

    call: int  # of the worker, empty steps included
    step: int  # non-empty ones
    slots_np: np.ndarray  # [R]
    generation: np.ndarray  # [R] of the slots when the step ran
    slots: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64, position that the sampled token will take


def is_due(plan: Plan, call: int, num_stages: int, num_ready: int) -> bool:
    """Rule 6: whether the plan's verdict must be applied before this call runs its rows.

    num_ready: steps whose output the scheduler had when it planned this one. Their verdicts
    are certainly on their way. Without them the scheduler could have taken a count back that
    the first stage still holds, and blocks allocated by that count would not suffice.
    """
    return plan.call <= call - num_stages or plan.step <= num_ready


class FirstStage:
    """What the first stage runs next for each slot, advanced by guesses, corrected by truth."""

    def __init__(self, num_slots: int, num_stages: int, device: torch.device):
        self.num_remembered = num_stages + 2
        self.dummy_slot = num_slots

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.position = zeros(num_slots + 1)  # [S+1] of the next decode row
        self.token = zeros(num_slots + 1)  # [S+1] that it will run, guess or truth
        self.planned = zeros(num_slots + 1, self.num_remembered)  # [S+1, H] by position % H
        # [S+1] of the slot's newest guess, for whoever decides whether it is worth running
        self.confidence = torch.zeros(num_slots + 1, dtype=torch.float32, device=device)

    def propose(
        self,
        slots: torch.Tensor,  # [R]
        positions: torch.Tensor,  # [R] position of the guess
        guesses: torch.Tensor,  # [R]
        samples: torch.Tensor,  # [R] bool, row samples a token
    ) -> None:
        """The drafter's guesses become the next rows of their slots."""
        s = torch.where(samples, slots, self.dummy_slot)
        self.position[s] = positions.to(self.position.dtype)  # V2 counts in int32
        self.token[s] = guesses
        self.planned[s, positions % self.num_remembered] = guesses

    def apply_verdict(
        self,
        slots: torch.Tensor,  # [R]
        positions: torch.Tensor,  # [R] position of the verdict's token
        tokens: torch.Tensor,  # [R] true token or NO_TOKEN
        alive: torch.Tensor,  # [R] bool, generation unchanged
    ) -> torch.Tensor:
        """Rules 3 and 4. Returns [R] bool: rows where a guess was wrong."""
        column = positions % self.num_remembered
        wrong = alive & (tokens != NO_TOKEN) & (self.planned[slots, column] != tokens)
        s = torch.where(wrong, slots, self.dummy_slot)
        self.position[s] = positions.to(self.position.dtype)  # V2 counts in int32
        self.token[s] = tokens
        self.planned[s, column] = tokens
        return wrong


class LastStage:
    """The (position, token) that each slot's next decode row must show to count."""

    def __init__(self, num_slots: int, device: torch.device):
        self.dummy_slot = num_slots
        self.position = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # [S+1]
        self.token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)  # [S+1]

    def judge(
        self,
        slots: torch.Tensor,  # [R]
        positions: torch.Tensor,  # [R] of the row's last token
        tokens: torch.Tensor,  # [R] the row's last token
        is_prefill: torch.Tensor,  # [R] bool
        samples: torch.Tensor,  # [R] bool
    ) -> torch.Tensor:
        """Rule 1. Needs no logits, so it can run before sampling. Returns [R] bool."""
        expected = (positions == self.position[slots]) & (tokens == self.token[slots])
        return samples & (is_prefill | expected)

    def expect(
        self,
        slots: torch.Tensor,  # [R]
        positions: torch.Tensor,  # [R] of the sampled tokens
        tokens: torch.Tensor,  # [R] sampled
        good: torch.Tensor,  # [R] bool
    ) -> torch.Tensor:
        """Rule 2. Returns the verdict, [R]: the sampled token, or NO_TOKEN."""
        s = torch.where(good, slots, self.dummy_slot)
        self.position[s] = positions.to(self.position.dtype)  # V2 counts in int32
        self.token[s] = tokens
        return torch.where(good, tokens, NO_TOKEN)
