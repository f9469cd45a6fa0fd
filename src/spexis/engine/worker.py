# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA worker with Spexis' model runner in place (CPU: worker_cpu.py).

Invariant: a worker differs from vLLM's in its runner, in telling it the sizes of a step before vLLM
receives that step's data (transfer.py), and in that it ends where a step of it failed.
"""

import functools

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from spexis.engine.lifeline import end_by, end_with_parent
from spexis.engine.nodes import SILENCE, may_span_nodes, watch_nodes

logger = init_logger("vllm.spexis.worker")


def with_spexis(runner_class: type, use_v2: bool) -> type:
    """The runner class with the mixin of its generation in front."""
    if use_v2:
        from spexis.engine.runner_v2 import SpexisV2Mixin as Mixin
    else:
        from spexis.engine.runner_v1 import SpexisV1Mixin as Mixin
    return type(f"Spexis{runner_class.__name__}", (Mixin, runner_class), {})


def _ends_on_error(method):
    """An exception in a step ends the worker, unless its rank is the one that replies.

    vLLM 0.32 returns the exception of the replying rank (the last stage's first) and only logs
    those of the others; the last stage then waits for hidden states that never come, and every
    client with it. A worker that ends is noticed by the executor at once.
    """

    @functools.wraps(method)
    def step(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Exception:
            if get_pp_group().is_last_rank and get_tp_group().is_first_rank:
                raise
            logger.exception("A step failed on this stage: ending the worker")
            end_by(10.0)  # an orderly end may wait for peers
            raise SystemExit(1) from None

    return step


class StageWorker:
    """Mixed in before vLLM's worker class."""

    peer_watch = None

    def watch_other_nodes(self) -> None:
        if may_span_nodes(self.parallel_config):
            self.peer_watch = watch_nodes()

    @_ends_on_error
    def execute_model(self, scheduler_output):
        if self.peer_watch is not None:
            self.peer_watch.silence = SILENCE
        if self.use_v2_model_runner:
            self.model_runner.expect_transfer(scheduler_output)
        return super().execute_model(scheduler_output)

    def _post_receives(self) -> None:
        """A device that is waited for must not wait for a receive that nobody has posted."""
        if self.use_v2_model_runner:
            self.model_runner.pp_handler.expect_steps(more=False)

    def synchronize_device(self) -> None:
        self._post_receives()
        super().synchronize_device()

    def sleep(self, *args, **kwargs) -> None:
        self._post_receives()
        super().sleep(*args, **kwargs)

    def profile(self, *args, **kwargs) -> None:
        self._post_receives()
        super().profile(*args, **kwargs)

    @_ends_on_error
    def sample_tokens(self, grammar_output):
        return super().sample_tokens(grammar_output)


class SpexisWorker(StageWorker, Worker):
    def init_device(self) -> None:
        end_with_parent()
        super().init_device()
        self.watch_other_nodes()

    def _make_model_runner(self):
        runner = super()._make_model_runner()
        runner.__class__ = with_spexis(type(runner), self.use_v2_model_runner)
        runner.init_spexis()
        return runner
