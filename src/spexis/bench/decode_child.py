# SPDX-License-Identifier: Apache-2.0
"""The inside of an engine whose decode rate is measured: `python -m spexis.bench.decode_child`.

Started by spexis.bench.decode, answers one JSON command a line. The engine core runs in this
process and is stepped from here, so that the measurement sees what the core returns at the moment
it does, and no front end (detokenizer, HTTP) stands in between.

A measurement: `rows` requests of `context` random tokens arrive in equal groups, one group a
step, so that a stock pipeline gets micro-batches of equal size. The window begins when every
request has had `warm` tokens and ends when `tokens` per request came out or the first request is
finished: all rows decode all the time. Invariant: afterwards the engine is idle and empty.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Any

from spexis.bench.decode import DecodeSpec, arrivals, llm_arguments, window_spread
from spexis.bench.engines import end_child

NEW_PROMPTS = 1_000_000  # above the rows of any batch, whose prompts are seeded by their index
EXTENSION = "spexis.bench.worker_extension.BenchWorker"


class Child:
    def __init__(self, spec: DecodeSpec) -> None:
        from vllm import LLM

        import spexis.plugin

        spexis.plugin.register()  # vLLM does it itself where the package is installed
        begin = time.monotonic()
        self.llm = LLM(**llm_arguments(spec), worker_extension_cls=EXTENSION)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.vocab_size = self.llm.model_config.get_vocab_size()
        self.stages = spec.stages
        self.num_runs = self.num_prompts = 0
        self.started_seconds = time.monotonic() - begin
        self.host = [0, 0.0]  # steps with rows, seconds in schedule() and update_from_output()

    # -- commands ------------------------------------------------------------------------------

    def started(self) -> dict:
        """What vLLM made of the specification."""
        config = self.engine.vllm_config
        pool = self.scheduler.kv_cache_manager.block_pool
        compilation = config.compilation_config
        return {
            "seconds": self.started_seconds,
            "kv_tokens": (pool.num_gpu_blocks - 1) * self.scheduler.block_size,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_concurrent_batches": config.max_concurrent_batches,
            "compilation_mode": str(getattr(compilation, "mode", None)),
            "cudagraph_mode": str(getattr(compilation, "cudagraph_mode", None)),
            "cudagraph_capture_sizes": list(compilation.cudagraph_capture_sizes or []),
        }

    def decode(
        self, *, rows: int, context: int, tokens: int, warm: int, trace: str | None = None
    ) -> dict:
        """One measurement (see above); {"skipped": why} where the memory does not suffice.

        trace: folder for traces of the window, one a rank; recording slows the hosts down.
        """
        budget = self.engine.vllm_config.scheduler_config.max_num_batched_tokens
        groups = arrivals(rows, self.stages, max(1, (budget - rows) // context))
        max_tokens = warm + tokens + 2 * len(groups) + 8
        needed = rows * (context + max_tokens + 16)
        if needed > self.started()["kv_tokens"]:
            return {"skipped": f"needs a KV cache of {needed} tokens"}
        self.num_runs += 1
        ids: list[str] = []
        counts: dict[str, int] = {}
        outputs_per_step: list[int] = []
        events: list[tuple[float, int]] = []
        before: dict[str, int] = {}
        total = 0
        while True:
            if groups:
                first = len(ids)
                ids += [self._add(first + i, context, max_tokens) for i in range(groups.pop(0))]
            elif not self.scheduler.has_requests():
                raise RuntimeError("requests ended before every row was warm: raise tokens")
            outputs = self.engine.engine_core.get_output().outputs
            now = time.monotonic()
            got = 0
            for output in outputs:
                new = len(output.new_token_ids)
                counts[output.request_id] = counts.get(output.request_id, 0) + new
                got += new
            total += got
            if events:
                events.append((now, total))
                if got:
                    outputs_per_step.append(got)
                if total - events[0][1] >= tokens * rows or max(counts.values()) >= max_tokens:
                    break
            elif len(counts) == rows and min(counts.values()) >= warm:
                if trace:
                    self.llm.collective_rpc("bench_trace_start")
                    now = time.monotonic()
                events.append((now, total))
                before = self._counters()
        after = self._counters()
        if trace:
            self.llm.collective_rpc("bench_trace_stop", args=(trace,))
        self.engine.abort_request(ids)
        self._drain()
        seconds, made = events[-1][0] - events[0][0], events[-1][1] - events[0][1]
        result: dict[str, Any] = {
            "rows": rows,
            "context": context,
            "rate": made / seconds,
            "spread": window_spread(events),
            "seconds": seconds,
            "tokens": made,
            "steps": len(outputs_per_step),
            "tokens_per_step": [min(outputs_per_step), max(outputs_per_step)],
        }
        grown = {key: value - before[key] for key, value in after.items()}
        if grown:
            result["steps"] = grown["steps"]
            result["acceptance"] = grown["accepted"] / max(1, grown["drafts"])
            result["rows_per_token"] = 1 + grown["discarded_rows"] / max(1, grown["tokens"])
        return result

    def prefill(self, *, tokens: int, count: int) -> dict:
        """Seconds of a step that is one prompt of so many tokens and nothing else.

        Mean of `count` steps in a row, behind one that is not counted.
        """
        config = self.engine.vllm_config
        most = min(
            config.scheduler_config.max_num_batched_tokens,
            config.model_config.max_model_len - 1,
            self.started()["kv_tokens"],
        )
        if tokens > most:
            return {"skipped": f"a step or the KV cache takes {most} tokens at most"}
        self.num_runs += 1
        budget = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = tokens  # so that no step takes two of them
        try:
            for _ in range(1 + count):
                self.num_prompts += 1  # a new one: the prefix cache must not know it
                self._add(NEW_PROMPTS + self.num_prompts, tokens, max_tokens=1)
            times: list[float] = []
            while len(times) <= count:
                outputs = self.engine.engine_core.get_output().outputs
                if len(outputs) > 1:
                    raise RuntimeError(f"{len(outputs)} prompts ended in one step")
                times += [time.monotonic()] * len(outputs)
            self._drain()
        finally:
            self.scheduler.max_num_scheduled_tokens = budget
        return {"tokens": tokens, "seconds": (times[-1] - times[0]) / count}

    def acceptance(self, *, acceptance: float) -> dict:
        changed = self.llm.collective_rpc("bench_set_acceptance", args=(acceptance,))
        return {"stages": sum(changed)}

    def head(self, *, rows: int, repeats: int) -> dict:
        return {"seconds": max(self.llm.collective_rpc("bench_head_seconds", args=(rows, repeats)))}

    def drafter(self, *, rows: int, repeats: int) -> dict:
        times = self.llm.collective_rpc("bench_drafter_seconds", args=(rows, repeats))
        return {"seconds": max((t for t in times if t is not None), default=0.0)}

    def watch_host(self) -> dict:
        """From now on host time is added up, by the scheduler here and by the workers there."""
        self.llm.collective_rpc("bench_watch_host")
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def watched_schedule(*args, **kwargs):
            begin = time.perf_counter()
            output = schedule(*args, **kwargs)
            self.host[0] += output.total_num_scheduled_tokens > 0
            self.host[1] += time.perf_counter() - begin
            return output

        def watched_update(*args, **kwargs):
            begin = time.perf_counter()
            output = update(*args, **kwargs)
            self.host[1] += time.perf_counter() - begin
            return output

        self.scheduler.schedule = watched_schedule
        self.scheduler.update_from_output = watched_update
        return {}

    def take_host(self) -> dict:
        """Seconds a step since the last call; workers: the slowest one's own CPU time."""
        (steps, seconds), self.host[:] = list(self.host), [0, 0.0]
        workers = self.llm.collective_rpc("bench_take_host")
        return {
            "scheduler": seconds / max(1, steps),
            "worker": max(cpu / max(1, calls) for calls, cpu in workers),
        }

    def stop(self) -> dict:
        self.engine.engine_core.shutdown()
        return {}

    # -- parts ---------------------------------------------------------------------------------

    def _add(self, index: int, context: int, max_tokens: int) -> str:
        from vllm import SamplingParams

        # The same prompt for the same row in every run: from the second run on its keys and
        # values come from the prefix cache, which saves the device's time and no decode work.
        prompt = random.Random(index).choices(range(2, self.vocab_size), k=context)
        name = f"{self.num_runs}-{index}"
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _counters(self) -> dict[str, int]:
        counters = getattr(self.scheduler, "counters", None)
        return counters.snapshot() if counters is not None else {}

    def _drain(self) -> None:
        """Rows of ended requests may still be in the pipeline."""
        for _ in range(1000):
            if not self.scheduler.has_requests() and not getattr(self.core, "batch_queue", None):
                return
            self.engine.engine_core.get_output()
        raise RuntimeError("the pipeline does not run empty")


COMMANDS = (
    "started",
    "decode",
    "prefill",
    "acceptance",
    "head",
    "drafter",
    "watch_host",
    "take_host",
    "stop",
)


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(pipe.fileno(), False)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    try:
        child = Child(DecodeSpec(**json.loads(sys.argv[2])))
        print(json.dumps(child.started()), file=pipe)
        for line in sys.stdin:
            command = json.loads(line)
            name = command.pop("do")
            if name not in COMMANDS:
                raise ValueError(f"no command {name!r}")
            print(json.dumps(getattr(child, name)(**command)), file=pipe)
            if name == "stop":
                break
    except BaseException as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=pipe)
    end_child()


if __name__ == "__main__":
    main()
