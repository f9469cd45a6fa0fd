# SPDX-License-Identifier: Apache-2.0
"""The verdict rules hold in random histories, and not one of them can be left out.

Histories of requests (arrivals, holds, chunked prefill, preemptions, aborts, stops, slot reuse,
requests at stock cadence) run through 2 to 4 stages with more steps in flight than stages. The
property is that of spexis.bench.pipeline: plain decoding's text, each row that counts read the
verified text on every stage, nothing left behind. `make histories` runs 100,000 of them.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spexis.bench.histories import (
    MUTATIONS,
    Setting,
    breaks,
    group_of,
    measure_rate,
    random_setting,
    run_group,
)
from spexis.bench.pipeline import RULES, BrokenError
from spexis.bench.scheduler_sim import History
from spexis.engine.verdict import NO_TOKEN, FirstStage, LastStage, Plan, SlotTable, is_due

CPU = torch.device("cpu")
FAULTS = (BrokenError, IndexError, KeyError)
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chance(*values: float) -> st.SearchStrategy[float]:
    return st.sampled_from((0.0, *values))


@st.composite
def histories(draw) -> History:
    max_prompt, max_tokens = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    need = -(-(max_prompt + max_tokens) // 2)  # blocks of two tokens
    return History(
        seed=draw(st.integers(0, 1 << 30)),
        acceptance=draw(st.sampled_from((0.6, 0.9, 0.3, 1.0, 0.0))),
        vocab_size=draw(st.integers(2, 8)),
        num_requests=draw(st.integers(1, 6)),
        max_prompt=max_prompt,
        max_tokens=max_tokens,
        max_running=draw(st.integers(1, 4)),
        num_blocks=need + draw(st.integers(0, 3 * need)),
        block_size=2,
        token_budget=draw(st.sampled_from((8, 3, 1, 32))),
        arrive=draw(st.sampled_from((1.0, 0.3))),
        stop=draw(chance(0.3)),
        stock=draw(chance(0.3)),
        hold=draw(chance(0.1, 0.4)),
        abort=draw(chance(0.02, 0.1)),
        preempt=draw(chance(0.02, 0.1)),
        flush=draw(chance(0.02, 0.1)),
        pause=draw(chance(0.1)),
    )


PIPELINES = st.builds(
    Setting,
    seed=st.integers(0, 1 << 30),
    num_stages=st.integers(2, 4),
    more_in_flight=st.integers(0, 3),
    stall=st.sampled_from((0.0, 0.3)),
    eager=st.sampled_from((1.0, 0.7, 0.3)),
)


@settings(max_examples=200, **SETTINGS)
@given(group=st.lists(histories(), min_size=1, max_size=4), setting=PIPELINES)
def test_random_histories(group, setting):
    run_group(group, setting, max_calls=8_000)


@pytest.mark.parametrize("rule", MUTATIONS)
def test_no_rule_can_be_left_out(rule):
    @settings(max_examples=400, phases=(Phase.generate,), **SETTINGS)
    @given(group=st.lists(histories(), min_size=1, max_size=4), setting=PIPELINES)
    def property_without_the_rule(group, setting):
        run_group(group, setting, MUTATIONS[rule], max_calls=8_000)

    with pytest.raises(FAULTS):
        property_without_the_rule()


def test_events_do_happen():
    """The histories that `make histories` runs are not idle ones."""
    pipelines = [run_group(group_of(seed), random_setting(seed)) for seed in range(4)]
    members = [member for p in pipelines for member in p.scheduler.members]
    assert sum(m.num_preemptions for m in members) > len(members) / 2
    assert sum(m.num_aborts for m in members) > len(members) / 8
    assert sum(m.num_stops for m in members) > 2 * len(members)
    assert sum(p.num_wrong for p in pipelines) > len(members)
    assert sum(p.num_rows for p in pipelines) > 15 * len(members)


def test_a_failure_names_its_history():
    with pytest.raises(BrokenError) as caught:
        run_group(group_of(0), random_setting(0), MUTATIONS["judge: token"])
    assert caught.value.model.seed in {h.seed for h in group_of(0)}
    assert breaks(RULES, max_groups=3) is None


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_rate_follows_the_law(num_stages, acceptance):
    requests = 200 if 0 < acceptance < 1 else 4
    rate = measure_rate(num_stages, acceptance, num_requests=requests, num_steps=144)
    assert rate.deviation <= 0.01, rate


# ------------------------------------------------------------- by hand, one step each
def tensor(*values):
    return torch.tensor(values)


def test_verdict_restarts_only_where_the_guess_was_wrong():
    first = FirstStage(num_slots=3, num_stages=2, device=CPU)
    yes, slots = tensor(True, True, True), tensor(0, 1, 2)
    first.propose(slots, tensor(5, 6, 7), tensor(50, 60, 70), yes)
    first.propose(slots, tensor(6, 7, 8), tensor(51, 61, 71), yes)
    wrong = first.apply_verdict(slots, tensor(5, 6, 7), tensor(50, 99, NO_TOKEN), yes)
    assert wrong.tolist() == [False, True, False]
    assert first.position[:3].tolist() == [6, 6, 8]
    assert first.token[:3].tolist() == [51, 99, 71]


def test_dead_slots_take_no_verdict():
    first = FirstStage(num_slots=1, num_stages=2, device=CPU)
    first.propose(tensor(0), tensor(5), tensor(50), tensor(True))
    wrong = first.apply_verdict(tensor(0), tensor(5), tensor(99), tensor(False))
    assert not wrong.any()
    assert (first.position[0], first.token[0]) == (5, 50)


def test_judge_wants_position_and_token():
    last = LastStage(num_slots=4, device=CPU)
    yes, no = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    slots = torch.arange(4)
    last.expect(slots, tensor(5, 5, 5, 5), tensor(50, 50, 50, 50), yes)
    positions, tokens = tensor(5, 5, 6, 6), tensor(50, 51, 50, 51)
    assert last.judge(slots, positions, tokens, no, yes).tolist() == [True, False, False, False]
    assert last.judge(slots, positions, tokens, yes, yes).all()
    assert not last.judge(slots, positions, tokens, yes, no).any()


def test_discards_leave_the_expectation():
    last = LastStage(num_slots=2, device=CPU)
    slots = tensor(0, 1)
    last.expect(slots, tensor(5, 5), tensor(50, 50), tensor(True, True))
    verdict = last.expect(slots, tensor(6, 6), tensor(60, 60), tensor(True, False))
    assert verdict.tolist() == [60, NO_TOKEN]
    assert last.position[:2].tolist() == [6, 5]
    assert last.token[:2].tolist() == [60, 50]


def test_slots_are_reused_with_a_new_generation():
    table = SlotTable(2)
    slot = table.bind("a", 3)
    before = table.generation[slot]
    assert table.bind("a", 7) == slot  # resumed
    assert table.generation[slot] > before
    assert table.prefill_len[slot] == 7
    other, before = table.bind("b", 1), table.generation[slot]
    assert other != slot
    table.release("a")
    table.release("unknown")
    assert table.bind("c", 2) == slot
    assert table.generation[slot] > before
    with pytest.raises(IndexError):
        table.bind("d", 1)


@pytest.mark.parametrize(
    ("call", "num_ready", "due"), [(5, 0, False), (6, 0, True), (5, 2, False), (5, 3, True)]
)
def test_when_a_verdict_is_due(call, num_ready, due):
    none = np.empty(0, dtype=np.int64)
    plan = Plan(4, 3, none, none, torch.empty(0), torch.empty(0))
    assert is_due(plan, call, num_stages=2, num_ready=num_ready) is due
