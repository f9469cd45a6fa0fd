# SPDX-License-Identifier: Apache-2.0
"""Two scrapes of /metrics to what `spexis top` shows: rates, latencies, the law, what lacks."""

import importlib.util
from pathlib import Path

import pytest
from metrics_text import AFTER, BEFORE, HOST, look, policies, served, stock

from spexis.observability import snapshot as snapshots
from spexis.observability.scrape import parse, quantile


def test_rates_are_differences_over_the_time_between_looks():
    now = look(BEFORE, AFTER)
    assert now.seconds == 2.0 and not now.restarted and now.notes == ()
    assert (now.models, now.engines) == (("demo",), 1)
    assert (now.running, now.waiting, now.kv_usage) == (3, 5, 0.5)
    assert (now.tokens_per_second, now.prompt_tokens_per_second) == (100, 20)
    assert (now.preemptions, now.preemptions_since_start) == (1, 4)
    assert (now.steps_per_second, now.tokens_per_step) == (50, 2)
    assert now.held_rows_per_second == 4
    assert (now.plain_share, now.mode_changes) == (0.25, 2)


def test_stages_by_kind():
    now = look(BEFORE, AFTER)
    assert [stage.stage for stage in now.stages] == ["0", "1"]
    for stage in now.stages:
        assert stage.rows == {
            "real": (1200 - 752 - 400) / 2,
            "draft": 152 / 2,
            "discarded": 30,
            "prompt": 5,
            "stale": 1,
        }
        assert stage.idle == 5 / 100


def test_acceptance_by_drafter_version_and_the_law():
    now = look(BEFORE, AFTER)
    first, second = now.drafters
    assert (first.version, first.drafts_per_second, first.acceptance) == ("v1", 50, 0.8)
    assert first.acceptance_since_start == 0.68
    # A version that appeared between the looks is counted from 0.
    assert (second.version, second.acceptance, second.acceptance_since_start) == ("v2", 0.9, 0.9)
    assert now.acceptance == pytest.approx(152 / 180)
    assert now.rows_per_token == (200 + 60) / 200
    assert now.rows_per_token_law == pytest.approx(1 + (1 - 152 / 180))
    assert now.rows_per_token_since_start == (1200 + 360) / 1200


def test_the_law_takes_the_number_of_stages_from_the_series():
    def text(steps, right, n=11):
        stages = tuple(str(i) for i in range(n))
        return served(steps, steps, drafts={"v": steps}, accepted={"v": right}, stages=stages)

    now = look(text(0, 0), text(100, 75))
    assert now.rows_per_token_law == 1 + 0.25 * 10
    assert [stage.stage for stage in now.stages] == [str(i) for i in range(11)]


def test_latencies_of_the_observations_between_looks_only():
    before = stock(ttft=(100, 0, 0), per_token=(0, 0, 7))
    now = look(before, stock(ttft=(101, 3, 0), per_token=(90, 10, 7)))
    assert now.ttft.count == 4
    assert now.ttft.mean == pytest.approx((0.05 + 3 * 0.15) / 4)
    assert now.ttft.p50 == pytest.approx(0.1 + 0.1 / 3)
    assert now.time_per_token.p50 == pytest.approx(0.01 * 50 / 90)
    assert now.time_per_token.p99 == pytest.approx(0.01 + 0.01 * 0.9)
    quiet = look(before, before).ttft
    assert (quiet.count, quiet.mean, quiet.p50, quiet.p99) == (0, None, None, None)


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0), (float("inf"), 0)], 0.5, None),
        ([(1.0, 4), (2.0, 4), (float("inf"), 4)], 0.5, 0.5),
        ([(1.0, 0), (2.0, 4), (float("inf"), 4)], 0.25, 1.25),
        ([(1.0, 1), (2.0, 2), (float("inf"), 10)], 0.99, 2.0),
        ([(1.0, 2), (2.0, 2), (3.0, 4), (float("inf"), 4)], 0.75, 2.5),
    ],
)
def test_quantile(buckets, q, expected):
    assert quantile(buckets, q) == expected


def test_several_engines_add_up_and_their_kv_use_is_averaged():
    def text(a, b):
        return stock(generation_tokens=a, kv_usage=0.2) + stock(
            generation_tokens=b, kv_usage=0.4, engine="1"
        )

    now = look(text(10, 20), text(20, 40))
    assert now.engines == 2 and now.tokens_per_second == 15 and now.running == 4
    assert now.kv_usage == pytest.approx(0.3)


def test_nothing_happened_between_looks():
    now = look(BEFORE, BEFORE)
    assert now.tokens_per_second == 0 and now.rows_per_token is None and now.acceptance is None
    assert now.rows_per_token_law is None and now.stages[0].idle is None
    assert now.rows_per_token_since_start == 1.3


@pytest.mark.parametrize("by_start_time", [False, True])
def test_a_restart_counts_from_zero(by_start_time):
    start = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"
    small = stock(generation_tokens=60) + served(steps=50, tokens=60)
    before, after = (start.format(1.0) + small, start.format(2.0) + AFTER)
    if not by_start_time:
        before, after = BEFORE, small
    now = look(before, after)
    assert now.restarted and now.tokens_per_second == (600 if by_start_time else 30)
    assert all(rate >= 0 for stage in now.stages for rate in stage.rows.values())
    assert not look(start.format(1.0) + BEFORE, start.format(1.0) + AFTER).restarted


def test_stock_vllm_is_one_plain_line():
    now = look(stock(), stock(generation_tokens=4))
    (note,) = now.notes
    assert note.startswith("no spexis:* series: Spexis is not on in this server")
    assert now.tokens_per_second == 2
    assert now.stages == () and now.drafters == () and now.rows_per_token is None


def test_a_server_without_vllm_series():
    (note,) = look(served(), served(tokens=2)).notes
    assert note.startswith("no vllm:* series")


def test_an_older_version_is_named_by_what_it_lacks():
    def without(text, name):
        return "".join(line for line in text.splitlines(True) if name not in line)

    before, after = (without(t, "held_rows") for t in (BEFORE, AFTER))
    now = look(before, after)
    assert now.notes == ("this server does not export spexis:held_rows_total",)
    assert now.held_rows_per_second is None and now.rows_per_token == 1.3
    before, after = (without(t, "inter_token") for t in (BEFORE, AFTER))
    assert look(before, after).time_per_token is None


def test_a_server_without_policies_lacks_nothing():
    now = look(BEFORE, AFTER)
    assert now.notes == () and now.decisions == ()
    assert now.held_requests is now.kv_tokens is now.lookahead_kv_tokens is None
    assert now.lookahead_steps is now.due_kv_tokens is now.came_kv_tokens is None
    assert now.forecasts == 0 and now.forecasts_exceeded is None


def test_what_the_policies_see_and_decided():
    more = served(forecasts=40, exceeded=2) + policies(
        held=3,
        on=(
            ("lookahead", "admit", "peak_fits", 0),
            ("lookahead", "wait", "peak_above_memory", 1),
            ("mode", "pp", "trial", 1),
        ),
    )
    now = look(served(), more)
    assert (now.held_requests, now.kv_tokens) == (3, 4000)
    assert (now.lookahead_kv_tokens, now.lookahead_steps) == (5000, 32)
    assert (now.due_kv_tokens, now.came_kv_tokens) == (4200, 3900)
    assert (now.forecasts, now.forecasts_exceeded) == (40, 0.05)
    assert [(d.policy, d.choice, d.reason) for d in now.decisions] == [
        ("lookahead", "wait", "peak_above_memory"),
        ("mode", "pp", "trial"),
    ]


def test_policies_of_several_engines():
    on = (("mode", "sp", "start", 1),)
    second = policies(on=(("mode", "pp", "measured", 1),)).replace('engine="0"', 'engine="1"')
    now = look(served(), served() + policies(on=on) + second)
    assert (now.held_requests, now.lookahead_kv_tokens, now.lookahead_steps) == (2, 10000, 32)
    assert [d.choice for d in now.decisions] == ["pp", "sp"]


def test_looks_in_the_wrong_order():
    with pytest.raises(ValueError, match="not later"):
        look(BEFORE, AFTER, seconds=0.0)


def test_values_that_are_not_finite_are_left_out():
    scrape = parse(f"vllm:kv_cache_usage_perc{{{HOST}}} NaN\nother 1\n", 0.0)
    assert scrape.series == {}


# -- the names ------------------------------------------------------------------------------------


def test_vllm_exports_the_series_that_are_read():
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0], "v1/metrics/loggers.py").read_text()
    for name in snapshots.VLLM_SERIES:
        base = name.removesuffix("_total").removesuffix("_count")
        assert f'"{base}"' in source, name


def test_the_fixture_has_every_series_that_is_read():
    names = set(parse(AFTER + policies(on=(("mode", "sp", "start", 1),)), 0.0).series)
    wanted = (*snapshots.VLLM_SERIES, *snapshots.SPEXIS_SERIES, *snapshots.POLICY_SERIES)
    assert names >= set(wanted)
