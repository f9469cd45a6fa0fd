# SPDX-License-Identifier: Apache-2.0
"""What benchmarks ask of vLLM's workers: vLLM's own `worker_extension_cls` door.

    LLM(..., worker_extension_cls="spexis.bench.worker_extension.BenchWorker")
    llm.collective_rpc("bench_set_acceptance", args=(0.785,))

Methods run inside each worker, between requests. Invariant: an engine built without the extension
has none of them, so no server can be told to change its drafter this way.
"""

import time
from types import SimpleNamespace

import torch


class BenchWorker:
    """Mixed into the worker class; uses its model_runner only."""

    def bench_set_acceptance(self, acceptance: float) -> bool:
        """Changes the synthetic drafter's probability. Returns whether this stage has one."""
        drafter = getattr(self.model_runner, "spexis_drafter", None)
        if drafter is None:
            return False  # stock, or a middle stage
        drafter.set_acceptance(acceptance)
        return True

    @torch.inference_mode()
    def bench_head_seconds(self, rows: int, repeats: int) -> float:
        """One output head with argmax on `rows` rows, in seconds; all ranks of a TP group."""
        model = self.model_runner.get_model()
        config = self.model_runner.model_config
        hidden = torch.randn(
            rows, config.get_hidden_size(), dtype=config.dtype, device=self.model_runner.device
        )

        def head():
            logits = model.compute_logits(hidden)
            return logits if logits is None else logits.argmax(-1)

        return _seconds(head, repeats, self.model_runner.device)

    @torch.inference_mode()
    def bench_drafter_seconds(self, rows: int, repeats: int) -> float | None:
        """One guess of the synthetic drafter for `rows` rows; None on other stages and kinds."""
        runner = self.model_runner
        drafter = getattr(runner, "spexis_drafter", None)
        if drafter is None or drafter.name != "synthetic" or not runner.pp.is_first_rank:
            return None
        numbers = torch.arange(rows, device=runner.device)
        guess_rows = SimpleNamespace(draft_positions=numbers, tokens=numbers)
        return _seconds(lambda: drafter.propose(guess_rows), repeats, runner.device)

    def bench_trace_start(self) -> None:
        """From now on this rank's kernels and launches are recorded."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.model_runner.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.bench_profiler = profile(activities=activities)
        self.bench_profiler.start()

    def bench_trace_stop(self, folder: str) -> str:
        """Writes the Chrome trace of this rank into the folder. Its times are those of the
        host's clock, so ranks' traces can be laid beside each other."""
        profiler, self.bench_profiler = self.bench_profiler, None
        if hasattr(self, "_post_receives"):  # stop() waits for the device
            self._post_receives()
        profiler.stop()
        path = f"{folder}/rank-{torch.distributed.get_rank()}.json.gz"
        profiler.export_chrome_trace(path)
        return path

    def bench_watch_host(self) -> None:
        """From now on adds up this thread's own CPU time in the runner's calls."""
        runner = self.model_runner
        self.bench_host = [0, 0.0]  # calls of execute_model that ran something, CPU seconds
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def watched_execute_model(scheduler_output, *args, **kwargs):
            begin = time.thread_time()
            try:
                return execute_model(scheduler_output, *args, **kwargs)
            finally:
                self.bench_host[0] += scheduler_output.total_num_scheduled_tokens > 0
                self.bench_host[1] += time.thread_time() - begin

        def watched_sample_tokens(*args, **kwargs):
            begin = time.thread_time()
            try:
                return sample_tokens(*args, **kwargs)
            finally:
                self.bench_host[1] += time.thread_time() - begin

        runner.execute_model, runner.sample_tokens = watched_execute_model, watched_sample_tokens

    def bench_take_host(self) -> list:
        """[steps, CPU seconds] since the last call."""
        taken, self.bench_host[:] = list(self.bench_host), [0, 0.0]
        return taken


def _seconds(call, repeats: int, device: torch.device) -> float:
    """Seconds of one call, from `repeats` of them in a row."""
    for _ in range(3):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / repeats
