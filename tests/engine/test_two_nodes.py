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
from importlib.util import find_spec
from pathlib import Path

import pytest

from spexis.bench import soak
from spexis.bench.serving import Launched, Server, family, free_port
from spexis.engine.nodes import SILENCE

pytestmark = pytest.mark.engine

CPU_ON_RAY = Path(__file__).resolve().parent / "cpu_on_ray"
RAY_MARK = "SPEXIS_TEST_RAY"
RAY_NODE = [
    "--disable-usage-stats",
    "--num-cpus=1",
    "--num-gpus=1",
    "--object-store-memory=100000000",
]
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

    def left(self, seconds: float) -> list:
        """Processes of the second node that are not gone by then; the soak sees the first's."""
        return self.second.wait_gone(seconds)[1]


class RayNodes:
    """`ray start` on both, `spexis serve` on the first: Ray starts a stage on each."""

    def __init__(self, cable: Cable, model: soak.Model, log):
        self.cable, self.log, port = cable, log, free_port()
        self.mark = f"{cable.name}-{port}"  # in the environment of all that Ray starts here
        path = os.pathsep.join(filter(None, [str(CPU_ON_RAY), os.environ.get("PYTHONPATH")]))
        here = {"PYTHONPATH": path, "VLLM_HOST_IP": HERE, "GLOO_SOCKET_IFNAME": cable.here}
        there = {**here, "VLLM_HOST_IP": THERE, "GLOO_SOCKET_IFNAME": cable.there}
        self.environment = {**here, "RAY_ADDRESS": f"{HERE}:{port}"}
        head = ["--head", f"--port={port}", f"--node-ip-address={HERE}"]
        joins = [f"--address={HERE}:{port}", f"--node-ip-address={THERE}"]
        try:
            self._start_ray([*head, "--include-dashboard=false"], here)
            self._start_ray(joins, there, netns=cable.name)
        except BaseException:
            self._kill_ray()
            raise
        self.server = Server(
            [
                *soak.server_arguments(model.path, model.drafter),
                *("--distributed-executor-backend", "ray"),
            ],
            self.environment,
        )

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *exc) -> None:
        try:
            self.server.__exit__()
        finally:
            self._kill_ray()

    def _start_ray(self, arguments: list[str], env: dict[str, str], netns: str | None = None):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *RAY_NODE]
        if netns is not None:
            command = ["ip", "netns", "exec", netns, *command]
        env = {**os.environ, **env, RAY_MARK: self.mark}
        subprocess.run(command, check=True, stdout=self.log, stderr=self.log, env=env, timeout=120)

    def _kill_ray(self) -> None:
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> set[int]:
        """All that Ray started. A worker's title overwrites its environment: it is a child."""
        roots = marked(self.mark)
        return {*roots, *(process.pid for root in roots for process in family(root))}

    def look(self) -> None:
        """Notes the two workers, one a node."""
        workers = {pid for pid in self._processes() if "RayWorkerProc" in command_of(pid)}
        self.there = workers & set(pids_in(self.cable.name))
        self.here = workers - self.there
        assert (len(self.here), len(self.there)) == (1, 1), workers

    def kill_stage(self) -> None:
        for worker in self.there:
            os.kill(worker, signal.SIGKILL)

    def left(self, seconds: float) -> list:
        """The stages that are not gone by then, on either node."""
        deadline = time.monotonic() + seconds
        while True:
            left = [pid for pid in self.here | self.there if "RayWorkerProc" in command_of(pid)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


def marked(mark: str) -> list[int]:
    """Processes that inherited the mark."""
    found, wanted = [], f"{RAY_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def pids_in(netns: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", netns], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


no_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
BY = pytest.mark.parametrize(
    "nodes", [pytest.param(MpNodes, id="mp"), pytest.param(RayNodes, id="ray", marks=no_ray)]
)


@pytest.fixture
def model(tmp_path):
    return soak.prepare("tiny", tmp_path)


@contextlib.contextmanager
def started(nodes: type, cable: Cable, model: soak.Model, folder: Path):
    """Both nodes, serving and looked at; what they said is shown when a test fails."""
    log_path = folder / "node2.log"
    with log_path.open("w") as log, nodes(cable, model, log) as two:
        try:
            two.server.wait_ready(240)
            two.look()
            yield two
        finally:
            print(two.server.tail(60), log_path.read_text()[-6000:])


@pytest.mark.slow
@BY
def test_answers_are_stock_vllms_and_a_lost_stage_is_an_error(nodes, cable, model, tmp_path):
    requests = soak.make_requests(30, 0, model.vocab_size, model.decoder())
    wanted = soak.reference(model.path, requests, timeout=300)
    with started(nodes, cable, model, tmp_path) as two:
        found = soak.run_soak(two.server, requests, wanted, timeout=120, clients=16)
        kill = soak.kill_under_load(
            two.server, "stage on the other node", model.vocab_size, strike=two.kill_stage
        )
        assert found.wrong == []
        assert 0.1 < found.acceptance < 0.9
        assert kill.errors == kill.clients
        assert kill.error_seconds < soak.ERROR_WITHIN
        assert kill.left == []
        assert two.left(soak.GONE_WITHIN) == []


@pytest.mark.slow
@BY
def test_an_orderly_end_leaves_nothing(nodes, cable, model, tmp_path):
    with started(nodes, cable, model, tmp_path) as two:
        assert soak.stop(two.server) == []
        assert two.left(soak.GONE_WITHIN) == []


@pytest.mark.slow
@BY
def test_a_pulled_cable_is_an_error_on_both_ends(nodes, cable, model, tmp_path):
    """Nothing is closed, so only silence tells."""
    with started(nodes, cable, model, tmp_path) as two:
        kill = soak.kill_under_load(two.server, "cable", model.vocab_size, strike=cable.pull)
        left = two.left(SILENCE + soak.GONE_WITHIN)
        assert kill.errors == kill.clients
        assert kill.error_seconds < SILENCE + soak.ERROR_WITHIN
        assert kill.left == []
        assert left == []
