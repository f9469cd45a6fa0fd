# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage alone on one device: the first of two, driven by hand, with Spexis or stock.

    stage = Stage.start(model_dir, spexis={"drafter": {...}}, max_rows=64, context=512, steps=200)
    stage.begin(64)                # 64 requests whose first 512 tokens count as computed
    stage.step()                   # one decode step of each, as the engine would drive the worker
    stage.use_stock() / stage.use_spexis()

It is vLLM's own worker and V2 runner, loaded, profiled and captured as an engine does it. Only
what would come from other processes is replaced: the second stage (its half of the pipeline group
is claimed, what is handed on is kept in `handed_on`) and its answers (verdicts from a table on
the device, delivered through the handler's own queue and side stream). So a step here is a stage's
step without the transfer itself. Stock runs on the very same weights, graphs and buffers, with
vLLM's own classes put back. For benchmarks and tests/gpu; on the CPU it runs in Triton's
interpreter (tests/engine/test_stage_alone.py).

Invariant: host inputs of a step are the same for both, and every step has every request.
"""

import os
import tempfile
from collections import deque
from pathlib import Path

import torch

from spexis.engine.verdict import NO_TOKEN

NUM_STAGES = 2
VERDICTS = 61  # rows of the table of verdicts; a prime, so that they do not repeat with batches


class Stage:
    @classmethod
    def start(
        cls,
        model_dir: str,
        *,
        spexis: dict,
        max_rows: int,
        context: int,
        steps: int,
        seed: int = 0,
        **engine_args,
    ) -> "Stage":
        """context: tokens of each request before the first step. steps: that one may take before
        the next begin(). engine_args: further ones of vLLM's."""
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        from spexis.plugin import register

        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        register()
        vllm_config = EngineArgs(
            model=model_dir,
            pipeline_parallel_size=NUM_STAGES,
            distributed_executor_backend="mp",
            additional_config={"spexis": spexis},
            max_num_seqs=max_rows,
            max_num_batched_tokens=max(max_rows, engine_args.pop("max_num_batched_tokens", 0)),
            max_model_len=context + steps + 2,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            seed=seed,
            **engine_args,
        ).create_engine_config()
        with set_current_vllm_config(vllm_config):
            return cls(vllm_config, context, steps, seed)

    def __init__(self, vllm_config, context: int, steps: int, seed: int):
        self.vllm_config, self.context, self.steps = vllm_config, context, steps
        self.handed_on: dict[str, torch.Tensor] = {}  # by the latest step
        self.worker = _make_worker(vllm_config, self.handed_on)
        self.worker.load_model()
        self.runner = self.worker.model_runner
        self.handler = self.runner.pp_handler
        self._spexis_classes = type(self.runner), type(self.handler)
        self.num_begun = self.num_done = 0
        self._make_verdicts(seed)
        self.use_spexis()
        self.num_blocks = _allocate_kv_cache(vllm_config, self.worker)
        self.worker.compile_or_warm_up_model()
        self.device = self.runner.device
        self.req_ids: list[str] = []
        self._in_flight: deque[torch.cuda.Event] = deque()

    def _make_verdicts(self, seed: int) -> None:
        """Every seventh row was discarded; other rows' tokens are never what was guessed."""
        runner = self.runner
        generator = torch.Generator().manual_seed(seed)
        shape = VERDICTS, runner.max_num_reqs
        tokens = torch.randint(0, runner.vocab_size, shape, generator=generator)
        tokens[torch.rand(shape, generator=generator) < 1 / 7] = NO_TOKEN
        self._verdicts = tokens.to(runner.device)
        self._states = None
        if size := self.handler.state_size:
            rows = torch.randn(runner.max_num_reqs, size, generator=generator)
            self._states = rows.to(runner.device, self.handler.state_dtype)

    # ------------------------------------------------------------ which classes
    def use_spexis(self) -> None:
        self.runner.__class__, self.handler.__class__ = self._spexis_classes
        self.runner.__dict__.pop("expect_transfer", None)
        self.handler.receive = self._receive_verdict

    def use_stock(self) -> None:
        """vLLM's own runner and handler; between two begin()s only."""
        self.runner.__class__ = self._spexis_classes[0].__bases__[1]
        self.handler.__class__ = self._spexis_classes[1].__bases__[0]
        self.runner.expect_transfer = lambda scheduler_output: None
        self.handler.receive = self._receive_tokens

    def _receive_verdict(self, input_batch) -> bool:
        """VerdictHandler.receive() with the table in place of the last stage."""
        from spexis.engine.transfer import ROWS
        from spexis.engine.v2_choice import HELD, PLAIN_LINES
        from spexis.engine.v2_handler import PendingVerdict

        handler, num_reqs = self.handler, input_batch.num_reqs
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            tokens = self._answer(num_reqs)
            if len(rows := self.handed_on[ROWS]) > PLAIN_LINES:  # held rows give no token
                tokens = torch.where(rows[0] == HELD, NO_TOKEN, tokens)
            states = None if self._states is None else self._states[:num_reqs].clone()
            event = handler.broadcast_stream.record_event()
        handler.pending.append(PendingVerdict(handler.plan, num_reqs, event, tokens, states))
        return True

    def _receive_tokens(self, input_batch) -> bool:
        """PPHandler.receive() likewise: every row sampled one token."""
        import numpy as np
        from vllm.v1.worker.gpu.pp_utils import PendingRecv

        handler, num_reqs = self.handler, input_batch.num_reqs
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            tokens = self._answer(num_reqs).clamp(min=0).unsqueeze(1)
            counts = torch.zeros(2, num_reqs, dtype=torch.int32, device=tokens.device)
            counts[0] = 1
            event = handler.broadcast_stream.record_event()
        handler.queue[-1] = PendingRecv(
            event,
            tokens,
            counts[0],
            counts[1],
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            np.ones(num_reqs, dtype=bool),
            handler.req_idx_gen_np[input_batch.idx_mapping_np],
        )
        return True

    def verdicts_of_latest_step(self, num_rows: int) -> torch.Tensor:
        """[R] in the order of the step's rows: the true token or NO_TOKEN."""
        return self._verdicts[self.num_done % VERDICTS, :num_rows]

    def _answer(self, num_rows: int) -> torch.Tensor:
        return self.verdicts_of_latest_step(num_rows).clone()

    # ------------------------------------------------------------------- steps
    def begin(self, num_rows: int, prompts: list[list[int]] | None = None) -> None:
        """Ends the requests there are and starts new ones with a step of one token each.

        prompts: run whole, in one step, instead of `context` tokens that count as computed.
        """
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        self.end()
        if prompts is None:
            tokens = torch.arange(self.context + 1) % self.runner.vocab_size
            prompts = [tokens.tolist()] * num_rows
            num_computed = self.context
        else:
            num_computed = 0
        self.lengths = [len(prompt) for prompt in prompts]
        self.req_ids = [f"request-{self.num_begun}-{i}" for i in range(num_rows)]
        self.num_begun += 1
        sampling = SamplingParams(temperature=0, max_tokens=self.steps + 1)
        new = [
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=sampling,
                pooling_params=None,
                block_ids=self._block_ids(i),
                num_computed_tokens=num_computed,
                lora_request=None,
                prefill_token_ids=prompt,
            )
            for i, (req_id, prompt) in enumerate(zip(self.req_ids, prompts, strict=True))
        ]
        self._run([n - num_computed for n in self.lengths], scheduled_new_reqs=new)

    def _block_ids(self, row: int) -> tuple[list[int], ...]:
        """All blocks a request can need; block 0 is vLLM's null block."""
        groups = []
        for group in self.runner.kv_cache_config.kv_cache_groups:
            size = group.kv_cache_spec.block_size
            count = -(-(self.context + self.steps + 2) // size)
            first = 1 + row * count
            if first + count > self.num_blocks:
                raise ValueError(f"row {row} has no blocks: {self.num_blocks} in all")
            groups.append(list(range(first, first + count)))
        return tuple(groups)

    def step(self, num_rows_to_run: int | None = None) -> None:
        """One decode step of every request, or of so many as the device chooses (mode "sp-alpha",
        selection "stage"); waits for nothing."""
        from vllm.v1.core.sched.output import CachedRequestData

        if self.num_done > self.steps:
            raise ValueError(f"requests were begun for {self.steps} steps")
        done, num_rows = self.num_done - 1, len(self.req_ids)
        cached = CachedRequestData.make_empty()
        cached.req_ids = self.req_ids
        cached.num_computed_tokens = [length + done for length in self.lengths]
        cached.num_output_tokens = [done + 1] * num_rows
        cached.new_block_ids = [None] * num_rows
        self._run([1] * num_rows, num_rows_to_run, scheduled_cached_reqs=cached)

    def paced_step(self) -> None:
        """step(), but waits first while as many are in flight as the engine would allow."""
        if self.device.type != "cpu":
            if len(self._in_flight) == self.vllm_config.max_concurrent_batches:
                self._in_flight.popleft().synchronize()
            self._in_flight.append(torch.cuda.Event())
        self.step()
        if self.device.type != "cpu":
            self._in_flight[-1].record()

    def end(self) -> None:
        """The requests end, and what is in flight is forgotten."""
        if self.req_ids:
            self._run([], finished_req_ids=set(self.req_ids))
        self.req_ids, self.num_done = [], 0
        self.handler.pending.clear()
        self.handler.queue = deque([None] * NUM_STAGES)

    def _run(self, num_tokens: list[int], num_rows_to_run: int | None = None, **what) -> None:
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        for name, value in what.items():
            setattr(output, name, value)
        output.num_scheduled_tokens = dict(zip(self.req_ids, num_tokens, strict=False))
        output.total_num_scheduled_tokens = sum(num_tokens)
        if num_tokens:
            output.spexis_num_verdicts = 0  # verdicts are due by steps alone
            output.spexis_pipeline_full = True
            output.spexis_run = num_rows_to_run
        self.worker.execute_model(output)
        if num_tokens:
            self.num_done += 1
            self.worker.sample_tokens(None)

    def synchronize(self) -> None:
        self._in_flight.clear()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def _make_worker(vllm_config, handed_on: dict):
    """vLLM's worker for rank 0 of two, in a process group of one."""
    from vllm.distributed import parallel_state
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker import gpu_worker

    def join_alone(vllm_config, rank, init_method=None, local_rank=-1, backend="nccl"):
        parallel_state.set_custom_all_reduce(False)
        parallel_state.init_distributed_environment(1, 0, init_method, local_rank, backend)
        parallel_state.ensure_model_parallel_initialized(1, 1)
        group = parallel_state.get_pp_group()
        # From here on it says that it is the first of two.
        group.world_size, group.ranks = NUM_STAGES, list(range(NUM_STAGES))

        def hand_on(tensors, *args, **kwargs):
            handed_on.clear()
            handed_on.update(tensors)
            return [None]

        group.isend_tensor_dict = hand_on

    worker_class = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    modules = [gpu_worker]
    if vllm_config.device_config.device_type == "cpu":
        from vllm.v1.worker import cpu_worker

        modules.append(cpu_worker)
    before = gpu_worker.init_worker_distributed_environment
    store = Path(tempfile.mkdtemp(prefix="spexis-stage-")) / "store"
    try:
        for module in modules:
            module.init_worker_distributed_environment = join_alone
        worker = worker_class(
            vllm_config=vllm_config,
            local_rank=0,
            rank=0,
            distributed_init_method=f"file://{store}",
            is_driver_worker=True,
        )
        worker.init_device()
    finally:
        for module in modules:
            module.init_worker_distributed_environment = before
    return worker


def _allocate_kv_cache(vllm_config, worker) -> int:
    """Profiles memory and allocates blocks as the engine core does; returns their number."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(vllm_config)
    specs = worker.get_kv_cache_spec()
    supported = [worker.get_supported_kv_cache_layouts()]
    layout = resolve_kv_cache_layout(vllm_config, supported, list(specs.values()))
    worker.set_kv_cache_layout(layout.name)
    available = worker.determine_available_memory()
    (config,) = get_kv_cache_configs(vllm_config, [specs], [available])
    config.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    vllm_config.cache_config.num_gpu_blocks = config.num_blocks
    worker.initialize_from_config(config)
    return config.num_blocks
