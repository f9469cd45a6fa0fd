# SPDX-License-Identifier: Apache-2.0
"""Runs work on a vLLM engine in a process of its own and brings the results back as JSON.

    run = run_engine(EngineSpec(model=folder, stages=2, drafter={"method": "exit"}),
                     [Work(name="base")])
    run.results["base"]["rows"][0]["outputs"][0]["token_ids"]

vLLM keeps its parallel groups and environment per process, so every engine gets a fresh one
(`python -m spexis.bench.engines`, work on standard input, events on a pipe). The engine core runs
inside that process, where the scheduler's counters and the block pool can be read. Invariants:
Spexis is switched on the way a user does it (additional_config and the plugin); whatever happens,
the whole process group is killed before run_engine() returns; an engine of one process gets half
of the cores, because OpenMP barriers over all cores of a busy machine cost ten times more.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from spexis.bench.machine import STOCK_CPU_WORKER, stock_cpu_binding

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """An engine to build."""

    model: str
    stages: int = 1
    tensor: int = 1
    drafter: dict | None = None
    """The spexis.drafter block; None builds stock vLLM."""
    settings: dict = field(default_factory=dict)
    """The rest of the spexis block, such as {"steps_in_flight": 3}."""
    options: dict = field(default_factory=dict)
    """Arguments of LLM() over the defaults below."""
    chat: bool = False
    """Prompts of scenarios are text (else random tokens)."""

    @property
    def label(self) -> str:
        kind = "stock" if self.drafter is None else self.drafter["method"]
        if "acceptance" in (self.drafter or {}):
            kind += f" p={self.drafter['acceptance']}"
        tensor = f" TP={self.tensor}" if self.tensor > 1 else ""
        rest = "".join(f" {key}={value}" for key, value in self.settings.items())
        return f"{Path(self.model).name} PP={self.stages}{tensor} {kind}{rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One thing to run on the engine: a scenario by name, or prompts given as rows."""

    name: str
    scenario: str | None = None
    """Scenario to run; None means the one called `name`, unless there are rows."""
    size: int = 12
    rows: list[dict] | None = None
    """[{"prompt_token_ids": [...], "params": {SamplingParams}}] instead of a scenario."""
    prepare: dict | None = None
    """{"drafter": block} or {"trust_guesses": {}}: what driver.PREPARE does to the workers first;
    {"oracle_lengths": {}} or {"look_ahead_turns": True}: what PREPARE_SCHEDULER does to the
    scheduler. Another drafter this way saves the start of another engine."""
    watch_steps: bool = False
    """Also bring what was in each step (step_watch.py), as "step_log"."""


@dataclass(kw_only=True, slots=True)
class EngineRun:
    spec: EngineSpec
    results: dict[str, dict]
    """By name of the work: rows, counters, free_blocks, ..."""
    start_seconds: float = 0.0
    seconds: float = 0.0
    slots_left: int | None = None
    """Slots bound on the stages after the last request; 0 or None on stock vLLM."""
    error: str | None = None

    def __getitem__(self, name: str) -> dict:
        if name not in self.results:
            raise RuntimeError(f"{self.spec.label} did not run {name}: {self.error}")
        return self.results[name]


def run_engine(
    spec: EngineSpec,
    work: list[Work],
    *,
    previous: dict[str, dict] | None = None,
    timeout: float = 900.0,
    on_event: Callable[[Event], None] | None = None,
) -> EngineRun:
    """Starts the engine, runs the work in order, stops it. Errors are in the result's `error`.

    previous: results of the stock engine that scenarios build on; on a stock engine its own.
    """
    order = {
        "spec": dataclasses.asdict(spec),
        "work": [dataclasses.asdict(item) for item in work],
        "previous": previous,
    }
    run = EngineRun(spec=spec, results={})
    begin = time.monotonic()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+") as order_file, tempfile.TemporaryFile("w+") as log:
        json.dump(order, order_file)
        order_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "spexis.bench.engines", str(write_end)],
            stdin=order_file,
            stdout=log,
            stderr=log,
            pass_fds=[write_end],
            env=_environment(spec),
            start_new_session=True,
        )
        os.close(write_end)
        _groups.add(process.pid)
        try:
            for event in _events(read_end, process, begin + timeout):
                _note(run, event)
                if on_event:
                    on_event(event)
            missing = [item.name for item in work if item.name not in run.results]
            if missing and run.error is None:
                late = time.monotonic() >= begin + timeout
                why = f"took longer than {timeout:.0f} s" if late else f"exit {process.poll()}"
                run.error = f"{spec.label}: {why} before {missing[0]}\n{_tail(log)}"
            elif run.error is not None:
                run.error += f"\n{_tail(log)}"
            else:  # it has ended in order and is removing its shared memory
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        finally:
            os.close(read_end)
            _kill_group(process)
    run.seconds = time.monotonic() - begin
    return run


def _note(run: EngineRun, event: Event) -> None:
    if event["event"] == "started":
        run.start_seconds = event["seconds"]
    elif event["event"] == "result":
        run.results[event["name"]] = event["result"]
    elif event["event"] == "end":
        run.slots_left = event["slots_left"]
    elif event["event"] == "error":
        run.error = f"{run.spec.label}: {event['message']}"


def _events(read_end: int, process: subprocess.Popen, deadline: float):
    """Events of the child until it ends, or until the deadline."""
    pending = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        ready, _, _ = select.select([read_end], [], [], min(left, 0.5))
        if not ready:
            if process.poll() is not None:
                return  # a worker may still hold the other end, so do not wait for its end
            continue
        chunk = os.read(read_end, 1 << 16)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            yield event
            if event["event"] in ("end", "error"):
                return


def _tail(log, num_lines: int = 25) -> str:
    log.seek(0)
    return "".join(log.readlines()[-num_lines:])


def first_answers(result: dict) -> list[list[int]]:
    """Tokens of each request's first answer, of one piece of work's result."""
    return [row["outputs"][0]["token_ids"] for row in result["rows"]]


def write_oracle_file(path: Path, *results: dict[str, dict]) -> str:
    """What the oracle drafter reads: the answers of stock runs, by prompt.

    Where a prompt was answered more than once (penalties, seeds), the first answer counts, and a
    longer one that goes on from it.
    """
    answers: dict[tuple[int, ...], list[int]] = {}
    rows = (row for run in results for result in run.values() for row in result["rows"])
    for row in rows:
        prompt = tuple(row["prompt_token_ids"])
        for output in row["outputs"][:1]:
            tokens, known = output["token_ids"], answers.get(prompt, [])
            if tokens[: len(known)] == known:
                answers[prompt] = tokens
    lines = (
        json.dumps({"prompt_token_ids": prompt, "token_ids": tokens})
        for prompt, tokens in answers.items()
    )
    path.write_text("\n".join(lines))
    return str(path)


# -- nothing is left behind ------------------------------------------------------------------------

_groups: set[int] = set()  # process groups of children that may be alive


def _kill_group(process: subprocess.Popen) -> None:
    # Workers of a dead engine can ignore SIGTERM, so there is only one signal that helps.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _groups.discard(process.pid)


def kill_on_signals(numbers=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) -> None:
    """For commands: on these signals kill the engines first, then end."""

    def stop(number, frame):
        for group in list(_groups):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os._exit(128 + number)

    for number in numbers:
        signal.signal(number, stop)


# -- inside the child ------------------------------------------------------------------------------


def end_child() -> NoReturn:
    """Ends this process: vLLM's own shutdown can hang on a broken engine.

    The parent then kills the group, and with it what would have removed vLLM's shared memory, so
    its files go first; who still maps one keeps it.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.partition("/dev/shm/")[2]
        if file and " " not in file:  # "(deleted)": gone already
            Path("/dev/shm", file).unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def base_environment(base: dict[str, str]) -> dict[str, str]:
    """For the process of any engine: without what would place or switch it, with our source."""
    env = {
        **base,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    source = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, base.get("PYTHONPATH")]))
    for name in ("VLLM_PP_LAYER_PARTITION", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_PLUGINS"):
        env.pop(name, None)
    return env


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = {
        **base_environment(dict(os.environ)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM compiles small helpers (ranks of logprobs, masks of TP): seconds, and a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if spec.drafter is None:  # else the plugin does it
        env["VLLM_CPU_OMP_THREADS_BIND"] = stock_cpu_binding(spec.stages * spec.tensor)
    return env


def build_llm(spec: EngineSpec):
    """The vLLM engine of a spec, in this process."""
    from vllm import LLM

    import spexis.plugin

    spexis.plugin.register()  # vLLM does it itself where the package is installed
    workers = spec.stages * spec.tensor
    options: dict[str, Any] = {
        "pipeline_parallel_size": spec.stages,
        "tensor_parallel_size": spec.tensor,
        "distributed_executor_backend": "mp" if workers > 1 else None,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "seed": 0,
        "disable_log_stats": True,
    }
    if spec.drafter is not None:
        options["additional_config"] = {"spexis": {"drafter": spec.drafter, **spec.settings}}
    elif spec.stages > 1:
        options["worker_cls"] = STOCK_CPU_WORKER
    return LLM(spec.model, **{**options, **spec.options})


def _main() -> None:
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    order = json.load(sys.stdin)

    def emit(**event: Any) -> None:
        data = (json.dumps(event) + "\n").encode()
        while data:
            data = data[os.write(pipe, data) :]

    try:
        from spexis.bench.driver import serve

        spec = EngineSpec(**order["spec"])
        serve(spec, [Work(**item) for item in order["work"]], order["previous"], emit)
    except BaseException as error:
        traceback.print_exc()
        emit(event="error", message=f"{type(error).__name__}: {error}")
    end_child()


if __name__ == "__main__":
    _main()
