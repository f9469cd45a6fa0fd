# SPDX-License-Identifier: Apache-2.0
"""Ends this process when the process that started it has died, however that died.

    end_with_parent()      # first thing in a worker and in the engine core

vLLM 0.32 closes a pipe and queues when a worker's parent dies, but a worker that waits inside a
native call (a stage's receive spins on shared memory, Gloo waits for a peer) never looks at
them, and an engine core whose API server was killed waits for requests for ever. Both stay as
orphans that hold memory and cores. Here a thread asks twice a second who the parent is (native
calls release the interpreter lock), then sends this process SIGTERM, so that it can end in
order, and forces it after a grace period.

Invariant: does nothing in a process that multiprocessing did not start (an engine inside the
user's own process must outlive the user's shell).
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.5
ORDERLY_SECONDS = 30.0  # an engine core that ends has this long to do it
RAY_MONITOR = "RayWorkerMonitor"  # vLLM's name for a thread of its Ray executor

logger = logging.getLogger("vllm.spexis.lifeline")


def end_with_parent(grace: float = 5.0) -> None:
    """grace: seconds between SIGTERM and SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # A fork server stands between the two, and ends with the process that started it.
    by_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    parent_pid = os.getppid() if by_server else parent.pid
    threading.Thread(
        target=_watch, args=(parent_pid, grace), daemon=True, name="SpexisLifeline"
    ).start()


def _watch(parent_pid: int, grace: float) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_SECONDS)
    end_process(grace)


def end_with_workers(grace: float = 2.0) -> None:
    """Ends the engine core a while after one of its workers has died, if it still runs then.

    For stages on several nodes: vLLM 0.32 notices the death, but waits for the reply of a rank on
    another node without looking at that notice, until its timeout of minutes. Call it in the engine
    core once the executor exists; does nothing where the core is part of the user's process."""
    if not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    known = _signs_of_workers()
    if not known:
        logger.warning("No sign of the workers: should one die, clients may wait for minutes")
        return
    threading.Thread(
        target=_watch_workers, args=(known, grace), daemon=True, name="SpexisWorkers"
    ).start()


def _watch_workers(known: set[str], grace: float) -> None:
    while not known - _signs_of_workers():
        time.sleep(POLL_SECONDS)
    time.sleep(grace)
    # vLLM's engine core puts the default handler back before it ends its workers in order.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        end_by(ORDERLY_SECONDS)
    else:
        end_process(grace)


def _signs_of_workers() -> set[str]:
    """What stands for this process's workers: their processes, or for Ray's, which are nobody's
    children here, the executor's thread that watches them and ends with the first of them."""
    children = multiprocessing.active_children()
    threads = threading.enumerate()
    return {child.name for child in children if child.name.startswith("VllmWorker")} | {
        thread.name for thread in threads if thread.name == RAY_MONITOR
    }


def end_process(grace: float = 5.0) -> None:
    """Ends this process, in order if it can within so many seconds. Call it from a thread."""
    end_by(grace)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace + 1)
    os.kill(os.getpid(), signal.SIGKILL)


def end_by(seconds: float) -> None:
    """This process is gone by then, and says on stderr where it hung if it has to be forced.

    Also while the interpreter shuts down, where Python's threads stand still: a timer of C does it.
    """
    with contextlib.suppress(Exception):  # no stderr to write to
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
