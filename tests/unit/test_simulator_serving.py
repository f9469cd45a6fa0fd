# SPDX-License-Identifier: Apache-2.0
"""The simulated server: nothing is lost, memory is never exceeded, latencies as by hand; traces."""

import gzip
import json

import numpy as np
import pytest

from spexis import cli
from spexis.config import ConfigError
from spexis.core.cost_model import CostModel
from spexis.core.presets import MEASURED
from spexis.core.stage_profile import StagePoints, StageProfile
from spexis.simulator import trace as traces
from spexis.simulator.drafts import DraftSource
from spexis.simulator.serving import POLICIES, Serving, Settings


def flat_cost(stages: int, seconds=0.01) -> CostModel:
    return CostModel.from_profile(
        StageProfile(
            hardware="h",
            model="m",
            layers_per_stage=(1,) * stages,
            stages=(StagePoints(points=((1, 0, seconds), (4096, 0, seconds))),),
        )
    )


def serve(trace="poisson:rate=20,requests=120,prompt=300,output=80", cost=None, p=0.7, **settings):
    cost = cost or CostModel.from_profile(MEASURED["h200-llama-70b-pp2"])
    serving = Serving(cost, DraftSource(p, seed=3), Settings(**settings))
    trace = traces.load(trace) if isinstance(trace, str) else trace
    return serving, serving.run(trace)


@pytest.mark.parametrize("memory", ["stock", "lookahead"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_blocks", [20_000, 220])
def test_every_request_is_answered_and_every_block_given_back(policy, memory, kv_blocks):
    serving, result = serve(policy=policy, memory=memory, kv_blocks=kv_blocks)
    figures = result.summary()
    assert figures["answered"] + figures["refused"] == 120
    assert serving.free_blocks == kv_blocks
    assert result.series[:, 2].max() <= kv_blocks
    if kv_blocks == 20_000:
        assert figures["refused"] == figures["evictions"] == 0
    latencies = result.latencies()
    assert all((seconds > 0).all() for seconds in latencies.values())


@pytest.mark.parametrize(("stages", "p", "policy", "per_token"), [
    (1, 0.0, "sp", 0.01),
    (2, 0.0, "pp", 0.02),
    (2, 1.0, "sp", 0.01),
    (4, 0.0, "sp", 0.04),
])  # fmt: skip
def test_latency_of_one_stream_by_hand(stages, p, policy, per_token):
    one = "batch:requests=1,prompt=100,output=50"
    _, result = serve(one, flat_cost(stages), p, policy=policy)
    figures = result.summary()
    assert figures["ttft_p50"] == pytest.approx(stages * 0.01)
    assert figures["tpot_p50"] == pytest.approx(per_token, rel=1e-6)


def test_prompts_run_in_chunks_of_the_budget():
    one = "batch:requests=1,prompt=1000,output=1"
    _, result = serve(one, flat_cost(1), 1.0, policy="sp", max_num_batched_tokens=256)
    assert result.summary()["ttft_p50"] == pytest.approx(4 * 0.01)


def test_lookahead_evicts_less_than_stock_and_is_not_slower():
    load = "poisson:rate=40,requests=400,prompt=300,output=150"
    stock = serve(load, policy="sp", memory="stock", kv_blocks=1200)[1].summary()
    ahead = serve(load, policy="sp", memory="lookahead", kv_blocks=1200)[1].summary()
    assert stock["evictions"] > 50
    assert ahead["evictions"] < 0.2 * stock["evictions"]
    assert ahead["tokens_per_second"] > 1.02 * stock["tokens_per_second"]


def test_the_same_seed_gives_the_same_run():
    first, second = (serve(policy="auto", kv_blocks=400)[1].summary() for _ in range(2))
    for figures in (first, second):
        del figures["wall_seconds"], figures["cpu_seconds"]
    assert first == second


def test_what_can_never_run_is_refused():
    trace = traces.Trace.of("t", [0, 1], [10_000, 100], [10, 10])
    _, result = serve(trace, policy="sp", kv_blocks=100)
    assert result.summary()["refused"] == 1 and result.summary()["answered"] == 1


def test_calibration_makes_up_for_an_overconfident_drafter():
    cost = CostModel.from_profile(MEASURED["h200-llama-70b-pp4"])
    rates = {}
    for calibrate in (False, True):
        drafts = DraftSource(0.6, 2.0, distortion=4.0, seed=1)
        settings = Settings(policy="sp-alpha", calibrate=calibrate, max_num_seqs=192)
        load = traces.load("batch:requests=192,prompt=16,output=400")
        rates[calibrate] = Serving(cost, drafts, settings).run(load).tokens_per_second
    assert rates[True] > 0.99 * rates[False]


# -- traces ----------------------------------------------------------------------------------------


def test_azure_csv_as_published_and_as_rebased(tmp_path):
    published = tmp_path / "azure.csv"
    published.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    rebased = tmp_path / "azure.csv.gz"
    rebased.write_bytes(
        gzip.compress(b"arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.314579,396,109\n")
    )
    for path in (published, rebased):
        trace = traces.load(str(path))
        assert trace.arrival == pytest.approx([0, 4.314579], abs=1e-5)
        assert trace.prompt.tolist() == [374, 396] and trace.output.tolist() == [44, 109]


def test_vllm_bench_result(tmp_path):
    path = tmp_path / "bench.json"
    block = {
        "input_lens": [10, 20, 30],
        "output_lens": [5, 0, 7],  # the second failed
        "start_times": [100.5, 100.0, 100.0],
    }
    path.write_text(json.dumps(block))
    trace = traces.load(str(path))
    assert trace.arrival.tolist() == [0, 0.5] and trace.output.tolist() == [7, 5]


def test_scaling_repeats_and_quickens():
    trace = traces.load("poisson:rate=2,requests=100").scaled(rate=4.0, requests=250)
    assert len(trace) == 250 and (np.diff(trace.arrival) >= 0).all()
    assert 250 / trace.arrival[-1] == pytest.approx(8, rel=0.25)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,c\n1,2,3\n", "columns a, b, c"),
        ('{"completed": 3}', "no detailed result"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
    ],
)
def test_trace_mistakes_are_one_line(tmp_path, text, words):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=words):
        traces.load(str(tmp_path / "t"))
    with pytest.raises(ConfigError, match="cannot be read"):
        traces.load(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="allowed are rate"):
        traces.load("poisson:speed=3")


# -- the commands ----------------------------------------------------------------------------------


def test_simulate_ends_with_one_json_line_and_draws(tmp_path, capsys):
    picture = tmp_path / "run.png"
    argv = ["simulate", "--trace", "poisson:requests=40", "--policies", "sp", "pp"]
    argv += ["--plot", str(picture), "--output", str(tmp_path / "out.json")]
    code = cli.main(argv)
    printed = capsys.readouterr()
    last = json.loads(printed.out.splitlines()[-1])
    assert code == 0 and last["name"] == "simulate" and last["ok"]
    assert last["policies"]["sp"]["answered"] == 40
    assert json.loads((tmp_path / "out.json").read_text()) == last
    assert (tmp_path / "run-sp.png").exists() and (tmp_path / "run-pp.png").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policies", "fast"], "allowed are sp,"),
        (["--profile", "none"], "built in are"),
        (["--trace", "none"], "cannot be read"),
        (["--profile", "h100/llama-70b/2/x"], "whole numbers"),
    ],
)
def test_simulate_mistakes_are_one_line(argv, words, capsys):
    assert cli.main(["simulate", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
