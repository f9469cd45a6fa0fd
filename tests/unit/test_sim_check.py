# SPDX-License-Identifier: Apache-2.0
"""sim-check without an engine: the fit, the comparison, and the engine part over pretended engines.

A pretended engine answers as the simulator says, with stage times that are longer than the
profile's; so what the whole engine part must find is known.
"""

import json
import os
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from spexis.bench import sim_check, sim_compare, sim_engine, sim_fit
from spexis.bench.engines import EngineRun
from spexis.bench.step_watch import StepSize, StepWatch
from spexis.core.cost_model import CostModel
from spexis.core.profile_file import ProfileFile
from spexis.simulator.trace import Trace

FILE = {
    "format": "spexis-profile-1",
    "model": {"name": "m", "num_hidden_layers": 30},
    "layers": 15,
    "points": [
        {"rows": rows, "context": context, "seconds": seconds + 1e-6 * rows * context}
        for rows, seconds in ((1, 0.045), (4, 0.055), (8, 0.07), (16, 0.1))
        for context in (64, 192)
    ],
    "head_seconds": {"1": 0.004, "16": 0.006},
}
PROFILE = ProfileFile.of(FILE).stage_profile()
LINK, HOST, PREPARE = -0.003, 0.005, 0.002


def true_cost() -> CostModel:
    """Both stages a fifth slower than alone, and a drafter on the first."""
    slower = replace(
        PROFILE,
        stages=(PROFILE.stages[0].scaled(1.2),),
        drafter=((1, 0.006), (16, 0.009)),
        hidden_link=((1, LINK),),
        host=((1, HOST),),
    )
    return CostModel.from_profile(slower)


def pretend(prefix, first: int, count: int, seed: int = 0) -> list[StepSize]:
    """Steps as they come under load, their timeline appended to PREFIX.stage0 and .stage1."""
    rng, cost = Random(seed), true_cost()
    free, back, sizes, lines = [0.0, 0.0], [0.0, 0.0], [], [[], []]
    rows = 1
    for k in range(count):
        rows = min(max(rows + rng.choice((-1, 0, 0, 1, 1)), 1), 16)
        prefill = rng.randrange(20, 90) if rng.random() < 0.15 else 0
        size = StepSize(
            first + k, rows + bool(prefill), rows, prefill, 80 * rows, k == 0, max(back[k % 2], 0.0)
        )
        at = back[k % 2]
        for s, stage in enumerate(cost.stages):
            at = max(at + (LINK if s else 0.0), free[s])
            end = at + stage.seconds(rows, prefill, 80.0 * rows) * rng.uniform(0.97, 1.03)
            event = {"step": size.number, "part": "forward", "begin": at + PREPARE, "end": end}
            lines[s].append(event | {"rows": [str(i) for i in range(size.num_reqs)]})
            at = free[s] = end
        back[k % 2] = at + HOST
        lines[1].append({"step": size.number, "good": []})
        sizes.append(size)
    for s in range(2):
        with open(f"{prefix}.stage{s}", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines[s])
    return sizes


# -- the fit ---------------------------------------------------------------------------------------


def test_the_fit_finds_what_slows_the_stages(tmp_path):
    prefix = str(tmp_path / "t")
    pretend(prefix, 1, 20)  # a warm-up that nobody asks for
    log = json.loads(json.dumps(pretend(prefix, 21, 250, seed=1)))
    fitted = sim_fit.fit(PROFILE, sim_fit.stage_runs(prefix, log))
    truth = true_cost()
    for rows, prefill in ((1, 0), (4, 0), (12, 0), (16, 0), (8, 60), (12, 200)):
        wanted = truth.step_seconds(rows, prefill, 80.0 * rows)
        found = fitted.cost.step_seconds(rows, prefill, 80.0 * rows)
        assert found == pytest.approx(wanted, rel=0.04), (rows, prefill)
    alone = CostModel.from_profile(PROFILE).step_seconds(12, 0, 960.0)
    assert alone < 0.87 * truth.step_seconds(12, 0, 960.0)  # the profile by itself would be wrong
    assert fitted.steps == 250 and abs(fitted.scale - 1) < 0.04
    assert fitted.link == pytest.approx(LINK, abs=0.0025)
    assert fitted.host == pytest.approx(HOST, abs=0.0025)
    json.dumps(fitted.described())


def test_a_timeline_of_other_steps_is_refused(tmp_path):
    prefix = str(tmp_path / "t")
    log = pretend(prefix, 1, 60)
    shifted = [size._replace(number=size.number + 1) for size in log]
    with pytest.raises(ValueError, match="numbered differently"):
        sim_fit.stage_runs(prefix, shifted)
    cut = (tmp_path / "t.stage1").read_text()[:-90]  # the stage was killed in its last line
    (tmp_path / "t.stage1").write_text(cut)
    assert 55 <= len(sim_fit.stage_runs(prefix, log)) < 60


def test_replay_keeps_pauses_as_they_were(tmp_path):
    prefix = str(tmp_path / "t")
    runs = sim_fit.stage_runs(prefix, pretend(prefix, 1, 40))
    busy, idle = sim_fit.replay(true_cost(), runs)
    assert idle == 0
    later = [
        sim_fit.StageRun(
            run.size._replace(at=run.size.at + 30.0, alone=run.size.number == 21),
            tuple(t + 30.0 for t in run.begin),
            tuple(t + 30.0 for t in run.end),
        )
        for run in runs[20:]
    ]
    total, idle = sim_fit.replay(true_cost(), runs[:20] + later)
    assert idle == pytest.approx(30.0, abs=0.3)
    assert total == pytest.approx(busy + idle, rel=0.05)


# -- the comparison --------------------------------------------------------------------------------

MEASURED = {
    "seconds": 50.0,
    "tokens": 2500,
    "prompt_tokens": 3000,
    "recomputed_tokens": 2000,
    "preemptions": 25,
    "drafts": 2000,
    "accepted": 1300,
    "different": 0,
}


@pytest.mark.parametrize(
    ("seconds", "again", "recomputed", "ok"),
    [
        (54.0, 2000, 2290, True),
        (54.0, 2000, 1710, True),
        (54.0, 2000, 2320, False),
        (44.0, 2000, 2000, False),  # a seventh too fast
        (57.0, 2000, 2000, False),
        (50.0, 0, 40, True),  # under 1 % of the tokens run
        (50.0, 0, 90, False),
        (50.0, 100, 150, True),
    ],
)
def test_what_counts_as_right(seconds, again, recomputed, ok):
    measured = sim_compare.together([MEASURED | {"recomputed_tokens": again}])
    simulated = {"seconds": seconds, "tokens": 2500, "recomputed_tokens": recomputed}
    row = sim_compare.compared("x", measured, sim_compare.together([simulated]))
    assert row["ok"] == ok
    assert row["throughput_error"] == pytest.approx(50.0 / seconds - 1)
    if not again:
        assert row["recomputed_error"] is None


def test_rounds_are_added_up():
    both = sim_compare.together([MEASURED, MEASURED | {"seconds": 75.0, "recomputed_tokens": 0}])
    assert both["tokens_per_second"] == pytest.approx(5000 / 125)
    assert both["recomputed_tokens"] == 2000 and both["drafts"] == 4000


def test_the_table_says_which_settings_are_off():
    good = sim_compare.together([MEASURED])
    rows = [
        sim_compare.compared("good", good, good),
        sim_compare.compared("bad", good | {"drafts": 0}, good | {"tokens_per_second": 99.0}),
    ]
    lines = sim_compare.table(rows).splitlines()
    assert lines[1].startswith("good") and not lines[1].endswith("off") and "0.65" in lines[1]
    assert lines[2].startswith("bad") and lines[2].endswith("off") and "+98.0%" in lines[2]


def test_a_missing_setting_is_not_right():
    good = sim_compare.together([MEASURED])
    rows = [sim_compare.compared(s.name, good, good) for s in sim_compare.SETTINGS]
    assert sim_check.judged_engine(rows)["ok"]
    judged = sim_check.judged_engine(rows[1:])
    assert not judged["ok"] and judged["missing"] == ["pp"]
    quick = [row for row in rows if row["setting"] in sim_compare.QUICK]
    assert sim_check.judged_engine(quick, quick=True)["ok"]
    assert not sim_check.judged_engine(quick)["ok"]
    assert not sim_check.judged_engine([rows[0] | {"ok": False}, *rows[1:]])["ok"]


def test_lookahead_knows_the_answers_that_ended_before():
    setting = next(s for s in sim_compare.SETTINGS if s.lookahead)
    rng = np.random.default_rng(0)
    trace = Trace.of("t", np.zeros(24), rng.integers(30, 150, 24), np.full(24, 20))
    cost = true_cost()
    runs = [
        sim_compare.simulate(setting, trace, blocks=31, acceptance=0.7, cost=cost, ended=ended)
        for ended in ((), [20] * 200)
    ]
    assert runs[1]["seconds"] < 0.95 * runs[0]["seconds"]  # it dares to admit more


# -- the engine part over pretended engines --------------------------------------------------------


class PretendedEngines:
    """run_engine() as the simulator with true_cost() would have it."""

    def __init__(self, slower: float = 1.0):
        self.slower, self.started, self.works = slower, [], []

    def __call__(self, spec, work, *, on_event, timeout):
        self.started.append(spec)
        run, number = EngineRun(spec=spec, results={}), 1
        self.ended = []
        for item in work:
            self.works.append(item)
            run.results[item.name], number = self.answer(spec, item, number)
            on_event({"event": "result", "name": item.name})
        return run

    def answer(self, spec, item, number):
        if item.name == "reference":
            outputs = [list(range(row["params"]["max_tokens"])) for row in item.rows]
            return self.result(item, outputs, 1.0, {}, None), number
        assert item.watch_steps and not spec.options["enable_prefix_caching"]
        outputs = [row["answer"] for row in item.rows]
        name = item.name.removeprefix("calibrate ").rpartition(" ")[0] or item.name
        named = {s.name: s for s in sim_compare.SETTINGS}
        setting = named.get(name, sim_compare.SETTINGS[0])
        trace = Trace.of(
            name,
            [row["arrive_seconds"] for row in item.rows],
            [len(row["prompt_token_ids"]) for row in item.rows],
            [len(output) for output in outputs],
        )
        acceptance = None if setting.drafter is None else 0.65
        blocks = spec.options["num_gpu_blocks_override"]
        run = sim_compare.simulate(
            setting,
            trace,
            blocks=blocks - 1,
            acceptance=acceptance,
            cost=true_cost(),
            ended=self.ended,
        )
        self.ended += [len(output) for output in outputs]
        steps = pretend(self.timeline(spec), number, 120, seed=number)
        counters = {"drafts": 1000, "accepted": 650} if acceptance else {}
        seconds = run["seconds"] * self.slower
        result = self.result(item, outputs, seconds, counters, steps, blocks)
        result["recomputed_tokens"] = round(run["recomputed_tokens"])
        return result, number + 120

    def timeline(self, spec) -> str:
        if spec.drafter is None:
            return os.environ[sim_engine.STOCK_TIMELINE_ENV]
        return spec.settings["timeline_log"]

    def result(self, item, outputs, seconds, counters, steps, blocks=512):
        rows = [
            {"prompt_token_ids": row["prompt_token_ids"], "outputs": [{"token_ids": output}]}
            for row, output in zip(item.rows, outputs, strict=True)
        ]
        return {
            "rows": rows,
            "seconds": seconds,
            "counters": counters,
            "recomputed_tokens": 0,
            "preempted": [1, 1],
            "num_blocks": blocks,
            "step_log": json.loads(json.dumps(steps)),
        }


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    def make(slower: float = 1.0, **arguments):
        engines = PretendedEngines(slower)
        monkeypatch.setattr(sim_engine, "run_engine", engines)
        monkeypatch.setattr(sim_engine, "chat_token_ids", lambda model, texts: [list(range(30))])
        monkeypatch.setattr("spexis.demo_model.demo_model_dir", lambda: "demo")
        monkeypatch.setattr(sim_engine.EngineCheck, "profile", lambda self: FILE)
        check = sim_engine.EngineCheck(folder=tmp_path, note=lambda line: None, **arguments)
        return engines, check

    return make


def test_six_settings_over_pretended_engines(pretended):
    engines, check = pretended(requests=24, calibration=8)
    progress = []
    recorded = check.run(lambda: progress.append(1))
    rows, fitted = sim_engine.predict(json.loads(json.dumps(recorded)))
    assert [row["setting"] for row in rows] == [s.name for s in sim_compare.SETTINGS]
    assert len(progress) == check.num_steps == 7
    assert len(engines.started) == 6  # the reference, and two settings share an engine
    for row in rows:
        assert abs(row["throughput_error"]) < 0.06, row
        assert row["measured"]["different"] == 0
    assert sim_check.judged_engine(rows)["ok"]
    # The oracle takes the trained drafter's place for its calibration and stays.
    prepared = {item.name: item.prepare for item in engines.works}
    assert prepared["calibrate sp-oracle"]["drafter"]["reference"].endswith("reference.jsonl")
    assert [name for name, what in prepared.items() if what] == ["calibrate sp-oracle"]
    # Other requests than those that are predicted, for all settings the same.
    prompts = {
        item.name: sorted(len(row["prompt_token_ids"]) for row in item.rows)
        for item in engines.works
    }
    assert prompts["calibrate sp"] == prompts["calibrate pp"] != prompts["sp 1"]
    assert prompts["sp 1"] == prompts["sp-short 2"]
    assert set(fitted) == {s.name for s in sim_compare.SETTINGS}
    assert recorded["settings"]["pp"]["rounds"][0]["acceptance"] is None
    assert recorded["failures"] == []


def test_what_was_recorded_is_simulated_again_without_an_engine(pretended, tmp_path, capsys):
    _, check = pretended(quick=True)
    recorded, path = check.run(), tmp_path / "first.json"
    path.write_text(json.dumps({"found": {"engine": {"recorded": recorded}}}))
    argv = ["--parts", "engine", "--quick", "--recorded", str(path)]
    code = sim_check.main([*argv, "--output", str(tmp_path / "again.json")])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if last["ok"] else 1)
    assert set(last["engine"]["throughput_error"]) == set(sim_compare.QUICK)
    assert max(map(abs, last["engine"]["throughput_error"].values())) < 0.06
    assert "recorded" not in last["engine"]
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["found"]["engine"]["recorded"] == json.loads(json.dumps(recorded))
    (tmp_path / "none.json").write_text("{}")
    assert sim_check.main([*argv[:-1], str(tmp_path / "none.json")]) == 2
    assert "no result with an engine part" in capsys.readouterr().err


def test_an_engine_that_fails_leaves_the_others(pretended):
    engines, check = pretended(quick=True)
    answer = engines.answer

    def fail(spec, item, number):
        if spec.drafter is None and item.name == "warm":
            raise RuntimeError("engine ended early\nits log")
        return answer(spec, item, number)

    engines.answer = fail
    recorded = check.run()
    assert recorded["failures"] == ["engine ended early"]
    rows, _ = sim_engine.predict(recorded)
    assert [row["setting"] for row in rows] == ["sp"]
    assert not sim_check.judged_engine(rows, quick=True)["ok"]


def test_an_engine_that_is_slower_than_it_was_is_seen(pretended):
    _, check = pretended(slower=1.2, quick=True)
    rows, _ = sim_engine.predict(check.run())
    assert [row["setting"] for row in rows] == list(sim_compare.QUICK)
    assert all(row["throughput_error"] > 0.1 and not row["ok"] for row in rows)


def test_arrivals_of_a_trace(pretended, tmp_path):
    lines = [f"{10 * i + (i % 3)},{300 + i},{80 + i}" for i in range(80)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n")
    _, check = pretended(trace=str(path), requests=16, calibration=8)
    pool, _ = check.pool()
    rows = check.rows(pool, 2.0, seed=3)
    gaps = np.diff([row["arrive_seconds"] for row in rows])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert len(set(np.round(gaps, 6))) == 2  # the trace's own, of two lengths
    assert all(row["arrive_seconds"] == 0 for row in check.rows(pool, None, seed=3))


# -- steps as a scheduler makes them ---------------------------------------------------------------


class Scheduler:
    """As much of vLLM's as StepWatch sees."""

    class Output:
        def __init__(self, tokens):
            self.num_scheduled_tokens = tokens

    class Request:
        def __init__(self, num_tokens, computed):
            self.num_tokens, self.num_computed_tokens = num_tokens, computed

    def __init__(self):
        self.requests, self.plan = {}, []

    def schedule(self, throttle=False):
        tokens = self.plan.pop(0)
        for req_id, count in tokens.items():
            self.requests[req_id].num_computed_tokens += count
        return self.Output(tokens)

    def update_from_output(self, output, result):
        return result


def test_steps_are_counted_and_parted_into_rows_and_prompts():
    scheduler = Scheduler()
    scheduler.requests = {
        "prompt": Scheduler.Request(50, 10),
        "row": Scheduler.Request(31, 30),
        "guess": Scheduler.Request(21, 21),  # a row of it is in flight
        "again": Scheduler.Request(41, 0),  # preempted, computed again
    }
    scheduler.plan = [{"prompt": 20, "row": 1}, {}, {"guess": 1, "again": 41}]
    watch = StepWatch.on(scheduler)
    assert StepWatch.on(scheduler) is watch
    first = scheduler.schedule()
    assert scheduler.schedule(True).num_scheduled_tokens == {}
    scheduler.schedule()
    assert scheduler.update_from_output(first, "result") == "result"
    one, two = watch.take()
    assert one[:6] == (1, 2, 1, 20, 30, True)
    assert two[:6] == (2, 2, 1, 41, 21, False)
    assert one.at <= two.at and watch.take() == []


# -- the parts without engines ---------------------------------------------------------------------


def test_only_explained_winners_may_differ():
    def row(hardware, model, same):
        return {"hardware": hardware, "model": model, "same_winner": same}

    known = row("a100", "qwen3-32b", False)
    assert sim_check.judged_winners([known, row("h100", "llama-70b", True)])["ok"]
    judged = sim_check.judged_winners([known, row("h100", "llama-70b", False)])
    assert not judged["ok"] and judged["other_winner"]["h100/llama-70b"] is None
    assert not sim_check.judged_winners([])["ok"]


def selection_rows(**changes):
    return [
        {
            "stages": stages,
            "graph_steps": steps,
            "batch": batch,
            "acceptance": p,
            "over_none": 1.1,
            "over_drop": 1.05,
            "over_pp": 1.3,
        }
        | changes
        for stages in (2, 4)
        for steps in (False, True)
        for batch in (64, 256)
        for p in (0.55, 0.8)
    ]


def test_selection_must_not_lose(tmp_path):
    assert sim_check.judged_selection(selection_rows())["ok"]
    rows = selection_rows()
    rows[3] = rows[3] | {"over_none": 0.985}
    judged = sim_check.judged_selection(rows)
    assert not judged["ok"] and judged["over_none"] == [0.985, 1.1]
    picture = tmp_path / "gain.svg"
    sim_check.draw_selection(rows, str(picture))
    assert "<svg" in picture.read_text()


def test_one_part_ends_with_one_json_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sim_check, "LAW_STAGES", (2,))
    monkeypatch.setattr(sim_check, "LAW_ACCEPTANCES", (0.0, 0.7))
    output = tmp_path / "out" / "check.json"
    assert sim_check.main(["--parts", "law", "--output", str(output)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["name"] == "sim-check" and last["ok"] and not last["complete"]
    assert max(last["law"]["worst"].values()) < 0.01
    assert len(json.loads(output.read_text())["found"]["law"]["rows"]) == 2


def test_a_part_that_fails_is_not_right(monkeypatch, tmp_path, capsys):
    def fail(part, args):
        raise RuntimeError("engine ended early\nits log")

    monkeypatch.setattr(sim_check, "run_part", fail)
    output = str(tmp_path / "check.json")
    assert sim_check.main(["--parts", "engine", "--output", output]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["engine"] == {"ok": False, "error": "engine ended early"}


def test_a_mistaken_profile_is_one_line(tmp_path, capsys):
    argv = ["--parts", "selection", "--profile", "none.json", "--output", str(tmp_path / "o")]
    assert sim_check.main(argv) == 2
    assert "cannot be read" in capsys.readouterr().err.splitlines()[-1]


def test_every_setting_can_start_and_holds_its_longest_request():
    """vLLM refuses fewer blocks than one request may fill; one block is its null block."""
    assert sim_engine.MOST + sim_compare.LIMIT <= sim_compare.MAX_LEN
    for setting in sim_compare.SETTINGS:
        assert (setting.blocks - 1) * sim_compare.BLOCK_SIZE >= sim_compare.MAX_LEN, setting.name
