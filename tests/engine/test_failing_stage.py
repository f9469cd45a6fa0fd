# SPDX-License-Identifier: Apache-2.0
"""A stage that raises in the middle of a step is an error to the user, soon, and no hang.

vLLM itself returns exceptions of the last stage only (engine/worker.py says more).
"""

import json

import pytest

from spexis.bench.engines import EngineSpec, Work, run_engine

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8]
NO_TENSOR = [9, 9, 1 << 70]  # the third guess does not fit a tensor: the drafter raises


def test_an_exception_on_the_first_stage_ends_the_engine(tiny_models, tmp_path):
    reference = tmp_path / "reference.jsonl"
    reference.write_text(json.dumps({"prompt_token_ids": PROMPT, "token_ids": NO_TENSOR}))
    spec = EngineSpec(
        model=tiny_models.model(),
        stages=2,
        drafter={"method": "oracle", "reference": str(reference), "acceptance": 1.0},
    )
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    work = [Work(name="prompts", rows=[{"prompt_token_ids": PROMPT, "params": params}])]
    run = run_engine(spec, work, timeout=300)
    assert run.error is not None
    # Whichever comes first: the last stage loses its peer, the executor finds the worker gone, or
    # its monitor cancels what the engine waits for. A hang would be "took longer than".
    words = ("Connection closed by peer", "died", "RuntimeError: cancelled")
    assert any(word in run.error for word in words), run.error
    assert "prompts" not in run.results
