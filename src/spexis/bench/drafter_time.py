# SPDX-License-Identifier: Apache-2.0
"""What an exit drafter of given size takes on the first stage, for `spexis profile`.

    drafter_seconds("l70", device="cuda", rows=[1, 64], layers=2, vocab=16384)
    ({"1": 0.00043, "64": 0.00054}, None)

Weights are random and the stage has two layers, since only the drafter's CUDA graph is timed
(bench/stage_step.py, in a process of its own). Invariant: None with the reason where there are no
graphs, never an estimate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spexis.bench import engines

TIMEOUT = 900.0


def drafter_seconds(
    model: str, *, device: str, rows: Sequence[int], layers: int, vocab: int
) -> tuple[dict[str, float] | None, str | None]:
    """(seconds by rows, None), or (None, why not).

    layers, vocab: attention layers of the drafter, tokens of its vocabulary.
    """
    if device != "cuda":
        return None, "timed as a CUDA graph, and this is a CPU"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        command = [
            *(sys.executable, "-m", "spexis.bench.stage_step", "--model", model, "--layers", "2"),
            *("--batches", *map(str, rows), "--rounds", "3", "--steps", "40", "--context", "128"),
            *("--drafter-layers", str(layers), "--draft-vocab", str(vocab)),
            *("--output", str(output)),
        ]
        env = {**engines.base_environment(dict(os.environ)), "VLLM_USE_V2_MODEL_RUNNER": "1"}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return None, f"did not end within {TIMEOUT:.0f} s"
        if done.returncode:
            return None, f"failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        steps = json.loads(output.read_text())["ms"]
    found = {str(step["batch"]): step["draft"] / 1e3 for step in steps if step["draft"]}
    return (found, None) if found else (None, "no graph of the drafter was captured")
