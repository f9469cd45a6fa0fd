# SPDX-License-Identifier: Apache-2.0
"""One first stage alone in Triton's interpreter: the checks of tests/gpu, and the benchmark.

What needs a GPU (graphs, waiting for the device) is left out or emulated by the scripts themselves.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SRC = TESTS.parent / "src"
V2_ON_CPU = TESTS / "engine" / "v2_on_cpu"

pytestmark = pytest.mark.engine


def run(*command: str) -> str:
    pytest.importorskip("triton", reason="the V2 runner needs Triton (requirements/dev.lock)")
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(V2_ON_CPU), str(SRC)]),
    }
    env.pop("VLLM_PP_LAYER_PARTITION", None)
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("states", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checks_of_one_stage(tmp_path, states: bool):
    out = tmp_path / "out.json"
    run(str(TESTS / "gpu" / "stage_checks.py"), str(out), *(["--states"] if states else []))
    result = json.loads(out.read_text())
    for way in ("", " eager"):
        assert result[f"rules{way}"]["rows"] == 25
        assert result[f"rules{way}"]["restarts"] > 5
        if not states:
            assert result[f"head{way}"]["rows"] == 24
            assert result[f"head{way}"]["different"] > 6  # a constant guess would show nothing
    assert [found["rows"] for found in result["graphs"]] == [8 * 6, 3 * 6]
    assert result["captured"] == [1, 2, 4, 8]
    memory = result["memory"]
    assert memory["kv_layers"] == 4  # two of the stage, two of the drafter
    assert memory["drafter"]["kv_cache"] == pytest.approx((1 << 30) / 2, rel=0.01)


def test_the_device_chooses_rows(tmp_path):
    out = tmp_path / "out.json"
    run(str(TESTS / "gpu" / "stage_checks.py"), str(out), "--choose")
    result = json.loads(out.read_text())
    for way in ("choice", "choice eager"):
        assert result[way]["held"] > 6 and result[way]["guesses that ran"] > 0


@pytest.mark.slow
def test_stage_step_benchmark():
    sizes = ("--model", "tiny", "--layers", "2", "--context", "16", "--draft-vocab", "99")
    work = ("--batches", "1", "3", "--steps", "2", "--rounds", "2")
    text = run("-m", "spexis.bench.stage_step", *sizes, *work)
    result = json.loads(text.splitlines()[-1])
    assert [row["batch"] for row in result["ms"]] == [1, 3]
    for row in result["ms"]:
        assert row["stock"] > 0 and row["spexis"] > 0 and row["eager"] > 0
        assert row["ratio"] == pytest.approx(row["spexis"] / row["stock"], abs=1e-3)
        assert row["graph"] is None and row["draft"] is None
    assert result["met"] is None  # batch 64 was not measured
    assert result["drafter"] == {"layers": 2, "draft_vocab_size": 99, "states": True}
