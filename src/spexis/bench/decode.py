# SPDX-License-Identifier: Apache-2.0
"""Decode rates of one vLLM engine after another, CUDA or CPU, each in a process of its own.

    spec = DecodeSpec(model=folder, stages=2, drafter={"method": "synthetic", "acceptance": 0.7})
    with DecodeEngine(spec, log="sp2.log") as engine:
        engine.call("decode", rows=64, context=128, tokens=64, warm=8)["rate"]

What a measurement is: decode_child.py. One engine at a time has the devices, so engines take
turns by rounds. Invariants: stock engines and Spexis get the same options; Spexis is switched on
the way a user does it; on the way out the whole process group is gone, and with it its memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spexis.bench import engines, machine

PARTITION_ENV = "VLLM_PP_LAYER_PARTITION"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSpec:
    """An engine to measure."""

    model: str
    """Folder with a config.json; weights are random."""
    device: str = "cuda"
    stages: int = 1
    tensor: int = 1
    drafter: dict | None = None
    """The spexis.drafter block; None builds stock vLLM."""
    settings: dict = field(default_factory=dict)
    """The rest of the spexis block."""
    split: tuple[int, ...] | list[int] | None = None
    """Layers per stage; None leaves it to vLLM."""
    p2p: bool = True
    """False: NCCL_P2P_DISABLE=1 and no custom all-reduce, as on devices without peer access."""
    max_num_seqs: int = 64
    max_model_len: int = 2048
    options: dict = field(default_factory=dict)
    """Arguments of LLM() over the defaults below."""

    @property
    def workers(self) -> int:
        return self.stages * self.tensor


def llm_arguments(spec: DecodeSpec) -> dict[str, Any]:
    """Arguments of LLM() for a spec."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "pipeline_parallel_size": spec.stages,
        "tensor_parallel_size": spec.tensor,
        # Also for one worker: stages of a pipeline run in processes of their own.
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "max_num_seqs": spec.max_num_seqs,
        "max_model_len": spec.max_model_len,
        "disable_log_stats": True,
        "load_format": "dummy",
        "seed": 0,
    }
    if not spec.p2p:
        arguments["disable_custom_all_reduce"] = True
    if spec.drafter is not None:
        block: dict[str, Any] = {"drafter": spec.drafter, **spec.settings}
        if spec.split is not None:
            block["placement"] = {"layers": list(spec.split)}
        arguments["additional_config"] = {"spexis": block}
    if spec.device == "cpu":
        arguments |= {"enforce_eager": True, "dtype": "float32"}
        if spec.drafter is None and spec.stages > 1:
            arguments["worker_cls"] = machine.STOCK_CPU_WORKER
    return {**arguments, **spec.options}


def environment(spec: DecodeSpec, base: dict[str, str]) -> dict[str, str]:
    """Environment of the engine's process, from the one of this process."""
    env = engines.base_environment(base)
    env.pop("NCCL_P2P_DISABLE", None)
    if spec.drafter is None and spec.split is not None:  # else by spexis.placement
        env[PARTITION_ENV] = ",".join(map(str, spec.split))
    if not spec.p2p:
        env["NCCL_P2P_DISABLE"] = "1"
    if spec.device == "cuda":
        if importlib.util.find_spec("flashinfer") is None:
            env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        return env
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    if spec.drafter is None:  # else the plugin does it
        env["VLLM_CPU_OMP_THREADS_BIND"] = machine.stock_cpu_binding(spec.workers)
    return env


def arrivals(rows: int, stages: int, per_step: int) -> list[int]:
    """Requests to add before each step: equal groups of at most per_step, a multiple of `stages`.

    A request of a stock pipeline keeps the step (modulo `stages`) at which it came, so the groups
    become its micro-batches.
    """
    share = -(-rows // stages)
    count = stages * -(-share // per_step)
    each, extra = divmod(rows, count)
    return [n for n in (each + (i < extra) for i in range(count)) if n]


def window_spread(events: Sequence[tuple[float, int]], parts: int = 4) -> list[float]:
    """Lowest and highest rate of `parts` equal shares of (seconds, tokens so far) events."""
    events = list(events)
    first, last = events[0], events[-1]
    cuts = [first]
    for part in range(1, parts):
        wanted = first[1] + (last[1] - first[1]) * part / parts
        cut = next(event for event in events if event[1] >= wanted)
        if cut[0] > cuts[-1][0]:
            cuts.append(cut)
    if last[0] > cuts[-1][0]:
        cuts.append(last)
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(cuts)]
    return [min(rates), max(rates)]


class DecodeEngine:
    """A vLLM engine in a child process that answers one command at a time."""

    def __init__(self, spec: DecodeSpec, log: str | Path, timeout: float = 400.0) -> None:
        """log: file for what the engine prints. timeout: seconds that one answer may take."""
        self.spec, self.log, self.timeout = spec, Path(log), timeout

    def start(self) -> DecodeEngine:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._answers, child_end = os.pipe()
        self._pending = b""
        order = json.dumps(dataclasses.asdict(self.spec))
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spexis.bench.decode_child", str(child_end), order],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[child_end],
                env=environment(self.spec, dict(os.environ)),
                start_new_session=True,
                text=True,
            )
        os.close(child_end)
        engines._groups.add(self._process.pid)
        try:
            self.started = self._answer()
        except BaseException:
            self.stop()
            raise
        return self

    def call(self, do: str, **arguments: Any) -> dict:
        """Runs one command of decode_child.Child."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words("ended early")) from None
        return self._answer()

    def _answer(self) -> dict:
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], 0.5)
            if ready:
                chunk = os.read(self._answers, 1 << 16)
                if not chunk:
                    raise RuntimeError(self._last_words("ended early"))
                self._pending += chunk
            elif self._process.poll() is not None:
                raise RuntimeError(self._last_words(f"ended early ({self._process.returncode})"))
            elif time.monotonic() > deadline:
                raise RuntimeError(self._last_words(f"did not answer in {self.timeout:.0f} s"))
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(self._last_words(answer["error"]))
        return answer

    def _last_words(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"engine {what}; log {self.log}, its end:", *lines[-25:]])

    def stop(self) -> None:
        """Ends it in order if it answers, by force if not, and waits until its group is gone."""
        with contextlib.suppress(RuntimeError, OSError):
            if self._process.poll() is None:
                self.timeout = 20.0
                self.call("stop")
        engines._kill_group(self._process)
        os.close(self._answers)
        # Memory on the device is free only when the last worker is gone.
        deadline = time.monotonic() + 20.0
        while _group_lives(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)

    def __enter__(self) -> DecodeEngine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs; zombies that nobody reaps do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                return True
    return False
