# SPDX-License-Identifier: Apache-2.0
"""A child that never looks at signals still ends when its parent was killed."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spexis.bench.serving import read_process
from spexis.engine.lifeline import RAY_MONITOR, end_with_parent

PARENT = """
import multiprocessing, os, signal, sys, time
from spexis.engine.lifeline import end_with_parent

def child(stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(grace=1.0)
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: the other child writes, too
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for stubborn in (False, True):
        context.Process(target=child, args=(stubborn,)).start()
    time.sleep(600)
"""


def wait_gone(pids: list[int], timeout: float) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if not any(map(read_process, pids)):
            return True
        time.sleep(0.05)
    return False


CORE = """
import multiprocessing, signal, sys, threading, time
from spexis.engine.lifeline import end_with_workers

def core(seconds, ends):
    if not ends:
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # in the middle of something
    monitor = threading.Thread(target=time.sleep, args=(seconds,), name="RayWorkerMonitor")
    monitor.start()
    end_with_workers(grace=0.2)
    print("runs", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(
        target=core, args=(float(sys.argv[1]), sys.argv[2] == "ends"), name="EngineCore"
    )
    process.start()
    process.join(5)
    print("lives" if process.is_alive() else "gone", flush=True)
    process.kill()
"""


@pytest.mark.parametrize(
    ("seconds", "state", "wanted"),
    [(1.0, "runs", "gone"), (60.0, "runs", "lives"), (1.0, "ends", "lives")],
)
def test_the_engine_core_ends_with_rays_watch_of_its_workers(seconds, state, wanted, tmp_path):
    """Unless the watch still goes on, or the core is ending by itself."""
    script = tmp_path / "core.py"
    script.write_text(CORE)
    command = [sys.executable, str(script), str(seconds), state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["runs", wanted]


def test_vllm_calls_its_watch_so():
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    source = (Path(folder) / "v1/executor/ray_executor_v2.py").read_text()
    assert f'name="{RAY_MONITOR}"' in source


def check(method: str, tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), method], stdout=subprocess.PIPE, text=True
    )
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    try:
        time.sleep(1.0)
        assert all(map(read_process, pids)), "they live while the parent does"
        parent.kill()
        parent.wait()
        assert wait_gone(pids, 15)
    finally:
        parent.kill()
        for pid in filter(read_process, pids):
            os.kill(pid, signal.SIGKILL)


def test_forked_children(tmp_path):
    check("fork", tmp_path)


def test_spawned_children(tmp_path):
    check("spawn", tmp_path)


def test_a_process_of_the_users_own_is_left_alone():
    end_with_parent()
    assert "SpexisLifeline" not in {thread.name for thread in threading.enumerate()}
