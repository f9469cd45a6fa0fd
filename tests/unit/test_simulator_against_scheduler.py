# SPDX-License-Identifier: Apache-2.0
"""The simulator's steps and preemptions against the very schedulers of vLLM and of Spexis.

No model runs: a pipeline of pretended stages answers each step N steps later, drafts are right at
random, requests end at chosen lengths by a stop token. All steps take equally long, so what is
compared is scheduling alone: number of steps, and tokens computed again where blocks are few.
"""

from collections import deque
from random import Random

import numpy as np
import pytest
from llama_folder import llama_folder

from spexis.bench.recompute import Recomputed
from spexis.bench.step_watch import StepWatch
from spexis.core.cost_model import CostModel
from spexis.core.stage_profile import StagePoints, StageProfile
from spexis.simulator.drafts import DraftSource
from spexis.simulator.serving import Serving, Settings
from spexis.simulator.trace import Trace

pytestmark = pytest.mark.engine  # no engine starts, but vLLM is imported
BLOCK_SIZE, STAGES, MAX_SEQS, BUDGET = 32, 2, 16, 256
LIMIT, MODEL_LEN = 200, 512
GO_ON, STOP = 1, 2  # tokens
STEP_SECONDS = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama_folder(tmp_path_factory.mktemp("llama"), MODEL_LEN)


def make_scheduler(folder: str, num_blocks: int, block: dict | None):
    """vLLM's scheduler for two stages, or Spexis' for this block of settings."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from spexis import plugin

    plugin.register()
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        pipeline_parallel_size=STAGES,
        max_model_len=MODEL_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
        enforce_eager=True,
        distributed_executor_backend="mp",
        additional_config={} if block is None else {"spexis": block},
    ).create_engine_config()
    plugin._take_back_env()
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = num_blocks + 1  # one is vLLM's null block
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return config.scheduler_config.get_scheduler_cls()(
        config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


class PretendedPipeline:
    """Schedules as the engine core does and answers each step STAGES steps later."""

    def __init__(self, scheduler, trace: Trace, acceptance: float, seed: int):
        self.scheduler, self.trace, self.acceptance = scheduler, trace, acceptance
        self.random = Random(seed)
        self.broken: dict[str, int] = {}  # request -> the step whose draft was wrong
        self.num_steps = self.drafts = self.accepted = 0
        self.now = 0.0
        self.free = [0.0] * STAGES

    def run(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            temperature=0, max_tokens=LIMIT, stop_token_ids=[STOP], ignore_eos=True
        )
        for i, prompt in enumerate(self.trace.prompt.tolist()):
            self.scheduler.add_request(Request(str(i), [GO_ON] * prompt, params, None))
        queue: deque = deque()
        while self.scheduler.has_requests() or queue:
            if len(queue) < STAGES and self.scheduler.has_requests():
                output = self.scheduler.schedule()
                queue.append((output, self._rows(output)))
                if len(queue) < STAGES:
                    continue
            self._answer(*queue.popleft())

    def _rows(self, output) -> dict[str, tuple[bool, bool]]:
        """By request: (does the row return a token, is its draft wrong)."""
        if not output.num_scheduled_tokens:
            return {}
        self.num_steps += 1
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        rows = {}
        for req_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[req_id]
            if req_id in resumed:
                self.broken.pop(req_id, None)
            samples = not request.is_prefill_chunk
            good = samples and req_id not in self.broken
            wrong = good and self.random.random() >= self.acceptance
            if wrong:
                self.broken[req_id] = self.num_steps
            rows[req_id] = good, wrong
            self.drafts += good
            self.accepted += good and not wrong
        at = self.now
        for stage in range(STAGES):
            at = self.free[stage] = max(at, self.free[stage]) + STEP_SECONDS
        return rows | {"step": self.num_steps, "back": at}

    def _answer(self, output, rows) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        result = EMPTY_MODEL_RUNNER_OUTPUT
        if rows:
            step, self.now = rows.pop("step"), rows.pop("back")
            tokens = []
            for req_id, (good, _) in rows.items():
                if self.broken.get(req_id) == step:
                    del self.broken[req_id]  # the truth is back at the first stage
                request = self.scheduler.requests.get(req_id)
                last = request and request.num_output_tokens + 1 >= self.trace.output[int(req_id)]
                tokens.append([STOP if last else GO_ON] if good else [])
            result = ModelRunnerOutput(
                req_ids=list(rows),
                req_id_to_index={req_id: i for i, req_id in enumerate(rows)},
                sampled_token_ids=tokens,
            )
        self.scheduler.update_from_output(output, result)


def requests(count: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.of("t", np.zeros(count), rng.integers(8, 150, count), rng.integers(4, 120, count))


def engine(folder, trace, num_blocks, block, acceptance=0.65, seed=0) -> dict[str, float]:
    from vllm.config import VllmConfig

    stock_steps = VllmConfig.__dict__["max_concurrent_batches"]
    try:
        scheduler = make_scheduler(folder, num_blocks, block)
        watch = Recomputed.on(scheduler)
        pipeline = PretendedPipeline(scheduler, trace, acceptance, seed)
        pipeline.run()
    finally:
        VllmConfig.max_concurrent_batches = stock_steps
    return {
        "seconds": pipeline.now,
        "recomputed": watch.tokens,
        "preempted": sum(watch.preemptions.values()),
        "acceptance": pipeline.accepted / max(pipeline.drafts, 1),
    }


def simulated(trace, num_blocks, policy, memory, acceptance, seed=0) -> dict[str, float]:
    cost = CostModel.from_profile(
        StageProfile(
            hardware="h",
            model="m",
            layers_per_stage=(1, 1),
            stages=(StagePoints(points=((1, 0, STEP_SECONDS),)),),
        )
    )
    settings = Settings(
        policy=policy,
        memory=memory,
        kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BUDGET,
        max_tokens=LIMIT,
    )
    result = Serving(cost, DraftSource(acceptance, seed=seed), settings).run(trace)
    return {
        "seconds": result.seconds,
        "recomputed": result.record.recomputed_tokens,
        "preempted": result.record.evictions,
    }


SP = {"drafter": {"method": "synthetic", "acceptance": 0.65}}
FEW = 40  # blocks: about half of what 16 such requests want


def test_stock_preempts_and_computes_again_as_simulated(folder):
    """Nothing is random here, so each run by itself must agree."""
    for seed in range(3):
        trace = requests(48, seed)
        real = engine(folder, trace, FEW, None)
        run = simulated(trace, FEW, "pp-stock", "stock", 0.0)
        assert real["preempted"] >= 0.4 * len(trace)
        assert run["preempted"] == pytest.approx(real["preempted"], abs=1)
        assert run["recomputed"] == pytest.approx(real["recomputed"], rel=0.02)
        assert run["seconds"] == pytest.approx(real["seconds"], rel=0.01)


def test_stock_forms_its_micro_batches_as_simulated(folder):
    """Where memory is ample, and requests wait for a place."""
    trace = requests(48, 7)
    real = engine(folder, trace, 400, None)
    run = simulated(trace, 400, "pp-stock", "stock", 0.0)
    assert run["preempted"] == real["preempted"] == 0
    assert run["seconds"] == pytest.approx(real["seconds"], abs=2 * STEP_SECONDS)


def test_a_watch_tells_what_was_in_each_step(folder):
    trace, scheduler = requests(24, 3), make_scheduler(folder, FEW, None)
    again, watch = Recomputed.on(scheduler), StepWatch.on(scheduler)
    pipeline = PretendedPipeline(scheduler, trace, 0.0, 0)
    pipeline.run()
    steps = watch.take()
    preempted = sum(again.preemptions.values())
    assert preempted > 5 and [s.number for s in steps] == list(range(1, pipeline.num_steps + 1))
    # Each prompt, first or again, gives a token of its own.
    rows = trace.output.sum() - len(trace) - preempted
    assert sum(s.rows for s in steps) == pytest.approx(rows, abs=3)
    prefill = sum(s.prefill_tokens for s in steps) - trace.prompt.sum() - again.tokens
    assert 0 <= prefill <= 2 * preempted
    assert steps[0].alone and not all(s.alone for s in steps)


@pytest.mark.parametrize(("num_blocks", "lookahead"), [(400, False), (FEW, False), (FEW, True)])
def test_speculation_takes_as_long_and_computes_as_much_again_as_simulated(
    folder, num_blocks, lookahead
):
    """Which drafts are right differs, so sums over several runs are compared."""
    real, run = [], []
    for seed in range(4):
        trace = requests(48, seed)
        found = engine(folder, trace, num_blocks, {**SP, "lookahead": lookahead}, seed=seed)
        real.append(found)
        memory = "lookahead" if lookahead else "stock"
        for more in range(3):
            args = (trace, num_blocks, "sp", memory, found["acceptance"], 10 * seed + more)
            run.append(simulated(*args))
    mean = {key: np.mean([r[key] for r in run]) for key in run[0]}
    wanted = {key: np.mean([r[key] for r in real]) for key in run[0]}
    assert mean["seconds"] == pytest.approx(wanted["seconds"], rel=0.04)
    if lookahead:
        assert max(mean["preempted"], wanted["preempted"]) < 1
    else:
        assert mean["recomputed"] == pytest.approx(wanted["recomputed"], rel=0.12)
        assert (wanted["preempted"] > 15) == (num_blocks == FEW)
