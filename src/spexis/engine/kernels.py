# SPDX-License-Identifier: Apache-2.0
"""The verdict rules as one kernel each, for the hot path of the V2 runner.

    apply_verdict(first_stage, slots, positions, tokens, alive)      rules 3 and 4
    begin_rows(first_stage, slots, ends, prefill_len, buffers, n)    what each row runs next
    propose(first_stage, slots, positions, guesses, samples)         guesses advance the state
    judge_rows(last_stage, ...)                                      rule 1 and the verdict
    keep_states(...)                                                 final states by slot
    hashed_tokens(...)                                               the synthetic drafter's

verdict.py written in PyTorch is about forty small kernels a step, all on the path from a verdict
to the next row. Invariant: verdict.py is the definition and these are its fused form: on CPU
tensors each function calls it, and tests/unit/test_kernels.py compares the two on random
histories in Triton's interpreter. Nothing here waits for the device, and no launch depends on
data. Under TRITON_INTERPRET=1 the kernels run on CPU tensors too (the V2 runner's tests).

Shapes: S slots and a dummy one at index S for padded rows, R rows of a step, P >= R rows of the
CUDA graph that runs them.
"""

import os
from dataclasses import dataclass

import torch

from spexis.engine.verdict import NO_TOKEN, FirstStage, LastStage

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of vLLM has none
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROWS_PER_PROGRAM = 128
VALUES_PER_PROGRAM = 1024


def is_fused(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor is done by the kernels rather than by verdict.py."""
    return triton is not None and (tensor.is_cuda or INTERPRETED)


@dataclass(slots=True)
class RowBuffers:
    """One step's rows on the first stage, at addresses that CUDA graphs may keep.

    Padded rows hold the dummy slot, position 0 and is_prefill, so that what a graph does for
    them touches nobody's state.
    """

    slots: torch.Tensor  # [M] int64
    start: torch.Tensor  # [M] int64, position of the row's first token
    tokens: torch.Tensor  # [M] int64, input token of decode rows
    ends: torch.Tensor  # [M] int64, position that the guess will take
    is_prefill: torch.Tensor  # [M] bool

    @classmethod
    def allocate(cls, max_rows: int, dummy_slot: int, device: torch.device) -> "RowBuffers":
        def zeros() -> torch.Tensor:
            return torch.zeros(max_rows, dtype=torch.int64, device=device)

        rows = cls(zeros(), zeros(), zeros(), zeros(), zeros().to(torch.bool))
        rows.pad(dummy_slot)
        return rows

    def pad(self, dummy_slot: int) -> None:
        """Makes every row a padded one."""
        self.slots.fill_(dummy_slot)
        for tensor in (self.start, self.tokens, self.ends):
            tensor.zero_()
        self.is_prefill.fill_(True)


# ------------------------------------------------------------------- first stage
def apply_verdict(
    stage: FirstStage,
    slots: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64, position of the verdict's token
    tokens: torch.Tensor,  # [R] int64, true token or NO_TOKEN
    alive: torch.Tensor,  # [R] bool
) -> None:
    """FirstStage.apply_verdict, without its result."""
    if not is_fused(stage.token):
        stage.apply_verdict(slots, positions, tokens, alive)
        return
    num_rows = slots.shape[0]
    _apply_verdict_kernel[_grid(num_rows)](
        slots,
        positions,
        tokens,
        alive,
        stage.position,
        stage.token,
        stage.planned,
        num_rows,
        REMEMBERED=stage.num_remembered,
        NONE=NO_TOKEN,
        BLOCK=ROWS_PER_PROGRAM,
    )


def begin_rows(
    stage: FirstStage,
    slots: torch.Tensor,  # [R] int64
    ends: torch.Tensor,  # [R] int32, tokens of the row's request once the step has run
    prefill_len: torch.Tensor,  # [S] int32, tokens known when the request (re)started
    buffers: RowBuffers,
    num_padded: int,  # P
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row runs next: what to send along, [2, R] int32 (positions, tokens), and the
    positions of the guesses, [R] int64. Fills the first P rows of the buffers."""
    num_rows = slots.shape[0]
    if not is_fused(stage.token):
        return _begin_rows_reference(stage, slots, ends, prefill_len, buffers, num_padded)
    sent = torch.empty(2, num_rows, dtype=torch.int32, device=slots.device)
    positions = torch.empty(num_rows, dtype=torch.int64, device=slots.device)
    _begin_rows_kernel[_grid(num_padded)](
        slots,
        ends,
        prefill_len,
        stage.position,
        stage.token,
        sent,
        positions,
        buffers.slots,
        buffers.start,
        buffers.tokens,
        buffers.ends,
        buffers.is_prefill,
        num_rows,
        num_padded,
        stage.dummy_slot,
        BLOCK=ROWS_PER_PROGRAM,
    )
    return sent, positions


def _begin_rows_reference(stage, slots, ends, prefill_len, buffers, num_padded):
    num_rows = slots.shape[0]
    start, tokens = stage.position[slots], stage.token[slots]
    buffers.pad(stage.dummy_slot)
    buffers.slots[:num_rows] = slots
    buffers.start[:num_rows] = start
    buffers.tokens[:num_rows] = tokens
    buffers.ends[:num_rows] = ends
    buffers.is_prefill[:num_rows] = start < prefill_len[slots]
    sent = torch.stack([start.to(torch.int32), tokens.to(torch.int32)])
    return sent, ends.to(torch.int64, copy=True)


def propose(
    stage: FirstStage,
    slots: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64, position of the guess
    guesses: torch.Tensor,  # [R] int64
    samples: torch.Tensor,  # [R] bool
) -> None:
    """FirstStage.propose."""
    if not is_fused(stage.token):
        stage.propose(slots, positions, guesses, samples)
        return
    num_rows = slots.shape[0]
    _propose_kernel[_grid(num_rows)](
        slots,
        positions,
        guesses,
        samples,
        stage.position,
        stage.token,
        stage.planned,
        num_rows,
        REMEMBERED=stage.num_remembered,
        BLOCK=ROWS_PER_PROGRAM,
    )


def keep_states(
    slots: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64, of the verdict's tokens
    tokens: torch.Tensor,  # [R] int64, true token or NO_TOKEN
    alive: torch.Tensor,  # [R] bool
    states: torch.Tensor,  # [R, H] final states of the rows that sampled them
    kept: torch.Tensor,  # [S+1, H] newest final state of each slot
    kept_positions: torch.Tensor,  # [S+1] int64, of the rows that they are states of
) -> None:
    """A verdict's final states become the newest ones of their slots, where they count."""
    if not is_fused(kept):
        use = alive & (tokens != NO_TOKEN)
        s = torch.where(use, slots, kept.shape[0] - 1)
        kept[s] = states.to(kept.dtype)
        kept_positions[s] = positions - 1
        return
    num_rows, size = states.shape
    _keep_states_kernel[(num_rows, triton.cdiv(size, VALUES_PER_PROGRAM))](
        slots,
        positions,
        tokens,
        alive,
        states,
        states.stride(0),
        kept,
        kept.stride(0),
        kept_positions,
        size,
        NONE=NO_TOKEN,
        BLOCK=VALUES_PER_PROGRAM,
    )


# -------------------------------------------------------------------- last stage
def judge_rows(
    stage: LastStage,
    slots: torch.Tensor,  # [R] int64
    sent: torch.Tensor,  # [2, R] int32, position and token as the first stage ran them
    prefill_len: torch.Tensor,  # [S] int32
    sampled: torch.Tensor,  # [R, 1] int64, the target's tokens
    num_sampled: torch.Tensor,  # [R] int32, changed in place
    num_rejected: torch.Tensor,  # [R] int32, changed in place
) -> torch.Tensor:
    """Rule 1 on vLLM's terms: a discarded row becomes num_sampled 0, num_rejected 1. Returns
    the verdict, [R] int64. Rule 2 (expect) is then vLLM's own post_update()."""
    num_rows = slots.shape[0]
    if not is_fused(stage.token):
        is_prefill = stage.position[slots] < prefill_len[slots]
        samples = num_sampled > 0
        good = stage.judge(slots, sent[0], sent[1], is_prefill, samples)
        discarded = samples & ~good
        num_sampled.masked_fill_(discarded, 0)
        num_rejected.masked_fill_(discarded, 1)
        return torch.where(good, sampled[:, 0], NO_TOKEN)
    verdict = torch.empty(num_rows, dtype=torch.int64, device=slots.device)
    _judge_kernel[_grid(num_rows)](
        slots,
        sent,
        sent.stride(0),
        prefill_len,
        sampled,
        sampled.stride(0),
        num_sampled,
        num_rejected,
        stage.position,
        stage.token,
        verdict,
        num_rows,
        NONE=NO_TOKEN,
        BLOCK=ROWS_PER_PROGRAM,
    )
    return verdict


# ------------------------------------------------------------------- benchmarks
def hashed_tokens(
    positions: torch.Tensor,  # [R] int32 or int64
    tokens: torch.Tensor,  # [R] int32 or int64
    seed: int,
    vocab_size: int,
    drawn: torch.Tensor | None,  # [R] float32 in [0, 1), or None
    acceptance: float,
) -> torch.Tensor:
    """A token for each (position, token), the same on every stage, [R] int64; where drawn is at
    least the acceptance, another one."""
    if not is_fused(tokens):
        # Knuth's multiplicative hash, cut to 31 bits so that no product overflows.
        mixed = positions.to(torch.int64) * 2654435761 + tokens.to(torch.int64) * 40503 + seed
        hashed = ((mixed & 0x7FFFFFFF) * 69069 + 1) % vocab_size
        if drawn is None:
            return hashed
        return torch.where(drawn < acceptance, hashed, (hashed + 1) % vocab_size)
    num_rows = tokens.shape[0]
    result = torch.empty(num_rows, dtype=torch.int64, device=tokens.device)
    _hashed_tokens_kernel[_grid(num_rows)](
        positions,
        tokens,
        result if drawn is None else drawn,
        result,
        seed,
        vocab_size,
        acceptance,
        num_rows,
        DRAWN=drawn is not None,
        BLOCK=ROWS_PER_PROGRAM,
    )
    return result


def _grid(num_rows: int) -> tuple[int]:
    return (triton.cdiv(num_rows, ROWS_PER_PROGRAM),)


# ----------------------------------------------------------------------- kernels
# Slots in one step are distinct (but for the dummy), so programs never write the same place.
if triton is not None:

    @triton.jit(do_not_specialize=["num_rows"])
    def _apply_verdict_kernel(
        slots_ptr,
        positions_ptr,
        tokens_ptr,
        alive_ptr,
        position_ptr,
        token_ptr,
        planned_ptr,
        num_rows,
        REMEMBERED: tl.constexpr,
        NONE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = row < num_rows
        slot = tl.load(slots_ptr + row, mask=valid, other=0)
        position = tl.load(positions_ptr + row, mask=valid, other=0)
        token = tl.load(tokens_ptr + row, mask=valid, other=NONE)
        alive = tl.load(alive_ptr + row, mask=valid, other=0) != 0
        planned = planned_ptr + slot * REMEMBERED + position % REMEMBERED
        guess = tl.load(planned, mask=valid, other=NONE)
        wrong = valid & alive & (token != NONE) & (guess != token)
        tl.store(position_ptr + slot, position, mask=wrong)
        tl.store(token_ptr + slot, token, mask=wrong)
        tl.store(planned, token, mask=wrong)

    @triton.jit(do_not_specialize=["num_rows", "num_padded", "dummy_slot"])
    def _begin_rows_kernel(
        slots_ptr,
        ends_ptr,
        prefill_len_ptr,
        position_ptr,
        token_ptr,
        sent_ptr,
        positions_ptr,
        row_slots_ptr,
        row_start_ptr,
        row_tokens_ptr,
        row_ends_ptr,
        row_is_prefill_ptr,
        num_rows,
        num_padded,
        dummy_slot,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = row < num_rows
        in_graph = row < num_padded
        slot = tl.load(slots_ptr + row, mask=valid, other=0)
        end = tl.load(ends_ptr + row, mask=valid, other=0)
        start = tl.load(position_ptr + slot, mask=valid, other=0)
        token = tl.load(token_ptr + slot, mask=valid, other=0)
        known = tl.load(prefill_len_ptr + slot, mask=valid, other=1)
        tl.store(sent_ptr + row, start, mask=valid)
        tl.store(sent_ptr + num_rows + row, token, mask=valid)
        tl.store(positions_ptr + row, end, mask=valid)
        tl.store(row_slots_ptr + row, tl.where(valid, slot, dummy_slot), mask=in_graph)
        tl.store(row_start_ptr + row, start, mask=in_graph)
        tl.store(row_tokens_ptr + row, token, mask=in_graph)
        tl.store(row_ends_ptr + row, end, mask=in_graph)
        tl.store(row_is_prefill_ptr + row, start < known, mask=in_graph)

    @triton.jit(do_not_specialize=["num_rows"])
    def _propose_kernel(
        slots_ptr,
        positions_ptr,
        guesses_ptr,
        samples_ptr,
        position_ptr,
        token_ptr,
        planned_ptr,
        num_rows,
        REMEMBERED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = row < num_rows
        slot = tl.load(slots_ptr + row, mask=valid, other=0)
        position = tl.load(positions_ptr + row, mask=valid, other=0)
        guess = tl.load(guesses_ptr + row, mask=valid, other=0)
        samples = valid & (tl.load(samples_ptr + row, mask=valid, other=0) != 0)
        tl.store(position_ptr + slot, position, mask=samples)
        tl.store(token_ptr + slot, guess, mask=samples)
        planned = planned_ptr + slot * REMEMBERED + position % REMEMBERED
        tl.store(planned, guess, mask=samples)

    @triton.jit(do_not_specialize=["num_rows", "sent_stride"])
    def _judge_kernel(
        slots_ptr,
        sent_ptr,
        sent_stride,
        prefill_len_ptr,
        sampled_ptr,
        sampled_stride,
        num_sampled_ptr,
        num_rejected_ptr,
        position_ptr,
        token_ptr,
        verdict_ptr,
        num_rows,
        NONE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = row < num_rows
        slot = tl.load(slots_ptr + row, mask=valid, other=0)
        ran_position = tl.load(sent_ptr + row, mask=valid, other=0)
        ran_token = tl.load(sent_ptr + sent_stride + row, mask=valid, other=0)
        position = tl.load(position_ptr + slot, mask=valid, other=0)
        token = tl.load(token_ptr + slot, mask=valid, other=0)
        known = tl.load(prefill_len_ptr + slot, mask=valid, other=0)
        count = tl.load(num_sampled_ptr + row, mask=valid, other=0)
        sampled = tl.load(sampled_ptr + row * sampled_stride, mask=valid, other=NONE)
        expected = (ran_position == position) & (ran_token == token)
        samples = count > 0
        good = samples & ((position < known) | expected)
        discarded = valid & samples & (good == 0)
        tl.store(num_sampled_ptr + row, tl.zeros_like(count), mask=discarded)
        tl.store(num_rejected_ptr + row, tl.zeros_like(count) + 1, mask=discarded)
        tl.store(verdict_ptr + row, tl.where(good, sampled, NONE), mask=valid)

    @triton.jit(do_not_specialize=["size"])
    def _keep_states_kernel(
        slots_ptr,
        positions_ptr,
        tokens_ptr,
        alive_ptr,
        states_ptr,
        states_stride,
        kept_ptr,
        kept_stride,
        kept_positions_ptr,
        size,
        NONE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        token = tl.load(tokens_ptr + row)
        alive = tl.load(alive_ptr + row)
        if (token == NONE) | (alive == 0):
            return
        slot = tl.load(slots_ptr + row)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        value = tl.load(states_ptr + row * states_stride + column, mask=inside, other=0.0)
        tl.store(kept_ptr + slot * kept_stride + column, value, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(kept_positions_ptr + slot, tl.load(positions_ptr + row) - 1)

    @triton.jit(do_not_specialize=["seed", "vocab_size", "acceptance", "num_rows"])
    def _hashed_tokens_kernel(
        positions_ptr,
        tokens_ptr,
        drawn_ptr,
        result_ptr,
        seed,
        vocab_size,
        acceptance,
        num_rows,
        DRAWN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = row < num_rows
        position = tl.load(positions_ptr + row, mask=valid, other=0).to(tl.int64)
        token = tl.load(tokens_ptr + row, mask=valid, other=0).to(tl.int64)
        mixed = (position * 2654435761 + token * 40503 + seed) & 0x7FFFFFFF
        hashed = (mixed * 69069 + 1) % vocab_size
        if DRAWN:
            drawn = tl.load(drawn_ptr + row, mask=valid, other=0.0)
            hashed = tl.where(drawn < acceptance, hashed, (hashed + 1) % vocab_size)
        tl.store(result_ptr + row, hashed, mask=valid)
