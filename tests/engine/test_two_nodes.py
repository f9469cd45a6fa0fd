# SPDX-License-Identifier: Apache-2.0
"""One stage a node: two network namespaces of one machine, joined by a cable that can be pulled.

    python -m pytest tests/engine/test_two_nodes.py --run-slow      # needs root and `ip`

The commands are those of docs/multi-node.md, for vLLM's multi-node `mp` executor and for Ray (where
it is installed). Node 1 is this namespace, node 2 a new one. vLLM's CPU platform names no resource
of Ray's, so tests/engine/cpu_on_ray gives it one that `ray start --num-gpus` declares.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spexis.bench import soak
from spexis.bench.serving import Launched, Server, free_port
from spexis.engine.nodes import SILENCE

pytestmark = pytest.mark.engine

CPU_ON_RAY = Path(__file__).resolve().parent / "cpu_on_ray"
RAY_NODE = ["--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000"]
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
        # The namespace goes when its last process has; the cable must be gone for the next test.
        for what in (("link", "del", self.here), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*what)

    def pull(self) -> None:
        ip("-n", self.name, "link", "set", self.there, "down")


@pytest.fixture
def cable():
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two network namespaces need root and the command ip")
    with Cable() as cable:
        yield cable


class MpNodes:
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

    def __enter__(self) -> "MpNodes":
        return self

    def __exit__(self, *exc) -> None:
        self.second.__exit__()
        self.server.__exit__()

    def look(self) -> None:
        """Notes the second node's processes while they are all there."""
        self.second.look()

    def kill_stage(self) -> None:
        """Kills the worker on the second node, and nothing else."""
        (worker,) = self.second.find("Worker")
        self.second.send(signal.SIGKILL, worker)

    def left_there(self, seconds: float) -> list:
        """Processes of the engine on the second node that are not gone by then."""
        return self.second.wait_gone(seconds)[1]


class RayNodes:
    """`ray start` on both, `spexis serve` on the first: Ray starts a stage on each."""

    def __init__(self, cable: Cable, model: soak.Model, log):
        pytest.importorskip("ray", reason="Ray is not installed")
        self.cable, port = cable, free_port()
        path = os.pathsep.join(filter(None, [str(CPU_ON_RAY), os.environ.get("PYTHONPATH")]))
        here = {"PYTHONPATH": path, "VLLM_HOST_IP": HERE, "GLOO_SOCKET_IFNAME": cable.here}
        there = {**here, "VLLM_HOST_IP": THERE, "GLOO_SOCKET_IFNAME": cable.there}
        head = ["--head", f"--port={port}", f"--node-ip-address={HERE}"]
        joins = [f"--address={HERE}:{port}", f"--node-ip-address={THERE}"]
        try:
            ray("start", *head, "--include-dashboard=false", *RAY_NODE, log=log, env=here)
            ray("start", *joins, *RAY_NODE, log=log, env=there, netns=cable.name)
        except BaseException:
            self._stop_ray()
            raise
        self.server = Server(
            [
                *soak.server_arguments(model.path, model.drafter),
                *("--distributed-executor-backend", "ray"),
            ],
            {**here, "RAY_ADDRESS": f"{HERE}:{port}"},
        )

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *exc) -> None:
        self.server.__exit__()
        self._stop_ray()

    def _stop_ray(self) -> None:
        for pid in pids_in(self.cable.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ray("stop", "--force", log=subprocess.DEVNULL, env={})

    def look(self) -> None:
        """Nothing to note: the namespace knows its processes."""

    def workers_there(self) -> list[int]:
        return [p for p in pids_in(self.cable.name) if "RayWorkerProc" in command_of(p)]

    def kill_stage(self) -> None:
        (worker,) = self.workers_there()
        os.kill(worker, signal.SIGKILL)

    def left_there(self, seconds: float) -> list:
        deadline = time.monotonic() + seconds
        while (left := self.workers_there()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def ray(*arguments: str, log, env: dict[str, str], netns: str | None = None) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    if netns is not None:
        command = ["ip", "netns", "exec", netns, *command]
    # Its processes may take more than the usual half minute to start on a busy machine.
    env = {**os.environ, "RAY_raylet_start_wait_time_s": "120", **env}
    subprocess.run(command, check=True, stdout=log, stderr=log, env=env)


def pids_in(netns: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", netns], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


BY = pytest.mark.parametrize("nodes", [MpNodes, RayNodes], ids=["mp", "ray"])


@pytest.fixture
def model(tmp_path):
    return soak.prepare("tiny", tmp_path)


@pytest.mark.slow
@BY
def test_answers_are_stock_vllms_and_a_lost_stage_is_an_error(nodes, cable, model, tmp_path):
    requests = soak.make_requests(30, 0, model.vocab_size, model.decoder())
    wanted = soak.reference(model.path, requests, timeout=300)
    log_path = tmp_path / "node2.log"
    with log_path.open("w") as log, nodes(cable, model, log) as two:
        try:
            two.server.wait_ready(240)
            found = soak.run_soak(two.server, requests, wanted, timeout=120, clients=16)
            two.look()
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
        assert two.left_there(soak.GONE_WITHIN) == []


@pytest.mark.slow
@BY
def test_a_pulled_cable_is_an_error_on_both_ends(nodes, cable, model, tmp_path):
    """Nothing is closed, so only silence tells."""
    log_path = tmp_path / "node2.log"
    with log_path.open("w") as log, nodes(cable, model, log) as two:
        try:
            two.server.wait_ready(240)
            two.look()
            kill = soak.kill_under_load(two.server, "cable", model.vocab_size, strike=cable.pull)
            left = two.left_there(SILENCE + soak.GONE_WITHIN)
        finally:
            print(two.server.tail(60), log_path.read_text()[-6000:])
        assert kill.errors == kill.clients
        assert kill.error_seconds < SILENCE + soak.ERROR_WITHIN
        assert kill.left == []
        assert left == []
