# SPDX-License-Identifier: Apache-2.0
"""Scheduler of speculative parallelism: every decode request is eligible at every step.

Subclass of vLLM's AsyncScheduler, which already plans a request's next step before the
present one has returned (output placeholders). Added:

- a decode row need not wait until the request's last row left the pipeline;
- a row that returns no token was discarded: its computed token and placeholder are taken
  back, so counts stay upper bounds of the device's and allocated blocks always suffice;
- blocks enter the prefix cache only up to verified tokens;
- policies (core/) say which requests keep stock cadence, who is admitted, held or preempted.

Only update_from_output() changes what a user can see, and it is vLLM's own: tokens reach it
verified, so stop checks, streaming, logprobs, metrics and billing never meet a guess.
"""

import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from spexis.config import SpexisConfig
from spexis.core.cadence import Cadence
from spexis.core.live_mode import LiveMode
from spexis.core.mode import Mode
from spexis.engine.lifeline import end_with_parent, end_with_workers
from spexis.engine.lookahead import Lookahead
from spexis.engine.nodes import may_span_nodes
from spexis.engine.requests import speculates
from spexis.engine.row_counter import RowCounter
from spexis.engine.step_chooser import StepChooser
from spexis.engine.verdict import take_back
from spexis.guards import check_sources
from spexis.observability.counters import SpexisCounters
from spexis.observability.iteration_log import IterationLog
from spexis.observability.policy_state import policy_state
from spexis.observability.wire import attach


class SpexisScheduler(AsyncScheduler):
    def __init__(self, vllm_config, *args, **kwargs):
        check_sources("scheduler")
        # Longer than the executor's own shutdown, which ends workers in order.
        end_with_parent(grace=15.0)
        if may_span_nodes(vllm_config.parallel_config):
            end_with_workers()
        self.spexis_config = SpexisConfig.from_vllm(vllm_config)
        _set_steps_in_flight(vllm_config, self.spexis_config.steps_in_flight)
        super().__init__(vllm_config, *args, **kwargs)
        self.num_stages = self.parallel_config.pipeline_parallel_size
        # A request that must not run a guess waits for its verdict. Of a row this many calls ago
        # the worker has it, and the engine core waits for one pending result at most, which is
        # then that row's (a grammar's state needs the token).
        self.stock_cadence = max(self.num_stages, vllm_config.max_concurrent_batches - 1)
        self.cadence = Cadence(self.stock_cadence)
        self.speculate = self.spexis_config.drafter.method != "none"
        self.mode = Mode.SP if self.speculate else Mode.PP
        self.live_mode = None
        if self.speculate and self.spexis_config.mode != "sp":
            self.mode = {"pp": Mode.PP, "sp-alpha": Mode.ALPHA}.get(
                self.spexis_config.mode, Mode.SP
            )
            if self.spexis_config.mode == "auto":
                # Rows of both modes are in flight for as many steps as the pipeline takes.
                self.live_mode = LiveMode(settle=2 * vllm_config.max_concurrent_batches + 2)
        self.num_steps = 0  # non-empty steps scheduled
        self.num_verdicts = 0  # non-empty steps whose output came back
        self._owes_empty_step = False  # to workers that leave receives for later (v2_handler.py)
        self._last_row_call: dict[str, int] = {}  # schedule() call of each request's newest row
        self._chain_broken: set[str] = set()  # requests whose newest verdict was a discard
        self._last_run_call: dict[str, int] = {}  # call of each request's newest row that ran
        self.counters = SpexisCounters(num_stages=self.num_stages)
        self.iteration_log = IterationLog.open(self.spexis_config.iteration_log)
        self._cache_only_verified_blocks()
        self.lookahead = Lookahead(self) if self.spexis_config.lookahead else None
        self.chooser: StepChooser | RowCounter | None = None
        if self.mode is Mode.ALPHA and self.spexis_config.selection == "scheduler":
            self.chooser = StepChooser(self)
        elif self.mode is Mode.ALPHA and vllm_config.use_v2_model_runner:
            self.chooser = RowCounter(self)  # on V1 the first stage chooses by itself
        self._last_output_time: float | None = None  # None: the pipeline ran empty since

    # ------------------------------------------------------------- scheduling
    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        if self.num_steps == self.num_verdicts and not self.running:
            self._last_output_time = time.monotonic()  # idle until now
        if self.chooser is not None:
            self.chooser.before_schedule()
        if self.lookahead is None:
            return super().schedule(*args, **kwargs)
        most, self.max_num_active_reqs = self.max_num_active_reqs, self.lookahead.before_schedule()
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = most

    def has_finished_requests(self) -> bool:
        """Keeps the engine core stepping once more, also where no request has ended (a pause)."""
        return super().has_finished_requests() or self._owes_empty_step

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        self._owes_empty_step = bool(scheduler_output.num_scheduled_tokens)
        if not scheduler_output.num_scheduled_tokens:
            return
        self.num_steps += 1
        # Decode rows of this step: does the row run a guess? (False: its input is verified)
        rows: dict[str, bool] = {}
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if request.is_prefill_chunk:
                continue
            is_first = request.num_output_placeholders <= 1
            last_call = self._last_row_call.get(req_id, -self.num_stages)
            rows[req_id] = not is_first and self.current_step - last_call < self.num_stages
            self._last_row_call[req_id] = self.current_step
            # A grammar's state follows verified tokens only, so those keep stock cadence.
            plain = self.mode is Mode.PP or request.use_structured_output or not speculates(request)
            request.next_decode_eligible_step = self.cadence.next_step(
                req_id, self.current_step, plain
            )
        run = None if self.chooser is None else self.chooser.scheduled(rows, scheduler_output)
        scheduler_output.spexis_run = run  # how many rows the first stage is to choose (v2_choice)
        scheduler_output.spexis_rows = rows
        scheduler_output.spexis_call = self.current_step
        # Workers may apply verdicts up to here without waiting (runner_v1.py).
        scheduler_output.spexis_num_verdicts = self.num_verdicts
        num_in_flight = self.num_steps - self.num_verdicts
        # Else stages idle, and the time between steps is not what a step takes.
        scheduler_output.spexis_pipeline_full = num_in_flight >= self.num_stages
        self.counters.observe_step(
            num_rows=len(scheduler_output.num_scheduled_tokens),
            num_decode_rows=len(rows),
            num_speculative_rows=sum(rows.values()),
            num_in_flight=num_in_flight,
        )
        self.counters.plain_steps += self.mode is Mode.PP

    def _make_cached_request_data(self, *args, **kwargs):
        data = super()._make_cached_request_data(*args, **kwargs)
        # Workers know tokens before the scheduler does; it has none to give.
        data.new_token_ids = []
        return data

    def _preempt_request(self, request, *args, **kwargs) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._forget(request.request_id)
        self.counters.preemptions += 1

    def _free_request(self, request, *args, **kwargs):
        self._forget(request.request_id)
        if self.lookahead is not None:
            self.lookahead.ended(request)
        return super()._free_request(request, *args, **kwargs)

    def _forget(self, req_id: str) -> None:
        self.cadence.forget(req_id)
        self._last_row_call.pop(req_id, None)
        self._last_run_call.pop(req_id, None)
        self._chain_broken.discard(req_id)
        if self.chooser is not None:
            self.chooser.chooser.forget(req_id)

    # ----------------------------------------------------------------- output
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ):
        if scheduler_output.num_scheduled_tokens:
            self.num_verdicts += 1
            tokens = self.counters.tokens
            self._take_back_discarded(scheduler_output, model_runner_output)
            if self.lookahead is not None:
                self.lookahead.hear(scheduler_output, model_runner_output)
            self._learn(scheduler_output, self.counters.tokens - tokens)
            self.iteration_log.write(self, scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _learn(self, scheduler_output: SchedulerOutput, tokens: int) -> None:
        """What the policies want to know of a step that came back."""
        if self.lookahead is None and self.live_mode is None and self.chooser is None:
            return
        now, last = time.monotonic(), self._last_output_time
        self._last_output_time = now
        seconds = now - last if last is not None else 0.0
        running = sum(not request.is_prefill_chunk for request in self.running)
        num_decode_rows = len(scheduler_output.spexis_rows)
        prefill_tokens = scheduler_output.total_num_scheduled_tokens - num_decode_rows
        if self.chooser is not None:
            rows, run = scheduler_output.spexis_rows, scheduler_output.spexis_run
            run = len(rows) if run is None else run
            full = scheduler_output.spexis_pipeline_full
            self.chooser.observe(seconds, tokens, rows, running, prefill_tokens, run, full)
        if self.lookahead is not None:
            self.lookahead.pace.observe(seconds, tokens, running, prefill_tokens)
        if self.live_mode is not None:
            self.mode = self.live_mode.observe(seconds, tokens, running, prefill_tokens)
            self.counters.mode_changes = self.live_mode.num_changes

    def make_stats(self, *args, **kwargs):
        return attach(super().make_stats(*args, **kwargs), self.counters, policy_state(self))

    def _take_back_discarded(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> None:
        sampled = model_runner_output.sampled_token_ids
        held = getattr(model_runner_output, "held", ())  # selector.py, v2_choice.py
        call = scheduler_output.spexis_call
        outcomes: dict[str, bool] = {}  # of rows that ran, for the chooser: was there a token?
        for req_id, is_guess in scheduler_output.spexis_rows.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or request.num_stale_output_tokens > 0:
                # Its counters are gone or were reset; vLLM drains such rows by itself.
                self.counters.stale_rows += 1
                continue
            if req_id in held:
                self.counters.held += 1
                self.counters.unrun_rows += 1
                take_back(request)
                continue
            # Behind a row that was held, the verdict of the last one that ran may be known.
            last_run = self._last_run_call.get(req_id, call - 1)
            is_guess = is_guess and call - last_run < self.num_stages
            self._last_run_call[req_id] = call
            has_token = bool(sampled[model_runner_output.req_id_to_index[req_id]])
            if self.chooser is not None:
                outcomes[req_id] = has_token
            if has_token:
                self.counters.tokens += 1
                self.counters.accepted += is_guess and req_id not in self._chain_broken
                self.counters.drafts += is_guess and req_id not in self._chain_broken
                self._chain_broken.discard(req_id)
                continue
            # The first discard after a good row is the wrong guess itself, those behind it
            # were never verified.
            self.counters.drafts += req_id not in self._chain_broken
            self._chain_broken.add(req_id)
            self.counters.discarded_rows += 1
            take_back(request)
        if self.chooser is not None:
            self.chooser.came(outcomes, call, model_runner_output)

    # ------------------------------------------------------------ prefix cache
    def _cache_only_verified_blocks(self) -> None:
        """Decode rows' blocks are hashed by AsyncScheduler once their tokens are verified."""
        manager, allocate = self.kv_cache_manager, self.kv_cache_manager.allocate_slots

        def allocate_slots(request, num_new_tokens, *args, **kwargs):
            if not request.is_prefill_chunk and (
                request.num_output_placeholders + request.num_output_tokens > 0
            ):
                kwargs["delay_cache_blocks"] = True
            return allocate(request, num_new_tokens, *args, **kwargs)

        manager.allocate_slots = allocate_slots


def _set_steps_in_flight(vllm_config, steps: int | None) -> None:
    """EngineCore reads vllm_config.max_concurrent_batches right after building the scheduler."""
    if steps is not None:
        cls = type(vllm_config)
        cls.max_concurrent_batches = property(lambda self: steps)
