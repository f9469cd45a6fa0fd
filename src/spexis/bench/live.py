# SPDX-License-Identifier: Apache-2.0
"""Engines side by side for measurements: each in its own process group, one awake at a time.

    stock, sp = LiveEngine(EngineSpec(...)), LiveEngine(EngineSpec(..., drafter={...}))
    with stock, sp:
        stock.generate(prompts, max_tokens=96)      # sp's processes are stopped meanwhile

Invariant: while one engine is measured every other one is stopped (SIGSTOP), so that its
polling workers take no cycles; on the way out every group is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import ClassVar

from spexis.bench import engines
from spexis.bench.engines import EngineSpec
from spexis.engine.timeline import STOCK_TIMELINE_ENV


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """One measured call."""

    seconds: float  # first request in to last token out
    decode_seconds: float  # from the moment every request had its first token
    full_span: tuple[float, float]  # machine-wide clock: while every stream had a running request
    full_tokens: int  # tokens that came out in that span
    token_ids: list[list[int]]  # by request
    counters: dict[str, int]  # Spexis' counters of this call; {} on stock

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after each request's first, over the decode time."""
        return (self.num_tokens - len(self.token_ids)) / self.decode_seconds

    @property
    def full_tokens_per_second(self) -> float:
        """Rate while every stream was taken: no ramp at the start, no lone stragglers at the end.

        Prompts of requests that follow on a finished one are part of it.
        """
        begin, end = self.full_span
        return self.full_tokens / (end - begin)


class LiveEngine:
    """A vLLM engine in a child process that answers one command at a time."""

    _alive: ClassVar[list[LiveEngine]] = []

    def __init__(self, spec: EngineSpec, timeline_log: str | None = None):
        self.spec, self.timeline_log = spec, timeline_log

    def start(self) -> LiveEngine:
        order = dataclasses.asdict(self.spec) | {"timeline_log": self.timeline_log}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the child)
        answers, child_end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spexis.bench.live", str(child_end), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[child_end],
            env=engines._environment(self.spec),
            start_new_session=True,
            text=True,
        )
        os.close(child_end)
        engines._groups.add(self._process.pid)
        self._answers = os.fdopen(answers)
        self._alive.append(self)
        self.start_seconds = self._answer()["seconds"]
        return self

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        streams: int | None = None,
        ignore_eos: bool = False,
    ) -> Generated:
        """Greedy answers of at most max_tokens tokens; exactly as many with ignore_eos.

        streams: requests that run at a time, the next one follows when one ends (default: all).
        """
        for other in self._alive:
            other._signal(signal.SIGCONT if other is self else signal.SIGSTOP)
        command = {
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "streams": min(streams or len(prompts), len(prompts)),
            "ignore_eos": ignore_eos,
        }
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return Generated(**self._answer())

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.spec.label} ended early:\n{engines._tail(self._log)}")
        return json.loads(line)

    def stop(self) -> None:
        if self in self._alive:
            self._alive.remove(self)
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # in order, if it can
                self._signal(signal.SIGCONT)
                self._process.stdin.close()
                self._process.wait(5)
            self._answers.close()
            engines._kill_group(self._process)

    def __enter__(self) -> LiveEngine:
        return self.start()

    def __exit__(self, *exc) -> None:
        self.stop()


# -- inside the child ------------------------------------------------------------------------------


def _serve(pipe: int, order: dict) -> None:
    timeline_log = order.pop("timeline_log")
    spec = EngineSpec(**order)
    begin = time.monotonic()
    if timeline_log and spec.drafter is None:
        os.environ[STOCK_TIMELINE_ENV] = timeline_log
    elif timeline_log:
        block = {"drafter": spec.drafter, "timeline_log": timeline_log}
        spec.options["additional_config"] = {"spexis": block}
    llm = engines.build_llm(spec)
    answers = os.fdopen(pipe, "w", buffering=1)
    print(json.dumps({"seconds": time.monotonic() - begin}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_generate(llm, json.loads(line))), file=answers)
    answers.flush()
    engines.end_child()


def _generate(llm, command: dict) -> dict:
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.reset_prefix_cache()  # every call prefills alike
    counters = getattr(scheduler, "counters", None)
    before = counters.snapshot() if counters else {}
    params = SamplingParams(
        temperature=0, max_tokens=command["max_tokens"], ignore_eos=command["ignore_eos"]
    )
    waiting = list(enumerate(command["prompts"]))[::-1]
    token_ids: list[list[int]] = [[] for _ in waiting]
    running: set[str] = set()
    begin = time.monotonic()
    # Moments with the tokens so far: all streams answer; all requests answer; a stream is free.
    full = all_started = free = None
    while waiting or running:
        while waiting and len(running) < command["streams"]:
            index, ids = waiting.pop()
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
            running.add(str(index))
        for output in engine.step():
            token_ids[int(output.request_id)] = list(output.outputs[0].token_ids)
            if output.finished:
                running.discard(output.request_id)
        moment = (time.monotonic(), sum(map(len, token_ids)))
        if full is None and sum(map(bool, token_ids)) >= command["streams"]:
            full = moment
        if all_started is None and all(token_ids):
            all_started = moment
        if free is None and not waiting and len(running) < command["streams"]:
            free = moment
    end = time.monotonic()
    grown = {k: v - before[k] for k, v in counters.snapshot().items()} if counters else {}
    return {
        "seconds": end - begin,
        "decode_seconds": end - all_started[0],
        "full_span": (full[0], free[0]),
        "full_tokens": free[1] - full[1],
        "token_ids": token_ids,
        "counters": grown,
    }


if __name__ == "__main__":
    _serve(int(sys.argv[1]), json.loads(sys.argv[2]))
