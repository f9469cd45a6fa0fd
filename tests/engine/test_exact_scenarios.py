# SPDX-License-Identifier: Apache-2.0
"""Every feature on a tiny model at PP=2 and PP=3, and with TP: equal to stock vLLM at PP=1.

    python -m pytest tests/engine/test_exact_scenarios.py

The scenarios and what they must have caused are in spexis/bench/scenarios.py. The last tests are
negative controls: on an engine that returns guesses the same comparison must fail.
"""

import pytest
from exact_work import PROMPTS, scenarios, start

from spexis.bench.compare import differences, problems
from spexis.bench.engines import EngineSpec
from spexis.bench.exact import CRAMPED, ROOMY, oracle
from spexis.bench.scenarios import SCENARIOS

pytestmark = pytest.mark.engine

ON_CRAMPED = [name for name in SCENARIOS if not SCENARIOS[name].same_cached_tokens]
THREE_STAGES = ("base", "first_turn", "pressure", "aborts", "seeds", "structured", "cache_reset")
TENSOR_PARALLEL = ("base", "first_turn", "pressure", "aborts", "stop_strings", "seeds")


def check(stock: dict, result: dict, name: str) -> None:
    assert differences(SCENARIOS[name], stock, result) == []
    assert problems(SCENARIOS[name], result) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_stock_engine_shows_the_feature(stock, name):
    """Else comparing with it proves nothing."""
    assert problems(SCENARIOS[name], stock[name]) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_oracle_drafts(stock, roomy, name):
    check(stock[name], roomy[name], name)


@pytest.mark.parametrize("name", ON_CRAMPED)
def test_exit_drafts_in_a_cramped_cache(stock, cramped, name):
    check(stock[name], cramped[name], name)


def test_no_slot_is_left(roomy, cramped):
    assert roomy.slots_left == cramped.slots_left == 0


def test_guesses_were_right_and_wrong(roomy, cramped):
    """The runs above must have seen both outcomes, and preemptions."""
    for run in (roomy, cramped):
        counters = run["mixed"]["counters"]
        assert counters["accepted"] > 50 and counters["discarded_rows"] > 50
    assert sum(cramped[name]["preemptions"] for name in ON_CRAMPED) > 10


@pytest.fixture(scope="module")
def three_stages(tiny_models, stock, reference):
    """Also one step more in flight than there are stages."""
    spec = EngineSpec(
        model=tiny_models.model(),
        stages=3,
        drafter=oracle(reference, 0.6),
        settings={"steps_in_flight": 4},
        options=CRAMPED,
    )
    return start(spec, scenarios(names=THREE_STAGES), stock)


@pytest.mark.parametrize("name", THREE_STAGES)
def test_three_stages(stock, three_stages, name):
    check(stock[name], three_stages[name], name)


@pytest.fixture(scope="module")
def tensor_parallel(tiny_models, stock):
    spec = EngineSpec(
        model=tiny_models.model(),
        stages=2,
        tensor=2,
        drafter=tiny_models.drafter(),
        options={**ROOMY, "num_gpu_blocks_override": CRAMPED["num_gpu_blocks_override"]},
    )
    return start(spec, scenarios(names=TENSOR_PARALLEL), stock)


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_and_pipeline_parallel(stock, tensor_parallel, name):
    check(stock[name], tensor_parallel[name], name)


def test_comparison_notices_a_lossy_drafter(stock, roomy):
    """Negative control: the synthetic drafter changes tokens by design."""
    assert len(differences(None, stock["prompts"], roomy["lossy"])) > len(PROMPTS.rows) // 2


def test_comparison_notices_a_missing_rule(stock, roomy):
    """Negative control: without rule 1 (engine/verdict.py) wrong guesses become text."""
    assert len(differences(None, stock["prompts"], roomy["no rule 1"])) > len(PROMPTS.rows) // 2
