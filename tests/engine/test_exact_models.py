# SPDX-License-Identifier: Apache-2.0
"""Other families with an exit drafter of their own, the demo model, and rows per token.

    python -m pytest tests/engine/test_exact_models.py                # the demo model
    python -m pytest tests/engine/test_exact_models.py --run-slow     # and all families

`make exact` runs all of them at N = 2, 3, 4 with more prompts.
"""

import pytest
from exact_work import LAW_TOKENS, PROMPTS, start, stock_results

from spexis.bench.compare import differences, problems
from spexis.bench.engines import EngineSpec, Work, write_oracle_file
from spexis.bench.exact import ROOMY, oracle, shipped_drafter
from spexis.bench.prompts import BUILT_IN, chat_token_ids
from spexis.bench.rows import deviation

pytestmark = pytest.mark.engine


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_family_with_exit_drafter(tiny_models, family):
    """Qwen2: biases, an output head of its own, a reduced draft vocabulary, older final states."""
    model = tiny_models.model(family)
    stock = stock_results(EngineSpec(model=model, options=ROOMY), [PROMPTS])
    spec = EngineSpec(model=model, stages=2, drafter=tiny_models.drafter(family), options=ROOMY)
    result = start(spec, [PROMPTS], stock)["prompts"]
    assert differences(None, stock["prompts"], result) == []
    assert problems(None, result) == []
    assert 0.05 < result["counters"]["accepted"] / result["counters"]["drafts"] < 0.98


def test_demo_model(demo_model, tmp_path):
    """Six prompts of 24 tokens with the shipped drafter, or oracle drafts while none is shipped."""
    ids = chat_token_ids(demo_model, list(BUILT_IN[:6]))
    rows = [{"prompt_token_ids": prompt, "params": {"max_tokens": 24}} for prompt in ids]
    work, options = [Work(name="prompts", rows=rows)], {"max_num_seqs": 8}
    stock = stock_results(EngineSpec(model=demo_model, options=options), work)
    drafter = shipped_drafter(demo_model)
    if drafter is None:
        drafter = oracle(write_oracle_file(tmp_path / "reference.jsonl", stock), 0.6)
    spec = EngineSpec(model=demo_model, stages=2, drafter=drafter, options=options)
    result = start(spec, work, stock)["prompts"]
    assert differences(None, stock["prompts"], result) == []
    assert problems(None, result) == []
    assert 0 < result["counters"]["accepted"] < result["counters"]["drafts"]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_rows_per_token(stock, roomy, acceptance):
    """1 + (1-p)(N-1), at the p that was realised; at the nominal p: exact.py's part `law`."""
    result = roomy[f"law {acceptance}"]
    assert differences(None, stock["law"], result) == []
    found = deviation(result["counters"], acceptance, num_stages=2)
    assert abs(found["p_measured"] - acceptance) < 0.02, found
    # Ends count: the last token of an answer costs no discarded row.
    assert abs(found["error_at_measured_p"]) < 0.005 + 1 / LAW_TOKENS, found
