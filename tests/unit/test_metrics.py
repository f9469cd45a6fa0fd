# SPDX-License-Identifier: Apache-2.0
"""Counters, the per-step log, the wire to the front end, and what /metrics then shows.

The `engine` tests use vLLM's own statistics classes (no engine starts).
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spexis.core import decisions
from spexis.core.law import rows_per_token
from spexis.core.live_mode import Reason
from spexis.core.mode import Mode
from spexis.observability import wire
from spexis.observability.counters import FIELDS, SpexisCounters
from spexis.observability.iteration_log import IterationLog
from spexis.observability.policy_state import STEPS, PolicyState, policy_state


def played(num_stages=2, acceptance=0.5, steps=2000):
    """Counters after one request in a full pipeline, each guess right with `acceptance`."""
    import random

    draw, counters = random.Random(1), SpexisCounters(num_stages=num_stages)
    wrong_until, guess, first_discard = 0, False, False
    for step in range(steps):
        counters.observe_step(
            num_rows=1, num_decode_rows=1, num_speculative_rows=1, num_in_flight=num_stages
        )
        if step < wrong_until:
            counters.discarded_rows += 1
            counters.drafts += first_discard
            first_discard = guess = False
            continue
        counters.tokens += 1
        counters.drafts += guess
        counters.accepted += guess
        guess = True
        if draw.random() >= acceptance:
            wrong_until, first_discard = step + num_stages, True
    return counters


# -- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_counters_agree_with_the_law(num_stages):
    counters = played(num_stages, 0.7, 40_000)
    assert counters.acceptance == pytest.approx(0.7, abs=0.02)
    law = rows_per_token(counters.acceptance, num_stages)
    assert counters.rows_per_token == pytest.approx(law, rel=0.01)


def test_nothing_counted_is_not_a_rate():
    counters = SpexisCounters(num_stages=2)
    assert counters.acceptance is None and counters.rows_per_token is None


@pytest.mark.parametrize(("in_flight", "idle"), [(1, 2), (2, 1), (3, 0), (4, 0), (None, 0)])
def test_idle_slots(in_flight, idle):
    counters = SpexisCounters(num_stages=3)
    counters.observe_step(num_rows=1, num_decode_rows=1, num_in_flight=in_flight)
    assert counters.idle_slots == idle


def test_take_gives_every_change_once():
    counters = SpexisCounters(num_stages=2)
    assert counters.take() == {}
    counters.tokens += 3
    counters.preemptions += 1
    assert counters.take() == {"tokens": 3, "preemptions": 1}
    assert counters.take() == {}
    counters.tokens += True  # the scheduler adds truth values
    assert counters.take() == {"tokens": 1} and type(counters.tokens) is int


# -- the per-step log -----------------------------------------------------------------------------


def fake_scheduler():
    return SimpleNamespace(
        counters=SpexisCounters(num_stages=2),
        num_verdicts=0,
        running=[1, 2],
        waiting=[3],
        kv_cache_manager=SimpleNamespace(usage=0.123456),
        mode=Mode.SP,
        live_mode=None,
        lookahead=None,
    )


def test_iteration_log_sums_to_the_counters(tmp_path):
    scheduler, path = fake_scheduler(), tmp_path / "made" / "steps.jsonl"
    log = IterationLog.open(str(path))
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 1, "c": 7},
        spexis_rows={"a": True, "b": False},
        total_num_scheduled_tokens=9,
    )
    for step in range(1, 4):
        scheduler.num_verdicts = step
        scheduler.counters.tokens += 1
        scheduler.counters.discarded_rows += step
        log.write(scheduler, output)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert sum(line["rows"]["discarded"] for line in lines) == scheduler.counters.discarded_rows
    assert lines[0]["rows"] == {"prompt": 1, "token": 1, "discarded": 1, "stale": 0}
    assert lines[0]["scheduled_tokens"] == 9 and lines[0]["kv_usage"] == 0.1235
    assert lines[0]["mode"] == "sp" and "lookahead" not in lines[0]
    assert lines[0]["running"] == 2 and lines[0]["waiting"] == 1
    log.close()


def test_iteration_log_not_asked_for(tmp_path):
    log = IterationLog.open(None)
    log.write(None, None)
    log.close()
    assert list(tmp_path.iterdir()) == []


# -- the wire -------------------------------------------------------------------------------------


def test_wire_with_statistics_off():
    counters = played()
    assert wire.attach(None, counters) is None
    assert counters.take()["tokens"] == counters.tokens  # nothing was lost


@pytest.mark.engine
def test_wire_survives_the_way_between_processes():
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    counters, sums = SpexisCounters(num_stages=2, drafter_version="v2"), dict.fromkeys(FIELDS, 0)
    for _ in range(3):
        part = played(steps=100)
        for name in FIELDS:
            setattr(counters, name, getattr(counters, name) + getattr(part, name))
        stats = wire.attach(SchedulerStats(), counters)
        sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
        got = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
        counts, version = wire.read(got)
        assert version == "v2"
        assert got.spec_decoding_stats.num_draft_tokens == counts["drafts"]
        assert got.spec_decoding_stats.num_accepted_tokens_per_pos == [counts["accepted"]]
        for name in FIELDS:
            sums[name] += counts[name]
    assert sums == counters.snapshot()


@pytest.mark.engine
def test_wire_of_an_idle_step_is_empty():
    from vllm.v1.metrics.stats import SchedulerStats

    stats = wire.attach(SchedulerStats(), SpexisCounters(num_stages=2))
    assert stats == SchedulerStats()
    assert wire.read(stats) == (dict.fromkeys(FIELDS, 0), None)
    assert wire.read_state(stats) is None


# -- what the policies see ------------------------------------------------------------------------


def with_policies(running=(1,)):
    """A scheduler with look-ahead and mode control."""
    check = SimpleNamespace(ahead=(1, 2, 3, 4, 5, 6), due=40, came=39, kv_tokens=38)
    return SimpleNamespace(
        lookahead=SimpleNamespace(check=check, decision=decisions.WAIT),
        live_mode=SimpleNamespace(mode=Mode.PP, reason=Reason.TRIAL),
        running=list(running),
    )


def test_no_policy_no_state():
    assert policy_state(fake_scheduler()) is None


def test_state_of_the_policies():
    state = policy_state(with_policies())
    assert state.decisions == {"lookahead": decisions.WAIT, "mode": ("pp", "trial")}
    assert state.gauges["kv_tokens"] == 38 and state.gauges["lookahead_due_kv_tokens"] == 40
    assert state.gauges["lookahead_kv_tokens/1"] == 1
    assert state.gauges["lookahead_kv_tokens/256"] == 6
    idle = policy_state(with_policies(running=()))
    assert not any(idle.gauges[f"lookahead_kv_tokens/{steps}"] for steps in STEPS)
    one = with_policies()
    one.lookahead = None
    assert policy_state(one) == PolicyState({}, {"mode": ("pp", "trial")})


def test_policies_say_what_is_listed_only():
    from spexis.core.live_mode import LiveMode
    from spexis.engine import lookahead

    assert decisions.Decision("sp", str(LiveMode().reason)) in decisions.DECISIONS["mode"]
    said = {name for name in dir(decisions) if name.isupper() and name != "DECISIONS"}
    assert {getattr(decisions, name) for name in said} == {*decisions.DECISIONS["lookahead"]}
    source = Path(lookahead.__file__).read_text()
    assert {name for name in said if f"decisions.{name}" in source} == said
    assert sum(map(len, decisions.DECISIONS.values())) < 20, "each is a time series"


@pytest.mark.engine
def test_state_survives_the_way_between_processes():
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    counters, state = SpexisCounters(num_stages=2), policy_state(with_policies())
    counters.steps, counters.held = 2, 6
    stats = wire.attach(SchedulerStats(), counters, state)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    got = wire.read_state(MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats)
    assert got.decisions == state.decisions
    assert got.gauges == {**state.gauges, "held_requests": 3}, "a step"
    assert wire.read(stats)[0]["held"] == 6


@pytest.mark.engine
def test_held_requests_need_no_other_policy():
    from vllm.v1.metrics.stats import SchedulerStats

    counters = SpexisCounters(num_stages=2)
    counters.steps, counters.held = 1, 4
    for held in (4, 0):
        state = wire.read_state(wire.attach(SchedulerStats(), counters))
        assert state == PolicyState({"held_requests": held})


# -- the front end --------------------------------------------------------------------------------


def fake_vllm_config(spexis):
    return SimpleNamespace(
        additional_config={"spexis": spexis},
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        model_config=SimpleNamespace(served_model_name="m"),
    )


def series(prefix, end="_total"):
    from prometheus_client import REGISTRY

    return {
        (
            sample.name,
            *(v for k, v in sorted(sample.labels.items()) if k not in ("model_name",)),
        ): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith(prefix) and sample.name.endswith(end)
    }


@pytest.fixture
def stat_logger():
    pytest.importorskip("vllm")
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from spexis.observability.stat_logger import SpexisStatLogger, _unregister

    unregister_vllm_metrics()
    yield SpexisStatLogger(fake_vllm_config({"drafter": {"method": "synthetic"}}), [0])
    unregister_vllm_metrics()
    _unregister()


@pytest.mark.engine
def test_series_add_up(stat_logger):
    from vllm.v1.metrics.stats import SchedulerStats

    start = series("spexis:")
    assert start and not any(start.values()), "series exist from the start, at 0"
    counters = played(acceptance=0.6)
    counters.idle_slots = 10
    stat_logger.record(wire.attach(SchedulerStats(), counters), None)
    stat_logger.record(SchedulerStats(), None)
    stat_logger.record(None, None)
    spexis, stock = series("spexis:"), series("vllm:spec_decode")
    for stage in ("0", "1"):
        slots = {
            key[2]: value
            for key, value in spexis.items()
            if key[0] == "spexis:pipeline_slot_total" and key[3] == stage
        }
        assert slots == {
            "prompt": 0,
            "real": counters.tokens - counters.accepted,
            "draft": counters.accepted,
            "discarded": counters.discarded_rows,
            "stale": 0,
            "idle": 5,
        }
    assert spexis["spexis:discarded_rows_total", "0"] == counters.discarded_rows
    assert spexis["spexis:drafts_total", "synthetic", "0"] == counters.drafts
    assert spexis["spexis:accepted_drafts_total", "synthetic", "0"] == counters.accepted
    assert stock["vllm:spec_decode_num_drafts_total", "0"] == counters.drafts
    assert stock["vllm:spec_decode_num_draft_tokens_total", "0"] == counters.drafts
    assert stock["vllm:spec_decode_num_accepted_tokens_total", "0"] == counters.accepted
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert stock[per_position, "0", "0"] == counters.accepted


@pytest.mark.engine
def test_policies_gauges(stat_logger):
    from vllm.v1.metrics.stats import SchedulerStats

    def gauges():
        found = series("spexis:", "")
        return {k: v for k, v in found.items() if not k[0].endswith(("_total", "_created"))}

    assert gauges() == {}, "no policy is on"
    counters = played()
    stat_logger.record(wire.attach(SchedulerStats(), counters), None)
    assert gauges() == {}
    state = policy_state(with_policies())
    for choice, on in (("wait", "wait"), ("admit", "admit"), ("bribe", "admit")):
        state.decisions["lookahead"] = next(
            (d for d in decisions.DECISIONS["lookahead"] if d.choice == choice), (choice, "gold")
        )
        stat_logger.record(wire.attach(SchedulerStats(), counters, state), None)
        found = gauges()
        assert [k[1] for k, v in found.items() if "lookahead" in k and v] == [on]
    assert found["spexis:kv_tokens", "0"] == 38
    assert found["spexis:held_requests", "0"] == 0
    assert found["spexis:lookahead_kv_tokens", "0", "32"] == 3
    assert found["spexis:decision", "pp", "0", "mode", "trial"] == 1
    assert len(found) == 4 + len(STEPS) + sum(map(len, decisions.DECISIONS.values()))


@pytest.mark.engine
def test_spexis_top_reads_what_was_recorded(stat_logger):
    from prometheus_client import REGISTRY, generate_latest
    from vllm.v1.metrics.stats import SchedulerStats

    from spexis.observability.scrape import parse
    from spexis.observability.snapshot import take_snapshot

    counters, looks = played(), []
    counters.forecasts, counters.forecasts_exceeded = 10, 1
    for time in (1.0, 2.0):
        stats = wire.attach(SchedulerStats(), counters, policy_state(with_policies()))
        stat_logger.record(stats, None)
        looks.append(parse(generate_latest(REGISTRY).decode(), time))
        counters.steps, counters.held = counters.steps + 1, counters.held + 5
    now = take_snapshot(*looks)
    assert (now.held_requests, now.kv_tokens) == (5, 38)
    assert (now.lookahead_kv_tokens, now.lookahead_steps) == (6, 256)
    assert (now.due_kv_tokens, now.came_kv_tokens) == (40, 39)
    assert (now.forecasts, now.forecasts_exceeded) == (10, 0.1)
    assert [(d.policy, d.choice, d.reason) for d in now.decisions] == [
        ("lookahead", *decisions.WAIT),
        ("mode", "pp", "trial"),
    ]


@pytest.mark.engine
@pytest.mark.parametrize(("lookahead", "mode"), [(True, "sp"), (False, "auto")])
def test_gauges_of_configured_policies_exist_from_the_start(stat_logger, lookahead, mode):
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from spexis.observability.stat_logger import SpexisStatLogger

    unregister_vllm_metrics()
    block = {"drafter": {"method": "synthetic"}, "lookahead": lookahead, "mode": mode}
    SpexisStatLogger(fake_vllm_config(block), [0, 1])
    found = series("spexis:", "")
    for engine in ("0", "1"):
        assert found["spexis:held_requests", engine] == 0
        assert (("spexis:kv_tokens", engine) in found) is lookahead
        assert (("spexis:lookahead_kv_tokens", engine, "32") in found) is lookahead
        first = ("spexis:decision", "sp", engine, "mode", "start")
        assert found.get(first) == (1 if mode == "auto" else None)
        assert (("spexis:decision", "none", engine, "lookahead", "start") in found) is lookahead


@pytest.mark.engine
def test_log_line_once_per_interval_with_work(stat_logger, caplog):
    import logging

    from vllm.v1.metrics.stats import SchedulerStats

    # vLLM keeps its loggers' records from the root logger once an engine was configured.
    logger = logging.getLogger("vllm.spexis")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger="vllm.spexis"):
            stat_logger.log()
            assert "Spexis metrics" not in caplog.text
            stat_logger.record(wire.attach(SchedulerStats(), played()), None)
            stat_logger.log()
            stat_logger.log()
    finally:
        logger.removeHandler(caplog.handler)
    messages = [record.getMessage() for record in dict.fromkeys(caplog.records)]
    assert len(messages) == 1
    assert messages[0].startswith("Engine 000: Spexis metrics: Draft acceptance rate: ")


@pytest.mark.engine
def test_log_line_words():
    from spexis.observability.stat_logger import log_line

    counts = dict.fromkeys(FIELDS, 0)
    assert "Draft acceptance rate: n/a, Rows per token: n/a (law: n/a)" in log_line(counts, 2)
    counts |= {"steps": 100, "tokens": 50, "discarded_rows": 50, "drafts": 50, "idle_slots": 20}
    line = log_line(counts, 2)
    assert line == (
        "Spexis metrics: Draft acceptance rate: 0.0%, Rows per token: 2.00 (law: 2.00), "
        "Tokens per step: 0.50, Discarded: 50 rows, Stage idle: 10.0%"
    )


@pytest.mark.engine
def test_installed_only_for_engines_that_asked(monkeypatch):
    from vllm.v1.metrics import loggers

    from spexis import observability
    from spexis.observability import stat_logger

    seen = []

    def original(self, vllm_config, engine_idxs=None):
        self.engine_indexes, self.stat_loggers = engine_idxs or [0], []

    monkeypatch.setattr(loggers.StatLoggerManager, "__init__", original)
    monkeypatch.setattr(stat_logger, "SpexisStatLogger", lambda *a: seen.append(a) or "ours")
    observability.install()
    observability.install()
    plain = SimpleNamespace(additional_config={})
    assert loggers.StatLoggerManager(plain).stat_loggers == []
    asked = fake_vllm_config({})
    assert loggers.StatLoggerManager(asked, engine_idxs=[0]).stat_loggers == ["ours"]
    assert seen == [(asked, [0])]
