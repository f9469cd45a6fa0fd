# SPDX-License-Identifier: Apache-2.0
"""bfloat16: texts part only where the two best tokens tie within rounding (bench/rounding.py).

Slow, since it starts two engines and `make exact` has the same part.
"""

import pytest
from exact_work import start, stock_results

from spexis.bench.engines import EngineSpec, Work, write_oracle_file
from spexis.bench.exact import ROOMY, oracle, tiny_rows
from spexis.bench.rounding import find_ties, rounding_options, with_logits

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORK = Work(name="prompts", rows=with_logits(tiny_rows(32, max_tokens=64)))


@pytest.fixture(scope="module")
def runs(tiny_models):
    model, options = tiny_models.model(), rounding_options(ROOMY)
    stock = stock_results(EngineSpec(model=model, options=options), [WORK])
    reference = write_oracle_file(tiny_models.folder / "bfloat16.jsonl", stock)
    drafter = oracle(reference, 0.6)
    broken = Work(
        name="broken",
        rows=WORK.rows,
        prepare={"drafter": oracle(reference, 0.9), "trust_guesses": {}},
    )
    spec = EngineSpec(model=model, stages=2, drafter=drafter, options=options)
    return stock, start(spec, [WORK, broken], stock)


def test_texts_part_only_at_ties(runs):
    stock, run = runs
    ties = find_ties(stock["prompts"], run["prompts"])
    assert ties.bad == []
    assert ties.positions > 500


def test_a_broken_engine_is_found(runs):
    """Negative control: an engine that trusts wrong guesses parts where there is no tie."""
    stock, run = runs
    assert find_ties(stock["prompts"], run["broken"]).bad
