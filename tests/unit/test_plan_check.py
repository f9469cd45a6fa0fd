# SPDX-License-Identifier: Apache-2.0
"""plan-check: cases from result files of both presets, the verdict, and what it says of H200s."""

import json

import pytest

from spexis.bench import plan_check
from spexis.core.profile_file import FORMAT

ROOT = plan_check.Path(__file__).parents[2]
GPU = [str(ROOT / path) for path in plan_check.GPU_RESULTS]
PROFILE = str(ROOT / plan_check.PROFILE)


def run(capsys, *argv):
    code = plan_check.main([str(a) for a in argv])
    printed = capsys.readouterr()
    return code, printed.out, json.loads(printed.out.splitlines()[-1]) if printed.out else None


def test_two_h200s(capsys):
    """All right. With peer access TP's all-reduce is the preset's, set from other runs. Bounds: the
    errors found on 2026-11-30, rounded up."""
    code, _, result = run(capsys, "--profile", PROFILE, "--results", *GPU)
    assert (code, result["ok"], result["cases"], result["wrong"]) == (0, True, 56, 0)
    for name, setting in result["settings"].items():
        far = name.endswith("no_p2p")
        assert setting["all_reduce_by"] == ("torch" if far else "preset")
        assert setting["pp_error"][0] > -0.02 and setting["pp_error"][1] < 0.06
        assert setting["sp_error"][0] > -0.01 and setting["sp_error"][1] < 0.06
        low, high = setting["tp_error"]
        assert low > -0.03 and high < (0.13 if far else 0.02)


def test_all_that_is_stored(capsys, monkeypatch):
    """`make plan-check`: GPUs, and on a newer CPU TP2, the fastest there but for 4 streams."""
    monkeypatch.chdir(ROOT)
    code, _, result = run(capsys)
    assert (code, result["cases"], result["wrong"]) == (0, 59, 0)
    setting = result["settings"]["2026-11-30-cpu-streams-avx512 p2p"]
    assert setting["cases"] == 3 and setting["all_reduce_by"] == "vllm"


@pytest.mark.parametrize(("by_vllm", "wrong"), [(None, True), (15e-6, False)])
def test_nccls_all_reduce_leads_astray_where_vllm_has_its_own(by_vllm, wrong, capsys, tmp_path):
    """On devices without a preset. Were vLLM's 15 us, about what rates leave at few rows, all would
    be right."""
    block = json.loads(plan_check.Path(PROFILE).read_text())
    for gpu in block["hardware"]["gpus"]:
        gpu["name"] = "some GPU"
    near = block["link_seconds"]["p2p"]
    if by_vllm:
        near["tp_all_reduce"] = dict.fromkeys(near["all_reduce"], by_vllm)
    (tmp_path / "p.json").write_text(json.dumps(block))
    code, out, result = run(capsys, "--profile", tmp_path / "p.json", "--results", GPU[1])
    assert (code, result["wrong"] > 0) == (int(wrong), wrong)
    assert result["wrong"] == sum(line.count("  wrong") for line in out.splitlines()[:-1])
    assert ("priced too high" in out) == wrong


# -- a CPU's results -------------------------------------------------------------------------------


@pytest.fixture
def cpu(tmp_path):
    """A stage of 10 ms, an all-reduce of .5 ms: 16 streams at PP2 give 16/2 tokens in 10 ms."""
    model = {
        "name": "random",
        "num_hidden_layers": 10,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    profile = {
        "format": FORMAT,
        "model": model,
        "layers": 5,
        "points": [{"rows": rows, "context": 128, "seconds": 0.01} for rows in (1, 16)],
        "head_seconds": {"1": 0.0},
        "link_seconds": {"gloo": {"send": {"1": 0.0}, "tp_all_reduce": {"1": 0.0005}}},
    }
    (tmp_path / "profile.json").write_text(json.dumps(profile))

    def results(**rates):
        row = {"acceptance": 0.5, "tokens_per_second": rates}
        record = {"name": "bench-cpu", "random": {"4": row, "2": row}}
        (tmp_path / "cpu.json").write_text(json.dumps(record))
        return (
            "--results",
            "--cpu-profile",
            tmp_path / "profile.json",
            "--cpu-results",
            tmp_path / "cpu.json",
        )

    return results


def test_cpu_results(cpu, capsys):
    # Predicted: PP 200, TP 4 / (10 + 20 * .5 ms) = 200, SP 4 / 1.5 / 10 ms = 267 tokens/s.
    code, _, result = run(capsys, *cpu(pp=190.0, tp=180.0, sp=240.0))
    assert (code, result["ok"], result["cases"], result["worst"]) == (0, True, 1, 1)
    code, out, result = run(capsys, *cpu(pp=190.0, tp=300.0, sp=240.0))
    assert (code, result["ok"], result["worst"]) == (1, False, 0.8)
    assert "SP2  0.800  wrong" in out
    assert result["settings"]["cpu p2p"]["sp_error"][0] == pytest.approx(0.1111, abs=1e-3)


def test_mistakes_are_one_line(cpu, capsys, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    for argv, words in (
        (["--results", tmp_path / "none.json"], "cannot be read"),
        (["--results", tmp_path / "other.json"], "is no result of `spexis bench"),
        (["--cpu-results", "x.json", "--results"], "needs --cpu-profile"),
        (cpu(pp=1.0), "no case with PP2, TP2 and SP2"),
    ):
        assert plan_check.main(["--profile", PROFILE, *map(str, argv)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
