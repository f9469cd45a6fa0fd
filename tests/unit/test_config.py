# SPDX-License-Identifier: Apache-2.0
"""The spexis block: every option, every refusal, no torch and no vLLM."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from spexis.config import (
    DRAFTER_KEYS,
    ConfigError,
    DrafterConfig,
    PlacementConfig,
    SpexisConfig,
)

ORACLE = {"method": "oracle", "reference": "ref.jsonl", "acceptance": 0.5, "seed": 3}


def test_empty_block_is_all_defaults():
    config = SpexisConfig.from_dict({})
    assert config == SpexisConfig()
    assert config.drafter.method == "exit" and config.steps_in_flight is None


def test_public_options_are_frozen():
    """Adding or renaming an option is a decision: change this list, the docs and the changelog."""
    assert [f.name for f in dataclasses.fields(SpexisConfig)] == [
        "drafter",
        "placement",
        "mode",
        "profile",
        "selection",
        "lookahead",
        "length_predictor",
        "steps_in_flight",
        "iteration_log",
        "timeline_log",
        "fixed_transfer",
        "draft_graphs",
    ]
    assert [f.name for f in dataclasses.fields(PlacementConfig)] == [
        "layers",
        "profile",
        "rows",
        "drafter_seconds",
    ]
    assert DRAFTER_KEYS == {
        "exit": ("model", "draft_vocab_size"),
        "oracle": ("reference", "acceptance", "seed"),
        "synthetic": ("acceptance", "seed", "sharpness"),
        "none": (),
    }


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"drafter": {}},
        {"drafter": {"method": "exit", "model": "folder", "draft_vocab_size": 8192}},
        {"drafter": ORACLE, "steps_in_flight": 3},
        {"drafter": {"method": "synthetic", "acceptance": 1}, "iteration_log": "a.jsonl"},
        {"drafter": {"method": "none"}, "timeline_log": "t"},
        {"drafter": {"method": "synthetic", "acceptance": 0.7, "sharpness": 1.5}},
        {"placement": {"layers": [16, 14]}},
        {"placement": {"profile": "p.json", "rows": 64, "drafter_seconds": 0.001}},
        {"placement": None},
        {"mode": "sp-alpha", "profile": "p.json", "selection": "scheduler"},
        {"fixed_transfer": False, "draft_graphs": False},
        {"lookahead": True, "length_predictor": "folder"},
        {"lookahead": True, "length_predictor": False},
        {"length_predictor": None},
    ],
)
def test_round_trip_is_json_and_stable(block):
    config = SpexisConfig.from_dict(block)
    text = json.dumps(config.to_dict(), sort_keys=True)
    assert SpexisConfig.from_dict(json.loads(text)) == config


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ([], ["spexis is []", "JSON object"]),
        ("exit", ["spexis is 'exit'"]),
        ({"draftr": {}}, ["spexis.draftr", "did you mean drafter?", "steps_in_flight"]),
        ({"drafter": "exit"}, ["spexis.drafter is 'exit'", "JSON object"]),
        (
            {"drafter": {"method": "synthetic", "sharpness": 0}},
            ["spexis.drafter.sharpness is 0", "a number above 0"],
        ),
        ({"drafter": {"method": "exti"}}, ["'exti'", "did you mean exit?", "oracle, synthetic"]),
        ({"drafter": {"method": None}}, ["spexis.drafter.method is None"]),
        ({"drafter": {"modle": "x"}}, ["spexis.drafter.modle = 'x'", "did you mean model?"]),
        # A key of another method would have no effect: refused, not ignored.
        ({"drafter": {"method": "exit", "acceptance": 1}}, ['for method "exit"', "acceptance"]),
        ({"drafter": {"method": "none", "seed": 1}}, ['for method "none"']),
        ({"drafter": {"method": "oracle"}}, ["spexis.drafter.reference is missing"]),
        ({"drafter": {**ORACLE, "acceptance": 1.5}}, ["acceptance is 1.5", "0 to 1"]),
        ({"drafter": {**ORACLE, "acceptance": True}}, ["acceptance is True"]),
        ({"drafter": {**ORACLE, "acceptance": float("nan")}}, ["acceptance is nan"]),
        ({"drafter": {**ORACLE, "seed": -1}}, ["seed is -1"]),
        ({"drafter": {"model": ""}}, ["model is ''"]),
        ({"drafter": {"model": 3}}, ["model is 3", "string or null"]),
        ({"drafter": {"draft_vocab_size": 0}}, ["draft_vocab_size is 0", "above 0"]),
        ({"drafter": {"draft_vocab_size": 1.5}}, ["draft_vocab_size is 1.5"]),
        ({"placement": {}}, ["spexis.placement is {}", "one of layers and profile"]),
        ({"placement": {"layers": [1], "profile": "p"}}, ["one of layers and profile"]),
        ({"placement": {"layers": [16, 0]}}, ["spexis.placement.layers", "0", "above 0"]),
        ({"placement": {"layers": [16, None]}}, ["spexis.placement.layers", "None"]),
        ({"placement": {"layers": 16}}, ["spexis.placement.layers is 16", "list"]),
        ({"placement": {"layer": [1]}}, ["did you mean layers?"]),
        ({"placement": {"profile": "p", "drafter_seconds": -1}}, ["drafter_seconds is -1"]),
        ({"steps_in_flight": "2"}, ["steps_in_flight is '2'", "whole number"]),
        ({"steps_in_flight": True}, ["steps_in_flight is True"]),
        ({"selection": "stage"}, ["selection is 'stage' with mode", "sp-alpha"]),
        ({"mode": "auto", "profile": "p"}, ["spexis.profile is 'p'", "sp-alpha"]),
        ({"selection": "host"}, ["spexis.selection is 'host'", "stage, scheduler, null"]),
        ({"mode": "sp-alpha"}, ["spexis.profile is missing", "spexis profile"]),
        ({"iteration_log": 1}, ["iteration_log is 1"]),
        ({"draft_graphs": "on"}, ["draft_graphs is 'on'", "true and false"]),
        ({"fixed_transfer": 1}, ["fixed_transfer is 1"]),
        ({"length_predictor": True}, ["length_predictor is True", "string, null or false"]),
        ({"length_predictor": 0}, ["length_predictor is 0"]),
        ({"length_predictor": ""}, ["length_predictor is ''"]),
        # Nothing would ask it.
        ({"length_predictor": "folder"}, ["length_predictor is 'folder'", "spexis.lookahead"]),
        ({1: 2}, ["spexis.1"]),
    ],
)
def test_refusals_are_one_line_and_name_key_value_and_allowed(block, words):
    with pytest.raises(ConfigError) as error:
        SpexisConfig.from_dict(block)
    message = str(error.value)
    assert ("\n" not in message and "allowed" in message) or "is missing" in message
    for word in words:
        assert word in message


def test_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_frozen_slots_and_keyword_only():
    config = SpexisConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps_in_flight = 4
    assert not hasattr(config, "__dict__")
    with pytest.raises(TypeError):
        DrafterConfig("exit")


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, SimpleNamespace()])
def test_from_vllm_is_none_when_not_asked(additional):
    assert SpexisConfig.from_vllm(SimpleNamespace(additional_config=additional)) is None


def test_from_vllm_reads_the_block():
    vllm_config = SimpleNamespace(additional_config={"spexis": {"steps_in_flight": 3}, "b": 1})
    assert SpexisConfig.from_vllm(vllm_config) == SpexisConfig(steps_in_flight=3)


def test_lossless_and_speculates():
    assert not DrafterConfig(method="synthetic").lossless
    assert DrafterConfig(method="exit").lossless
    assert not DrafterConfig(method="none").speculates


def test_import_is_light():
    code = "import sys, spexis.config; print('torch' in sys.modules, 'vllm' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
