# SPDX-License-Identifier: Apache-2.0
"""Ends a worker when another node is not heard of any more (multi-node `mp` and Ray executors).

    if may_span_nodes(parallel_config):
        watch_nodes()      # in a worker, once the process groups exist

A worker that dies closes its connections, and whoever waits for it gets an error at once. A node
that loses power, or a cable that is pulled, closes nothing: its peers would wait for data, and the
clients with them, until some timeout of many minutes. So each worker counts in the key-value store
that torch.distributed keeps on the first node, over a connection of its own, and reads the others'
counts. One that stands still for SILENCE seconds, or a store that is gone, ends this worker; vLLM's
executor notices that and gives every request an error.

Invariant: nobody is given up who was never heard of, nor for the time that this process stood still
itself; until the first step, while models load and compile, silence may last LOADING seconds.
"""

import logging
import threading
import time
from collections.abc import Callable

from spexis.engine.lifeline import end_process

logger = logging.getLogger("vllm.spexis.nodes")

LOADING = 300.0  # seconds; compilers and loaders may keep Python's lock for long
SILENCE = 15.0  # seconds; a busy host may not get to its count for some of them
BEAT = 1.0


def may_span_nodes(parallel_config) -> bool:
    """Whether stages can be on more than one node; Ray alone knows where it puts them."""
    return parallel_config.nnodes > 1 or parallel_config.distributed_executor_backend == "ray"


def watch_nodes(silence: float = LOADING) -> "PeerWatch":
    """Watches all ranks of the default process group from daemon threads.

    `silence` of what it returns may be changed at any time."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("spexis_nodes", _get_default_store().clone())
    watch = PeerWatch(store, rank, world_size, silence, _end)
    watch.start()
    return watch


def _end(why: str) -> None:
    logger.error("%s: ending this worker", why)
    end_process(grace=2.0)


class PeerWatch:
    def __init__(
        self,
        store,
        rank: int,
        world_size: int,
        silence: float,
        on_silence: Callable[[str], None],
        beat: float = BEAT,
    ):
        """store: a torch.distributed store that nobody else uses the connection of.
        on_silence(why): called once, from a thread."""
        self.store, self.rank, self.silence, self.beat = store, rank, silence, beat
        self.keys = [f"alive/{peer}" for peer in range(world_size)]
        self.heard: dict[int, float] = {}  # peer -> when its count last changed
        self.judge_from = 0.0  # not before: this process stood still itself
        self.failure: str | None = None
        self.on_silence = on_silence
        self._stopped = threading.Event()

    def start(self) -> None:
        for target in (self._beat, self._watch):
            threading.Thread(target=target, daemon=True, name="SpexisNodes").start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        """Counts, and reads what others count. May block in the store: _watch() does not."""
        count, known = 0, {}
        try:
            while not self._stopped.is_set():
                count += 1
                self.store.set(self.keys[self.rank], str(count))
                if self.store.check(self.keys):
                    values = self.store.multi_get(self.keys)
                    for peer, value in enumerate(values):
                        if peer != self.rank and known.get(peer) != value:
                            known[peer] = value
                            self.heard[peer] = time.monotonic()
                self._stopped.wait(self.beat)
        except Exception as error:  # c10d raises more than one kind for a connection that is gone
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.failure = f"The store on the first node is gone ({first_line})"

    def _watch(self) -> None:
        last = time.monotonic()
        while (why := self.silent()) is None:
            if self._stopped.wait(self.beat / 2):
                return
            now = time.monotonic()
            if now - last > 2 * self.beat:
                self.judge_from = now + self.silence
            last = now
        self.on_silence(why)

    def silent(self) -> str | None:
        """Why this worker should end; None while everybody is heard of."""
        if self.failure is not None:
            return self.failure
        now = time.monotonic()
        if now < self.judge_from:
            return None
        for peer, heard in sorted(self.heard.items()):
            if now - heard > self.silence:
                return f"Rank {peer} was not heard of for {self.silence:.0f} s"
        return None
