# SPDX-License-Identifier: Apache-2.0
"""bench-memory over pretended engines: which run, what they are asked, what is concluded."""

import json
import random

import pytest

from spexis.bench import memory
from spexis.bench.engines import EngineRun
from spexis.bench.oracle_lengths import ANSWER_TOKENS


def answer(prompt: list[int], count: int) -> list[int]:
    rng = random.Random(repr(prompt))
    return [rng.randrange(60) for _ in range(count)]  # tokens come again


class Engines:
    """In the place of run_engine."""

    def __init__(self):
        self.started: list[str] = []
        self.asked: list[dict] = []
        self.prepared: list[list] = []
        self.broken: set[str] = set()
        self.wrong: set[str] = set()
        self.slow = False

    def __call__(self, spec, work, on_event):
        lookahead = spec.settings.get("lookahead")
        name = "reference" if spec.stages == 1 else "stock"
        if spec.drafter is not None:
            name = "on" if lookahead else "off"
        self.started.append(name)
        run = EngineRun(spec=spec, results={})
        if name in self.broken:
            run.error = "no engine"
            return run
        self.prepared.append([item.prepare for item in work])
        for item in work:
            result = self._result(item.rows, name, spec.options)
            if "look_ahead_turns" in (item.prepare or {}):
                result["turns"] = {"on": [10.0, 960 if self.slow else 990], "off": [10.0, 1000]}
            run.results[item.name] = result
        return run

    def _result(self, asked, name, options):
        rows = []
        for row in asked:
            params = row["params"]
            tokens = answer(row["prompt_token_ids"], params["max_tokens"])
            stops = [i for i, t in enumerate(tokens) if t in params.get("stop_token_ids", ())]
            tokens = tokens[: stops[0] + 1] if stops else tokens
            if name in self.wrong:
                tokens[-1] += 1
            rows.append({"outputs": [{"token_ids": tokens}]})
        if name != "reference":
            self.asked += asked
        short = options["num_gpu_blocks_override"] < 2048
        again = {"stock": 900, "off": 900, "on": 90}.get(name, 0) * short
        seconds = 80.0 if name == "on" and short else 100.0
        return {
            "rows": rows,
            "seconds": seconds,
            "times": [[0.0, 1.0, seconds] for _ in asked],
            "preempted": [1] * (len(asked) // 2) if again > 100 else [],
            "recomputed_tokens": again,
            "policy_seconds": 0.1 if name == "on" else 0.0,
            "num_blocks": 11,
            "free_blocks": 10,
            "counters": {},
            "predictor": None,
        }


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    engines = Engines()
    monkeypatch.setattr(memory, "run_engine", engines)
    monkeypatch.setattr(memory, "kill_on_signals", lambda: None)
    monkeypatch.setattr(memory, "chat_token_ids", lambda model, texts: [[i] for i in range(50)])
    monkeypatch.setattr("spexis.demo_model.demo_model_dir", lambda: "demo")

    def run(*argv):
        output = tmp_path / "m.json"
        few = ["--requests", "10", "--warm", "3", "--ample-requests", "4"]
        try:
            memory.main(
                [*few, "--rounds", "2", "--ample-rounds", "2", *argv, "--output", str(output)]
            )
        finally:
            run.saved = json.loads(output.read_text())
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    run.engines = engines
    return run


def test_each_round_has_a_reference_and_its_engines_in_another_order(bench):
    result = bench()
    assert bench.engines.started == [
        *("reference", "stock", "off", "on"),
        *("reference", "off", "on", "stock"),
        *("reference", "on"),  # the requests to warm up with are known
        *("reference", "on"),
    ]
    assert result["ok"] and result["recomputed_ratio"] == 0.1 and result["different"] == 0
    assert result["throughput_ratio"] == 1.25 and result["stock_preempted"] == 0.5
    assert result["ample_throughput_ratio"] == 0.99 and result["policy_share"] == 0.01
    assert len(bench.saved["runs"]) == 2 * 3 and len(bench.saved["ample_runs"]) == 2


def test_no_engine_is_told_where_an_answer_ends(bench):
    """All have the same limit; the length that is said is the oracle's alone."""
    bench()
    for row in bench.engines.asked:
        params = row["params"]
        assert params["max_tokens"] == memory.LIMIT and len(params["stop_token_ids"]) == 1
        tokens = answer(row["prompt_token_ids"], memory.LIMIT)
        end = tokens.index(params["stop_token_ids"][0]) + 1
        assert params["extra_args"] == {ANSWER_TOKENS: end}
        assert "n" not in row


def test_with_ample_memory_look_ahead_takes_turns_in_one_engine(bench):
    """On first, then off first; the other way round in the next engine."""
    bench()
    first, second = bench.engines.prepared[-3], bench.engines.prepared[-1]
    assert first[0] is None and second[0] is None  # to warm up
    assert [p["look_ahead_turns"] for p in first[1:]] == [True, False] * 2
    assert [p["look_ahead_turns"] for p in second[1:]] == [False, True] * 2
    for run in bench.saved["ample_runs"]:
        assert (run["on"], run["off"]) == (99.0, 100.0) and len(run["turns"]) == memory.AMPLE_RUNS


def test_a_cost_with_ample_memory_is_not_ok(bench):
    bench.engines.slow = True
    result = bench()
    assert not result["ok"] and result["ample_throughput_ratio"] == 0.96


def test_the_oracle_speaks_before_anything_runs(bench):
    bench("--predictor", "oracle")
    of_on = [p for p in bench.engines.prepared if any(p)]
    assert len(of_on) == 4 and all(p[0] == {"oracle_lengths": {}} for p in of_on)


def test_answers_may_end_by_themselves(bench):
    bench("--ends", "own")
    assert all(row["params"].keys() == {"max_tokens", "extra_args"} for row in bench.engines.asked)


def test_a_wrong_answer_is_not_ok(bench):
    bench.engines.wrong.add("on")
    result = bench()
    assert not result["ok"] and result["different"] == 2 * 10 + 2 * memory.AMPLE_RUNS * 4


def test_what_was_measured_is_kept_when_an_engine_fails(bench):
    bench.engines.broken.add("on")
    with pytest.raises(SystemExit, match="no engine"):
        bench()
    assert [run["engine"] for run in bench.saved["runs"]] == ["stock", "off"]
    assert not bench.saved["ok"] and bench.saved["failures"] == ["no engine"]


def test_an_end_is_where_its_token_comes_first():
    assert memory.stop_position([5, 6, 5, 7, 6, 8], 4) == 3
    assert memory.stop_position([5, 6, 5, 5, 5, 8], 5) == 5
    assert memory.stop_position([5, 5, 5, 5], 4) == 0
