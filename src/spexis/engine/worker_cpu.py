# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with Spexis' model runner in place, and a stock one for baselines.

Apart from worker.py because importing vLLM's CPU worker binds CPU libraries. The worker
hard-codes its runner class, so the class is swapped once init_device() has built it.
"""

import os
from types import SimpleNamespace

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from spexis.engine.lifeline import end_with_parent
from spexis.engine.timeline import STOCK_TIMELINE_ENV, Timeline
from spexis.engine.worker import StageWorker, with_spexis


class SpexisCPUWorker(StageWorker, CPUWorker):
    def init_device(self) -> None:
        end_with_parent()
        super().init_device()
        runner = self.model_runner
        runner.__class__ = with_spexis(type(runner), self.use_v2_model_runner)
        runner.init_spexis()
        self.watch_other_nodes()


class StockCPUWorker(CPUWorker):
    """Stock pipeline stages in eager mode on CPU, as the baseline to compare with.

    vLLM 0.32 allocates a stage's receive buffers only in a warm-up that eager mode skips
    (cpu_model_runner.py, warming_up_model); without them the first step fails.
    """

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        if path := os.environ.get(STOCK_TIMELINE_ENV):
            _record_stock_steps(runner, Timeline.open(path, get_pp_group().rank_in_group))


def _record_stock_steps(runner, timeline: Timeline) -> None:
    """Times the stock runner's two calls per step, for the demo's picture of stock stages."""
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    step = 0

    def timed_execute_model(scheduler_output, *args, **kwargs):
        nonlocal step
        if not scheduler_output.total_num_scheduled_tokens:
            return execute_model(scheduler_output, *args, **kwargs)
        step += 1
        rows = SimpleNamespace(req_ids=list(scheduler_output.num_scheduled_tokens))
        with timeline.busy(step, rows):
            return execute_model(scheduler_output, *args, **kwargs)

    def timed_sample_tokens(*args, **kwargs):
        if runner.execute_model_state is None:
            return sample_tokens(*args, **kwargs)
        with timeline.busy(step, SimpleNamespace(req_ids=["-"]), part="sample"):
            return sample_tokens(*args, **kwargs)

    runner.execute_model, runner.sample_tokens = timed_execute_model, timed_sample_tokens
