# SPDX-License-Identifier: Apache-2.0
"""The planner against what was measured on two H200s and against the published winners."""

import json
from pathlib import Path

import pytest

from spexis import cli
from spexis.core.plan import beta_histogram, plan
from spexis.core.presets import HARDWARE, MEASURED, MODELS, STACKS, estimate_profile
from spexis.simulator.tables import PUBLISHED, published_row

STORED = str(Path(__file__).parents[2] / "benchmarks/results/2026-11-30-gpu-profile-l70.json")


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
    argv = ["plan", str(tmp_path), "--gpus", "2", "--acceptance", "0.7"]
    assert cli.main(argv) == 0
    assert "SP 2 stages" in capsys.readouterr().out


def test_plan_from_a_measured_profile(capsys):
    def ranking(*more):
        assert cli.main(["plan", "--profile", STORED, "--context", "128", *more]) == 0
        out = capsys.readouterr().out
        last = json.loads(out.splitlines()[-1])
        return out, {o["label"]: o["tokens_per_second"] for o in last["ranking"]}

    near_text, near = ranking("--acceptance", "0.785")
    assert set(near) == {"TP2", "PP 2 stages", "SP 2 stages"}  # a GPU alone cannot hold it
    assert "assumed - all-reduce: vLLM's own on such devices" in near_text
    assert next(iter(near)) == "TP2"  # as measured
    far_text, far = ranking("--acceptance", "0.785", "--no-p2p")
    assert far["TP2"] < 0.9 * near["TP2"] and "without peer access" in far_text
    assert far["SP 2 stages"] == pytest.approx(near["SP 2 stages"], rel=0.01)
    _, four = ranking("--acceptance", "0.785", "--gpus", "4")
    assert {"TP4", "PP 4 stages", "SP 2 stages TP2", "2xTP2"} <= set(four)
    text, without = ranking()
    assert "give --acceptance" in text and not any("SP" in label for label in without)
    # The published acceptance of the model by that name, its dimensions being the profile's.
    _, named = ranking("llama-70b")
    assert "SP 2 stages" in named


def test_a_profile_with_nccls_all_reduce_only_says_so(tmp_path, capsys):
    block = json.loads(Path(STORED).read_text())
    for gpu in block["hardware"]["gpus"]:
        gpu["name"] = "some GPU"
    (tmp_path / "p.json").write_text(json.dumps(block))
    assert cli.main(["plan", "--profile", str(tmp_path / "p.json"), "--acceptance", "0.7"]) == 0
    assert "TP may be priced too high" in capsys.readouterr().out


def test_a_profile_without_links_prices_no_tensor_parallelism(tmp_path, capsys):
    block = json.loads(Path(STORED).read_text())
    (tmp_path / "p.json").write_text(json.dumps({**block, "link_seconds": None}))
    argv = ["plan", "--profile", str(tmp_path / "p.json"), "--acceptance", "0.7"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "no TP: the profile has no all-reduce times" in out
    assert "TP2" not in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nothing"], "no preset"),
        (["--gpus", "0"], "above 0"),
        (["--acceptance", "2"], "from 0 to 1"),
        (["--profile", "none.json"], "cannot be read"),
        (["--profile", STORED, "--hardware", "h200"], "give one of them"),
        (["--no-p2p"], "needs --profile"),
        (["llama-8b", "--profile", STORED], "of another model (layers is 80 there and 32 in"),
    ],
)
def test_plan_mistakes_are_one_line(argv, words, capsys):
    assert cli.main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["--gpus", "--batch", "--context", "--prompt", "--top"])
@pytest.mark.parametrize("given", ["0", "-1", "x", "²"])
def test_plan_numbers_that_make_no_sense(name, given, capsys):
    assert cli.main(["plan", name, given]) == 2
    assert f"{name}: {given}: allowed is a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["2", "-0.1", "nan", "x"])
def test_plan_shares_that_make_no_sense(given, capsys):
    assert cli.main(["plan", "--acceptance", given]) == 2
    assert f"{given}: allowed is a number from 0 to 1" in capsys.readouterr().err


def test_plan_knows_the_dimensions_that_can_be_profiled(capsys):
    rankings = []
    for name in ("l70", "llama-70b"):
        assert cli.main(["plan", name, "--acceptance", "0.7"]) == 0
        rankings.append(json.loads(capsys.readouterr().out.splitlines()[-1])["ranking"])
    assert rankings[0] == rankings[1]
