# SPDX-License-Identifier: Apache-2.0
"""Speculative parallelism on vLLM's V1 model runner (the CPU back end).

The cold path (request states, block tables, attention metadata, sampler) is vLLM's, the hot
path is the two methods below. One step, on the first, a middle and the last stage:

    execute_model   first:   apply verdicts -> forward -> hand on -> drafter guesses
                    middle:  positions and tokens from the data sent along -> forward
                    last:    the same -> logits -> judge rows
                    second:  length predictor, where there is one, on the state received
    sample_tokens   last:    sample -> verdict to the first stage and to the scheduler

Invariant: positions and tokens of decode rows come from the first stage's device state
alone; the scheduler's counts are upper bounds used for memory only.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from spexis.config import SpexisConfig
from spexis.drafters.base import DraftRows, load_drafter
from spexis.engine.channel import VerdictChannel
from spexis.engine.outputs import SpexisOutput
from spexis.engine.seeds import SeededDraws
from spexis.engine.selector import HELD_KEY, DraftSelector
from spexis.engine.timeline import Timeline
from spexis.engine.verdict import FirstStage, LastStage, Plan, SlotTable, is_due
from spexis.guards import check_sources
from spexis.lengths.engine import StagePredictor

SENT_KEYS = ("spexis_positions", "spexis_tokens")  # travel with the hidden states
ENDS_KEY = "spexis_ends"  # likewise from the second stage on, where a length predictor runs


@dataclass(slots=True)
class StepRows:
    """The rows of one step; R requests, T tokens."""

    req_ids: list[str]
    slots_np: np.ndarray  # [R]
    slots: torch.Tensor  # [R] int64
    num_scheduled_np: np.ndarray  # [R] int32
    num_scheduled: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64, the scheduler's count
    is_prefill: torch.Tensor  # [R] bool
    samples: torch.Tensor  # [R] bool
    has_prefill: bool
    num_tokens: int
    ran: torch.Tensor | None = None  # [n] int64, rows with tokens; None: all of them

    def hold(self, held: np.ndarray) -> None:
        """held: [R] bool. Those rows have no tokens in this step and sample nothing."""
        self.num_scheduled_np[held] = 0
        self.num_scheduled = torch.from_numpy(self.num_scheduled_np.astype(np.int64))
        self.samples &= torch.from_numpy(~held)
        self.num_tokens = int(self.num_scheduled_np.sum())
        self.ran = torch.from_numpy(np.flatnonzero(~held))

    def of_ran(self, values: torch.Tensor) -> torch.Tensor:
        """[R, ...] -> [n, ...], the rows with tokens."""
        return values if self.ran is None else values[self.ran]


@dataclass(slots=True)
class Pending:
    """What sample_tokens needs of the step that execute_model ran on the last stage."""

    scheduler_output: object
    rows: StepRows
    logits: torch.Tensor  # [R, V]
    hidden_states: torch.Tensor  # [T, H]
    last: torch.Tensor  # [n] index of the last token of each row that ran
    good: torch.Tensor  # [R] bool
    sent_tokens: torch.Tensor  # [R] decode rows' input tokens
    positions: torch.Tensor  # [R] of the tokens about to be sampled
    ends: torch.Tensor | None  # [R, 5] of the length predictor


class SpexisV1Mixin:
    """Mixed in before vLLM's V1 model runner class by engine/worker.py."""

    # ------------------------------------------------------------------ set-up
    def init_spexis(self) -> None:
        check_sources("runner_v1")
        self.spexis_config = SpexisConfig.from_vllm(self.vllm_config)
        self.pp = get_pp_group()
        self.num_stages = self.pp.world_size
        # A preempted request keeps its slot while it waits, hence twice the batch at least.
        self.num_slots = 4 * self.max_num_reqs + 1024
        self.slot_table = SlotTable(self.num_slots)
        self.first_stage = FirstStage(self.num_slots, self.num_stages, self.device)
        self.last_stage = LastStage(self.num_slots, self.device)
        self.seeded_draws = SeededDraws(2 * self.num_stages)  # the most steps in flight
        self.plans: deque[Plan] = deque()
        self.num_calls = 0  # execute_model calls, empty steps included
        self.num_steps = 0
        self.pending: Pending | None = None
        self.pp_sends: list = []
        self.timeline = Timeline.open(self.spexis_config.timeline_log, self.pp.rank_in_group)
        self.stage_selects = (
            self.spexis_config.mode == "sp-alpha"
            and self.spexis_config.selection == "stage"
            and self.spexis_config.drafter.speculates
        )

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        self.spexis_drafter = load_drafter(self.spexis_config.drafter, self)  # None in between
        state_size = self.spexis_drafter.state_size if self.spexis_drafter else 0
        self.verdicts = VerdictChannel(self.pp, state_size, self.model_config.dtype)
        self.length_predictor = StagePredictor.load(self)  # None but on the second stage
        self.selector = DraftSelector.build(self)  # None but on the first stage of "sp-alpha"

    def prompt_token_ids(self, req_id: str) -> list[int]:
        return self.requests[req_id].prompt_token_ids

    # ------------------------------------------------------------------ states
    def _update_states(self, scheduler_output):
        for req_id in scheduler_output.finished_req_ids:
            self.slot_table.release(req_id)
            self.seeded_draws.forget(req_id)
            if self.spexis_drafter:
                self.spexis_drafter.forget(req_id)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in cached.resumed_req_ids:
            # vLLM restores these under async scheduling only; every stage needs them here.
            token_ids = cached.all_token_ids[req_id]
            request = self.requests[req_id]
            output_token_ids = list(token_ids[request.num_prompt_tokens :])
            num_dropped = len(request.output_token_ids) - len(output_token_ids)
            self.seeded_draws.take_back(req_id, request.generator, num_dropped)
            request.output_token_ids = output_token_ids
            self._bind(req_id, len(token_ids))
        result = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._bind(new.req_id, self.requests[new.req_id].num_tokens)
        return result

    def _bind(self, req_id: str, prefill_len: int) -> None:
        slot = self.slot_table.bind(req_id, prefill_len)
        if self.spexis_drafter:
            self.spexis_drafter.bind(slot)
        if self.selector:
            self.selector.bind(slot)

    def _step_rows(self, scheduler_output) -> StepRows:
        batch, table = self.input_batch, self.slot_table
        num_reqs, req_ids = batch.num_reqs, batch.req_ids
        scheduled = scheduler_output.num_scheduled_tokens
        num_scheduled = np.array([scheduled[r] for r in req_ids], dtype=np.int32)
        slots = np.array([table.slot_of[r] for r in req_ids])
        num_computed = batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
        prefill_len = table.prefill_len[slots]
        is_prefill = num_computed < prefill_len
        return StepRows(
            req_ids=req_ids,
            slots_np=slots,
            slots=self._to_device(slots),
            num_scheduled_np=num_scheduled,
            num_scheduled=self._to_device(num_scheduled.astype(np.int64)),
            num_computed=self._to_device(num_computed),
            is_prefill=self._to_device(is_prefill),
            samples=self._to_device(num_computed + num_scheduled >= prefill_len),
            has_prefill=bool(is_prefill.any()),
            num_tokens=scheduler_output.total_num_scheduled_tokens,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    # ---------------------------------------------------------------- hot path
    @torch.inference_mode()
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.num_calls += 1
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            if self.selector:
                self.selector.no_choice()
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.num_steps += 1
        rows = self._step_rows(scheduler_output)
        if not self.stage_selects:  # else which rows run is not known yet
            self._prepare_host_inputs(rows)
        if self.pp.is_first_rank:
            self._apply_verdicts(scheduler_output.spexis_num_verdicts)
            start = self.first_stage.position[rows.slots]
            token = self.first_stage.token[rows.slots]
        else:
            start, token = (intermediate_tensors[k] for k in SENT_KEYS)
        if self.stage_selects:
            full = scheduler_output.spexis_pipeline_full
            self._leave_out(rows, start, full, intermediate_tensors)
            self._prepare_host_inputs(rows)
        with self.timeline.busy(self.num_steps, rows):
            return self._run_stage(scheduler_output, rows, start, token, intermediate_tensors)

    def _leave_out(self, rows: StepRows, start, full: bool, intermediate_tensors) -> None:
        """The rows that the first stage holds back, there and as it tells the others."""
        if self.pp.is_first_rank:
            held = self.selector.choose(rows, start, full)
        else:
            held = intermediate_tensors.tensors.get(HELD_KEY)
            held = None if held is None else held.numpy()
        if held is not None:
            rows.hold(held)

    def _run_stage(self, scheduler_output, rows, start, token, intermediate_tensors):
        # Prefill rows run from the scheduler's count, decode rows from the first stage's.
        start = torch.where(rows.is_prefill, rows.num_computed, start)
        last = self._prepare_device_inputs(rows, start, token)
        positions = start + rows.num_scheduled  # of the tokens that this step samples
        ends = self._ends(rows, last, positions, intermediate_tensors)
        with self._forward_context(rows):
            output = self._forward(rows, intermediate_tensors)
            if self.pp.is_last_rank:
                logits = self._logits(rows, output, last)
                good = self.last_stage.judge(
                    rows.slots, start, token, rows.is_prefill, rows.samples
                )
                self.pending = Pending(
                    scheduler_output, rows, logits, output, last, good, token, positions, ends
                )
                return None
            # Hand on before drafting: the next stage starts while the drafter runs.
            self._send_to_next_stage(output, start, token, rows, ends)
            if self.pp.is_first_rank:
                self._draft(rows, output, last, start, token, positions)
        return None

    def _ends(self, rows: StepRows, last, positions, received) -> torch.Tensor | None:
        """[R, 5] what the length predictor says of each row's last token, a good one or not.

        Before the layers run: they may work on the received state in place.
        """
        if self.length_predictor is None:
            return None if received is None else received.tensors.get(ENDS_KEY)
        prompt_len = self.input_batch.num_prompt_tokens[: len(rows.req_ids)].astype(np.int64)
        answered = rows.of_ran(positions - self._to_device(prompt_len))
        state = received["hidden_states"], received["residual"]
        exit_rows = self.length_predictor.read(*state, last, answered)
        return _spread(self.length_predictor.ends(exit_rows), rows)

    def _draft(self, rows: StepRows, output, last, start, token, positions) -> None:
        of_ran = rows.of_ran
        req_ids = rows.req_ids
        if rows.ran is not None:
            req_ids = [req_ids[i] for i in rows.ran.tolist()]
        draft_rows = DraftRows(
            req_ids=req_ids,
            slots=of_ran(rows.slots),
            hidden_states=output["hidden_states"],
            residual=output["residual"],
            token_positions=self.positions[: rows.num_tokens],
            last=last,
            start=of_ran(start),
            tokens=of_ran(token),
            draft_positions=of_ran(positions),
            is_prefill=of_ran(rows.is_prefill),
            has_prefill=rows.has_prefill,
        )
        guesses = self.spexis_drafter.propose(draft_rows)
        slots, samples = draft_rows.slots, of_ran(rows.samples)
        self.first_stage.propose(slots, draft_rows.draft_positions, guesses.tokens, samples)
        self.first_stage.confidence[slots] = guesses.confidence
        if self.selector:
            self.selector.drafted(rows, positions, self.first_stage.confidence[rows.slots])
        generation = self.slot_table.generation[rows.slots_np].copy()
        self.plans.append(
            Plan(self.num_calls, self.num_steps, rows.slots_np, generation, rows.slots, positions)
        )

    @torch.inference_mode()
    def sample_tokens(self, grammar_output):
        if self.pending is None:  # not the last stage, or execute_model raised: vLLM then asks it
            return None
        step, self.pending = self.pending, None
        batch, rows = self.input_batch, step.rows
        with self.timeline.busy(self.num_steps, rows, part="sample"):
            if grammar_output is not None:
                apply_grammar_bitmask(step.scheduler_output, grammar_output, batch, step.logits)
            with self.seeded_draws.drawing(rows.req_ids, batch.generators, step.good):
                sampled = self.sampler(
                    logits=step.logits, sampling_metadata=batch.sampling_metadata
                )
            tokens = sampled.sampled_token_ids[:, 0].to(torch.int64)
            if not self.spexis_drafter.lossless:
                tokens = self.spexis_drafter.overrule(step.positions, step.sent_tokens)
            verdict = self.last_stage.expect(rows.slots, step.positions, tokens, step.good)
            states = None
            if self.verdicts.state_size:
                states = _spread(step.hidden_states[step.last], rows)
            self.verdicts.send(verdict, states)
            self.timeline.note_verdict(self.num_steps, verdict, rows)
        return self._runner_output(step, sampled, verdict)

    # ------------------------------------------------------- parts of the step
    def _apply_verdicts(self, num_ready: int) -> None:
        """Waits for the verdict of call j-N; takes further ones if the engine has seen them.

        So a request that runs at stock cadence (or alone after a pause) continues from the
        truth.
        """
        while self.plans and is_due(self.plans[0], self.num_calls, self.num_stages, num_ready):
            plan = self.plans.popleft()
            tokens, states = self.verdicts.receive(len(plan.slots_np))
            alive = self._to_device(plan.generation == self.slot_table.generation[plan.slots_np])
            wrong = self.first_stage.apply_verdict(plan.slots, plan.positions, tokens, alive)
            if self.selector:
                self.selector.verdicts(plan, tokens, alive, wrong)
            if states is not None:
                self.spexis_drafter.observe(plan.slots, plan.positions, tokens, alive, states)

    def _send_to_next_stage(self, output: IntermediateTensors, start, token, rows, ends) -> None:
        for handle in self.pp_sends:
            handle.wait()
        output.tensors.update(zip(SENT_KEYS, (start, token), strict=True))
        if rows.ran is not None:
            held = torch.ones(len(rows.req_ids), dtype=torch.bool)
            held[rows.ran] = False
            output.tensors[HELD_KEY] = held
        if ends is not None:
            output.tensors[ENDS_KEY] = ends
        self.pp_sends = self.pp.isend_tensor_dict(output.tensors, all_gather_group=get_tp_group())

    def _prepare_host_inputs(self, rows: StepRows) -> None:
        """Block tables, query offsets and the known tokens of prefill rows."""
        batch, num_reqs, num_tokens = self.input_batch, len(rows.req_ids), rows.num_tokens
        batch.block_table.commit_block_table(num_reqs)
        row_of_token = np.repeat(self.arange_np[:num_reqs], rows.num_scheduled_np)
        cumulative = self._get_cumsum_and_arange(rows.num_scheduled_np, self.query_pos.np)
        offsets = self.query_start_loc.np
        offsets[0] = 0
        offsets[1 : num_reqs + 1] = cumulative
        offsets[num_reqs + 1 :].fill(cumulative[-1])
        self.query_start_loc.copy_to_gpu()
        self.query_pos.copy_to_gpu(num_tokens)
        self._row_of_token = self._to_device(row_of_token.astype(np.int64))  # [T]
        num_computed = batch.num_computed_tokens_cpu[:num_reqs]
        self.optimistic_seq_lens_cpu[:num_reqs] = torch.from_numpy(
            num_computed + rows.num_scheduled_np
        )
        self.optimistic_seq_lens_cpu[num_reqs:].fill_(0)
        if rows.has_prefill and self.pp.is_first_rank:
            flat = (
                num_computed[row_of_token].astype(np.int64)
                + self.query_pos.np[:num_tokens]
                + row_of_token.astype(np.int64) * batch.token_ids_cpu.shape[1]
            )
            torch.index_select(
                batch.token_ids_cpu_tensor.flatten(),
                0,
                torch.from_numpy(flat),
                out=self.input_ids.cpu[:num_tokens],
            )
            self.input_ids.copy_to_gpu(num_tokens)

    def _prepare_device_inputs(self, rows: StepRows, start, token) -> torch.Tensor:
        """Positions, sequence lengths, decode rows' tokens, slot mapping. Returns last [n]."""
        num_reqs, num_tokens = len(rows.req_ids), rows.num_tokens
        self.positions[:num_tokens] = start[self._row_of_token] + self.query_pos.gpu[:num_tokens]
        self.seq_lens[:num_reqs] = start + rows.num_scheduled
        self.seq_lens[num_reqs:].fill_(0)
        offsets = self.query_start_loc.gpu[: num_reqs + 1]
        last = rows.of_ran((offsets[1:] - 1).to(torch.int64))
        if self.pp.is_first_rank:
            known = self.input_ids.gpu[last]
            token = rows.of_ran(token).to(known.dtype)
            self.input_ids.gpu[last] = torch.where(rows.of_ran(rows.is_prefill), known, token)
        self.input_batch.block_table.compute_slot_mapping(
            num_reqs, offsets, self.positions[:num_tokens]
        )
        return last

    def _forward_context(self, rows: StepRows):
        num_reqs, num_tokens = len(rows.req_ids), rows.num_tokens
        max_query_len = int(rows.num_scheduled_np.max())
        mode, descriptor, *_ = self._determine_batch_execution_and_padding(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=rows.num_scheduled_np,
            max_num_scheduled_tokens=max_query_len,
            use_cascade_attn=False,
            num_encoder_reqs=0,
            allow_microbatching=False,
        )
        self._num_padded = descriptor.num_tokens
        by_group, by_layer = self._get_slot_mappings(
            num_tokens_padded=self._num_padded,
            num_reqs_padded=num_reqs,
            num_tokens_unpadded=num_tokens,
        )
        metadata, _ = self._build_attention_metadata(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            slot_mappings=by_group,
        )
        return set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=self._num_padded,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
            slot_mapping=by_layer,
        )

    def _forward(self, rows: StepRows, intermediate_tensors):
        received = None
        if not self.pp.is_first_rank:
            received = IntermediateTensors(
                {k: intermediate_tensors[k] for k in ("hidden_states", "residual")}
            )
        return self._model_forward(
            input_ids=self.input_ids.gpu[: self._num_padded] if received is None else None,
            positions=self.positions[: self._num_padded],
            intermediate_tensors=received,
            inputs_embeds=None,
            **self._init_model_kwargs(),
        )

    def _logits(self, rows: StepRows, hidden_states, last) -> torch.Tensor:
        """[R, V]; of held rows zeros, whose samples count for nothing."""
        return _spread(self.model.compute_logits(hidden_states[last]), rows)

    def _runner_output(self, step: Pending, sampled, verdict) -> SpexisOutput:
        batch, rows = self.input_batch, step.rows
        held = frozenset()
        if rows.ran is not None:
            held = frozenset(batch.req_ids) - {batch.req_ids[i] for i in rows.ran.tolist()}
        token_ids: list[list[int]] = []
        for req_id, token in zip(batch.req_ids, verdict.tolist(), strict=True):
            token_ids.append([token] if token >= 0 else [])
            if token >= 0:
                self.requests[req_id].output_token_ids.append(token)
        logprobs = sampled.logprobs_tensors
        return SpexisOutput(
            held=held,
            req_ids=list(batch.req_ids),
            req_id_to_index=dict(batch.req_id_to_index),
            sampled_token_ids=token_ids,
            logprobs=logprobs.tolists() if logprobs is not None else None,
            prompt_logprobs_dict=self._get_prompt_logprobs_dict(
                step.hidden_states[: step.rows.num_tokens],
                step.scheduler_output.num_scheduled_tokens,
            ),
            ends=step.ends.numpy() if step.ends is not None else None,
        )


def _spread(values: torch.Tensor, rows: StepRows) -> torch.Tensor:
    """[n, ...] of the rows that ran -> [R, ...], zeros elsewhere. None (other TP ranks) stays."""
    if rows.ran is None or values is None:
        return values
    return values.new_zeros(len(rows.req_ids), *values.shape[1:]).index_copy_(0, rows.ran, values)
