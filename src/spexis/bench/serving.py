# SPDX-License-Identifier: Apache-2.0
"""A `spexis serve` process under test: start, requests over HTTP, metrics, and its remains.

    with Server([model, "--port", "0"]) as server:
        answer = await complete(session, server.url, {"prompt": [1, 2], "max_tokens": 8})

Everything is on the loopback address. Invariant: when the `with` block ends, no process that the
server started is alive, whatever happened; pids are told from reused ones by their start time.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from spexis.observability.scrape import parse

HOST = "127.0.0.1"
SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Without it vLLM wants nearly all of the machine's memory, and free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


# ------------------------------------------------------------------ processes
@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: str  # clock ticks since boot
    name: str

    @property
    def alive(self) -> bool:
        now = read_process(self.pid)
        return now is not None and now[0].started == self.started


def read_process(pid: int) -> tuple[Process, int, int] | None:
    """The process, its parent's pid and its session; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    if rest[0] in "ZX":
        return None
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        name = title or name
    return Process(pid, rest[19], name), int(rest[1]), int(rest[3])


def family(pid: int) -> set[Process]:
    """The session that `pid` leads and all its descendants."""
    children: dict[int, list[Process]] = {}
    result: set[Process] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (found := read_process(int(folder.name))):
            process, parent, session = found
            children.setdefault(parent, []).append(process)
            if session == pid:
                result.add(process)
    todo = [pid, *(process.pid for process in result)]
    while todo:
        for process in children.get(todo.pop(), ()):
            if process not in result:
                result.add(process)
                todo.append(process.pid)
    return result


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def _die_with_parent() -> None:
    """In the child: if the test is killed, so is the server (and then what the server started)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Launched:
    """A command in a session of its own, and every process that it has started."""

    def __init__(self, command: list[str], log, env: dict[str, str]):
        """log: file for what it prints. env: in addition to this process's own."""
        self.seen: set[Process] = set()
        self._process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **SERVER_ENV, **env},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.look()
        for process in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> set[Process]:
        """Notes the processes that there are now."""
        self.seen |= family(self.pid)
        return self.seen

    def left(self) -> list[Process]:
        self._process.poll()  # else a dead server would wait to be reaped
        return [process for process in self.seen if process.alive]

    def find(self, part: str) -> list[Process]:
        """Living processes whose title holds `part`: "EngineCore", "Worker"."""
        self.look()
        return [process for process in self.left() if part in process.name]

    def send(self, number: int, process: Process | None = None) -> None:
        self.look()
        os.kill(process.pid if process else self.pid, number)

    def wait_gone(self, timeout: float) -> tuple[float, list[Process]]:
        """Seconds until no process was left (or the timeout), and those still alive."""
        begin = time.monotonic()
        while True:
            self.look()
            left, passed = self.left(), time.monotonic() - begin
            if not left or passed >= timeout:
                return passed, left
            time.sleep(0.25)


# --------------------------------------------------------------------- server
class Server(Launched):
    """`spexis serve` with these arguments, in a process of its own."""

    def __init__(
        self, arguments: list[str], env: dict[str, str] | None = None, *, stock: bool = False
    ):
        """stock: `vllm serve`, as it is."""
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [
            *(sys.executable, "-m", "spexis.cli.launch" if stock else "spexis.cli"),
            *("serve", *arguments),
            *("--host", HOST, "--port", str(self.port)),
        ]
        super().__init__(command, self.log, env or {})

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.log.close()

    def wait_ready(self, timeout: float) -> float:
        begin = time.monotonic()
        while time.monotonic() - begin < timeout:
            self.look()
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended at start\n{self.tail()}")
            with contextlib.suppress(OSError):
                self.get("/health")
                self.look()
                return time.monotonic() - begin
            time.sleep(0.3)
        raise TimeoutError(f"the server was not ready in {timeout:.0f} s\n{self.tail()}")

    def get(self, path: str, timeout: float = 10.0) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as reply:
            return reply.read().decode()

    def metrics(self) -> dict[str, float]:
        """Sums over label sets by name, vLLM's and Spexis' series; one label as name{value}."""
        sums: dict[str, float] = defaultdict(float)
        page = self.get("/metrics", timeout=60.0)  # seconds late where cores are few
        for name, by_labels in parse(page, time=0.0).series.items():
            for labels, value in by_labels.items():
                sums[name] += value
                for label, text in labels:
                    if label in ("finished_reason", "kind"):
                        sums[f"{name}{{{text}}}"] += value
        return dict(sums)

    def tail(self, num_lines: int = 40) -> str:
        self.log.seek(0)
        return "".join(self.log.readlines()[-num_lines:])


# --------------------------------------------------------------------- client
@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    left: bool = False  # the client went away on purpose
    seconds: float = 0.0


async def complete(
    session,
    url: str,
    body: dict,
    *,
    leave_after: int | None = None,
    leave_in: float | None = None,
    timeout: float = 600.0,
) -> Answer:
    """One completion. leave_after: closes the connection once it has this many tokens;
    leave_in: after so many seconds. Errors of any kind are the answer's `error`."""
    answer, begin = Answer(), time.monotonic()
    body = {"model": "m", "temperature": 0, "return_token_ids": True, **body}
    run = _stream if body.get("stream") else _whole
    try:
        async with asyncio.timeout(timeout if leave_in is None else leave_in):
            await run(session, url, body, answer, leave_after)
    except TimeoutError:
        answer.left = leave_in is not None
        answer.error = None if answer.left else f"no answer in {timeout:.0f} s"
    except Exception as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.monotonic() - begin
    return answer


async def _whole(session, url: str, body: dict, answer: Answer, leave_after: int | None) -> None:
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        data = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {data}")
        _add(answer, data["choices"][0])


async def _stream(session, url: str, body: dict, answer: Answer, leave_after: int | None) -> None:
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                if answer.finish_reason is None:
                    raise RuntimeError("the stream ended without a finish reason")
                return
            data = json.loads(line[len(b"data: ") :])
            if "error" in data:
                raise RuntimeError(f"error in the stream: {data['error']}")
            if data["choices"]:
                _add(answer, data["choices"][0])
            if leave_after is not None and len(answer.token_ids) >= leave_after:
                answer.left = True
                reply.close()
                return
        raise RuntimeError("the stream broke off")


def _add(answer: Answer, choice: dict) -> None:
    answer.token_ids += choice.get("token_ids") or []
    answer.text += choice.get("text") or ""
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    stop_reason = choice.get("stop_reason")
    answer.stop_reason = answer.stop_reason if stop_reason is None else stop_reason
