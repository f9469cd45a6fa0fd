# SPDX-License-Identifier: Apache-2.0
"""The GPU ladder: kernels, one stage on one GPU, engines on two GPUs, the stage benchmark.

    python -m pytest tests/gpu                 # skipped with a message where a GPU is missing
    python -m pytest tests/gpu --run-slow      # also what takes minutes (the 70B-sized stage)

Everything here is marked gpu; what needs two devices carries `num_gpus(2)`. Invariant: nothing
imports vLLM into the test process, since each run needs a process group of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("num_gpus")
        if marker and 0 < _num_gpus() < marker.args[0]:
            reason = f"gpu: needs {marker.args[0]} CUDA devices, {_num_gpus()} here"
            item.add_marker(pytest.mark.skip(reason=reason))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session")
def run():
    """run(*arguments of python, **environment) -> what it printed; its failure is the test's."""

    def run(*arguments: str, timeout: int = 1200, **environment: str) -> str:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # drive.py looks into the scheduler
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")])),
        }
        for name in ("VLLM_PP_LAYER_PARTITION", "TRITON_INTERPRET"):
            env.pop(name, None)
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
        return done.stdout

    return run
