# SPDX-License-Identifier: Apache-2.0
"""One stage a node: two network namespaces of one machine, joined by a cable that can be pulled.

    python -m pytest tests/engine/test_two_nodes.py --run-slow      # needs root and `ip`

The commands are those of docs/multi-node.md: `spexis serve` on both, vLLM's multi-node `mp`
executor between them. Node 1 is this namespace, node 2 a new one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from spexis.bench import soak
from spexis.bench.serving import Launched, Server, free_port
from spexis.engine import nodes

pytestmark = pytest.mark.engine

HERE, THERE = "10.213.77.1", "10.213.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Cable:
    """A second network namespace and the only way there."""

    def __init__(self) -> None:
        self.name = f"spexis{os.getpid() % 10000}"
        self.here, self.there = f"{self.name}a", f"{self.name}b"

    def __enter__(self) -> "Cable":
        try:
            ip("netns", "add", self.name)
            ip("link", "add", self.here, "type", "veth", "peer", "name", self.there)
            ip("link", "set", self.there, "netns", self.name)
            ip("addr", "add", f"{HERE}/30", "dev", self.here)
            ip("-n", self.name, "addr", "add", f"{THERE}/30", "dev", self.there)
            ip("link", "set", self.here, "up")
            ip("-n", self.name, "link", "set", self.there, "up")
            ip("-n", self.name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        return self

    def __exit__(self, *exc) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.name)  # and the cable with it

    def pull(self) -> None:
        ip("-n", self.name, "link", "set", self.there, "down")


@pytest.fixture
def cable():
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two network namespaces need root and the command ip")
    with Cable() as cable:
        yield cable


class TwoNodes:
    """`spexis serve` on both; `server` is the one that answers."""

    def __init__(self, cable: Cable, model: soak.Model, log):
        arguments = [
            *soak.server_arguments(model.path, model.drafter),
            *("--nnodes", "2", "--master-addr", HERE, "--master-port", str(free_port())),
        ]
        self.server = Server(
            [*arguments, "--node-rank", "0"],
            {"VLLM_HOST_IP": HERE, "GLOO_SOCKET_IFNAME": cable.here},
        )
        self.second = Launched(
            [
                *("ip", "netns", "exec", cable.name, sys.executable, "-m", "spexis.cli", "serve"),
                *(*arguments, "--node-rank", "1", "--headless"),
            ],
            log,
            {"VLLM_HOST_IP": THERE, "GLOO_SOCKET_IFNAME": cable.there},
        )

    def __enter__(self) -> "TwoNodes":
        return self

    def __exit__(self, *exc) -> None:
        self.second.__exit__()
        self.server.__exit__()

    def kill_stage(self) -> None:
        """Kills the worker on the second node, and nothing else."""
        (worker,) = self.second.find("Worker")
        self.second.send(signal.SIGKILL, worker)


@pytest.fixture
def model(tmp_path):
    return soak.prepare("tiny", tmp_path)


@pytest.mark.slow
def test_answers_are_stock_vllms_and_a_lost_stage_is_an_error(cable, model, tmp_path):
    requests = soak.make_requests(30, 0, model.vocab_size, model.decoder())
    wanted = soak.reference(model.path, requests, timeout=300)
    log_path = tmp_path / "node2.log"
    with log_path.open("w") as log, TwoNodes(cable, model, log) as two:
        try:
            two.server.wait_ready(240)
            found = soak.run_soak(two.server, requests, wanted, timeout=120, clients=16)
            two.second.look()
            kill = soak.kill_under_load(
                two.server, "stage on the other node", model.vocab_size, strike=two.kill_stage
            )
        finally:
            print(two.server.tail(60), log_path.read_text()[-6000:])  # shown when a test fails
        assert found.wrong == []
        assert 0.1 < found.acceptance < 0.9
        assert kill.errors == kill.clients
        assert kill.error_seconds < soak.ERROR_WITHIN
        assert kill.left == []
        assert two.second.wait_gone(soak.GONE_WITHIN)[1] == []


@pytest.mark.slow
def test_a_pulled_cable_is_an_error_on_both_ends(cable, model, tmp_path):
    """Nothing is closed, so only silence tells."""
    log_path = tmp_path / "node2.log"
    with log_path.open("w") as log, TwoNodes(cable, model, log) as two:
        try:
            two.server.wait_ready(240)
            two.second.look()
            kill = soak.kill_under_load(two.server, "cable", model.vocab_size, strike=cable.pull)
            _, left = two.second.wait_gone(nodes.SILENCE + soak.GONE_WITHIN)
        finally:
            print(two.server.tail(60), log_path.read_text()[-6000:])
        assert kill.errors == kill.clients
        assert kill.error_seconds < nodes.SILENCE + soak.ERROR_WITHIN
        assert kill.left == []
        assert left == []
