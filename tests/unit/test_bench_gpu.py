# SPDX-License-Identifier: Apache-2.0
"""The GPU presets: what runs in which order, resuming, and what becomes of the figures."""

import json

import pytest

from spexis.bench import gpu, gpu_kinds, gpu_report
from spexis.bench.gpu_kinds import KINDS, NO_P2P, engines_of
from spexis.config import ConfigError
from spexis.core.law import tokens_per_step

STAGE, HEAD = 0.010, 0.0005  # seconds of half the layers, and of the head


def cell(engine, rows, rate, p=None, number=0, **more):
    return {"engine": engine, "round": number, "rows": rows, "p": p, "rate": rate, **more}


# -- kinds -----------------------------------------------------------------------------------------


def test_kinds_of_a_preset_use_the_same_devices():
    for preset, devices in (("gpu2", 2), ("gpu4", 4)):
        assert {kind.stages * kind.tensor for kind in KINDS[preset]} == {devices}
        names = {kind.name for kind in KINDS[preset]}
        assert all(kind.against in names for kind in KINDS[preset] if kind.is_sp)
        assert gpu_kinds.TENSOR[preset] in names


def test_engines_by_p2p_and_by_name():
    def names(*asked):
        return [kind.name for kind in engines_of(*asked)]

    assert names("gpu2", "on", None) == ["sp2", "pp2", "tp2"]
    assert names("gpu2", "off", None) == ["sp2_no_p2p", "pp2_no_p2p", "tp2_no_p2p"]
    assert names("gpu2", "both", None) == ["sp2", "pp2", "tp2", "sp2_no_p2p", "tp2_no_p2p"]
    assert "tp4_no_p2p" in names("gpu4", "both", None)
    assert names("gpu2", "on", ["tp2_no_p2p", "sp2"]) == ["tp2_no_p2p", "sp2"]
    assert not engines_of("gpu2", "on", ["tp2_no_p2p"])[0].p2p
    with pytest.raises(ConfigError, match="--engines tp3: allowed are sp2"):
        engines_of("gpu2", "on", ["tp3"])


# -- figures ---------------------------------------------------------------------------------------


def test_ratios_compare_within_a_round():
    cells = [
        cell("sp2", 64, 200, 0.7, 0),
        cell("pp2", 64, 100, None, 0),
        cell("sp2", 64, 330, 0.7, 1),  # the machine was faster in round 1, for both
        cell("pp2", 64, 150, None, 1),
        cell("sp2", 64, 999, 0.7, 2),  # no partner: left out
        {"engine": "sp2", "round": 0, "rows": 128, "p": 0.7, "skipped": "memory"},
    ]
    assert gpu_report.ratios(cells, "sp2", "pp2") == {"64": {"0.7": 2.1}}
    assert gpu_report.ratios(cells, "sp2", "tp2") == {}


def test_law_share_uses_the_acceptance_that_was_counted():
    steps = {"sp2": {"64": {"stages": 2, "full": 0.02, "bare": 0.019}}}
    at_limit = 64 * tokens_per_step(0.71, 2) / 0.02
    cells = [cell("sp2", 64, at_limit, 0.7, acceptance=0.71), cell("sp2", 1, 5.0, 0.7)]
    assert gpu_report.shares(cells, "sp2", steps, "full") == {"64": {"0.7": 1.0}}
    assert gpu_report.shares(cells, "sp2", steps, "bare") == {"64": {"0.7": 0.95}}
    limits = gpu_report.limits(KINDS["gpu2"][0], [0.785], steps)
    assert limits == {"64": {"0.785": pytest.approx(64 / 1.215 / 0.02, abs=0.1)}}


GPU2 = [
    cell("sp2", 1, 32, 0.785),
    cell("sp2", 64, 160, 0.785),
    cell("pp2", 1, 20),
    cell("pp2", 64, 100),
    cell("tp2", 64, 200),
    cell("sp2" + NO_P2P, 64, 150, 0.785),
    cell("tp2" + NO_P2P, 64, 100),
]


def test_fields_of_gpu2():
    summary = gpu_report.summarise("gpu2", GPU2, {})
    assert summary["sp_over_pp"] == {"1": {"0.785": 1.6}, "64": {"0.785": 1.6}}
    assert summary["sp_over_tp"] == {"64": {"0.785": 0.8}}
    assert summary["sp_over_tp_no_p2p"] == {"64": {"0.785": 1.5}}
    assert summary["single_stream_speedup"] == {"0.785": 1.6}
    assert summary["law_share"] == {}  # no stage curve, no share
    wanted = gpu_report.verdict("gpu2", "l70", summary)
    assert wanted["sp_over_pp 64 0.785"] == [1.6, 1.5, True]
    assert wanted["sp_over_tp_no_p2p 64 0.785"] == [1.5, 1.2, True]
    assert "sp_over_pp 128 0.785" not in wanted  # not measured, not judged
    assert gpu_report.verdict("gpu2", "q32", summary) == {}


def test_every_wanted_figure_is_a_field():
    summary = {preset: gpu_report.summarise(preset, [], {}) for preset in KINDS}
    for (preset, _), figures in gpu_kinds.WANTED.items():
        assert {field for field, *_ in figures} <= set(summary[preset])


def test_fields_of_gpu4():
    cells = [
        cell("sp4" + NO_P2P, 64, 130, 0.634),
        cell("sp2tp2" + NO_P2P, 64, 150, 0.785),
        cell("sp2tp2" + NO_P2P, 64, 500, 0.99),  # not the acceptance its drafter would have
        cell("pp4" + NO_P2P, 64, 100),
        cell("tp4" + NO_P2P, 64, 90),
        cell("tp2pp2" + NO_P2P, 64, 75),
    ]
    summary = gpu_report.summarise("gpu4", cells, {})
    assert summary["sp_over_pp_no_p2p"]["sp2tp2"]["64"]["0.785"] == 2.0
    assert summary["sp_over_tp_no_p2p"]["sp4"] == {"64": {"0.634": round(130 / 90, 4)}}
    assert summary["best_sp_over_best_stock_no_p2p"] == {"64": 1.5}
    assert summary["best_sp_over_best_stock"] == {}
    assert gpu_report.verdict("gpu4", "l70", summary)["best_sp_over_best_stock_no_p2p 64"][2]
    assert "sp4 64: p=0.634" in gpu_report.table("gpu4", KINDS["gpu4"], cells, summary)


def test_table_and_plot(tmp_path):
    steps = {"sp2": {"64": {"stages": 2, "full": 0.3, "bare": 0.29}}}
    summary = gpu_report.summarise("gpu2", GPU2, steps)
    table = gpu_report.table("gpu2", engines_of("gpu2", "both", None), GPU2, summary)
    header, first, second = table.splitlines()[1:4]
    assert header.split() == [
        "batch", "sp2", "p=0.785", "pp2", "tp2", "sp2_no_p2p", "p=0.785", "tp2_no_p2p",
    ]  # fmt: skip
    assert first.split() == ["1", "32", "20", "-", "-", "-"]
    assert second.split() == ["64", "160", "100", "200", "150", "100"]
    picture = tmp_path / "p.svg"
    gpu_report.plot("t", engines_of("gpu2", "both", None), GPU2, steps, str(picture))
    assert "tp2_no_p2p" in picture.read_text()  # the legend's text is kept as a comment


# -- the run, with engines that answer at once -----------------------------------------------------


class FakeEngine:
    """Stage steps of STAGE seconds; an engine listed in `broken` does not start."""

    started: list = []  # noqa: RUF012 (reset by the fixture)
    broken: set = set()  # noqa: RUF012
    tokens: dict = {}  # noqa: RUF012
    settings: dict = {}  # noqa: RUF012

    def __init__(self, spec, log, timeout=1.0):
        self.spec, self.log, self.acceptance = spec, log, None

    def __enter__(self):
        name = self.log.name.split("-")[0]
        if name in FakeEngine.broken:
            raise RuntimeError(f"engine {name} ended early\nand more")
        FakeEngine.started.append(name)
        FakeEngine.settings[name] = self.spec.settings
        self.started = {"seconds": 1.0, "runner": "V2"}
        return self

    def __exit__(self, *exc):
        pass

    def call(self, do, **arguments):
        if do == "drafter":
            return {"seconds": 0.0001}
        if do == "acceptance":
            self.acceptance = arguments["acceptance"]
            return {"stages": 2}
        assert do == "decode"
        FakeEngine.tokens[self.spec.drafter is not None, arguments["rows"]] = arguments["tokens"]
        rate = arguments["rows"] / STAGE / 2
        if (self.spec.drafter or {}).get("method") == "synthetic":
            rate *= 2 * tokens_per_step(self.acceptance, 2)
        return {"rows": arguments["rows"], "rate": rate, "spread": [rate, rate]}


def fake_stage(model, *, layers, batches, contexts, **_):
    return {
        "layers": layers,
        "points": [{"rows": r, "context": contexts[0], "seconds": STAGE} for r in batches],
        "head_seconds": {str(r): HEAD for r in batches},
    }


@pytest.fixture
def bench(monkeypatch, tmp_path):
    FakeEngine.started, FakeEngine.broken, FakeEngine.tokens = [], set(), {}
    monkeypatch.setattr(gpu, "DecodeEngine", FakeEngine)
    monkeypatch.setattr(gpu, "measure_stage", fake_stage)
    monkeypatch.setattr(gpu.engines, "kill_on_signals", lambda: None)
    plots = []  # drawing takes a second; it has a test of its own
    monkeypatch.setattr(gpu_report, "plot", lambda *arguments: plots.append(arguments))

    def run(*argv):
        output = tmp_path / "out.json"
        fixed = ["--preset", "gpu2", "--dims", "l70", "--device", "cpu", "--output", str(output)]
        gpu.main([*fixed, "--batches", "1", "64", "--p", "0.785", *argv])
        return json.loads(output.read_text())

    run.plots = plots
    return run


def test_without_the_gpus_it_says_so_at_once(monkeypatch):
    monkeypatch.setattr(gpu.machine, "num_gpus", lambda: 0)
    with pytest.raises(ConfigError, match="none can be seen here"):
        gpu.main(["--preset", "gpu2"])
    monkeypatch.setattr(gpu.machine, "num_gpus", lambda: 2)
    with pytest.raises(ConfigError, match="4 GPUs are needed and 2 can be seen"):
        gpu.main(["--preset", "gpu4", "--device", "cuda"])


@pytest.mark.parametrize("split", ["5,x", "9,-1", "40,41", ""])
def test_a_split_that_is_none_is_refused(bench, split):
    with pytest.raises(ConfigError, match="counts above 0 that add up to the 80 layers"):
        bench("--split", split)
    assert FakeEngine.started == []


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "profile"}'])
def test_only_its_own_file_is_gone_on_with(bench, tmp_path, text):
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--resume: .* cannot be gone on with"):
        bench("--resume")


@pytest.mark.parametrize(
    "flag", ["--batches=0", "--p=2", "--rounds=0", "--tokens=-1", "--stop-after=nan"]
)
def test_numbers_that_make_no_sense_are_refused(bench, flag, capsys):
    with pytest.raises(SystemExit):
        bench(flag)
    assert f"{flag.partition('=')[2]}: allowed is" in capsys.readouterr().err
    assert FakeEngine.started == []


def test_a_whole_run(bench, capsys):
    record = bench("--p2p", "on", "--rounds", "2")
    assert FakeEngine.started == ["sp2", "pp2", "tp2", "tp2", "pp2", "sp2"]  # alternating
    assert record["complete"] and record["name"] == "bench-gpu2"
    # A head of 2 layers of .25 ms: the last stage gets one layer less.
    assert record["splits"] == {"pp2tp1": [41, 39]}
    assert record["step_seconds"]["sp2"]["64"]["full"] == pytest.approx(41 * 0.00025 + 0.0001)
    assert record["step_seconds"]["sp2"]["64"]["bare"] == pytest.approx(STAGE)
    assert record["sp_over_pp"]["64"]["0.785"] == pytest.approx(2 / 1.215, abs=1e-3)
    assert record["law_share_bare"]["64"]["0.785"] == pytest.approx(1.0)
    # One request's acceptance needs a long window, that of 64 does not, nor does stock.
    tokens = {(True, 1): 512, (True, 64): 64, (False, 1): 64, (False, 64): 64}
    assert FakeEngine.tokens == tokens
    assert len(record["cells"]) == 2 * 6 and record["failures"] == []
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key in ("name", "ok", "sp_over_pp", "sp_over_tp_no_p2p", "sp_over_tp", "law_share"):
        assert key in last
    assert last["single_stream_speedup"] == {"0.785": record["sp_over_pp"]["1"]["0.785"]}


def test_graphs_for_what_any_kind_runs(bench):
    sizes = gpu.capture_sizes("gpu2", [64, 100], 128)
    assert sizes == [1, 8, 16, 32, 48, 50, 64, 96, 100, 128]
    record = bench("--engines", "pp2", "--capture-batches")
    graphs = record["settings"]["options"]["compilation_config"]["cudagraph_capture_sizes"]
    assert {1, 32, 64} <= set(graphs)


def test_the_report_can_be_made_again_from_the_file(bench, tmp_path, capsys):
    bench("--p2p", "on")
    table = capsys.readouterr().out.partition("\nlaw's limit")[0]
    assert gpu_report.main([str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.startswith(table)
    assert bench.plots[0] == bench.plots[1]  # title, kinds, cells, step times, file


def test_resume_measures_only_what_is_missing(bench):
    first = bench("--engines", "sp2", "pp2")
    FakeEngine.started = []
    second = bench("--engines", "sp2", "pp2", "tp2", "--resume")
    assert FakeEngine.started == ["tp2"]
    assert second["cells"][: len(first["cells"])] == first["cells"]
    assert len(second["commands"]) == 2
    third = bench("--engines", "sp2", "--batches", "1", "64", "--p", "0.785", "0.88", "--resume")
    assert [c["p"] for c in third["cells"][6:]] == [0.88, 0.88]
    assert third["sp_over_pp"]["64"].keys() == {"0.785", "0.88"}


def test_resume_with_other_settings_is_refused(bench):
    bench("--engines", "pp2")
    with pytest.raises(ConfigError, match="was measured with tokens = 64, not 32"):
        bench("--engines", "pp2", "--tokens", "32", "--resume")


def test_one_engine_that_fails_does_not_end_the_run(bench, capsys):
    FakeEngine.broken = {"pp2"}
    record = bench("--p2p", "on")
    assert FakeEngine.started == ["sp2", "tp2"]
    assert not record["ok"] and not record["complete"]
    assert record["failures"][0]["what"] == "pp2 round 0"
    assert "FAILED: pp2 round 0: engine pp2 ended early" in capsys.readouterr().out
    FakeEngine.broken, FakeEngine.started = set(), []
    assert bench("--p2p", "on", "--resume")["complete"]
    assert FakeEngine.started == ["pp2"]


def test_stop_after_stops_in_order(bench):
    record = bench("--p2p", "on", "--stop-after", "1e-9")
    assert FakeEngine.started == [] and record["cells"] == [] and not record["complete"]


def test_splits_by_hand_and_for_stock(bench):
    record = bench("--p2p", "on", "--split", "42,38", "--stock-split", "same")
    splits = {engine["engine"]: engine["split"] for engine in record["engines"]}
    assert splits == {"sp2": [42, 38], "pp2": [42, 38], "tp2": None}


def test_speculation_off_against_stock(bench):
    record = bench("--engines", "pp2", "off2", "--no-profile")
    assert FakeEngine.started == ["pp2", "off2"]
    assert record["off_over_pp"] == {"1": 1.0, "64": 1.0}
    assert record["wanted"]["off_over_pp 64"] == [1.0, 0.98, True]


def test_engines_with_other_settings_are_held_against_stock(bench):
    record = bench("--engines", "pp2", "auto2", "described2", "--p", "0.5", "--no-profile")
    assert FakeEngine.started == ["pp2", "auto2", "described2"]
    for name in ("auto2", "described2"):
        assert record[f"{name}_over_pp"].keys() == {"1", "64"}
        assert record[f"{name}_over_pp"]["64"]["0.5"] == pytest.approx(2 / 1.5, rel=0.01)
    assert record["off_over_pp"] == {}


def test_selection_is_told_what_steps_take(bench, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="alpha2 needs --step-times"):
        bench("--engines", "sp2", "alpha2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"p\.json: no such file"):
        bench("--engines", "alpha2", "--step-times", "p.json")
    (tmp_path / "p.json").touch()
    record = bench("--engines", "pp2", "sp2", "alpha2", "--no-profile", "--step-times", "p.json")
    assert FakeEngine.settings["sp2"] == {}
    assert FakeEngine.settings["alpha2"] == {
        "mode": "sp-alpha",
        "selection": "scheduler",
        "profile": str(tmp_path / "p.json"),  # the engine may run elsewhere
    }
    assert record["alpha2_over_pp"].keys() == {"1", "64"}


def test_without_a_profile_there_is_no_limit(bench):
    record = bench("--p2p", "on", "--no-profile")
    assert record["law_share"] == {} and record["splits"] == {"pp2tp1": None}
    assert record["complete"]
