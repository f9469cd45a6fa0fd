# SPDX-License-Identifier: Apache-2.0
"""Engines for the exactness tests: tiny models, one stock run, and runs of engines under test.

Starting an engine takes most of the time, so each fixture starts one and runs everything on it;
the tests then look at parts of its results. Invariant: an engine that died fails the tests of what
it did not run, with its last words.
"""

import signal

import pytest
from exact_work import (
    GREEDY_SAMPLED,
    LAW,
    PROMPTS,
    SAMPLED_TEMPERATURES,
    Tiny,
    sampled,
    scenarios,
    start,
    stock_results,
)

from spexis.bench.engines import EngineRun, EngineSpec, Work, kill_on_signals, write_oracle_file
from spexis.bench.exact import CRAMPED, ROOMY, oracle
from spexis.bench.scenarios import SCENARIOS


@pytest.fixture(scope="session", autouse=True)
def no_engine_survives():
    """pytest itself handles SIGINT; a SIGTERM would otherwise leave engines behind."""
    kill_on_signals((signal.SIGTERM, signal.SIGHUP))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def stock(tiny_models: Tiny) -> dict[str, dict]:
    """The reference: stock vLLM, one stage, tiny Llama."""
    work = [*scenarios(), PROMPTS, LAW, GREEDY_SAMPLED]
    return stock_results(EngineSpec(model=tiny_models.model(), options=ROOMY), work)


@pytest.fixture(scope="session")
def reference(tiny_models: Tiny, stock: dict) -> str:
    return write_oracle_file(tiny_models.folder / "reference.jsonl", stock)


@pytest.fixture(scope="session")
def roomy(tiny_models: Tiny, stock: dict, reference: str) -> EngineRun:
    """PP=2, oracle right at random: scenarios, the law, sampling; last, a rule is taken away."""
    spec = EngineSpec(
        model=tiny_models.model(), stages=2, drafter=oracle(reference, 0.6), options=ROOMY
    )
    work = [*scenarios(), *(sampled(t) for t in SAMPLED_TEMPERATURES)]
    work += [
        Work(name=f"law {p}", rows=LAW.rows, prepare={"drafter": oracle(reference, p)})
        for p in (0.0, 0.5, 0.8, 1.0)
    ]
    lossy = {"method": "synthetic", "acceptance": 0.6}
    work += [
        Work(name="lossy", rows=PROMPTS.rows, prepare={"drafter": lossy}),
        Work(
            name="no rule 1",
            rows=PROMPTS.rows,
            prepare={"drafter": oracle(reference, 0.6), "trust_guesses": {}},
        ),
    ]
    return start(spec, work, stock)


@pytest.fixture(scope="session")
def cramped(tiny_models: Tiny, stock: dict) -> EngineRun:
    """PP=2, exit drafter, chunked prefill, preemptions, priorities."""
    spec = EngineSpec(
        model=tiny_models.model(), stages=2, drafter=tiny_models.drafter(), options=CRAMPED
    )
    work = [w for w in scenarios() if not SCENARIOS[w.name].same_cached_tokens]
    return start(spec, work, stock)
