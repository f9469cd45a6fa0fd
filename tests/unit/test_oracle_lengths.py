# SPDX-License-Identifier: Apache-2.0
"""Length predictors that are made up: the benchmark's oracle, and the simulator's."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from spexis import cli
from spexis.bench.oracle_lengths import ANSWER_TOKENS, OraclePredictions, install
from spexis.core.cost_model import CostModel
from spexis.core.lengths import THRESHOLDS, LengthModel
from spexis.core.presets import MEASURED
from spexis.simulator import trace as traces
from spexis.simulator.drafts import DraftSource
from spexis.simulator.predicted import PredictedServing, quality
from spexis.simulator.serving import Serving, Settings

M = np.array(THRESHOLDS)


# -- the benchmark's ------------------------------------------------------------------------------


def request(given: int, answer: int | None, params: bool = True):
    extra = None if answer is None else {ANSWER_TOKENS: answer}
    sampling = SimpleNamespace(extra_args=extra) if params else None
    return SimpleNamespace(num_output_tokens=given, sampling_params=sampling)


def test_the_oracle_is_right_about_each_threshold_and_silent_where_it_was_told_nothing():
    requests = {
        "a": request(10, 14),  # 4 remain
        "b": request(0, 64),
        "c": request(5, None),
        "d": request(5, 100, params=False),
    }
    scheduler = SimpleNamespace(requests=requests, lookahead=SimpleNamespace())
    install(scheduler, {})
    oracle = scheduler.lookahead.predictions
    told = oracle.of(["d", "b", "a"])
    assert np.isnan(told.said[0]).all()
    assert told.said[1:].tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
    assert told.at.tolist() == [5, 0, 10]
    assert oracle.of(["c", "d"]) is None and oracle.of([]) is None
    requests["a"].num_output_tokens = 11
    assert oracle.of(["a"]).said.tolist() == [[1, 1, 1, 1, 1]]


def test_look_ahead_takes_its_word():
    """At once and without learning: the curve of each request falls where it ends."""
    oracle = OraclePredictions({"a": request(0, 40), "b": request(0, 200)})
    told = oracle.of(["a", "b"])
    oracle.ended("a", 40, 400)
    limits = np.array([400, 400])
    alive = LengthModel().alive(
        np.zeros(2, int), limits, np.array([31.0, 63.0]), oracle.calibrated(told), told.at
    )
    assert alive[0, 0] > 0.99 and alive[0, 1] < 0.01
    assert (alive[1] > 0.99).all()


# -- the simulator's ------------------------------------------------------------------------------


LOAD = "poisson:rate=40,requests=400,prompt=300,output=150"


def serve(sharpness: float | None, load=LOAD, kv_blocks=1200):
    cost = CostModel.from_profile(MEASURED["h200-llama-70b-pp2"])
    parts = cost, DraftSource(0.7, seed=3), Settings(policy="sp", kv_blocks=kv_blocks)
    serving = (
        Serving(*parts) if sharpness is None else PredictedServing(*parts, sharpness=sharpness)
    )
    trace = traces.load(load)
    return serving, trace, serving.run(trace).summary()


@pytest.mark.parametrize("sharpness", [0.0, 2.5, math.inf])
def test_every_request_is_answered_whatever_is_said(sharpness):
    serving, trace, figures = serve(sharpness)
    assert figures["answered"] + figures["refused"] == len(trace)
    assert serving.free_blocks == 1200
    assert figures["evictions"] < 100  # without look-ahead several hundred


def test_a_sharper_predictor_finds_more_and_its_probabilities_come_true():
    recalls = []
    for sharpness in (1.0, 2.0, 3.0):
        serving, trace, _ = serve(sharpness)
        found = quality(serving, trace)
        recalls.append(found[2:, 1].mean())
    # What is called likely is; the reports themselves are far off.
    assert (found[:, 0] > 0.6).all()
    assert recalls[0] + 0.2 < recalls[1] < recalls[2] - 0.2


def test_a_predictor_saves_recomputing_and_time_where_memory_is_short():
    """Answers of 400 tokens, which last longer than a predictor sees."""
    load = "poisson:rate=14,requests=700,prompt=200,output=400,seed=1"
    none, good = (serve(sharpness, load, kv_blocks=6000)[2] for sharpness in (None, 2.5))
    assert none["evictions"] > 10
    assert good["recomputed_tokens"] < 0.6 * none["recomputed_tokens"]
    assert good["tokens_per_second"] > none["tokens_per_second"]


def test_simulate_with_a_predictor(capsys):
    argv = ["simulate", "--trace", "poisson:requests=30", "--policies", "sp", "--predictor", "inf"]
    assert cli.main(argv) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"] and last["predictor"] == "inf"
