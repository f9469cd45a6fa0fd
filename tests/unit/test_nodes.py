# SPDX-License-Identifier: Apache-2.0
"""A worker ends when another node is silent, and only then. Peers are threads on one store."""

import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
dist = torch.distributed

from spexis.engine.nodes import PeerWatch, may_span_nodes  # noqa: E402

SILENCE, BEAT = 2.0, 0.1


@pytest.fixture
def store():
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for watched in Watched.all:
        watched.watch.stop()
    time.sleep(2 * BEAT)  # before the store goes
    Watched.all.clear()


class Watched:
    """One rank's watch, and what it said."""

    all: ClassVar[list["Watched"]] = []

    def __init__(self, store, rank: int, world_size: int = 2):
        self.said: list[str] = []
        self.done = threading.Event()
        self.watch = PeerWatch(store.clone(), rank, world_size, SILENCE, self._say, beat=BEAT)
        self.watch.start()
        self.all.append(self)

    def _say(self, why: str) -> None:
        self.said.append(why)
        self.done.set()


def count_for(store, rank: int, seconds: float) -> None:
    """A peer that is alive for so long."""
    mine, end, count = store.clone(), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += 1
        mine.set(f"alive/{rank}", str(count))
        time.sleep(BEAT)


def test_living_peers_are_left_alone(store):
    ranks = [Watched(store, rank) for rank in range(2)]
    time.sleep(2 * SILENCE)
    assert [rank.said for rank in ranks] == [[], []]
    assert all(rank.watch.heard for rank in ranks)


def test_a_silent_peer_is_noticed(store):
    mine = Watched(store, 0)
    count_for(store, 1, 0.5)
    assert mine.done.wait(timeout=20 * SILENCE)
    assert mine.said == ["Rank 1 was not heard of for 2 s"]


def test_a_peer_that_never_came_is_waited_for(store):
    mine = Watched(store, 0)
    time.sleep(2 * SILENCE)
    assert mine.said == []
    count_for(store, 1, 0.3)
    assert mine.done.wait(timeout=20 * SILENCE)


def test_a_store_that_is_gone_is_noticed(store):
    class Gone:
        def set(self, key, value):
            raise dist.DistNetworkError("Connection reset by peer\nmore lines")

    said: list[str] = []
    done = threading.Event()
    watch = PeerWatch(Gone(), 1, 2, SILENCE, lambda why: (said.append(why), done.set()), BEAT)
    watch.start()
    assert done.wait(timeout=10)
    assert said == ["The store on the first node is gone (Connection reset by peer)"]


def test_time_that_this_process_stood_still_is_not_the_peers(store):
    """A stopped process wakes up to counts that are old for its own fault."""
    mine = Watched(store, 0)
    count_for(store, 1, 0.5)
    watch = mine.watch
    watch.heard[1] = time.monotonic() - 10 * SILENCE
    watch.judge_from = time.monotonic() + 60
    assert watch.silent() is None
    watch.judge_from = 0.0
    assert watch.silent() is not None


@pytest.mark.parametrize(
    ("num_nodes", "backend", "wanted"), [(1, "mp", False), (2, "mp", True), (1, "ray", True)]
)
def test_where_stages_can_be_apart(num_nodes, backend, wanted):
    config = SimpleNamespace(nnodes=num_nodes, distributed_executor_backend=backend)
    assert may_span_nodes(config) is wanted
