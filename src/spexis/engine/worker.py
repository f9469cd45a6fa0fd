# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA worker with Spexis' model runner in place (CPU: worker_cpu.py).

Invariant: a worker differs from vLLM's in its runner, and in telling it the sizes of a step
before vLLM receives that step's data (transfer.py).
"""

from vllm.v1.worker.gpu_worker import Worker

from spexis.engine.lifeline import end_with_parent


def with_spexis(runner_class: type, use_v2: bool) -> type:
    """The runner class with the mixin of its generation in front."""
    if use_v2:
        from spexis.engine.runner_v2 import SpexisV2Mixin as Mixin
    else:
        from spexis.engine.runner_v1 import SpexisV1Mixin as Mixin
    return type(f"Spexis{runner_class.__name__}", (Mixin, runner_class), {})


class StageWorker:
    """Mixed in before vLLM's worker class."""

    def execute_model(self, scheduler_output):
        if self.use_v2_model_runner:
            self.model_runner.expect_transfer(scheduler_output)
        return super().execute_model(scheduler_output)


class SpexisWorker(StageWorker, Worker):
    def init_device(self) -> None:
        end_with_parent()
        super().init_device()

    def _make_model_runner(self):
        runner = super()._make_model_runner()
        runner.__class__ = with_spexis(type(runner), self.use_v2_model_runner)
        runner.init_spexis()
        return runner
