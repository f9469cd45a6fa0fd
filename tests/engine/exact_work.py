# SPDX-License-Identifier: Apache-2.0
"""What the exactness tests run, and how they start engines (fixtures: conftest.py)."""

from pathlib import Path

import pytest

from spexis.bench import tiny
from spexis.bench.engines import EngineRun, EngineSpec, Work, run_engine
from spexis.bench.exact import scenario_work, tiny_rows
from spexis.bench.rows import law_work

TIMEOUT = 900.0  # a busy machine; idle ones need a tenth
LAW_TOKENS, LAW_STREAMS = 120, 32
SAMPLED_TEMPERATURES = (0.5, 1.0, 1.5)
SAMPLES, SAMPLED_TOKENS = 2000, 5
SAMPLED_PROMPT = list(range(130, 142))  # its next token is open at every temperature

PROMPTS = Work(name="prompts", rows=tiny_rows(16, max_tokens=32))


def scenarios(size: int = 4, names: tuple[str, ...] | None = None) -> list[Work]:
    return [work for work in scenario_work(size) if names is None or work.name in names]


def sampled(temperature: float) -> Work:
    """One prompt, many times, without a seed."""
    params = {"temperature": temperature, "max_tokens": SAMPLED_TOKENS, "ignore_eos": True}
    row = {"prompt_token_ids": SAMPLED_PROMPT, "params": params}
    return Work(name=f"sampled {temperature}", rows=[row] * SAMPLES)


GREEDY_SAMPLED = Work(  # what the oracle guesses while sampling: the most likely tokens
    name="most likely",
    rows=[
        {
            "prompt_token_ids": SAMPLED_PROMPT,
            "params": {"max_tokens": SAMPLED_TOKENS, "ignore_eos": True},
        }
    ],
)
LAW = law_work(LAW_STREAMS, LAW_TOKENS, "law")


class Tiny:
    """Tiny models and their drafters, made on first use."""

    def __init__(self, folder: Path):
        self.folder = folder

    def model(self, family: str = "llama") -> str:
        path = self.folder / f"tiny-{family}"
        if not path.exists():
            tiny.tiny_model(family, path)
        return str(path)

    def drafter(self, family: str = "llama") -> dict:
        path = self.folder / f"drafter-{family}"
        if not path.exists():
            tiny.tiny_drafter(self.model(family), path)
        return {"method": "exit", "model": str(path)}


def start(spec: EngineSpec, work: list[Work], previous: dict | None = None) -> EngineRun:
    return run_engine(spec, work, previous=previous, timeout=TIMEOUT)


def stock_results(spec: EngineSpec, work: list[Work]) -> dict[str, dict]:
    run = start(spec, work)
    if run.error:
        pytest.fail(f"the stock engine did not run: {run.error}")
    return run.results
