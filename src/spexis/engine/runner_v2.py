# SPDX-License-Identifier: Apache-2.0
"""Speculative parallelism on vLLM's V2 model runner (CUDA; in CI the Triton interpreter).

V2 keeps each request's position and next input token on the device and hands sampled tokens
back to earlier stages N steps later. Spexis reads those two tensors as the states of the rules
in verdict.py: on the first stage they are what runs next, guess or truth, on the last stage
what a row must show to count. One step:

    execute_model  first:   apply due verdicts -> vLLM's step, from the guesses
                   middle:  vLLM's step, at the positions that came with the hidden states
                   last:    vLLM's step
    sample_tokens  first:   (hidden states are on their way) draft -> guesses advance the state
                   last:    sample -> judge rows -> verdict -> vLLM's bookkeeping of good rows
                            -> length predictor, where there is one and the stage is the second

Invariants: nothing here waits for the device; no index has a size that depends on data; all
state is preallocated; discarded rows reach vLLM's bookkeeping as num_sampled = 0 and
num_rejected = 1, which leaves lengths, token history, penalty counts and the position as they
were. Run: tests/engine/test_v2_interpreter.py.
"""

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.utils.torch_utils import async_tensor_h2d

from spexis.config import SpexisConfig
from spexis.drafters.base import load_drafter
from spexis.engine import kernels
from spexis.engine.transfer import ROWS, FixedTransfer, Schema, agree
from spexis.engine.v2_choice import RowChoiceMixin
from spexis.engine.v2_drafter import DrafterMixin
from spexis.engine.v2_extras import AsyncExtras
from spexis.engine.v2_handler import VerdictHandler
from spexis.engine.verdict import FirstStage, LastStage
from spexis.guards import check_sources
from spexis.lengths.engine import ExitRows, StagePredictor

logger = init_logger("vllm.spexis.runner_v2")


class SpexisV2Mixin(RowChoiceMixin, DrafterMixin):
    """Mixed in before vLLM's V2 model runner class by engine/worker.py."""

    # ------------------------------------------------------------------ set-up
    def init_spexis(self) -> None:
        check_sources("runner_v2")
        self.spexis_config = SpexisConfig.from_vllm(self.vllm_config)
        self.pp = get_pp_group()
        self.num_stages = self.pp.world_size
        self.num_slots = self.max_num_reqs  # V2's request index; a preempted request has none
        self.num_calls = 0  # execute_model calls, empty ones included
        self.num_ready = 0  # steps whose output the scheduler had when it planned this one
        self.num_steps = 0  # non-empty ones of the scheduler's, which numbers them alike
        self.step = 0  # number of this one; 0 in vLLM's warm-up, so that verdicts are due at once
        self.received: IntermediateTensors | None = None
        self.stage_output: IntermediateTensors | None = None
        self.prompts: dict[str, list[int]] = {}
        self.transfer: FixedTransfer | None = None
        self.exit_rows: ExitRows | None = None  # of this step, for the length predictor
        self._share_request_states()
        self.init_choice()
        if self.spexis_config.timeline_log:
            logger.warning("spexis.timeline_log is recorded by the V1 (CPU) runner only")

    def _share_request_states(self) -> None:
        """vLLM's position and token per slot become the states of the rules in verdict.py.

        One row longer for the dummy slot. Must run before load_model(), where samplers and
        CUDA graphs take hold of the tensors.
        """
        slots, states = self.num_slots, self.req_states
        self.first_stage = FirstStage(slots, self.num_stages, self.device)
        self.last_stage = LastStage(slots, self.device)
        stage = self.last_stage if self.pp.is_last_rank else self.first_stage
        stage.position = torch.zeros(slots + 1, dtype=torch.int32, device=self.device)
        states.num_computed_tokens.gpu = stage.position[:slots]
        states.last_sampled_tokens = stage.token[:slots].unsqueeze(1)
        self.init_drafter_rows()

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        with DeviceMemoryProfiler() as memory:
            self.spexis_drafter = load_drafter(self.spexis_config.drafter, self)
            self.length_predictor = StagePredictor.load(self)  # None but on the second stage
        state_size = self.spexis_drafter.state_size if self.spexis_drafter else 0
        if self.pp.is_first_rank or self.length_predictor is not None:
            self.model_memory_usage += memory.consumed_memory
        if self.pp.is_first_rank:
            self.drafter_bytes["weights"] = memory.consumed_memory
            self.plan_draft_graphs()
        # Middle stages hold no drafter but take part in the broadcast.
        state_size = self._agree_on_state_size(state_size)
        VerdictHandler.adopt(self.pp_handler, self.num_slots, state_size, self.model_config.dtype)
        self._set_up_transfer()

    def _set_up_transfer(self) -> None:
        """All stages get here or none, since they have one configuration."""
        tensor_parallel = self.parallel_config.tensor_parallel_size > 1
        if not self.spexis_config.fixed_transfer or tensor_parallel or self.num_stages == 1:
            return
        try:
            schema = Schema.of_model(self.model, self.model_config.dtype)
        except ValueError as err:
            schema = None
            logger.warning("Stages describe each step's data, as vLLM does: %s", err)
        if agree(self.pp, schema):
            buffers = None if self.pp.is_first_rank else self.intermediate_tensors.tensors
            self.transfer = FixedTransfer.install(
                self.pp, schema, buffers, self.device, self.row_lines
            )

    def expect_transfer(self, scheduler_output) -> None:
        """The worker is about to receive this step's data."""
        if self.transfer is None:
            return
        num_tokens = self.num_rows_to_run(scheduler_output)
        if num_tokens is None:
            num_tokens = scheduler_output.total_num_scheduled_tokens
        self.transfer.expect(num_tokens, len(scheduler_output.num_scheduled_tokens))

    def _agree_on_state_size(self, state_size: int) -> int:
        return int(self.pp.broadcast_object(state_size, src=0))

    def prompt_token_ids(self, req_id: str) -> list[int]:
        return self.prompts.get(req_id, [])

    # ------------------------------------------------------------------ states
    def add_requests(self, scheduler_output) -> None:
        super().add_requests(scheduler_output)
        if not self.pp.is_first_rank:
            return
        for new in scheduler_output.scheduled_new_reqs:  # resumed requests are new again
            self.prompts[new.req_id] = new.prompt_token_ids or []
            self.spexis_drafter.bind(self.req_states.req_id_to_index[new.req_id])

    def finish_requests(self, scheduler_output) -> None:
        super().finish_requests(scheduler_output)
        if self.pp.is_first_rank:
            for req_id in scheduler_output.finished_req_ids:
                self.prompts.pop(req_id, None)
                self.spexis_drafter.forget(req_id)

    def update_pp_decode_requests(self) -> None:
        """vLLM calls this first in every step: here the first stage applies due verdicts."""
        if not self.pp.is_first_rank:
            return
        handler = self.pp_handler
        for due in handler.take_due(self.num_calls, self.num_stages, self.num_ready):
            plan, alive = due.plan, handler.alive(due.plan)
            verdict = plan.slots, plan.positions, due.tokens, alive
            kernels.apply_verdict(self.first_stage, *verdict)
            if self.chains is not None:
                self.chains.verdict(*verdict)
            if due.states is not None:
                self.spexis_drafter.observe(*verdict, due.states)

    # ---------------------------------------------------------------- hot path
    @torch.inference_mode()
    def execute_model(
        self, scheduler_output, intermediate_tensors=None, dummy_run=False, *args, **kwargs
    ):
        self.sent = self.stage_output = self.batch_desc = self.exit_rows = None
        self.received = intermediate_tensors
        self.asked = self.choice = None
        if not dummy_run:
            self._count(scheduler_output)
            scheduler_output = self.begin_choice(scheduler_output)
        output = super().execute_model(
            scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs
        )
        if self.choice is not None and not self.pp.is_first_rank:  # the first one drafts before
            self.see_all_requests()
        if not isinstance(output, IntermediateTensors):
            return output
        self.stage_output = output
        if dummy_run:
            return output
        return IntermediateTensors({**output.tensors, ROWS: self.sent})

    def _received_rows(self) -> torch.Tensor:
        """[2, R] positions and tokens that came along (v2_choice.py: and two lines more); waits for
        them, so call it late."""
        return self.received.tensors[ROWS]

    def _count(self, scheduler_output) -> None:
        self.num_calls += 1
        num_ready = getattr(scheduler_output, "spexis_num_verdicts", None)
        # An empty step, or vLLM's warm-up: nobody knows when the next one comes.
        self.pp_handler.expect_steps(more=num_ready is not None)
        if num_ready is None:
            self.step = 0
            return
        self.num_steps += 1
        self.step, self.num_ready = self.num_steps, num_ready

    def prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, *args, **kwargs):
        self.batch_desc = batch_desc
        if not (self.pp.is_first_rank or self.pp.is_last_rank):
            # A middle stage learns of restarts from the rows themselves.
            self.sent = self._received_rows()
            if self.asked is None:
                slots = async_tensor_h2d(
                    batch_req_state.idx_mapping_np, device=self.device, dtype=torch.int64
                )
                self.req_states.num_computed_tokens.gpu.index_copy_(0, slots, self.sent[0])
        batch = super().prepare_inputs(
            scheduler_output, batch_req_state, batch_desc, *args, **kwargs
        )
        if self.asked is not None:
            self.choose_rows(batch)
        if self.pp.is_first_rank:
            self._begin_rows(batch)
            if self.chains is not None:
                # Not by assigning a number: that would wait for the device.
                self.chains.ran.index_fill_(0, batch.idx_mapping, self.step)
                self.sent = self.rows_to_send(batch, self.sent)
        elif self.length_predictor is not None:
            self._read_exit(batch)
        return batch

    def _read_exit(self, batch) -> None:
        """Before the layers run: they work on the received state in place."""
        received, num_reqs = self.received.tensors, batch.num_reqs
        choice = self.choice
        slots_np = batch.idx_mapping_np if choice is None else choice.slots_np
        prompt_len = self.req_states.prompt_len.np[slots_np]
        prompt_len = async_tensor_h2d(prompt_len, device=self.device, dtype=torch.int64)
        if choice is not None:
            prompt_len = prompt_len[choice.chosen]
        self.exit_rows = self.length_predictor.read(
            received["hidden_states"],
            received["residual"],
            batch.logits_indices,
            batch.seq_lens[:num_reqs] - prompt_len,  # of a row that counts its own position's
        )

    @torch.inference_mode()
    def sample_tokens(self, grammar_output):
        if self.pp.is_first_rank and self.execute_model_state is not None:
            batch = self.execute_model_state.input_batch
            self._draft_and_advance()
            positions = self.guess_positions
            if self.choice is not None:
                batch, positions = self.see_all_requests(), self.positions_of_all(positions)
            self.pp_handler.make_plan(batch, self.num_calls, self.step, positions)
        rows = self._offered_rows()
        output = super().sample_tokens(grammar_output)
        if output is None:
            return output
        ends = None
        if self.exit_rows is not None:
            # The verdict is on its way: nobody who waits for it waits for this.
            ends = self.length_predictor.ends(self.exit_rows)
            ends = ends if self.choice is None else ends[self.choice.place]
        if ends is None and rows is None:
            return output
        return AsyncExtras(output, ends, rows, self.main_stream, self.output_copy_stream)

    def _offered_rows(self) -> torch.Tensor | None:
        """On the last stage: [4, B] what the first one had to choose from, for the scheduler."""
        if not (self.selecting and self.pp.is_last_rank) or self.execute_model_state is None:
            return None
        has_prefill = self.execute_model_state.input_batch.has_prefill
        return None if has_prefill else self._received_rows()

    def postprocess_num_computed_tokens(self, input_batch) -> None:
        """Called on earlier stages, whose positions come from propose() or with the rows."""

    def sample(self, hidden_states, input_batch, grammar_output):
        output, num_sampled, num_rejected = super().sample(
            hidden_states, input_batch, grammar_output
        )
        sent = self._received_rows()
        if not self.spexis_drafter.lossless:
            ends = input_batch.seq_lens[: input_batch.num_reqs]
            output.sampled_token_ids[:, 0] = self.spexis_drafter.overrule(ends, sent[1])
        # In place: output holds the same tensors. vLLM's post_update then plays rule 2 (expect).
        self.pp_handler.verdict = kernels.judge_rows(
            self.last_stage,
            input_batch.idx_mapping,
            sent,
            self.req_states.prefill_len.gpu,
            output.sampled_token_ids,
            num_sampled,
            num_rejected,
        )
        if self.pp_handler.state_size:
            self.pp_handler.states = hidden_states[input_batch.logits_indices]
        return output, num_sampled, num_rejected

    # ----------------------------------------------------------------- memory
    @torch.inference_mode()
    def _dummy_run(self, *args, **kwargs):
        """vLLM measures peak memory and warms up with dummy steps: the drafter takes part."""
        result = super()._dummy_run(*args, **kwargs)
        if self.pp.is_first_rank and self.stage_output is not None:
            self._begin_rows(self.execute_model_state.input_batch)
            self._draft()
            self.stage_output = None  # or it would outlive the measurement
        return result
