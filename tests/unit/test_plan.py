# SPDX-License-Identifier: Apache-2.0
"""The planner against what was measured on two H200s and against the published winners."""

import json

import pytest

from spexis import cli
from spexis.core.plan import beta_histogram, plan
from spexis.core.presets import HARDWARE, MEASURED, MODELS, STACKS, estimate_profile
from spexis.simulator.tables import PUBLISHED, published_row


def rate(options, mode, **match):
    fitting = [
        o
        for o in options
        if o.mode == mode and all(getattr(o, key) == value for key, value in match.items())
    ]
    return fitting[0].tokens_per_second


@pytest.mark.parametrize(
    ("hardware", "mode", "batch", "measured"),
    [
        ("h200", "tp", 64, 2742),
        ("h200", "tp", 128, 4870),
        ("h200-no-p2p", "tp", 64, 1908),
        ("h200-no-p2p", "tp", 128, 3098),
        ("h200", "pp", 64, 1663),
        ("h200", "pp", 128, 3148),
        ("h200", "sp", 64, 2613),
        ("h200", "sp", 128, 4430),
    ],
)
def test_two_h200s_as_measured(hardware, mode, batch, measured):
    """benchmarks/results/gpu2-l70-2026-11-29-b.json"""
    options = plan(HARDWARE[hardware], MODELS["llama-70b"], 2, batch, context=1, replicas=[1])
    assert rate(options, mode) == pytest.approx(measured, rel=0.07)


def test_published_winners():
    """Four of five; why not the fifth: docs/scheduling.md."""
    same = {case: published_row(*case, steps=400)["same_winner"] for case in PUBLISHED}
    assert [case for case, ok in same.items() if not ok] == [("a100", "qwen3-32b")]


def test_fast_links_favour_tensor_parallelism():
    def best(hardware):
        return plan(HARDWARE[hardware], MODELS["llama-70b"], 8, 64, replicas=[1])[0].mode

    assert best("a100-nvlink") == "tp"
    assert best("a100") in ("sp", "sp-alpha")


def test_memory_limits_what_is_listed_and_the_batch():
    model = MODELS["llama-70b"]
    assert plan(HARDWARE["h100"], model, 2, 8) == []  # 141 GB of weights
    options = plan(HARDWARE["h100"], model, 4, 64, context=8000)
    assert options and all(o.batch < 64 and "memory holds" in o.reason for o in options)


def test_ranking_is_sorted_and_covers_mixes_and_replicas():
    options = plan(HARDWARE["h200"], MODELS["llama-8b"], 4, 64)
    rates = [o.tokens_per_second for o in options]
    assert rates == sorted(rates, reverse=True)
    found = {(o.mode, o.replicas, o.stages, o.tensor) for o in options}
    assert {("tp", 4, 1, 1), ("tp", 1, 1, 4), ("pp", 1, 2, 2), ("sp", 2, 2, 1)} <= found
    assert all(o.replicas * o.stages * o.tensor == 4 for o in options)


def test_no_sp_where_nobody_knows_how_often_drafts_are_right():
    options = plan(HARDWARE["h100"], MODELS["qwen3-32b"], 8, 64)
    assert all(o.stages == 2 for o in options if o.mode == "sp")
    options = plan(HARDWARE["h100"], MODELS["qwen3-32b"], 8, 64, acceptance=0.6)
    assert {o.stages for o in options if o.mode == "sp"} >= {2, 4, 8}


def test_assumed_confidences_have_the_acceptance_as_mean():
    for p in (0.3, 0.6, 0.9):
        assert beta_histogram(p).mean == pytest.approx(p, abs=0.01)


def test_estimated_stage_is_near_the_measured_one():
    estimated = estimate_profile(HARDWARE["h200"], MODELS["llama-70b"], 1, 2)
    points = {r: s for r, _, s in estimated.stages[0].points}
    for rows, _, seconds in MEASURED["h200-llama-70b-pp2"].stages[0].points:
        assert points[rows] == pytest.approx(seconds, rel=0.02)


def test_every_preset_says_where_it_is_from():
    assert all(h.source for h in HARDWARE.values())
    assert all(s.source for s in STACKS.values())


def test_plan_command(tmp_path, capsys):
    assert cli.main(["plan", "--hardware", "a100", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last["name"] == "plan" and last["ok"]
    assert last["best"]["label"] == last["ranking"][0]["label"]
    assert lines[0].startswith("assumed - links")
    config = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["plan", "--model", str(tmp_path), "--gpus", "2", "--acceptance", "0.7"]
    assert cli.main(argv) == 0
    assert "SP 2 stages" in capsys.readouterr().out
    profile = tmp_path / "p.json"
    MEASURED["h200-llama-70b-pp2"].save(profile)
    assert cli.main(["plan", "--profile", str(profile), "--acceptance", "0.7"]) == 0
    assert "PP 2 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nothing"], "no preset"),
        (["--gpus", "0"], "above 0"),
        (["--acceptance", "2"], "from 0 to 1"),
        (["--profile", "h200-llama-70b-pp2"], "needs --acceptance"),
    ],
)
def test_plan_mistakes_are_one_line(argv, words, capsys):
    assert cli.main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
