# SPDX-License-Identifier: Apache-2.0
"""The fused kernels are the verdict rules: compared step by step in random histories.

Each kernel runs in Triton's interpreter, which must be chosen before Triton is imported, hence
the process of its own (fused_rules.py). Without Triton the same functions are verdict.py itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spexis.engine import kernels
from spexis.engine.verdict import NO_TOKEN, FirstStage, LastStage

SCRIPT = Path(__file__).parent / "fused_rules.py"
CPU = torch.device("cpu")


@pytest.mark.skipif(kernels.triton is None, reason="no Triton here (requirements/dev.lock)")
def test_kernels_equal_the_rules_on_random_histories():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    # Every kernel ran, and every branch of it was taken.
    for name in ("apply_verdict", "propose", "begin_rows", "judge_rows"):
        assert counts[name] > 20, counts
    assert counts["hashed_tokens"] == 3
    for name in ("wrong", "dead", "no_token", "no_sample", "good", "discarded"):
        assert counts[name] > 5, counts


def test_on_cpu_tensors_the_rules_themselves_run():
    assert kernels.INTERPRETED or not kernels.is_fused(torch.empty(0))


def test_padded_rows_belong_to_the_dummy_slot():
    first = FirstStage(num_slots=4, num_stages=2, device=CPU)
    yes, slots = torch.ones(2, dtype=torch.bool), torch.tensor([2, 0])
    kernels.propose(first, slots, torch.tensor([5, 6]), torch.tensor([50, 60]), yes)
    rows = kernels.RowBuffers.allocate(8, first.dummy_slot, CPU)
    ends = torch.tensor([6, 7], dtype=torch.int32)
    prefill_len = torch.tensor([9, 0, 5, 0], dtype=torch.int32)
    sent, positions = kernels.begin_rows(first, slots, ends, prefill_len, rows, num_padded=4)
    assert sent.tolist() == [[5, 6], [50, 60]]
    assert positions.tolist() == [6, 7]
    assert rows.slots[:4].tolist() == [2, 0, 4, 4]
    assert rows.start[:4].tolist() == [5, 6, 0, 0]
    assert rows.ends[:4].tolist() == [6, 7, 0, 0]
    assert rows.is_prefill[:4].tolist() == [False, True, True, True]


def test_a_discarded_row_is_one_rejected_token():
    last = LastStage(num_slots=4, device=CPU)
    slots = torch.arange(4)
    last.expect(slots, torch.full((4,), 5), torch.full((4,), 50), slots < 4)
    sent = torch.tensor([[5, 5, 6, 5], [50, 51, 50, 51]], dtype=torch.int32)
    prefill_len = torch.tensor([0, 0, 0, 9], dtype=torch.int32)  # the last row is a prompt's
    num_sampled = torch.ones(4, dtype=torch.int32)
    num_rejected = torch.zeros(4, dtype=torch.int32)
    sampled = torch.tensor([[7], [8], [9], [10]])
    verdict = kernels.judge_rows(last, slots, sent, prefill_len, sampled, num_sampled, num_rejected)
    assert verdict.tolist() == [7, NO_TOKEN, NO_TOKEN, 10]
    assert num_sampled.tolist() == [1, 0, 0, 1]
    assert num_rejected.tolist() == [0, 1, 1, 0]
