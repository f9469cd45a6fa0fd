# SPDX-License-Identifier: Apache-2.0
"""Policies decide what runs and when, never what comes out: every feature with all of them on.

    python -m pytest tests/engine/test_policies.py

Drafts that do not pay are left out by the first stage (mode "sp-alpha"), requests wait, are held
and preempted by look-ahead. What was decided must follow from the logs alone.
"""

import json

import pytest
from exact_work import scenarios, start

from spexis.bench.compare import differences, problems
from spexis.bench.engines import EngineSpec
from spexis.bench.exact import CRAMPED
from spexis.bench.scenarios import SCENARIOS
from spexis.bench.tiny import steep_profile
from spexis.config import SELECTIONS
from spexis.core.replay import replay, replay_selection

pytestmark = pytest.mark.engine

# Without priorities, where preemption is vLLM's alone.
OPTIONS = {k: v for k, v in CRAMPED.items() if k != "scheduling_policy"}
NAMES = [
    name
    for name in ("base", "first_turn", "pressure", "aborts", "stop_strings", "seeds", "structured")
    if not SCENARIOS[name].same_cached_tokens
]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("policies") / "steps.jsonl"


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=[pytest.mark.slow] * (s == "scheduler")) for s in SELECTIONS],
)
def chosen(request, tiny_models, stock, log):
    settings = {
        "selection": request.param,
        "mode": "sp-alpha",
        "profile": steep_profile(log.with_name("steep.json")),
        "lookahead": True,
        "iteration_log": str(log),
    }
    spec = EngineSpec(
        model=tiny_models.model(),
        stages=2,
        drafter=tiny_models.drafter(),
        settings=settings,
        options=OPTIONS,
    )
    return start(spec, scenarios(names=NAMES), stock)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_stock_vllms(stock, chosen, name):
    assert differences(SCENARIOS[name], stock[name], chosen[name]) == []
    assert problems(SCENARIOS[name], chosen[name]) == []


def test_drafts_ran_and_were_left_out(chosen):
    assert chosen.slots_left == 0
    totals = [chosen[name]["counters"] for name in NAMES]
    for key in ("held", "accepted", "discarded_rows"):
        assert sum(counters[key] for counters in totals) > 20, key


def test_every_decision_follows_from_the_logs(chosen, log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("admit" in entry for line in lines for entry in line["lookahead"]) > 10
    assert replay(lines) == []
    if chosen.spec.settings["selection"] == "scheduler":  # replay() has done it
        runs = [e["run"] for line in lines for e in line["selection"] if "choose" in e]
        assert sum(not all(run) for run in runs) > 20
        return
    journal = [
        json.loads(line) for line in log.with_name(f"{log.name}.selection").read_text().splitlines()
    ]
    runs = [entry["run"] for entry in journal if "choose" in entry]
    assert sum(not all(run) for run in runs) > 20
    assert replay_selection(journal) == []
