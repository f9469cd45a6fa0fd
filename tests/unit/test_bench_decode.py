# SPDX-License-Identifier: Apache-2.0
"""What the measuring tools ask of engines: arguments, environments, arrivals, dimensions."""

import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from spexis.bench import (
    cpu,
    decode,
    decode_child,
    dims,
    drafter_time,
    links,
    machine,
    presets,
    profile,
)
from spexis.bench.decode import DecodeSpec, arrivals, environment, llm_arguments, window_spread
from spexis.bench.decode_child import Child
from spexis.bench.options import add_engine_options, engine_options
from spexis.config import ConfigError
from spexis.core.profile_file import ProfileFile
from spexis.core.stage_curve import StageCurve
from spexis.observability.counters import SpexisCounters

SP = {"method": "synthetic", "acceptance": 0.5}


# -- arrivals and windows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "stages", "per_step", "groups"),
    [
        (64, 2, 100, [32, 32]),
        (64, 1, 100, [64]),
        (128, 2, 30, [22, 22, 21, 21, 21, 21]),  # not 5 groups: both micro-batches alike
        (1, 2, 100, [1]),
        (5, 4, 1, [1, 1, 1, 1, 1]),
    ],
)
def test_arrivals(rows, stages, per_step, groups):
    assert arrivals(rows, stages, per_step) == groups


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100, 256])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("per_step", [1, 3, 62])
def test_arrivals_make_even_micro_batches(rows, stages, per_step):
    groups = arrivals(rows, stages, per_step)
    assert sum(groups) == rows and max(groups) <= per_step
    batches = [sum(groups[stage::stages]) for stage in range(stages)]
    # A group differs by one row at most from another, so do the micro-batches by one a group.
    assert max(batches) - min(batches) <= -(-len(groups) // stages)


def test_spread_of_a_window():
    steady = [(t / 10, 4 * t) for t in range(41)]
    assert window_spread(steady) == pytest.approx([40, 40])
    slower = steady + [(4.0 + t / 5, 160 + 4 * t) for t in range(1, 41)]
    low, high = window_spread(slower)
    assert (low, high) == pytest.approx((20, 40))
    assert window_spread([(0.0, 0), (2.0, 10)]) == [5, 5]


class FakeCore:
    """An engine core of two stages: a request's token comes at every second step."""

    def __init__(self):
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.joined), counters=SpexisCounters(num_stages=2)
        )
        self.batch_queue, self.joined, self.step, self.added = [], {}, 0, []

    def add(self, index, context, max_tokens):
        name = str(index)
        self.joined[name] = self.step % 2
        self.added.append((self.step, name))
        return name

    def get_output(self):
        parity, self.step = self.step % 2, self.step + 1
        names = [name for name, at in self.joined.items() if at == parity]
        self.scheduler.counters.steps += 1
        self.scheduler.counters.tokens += len(names)
        self.scheduler.counters.discarded_rows += len(names)
        outputs = [SimpleNamespace(request_id=name, new_token_ids=[7]) for name in names]
        return SimpleNamespace(outputs=outputs)


def fake_child(kv_tokens=10**6):
    child, core = object.__new__(Child), FakeCore()
    limits = SimpleNamespace(max_num_batched_tokens=46)
    child.engine = SimpleNamespace(
        engine_core=core,
        abort_request=lambda ids: [core.joined.pop(name) for name in ids],
        vllm_config=SimpleNamespace(scheduler_config=limits),
    )
    child.core, child.scheduler, child.stages, child.num_runs = core, core.scheduler, 2, 0
    child.started = lambda: {"kv_tokens": kv_tokens}
    child._add = core.add
    return child, core


def test_a_measurement_counts_the_window_only():
    child, core = fake_child()
    found = child.decode(rows=6, context=20, tokens=10, warm=3)
    # 46 tokens a step: six rows decode, so two prompts of 20 fit; both micro-batches alike.
    assert [step for step, _ in core.added] == [0, 0, 1, 1, 2, 3]
    assert found["tokens_per_step"] == [3, 3]
    assert 60 <= found["tokens"] <= 62 and found["steps"] == pytest.approx(20, abs=1)
    assert found["rows_per_token"] == 2.0  # of the window; counters began before it
    assert found["rate"] == pytest.approx(found["tokens"] / found["seconds"])
    assert core.joined == {}  # nothing is left behind


class PromptCore:
    """An engine core whose every step runs one waiting prompt; its scheduler notes the limit."""

    def __init__(self):
        self.waiting, self.limits = [], []
        self.scheduler = SimpleNamespace(
            max_num_scheduled_tokens=64, has_requests=lambda: bool(self.waiting)
        )

    def get_output(self):
        self.limits.append(self.scheduler.max_num_scheduled_tokens)
        outputs = [SimpleNamespace(request_id=self.waiting.pop(0), new_token_ids=[7])]
        return SimpleNamespace(outputs=outputs)


def test_prompt_chunks_have_a_step_each_and_are_new_to_the_prefix_cache(monkeypatch):
    ends = iter([5.0, 5.2, 5.4, 5.6] * 2)
    monkeypatch.setattr(decode_child.time, "monotonic", lambda: next(ends))
    child, _ = fake_child(kv_tokens=50)
    core, added = PromptCore(), []

    def add(index, context, max_tokens):
        added.append((index, context, max_tokens))
        core.waiting.append(str(index))

    config = child.engine.vllm_config
    config.model_config = SimpleNamespace(max_model_len=1000)
    child.engine.engine_core, child.core, child.scheduler = core, core, core.scheduler
    child._add, child.num_prompts = add, 0
    found = child.prefill(tokens=46, count=3)
    assert found == {"tokens": 46, "seconds": pytest.approx(0.2)}
    assert core.limits == [46] * 4 and core.scheduler.max_num_scheduled_tokens == 64
    child.prefill(tokens=46, count=3)
    assert len({index for index, *_ in added}) == 8 and all(a[1:] == (46, 1) for a in added)
    # random.Random takes -3 for 3: these must not be the prompts of a batch's rows either.
    assert min(index for index, *_ in added) > 100_000
    assert "46 tokens at most" in child.prefill(tokens=47, count=3)["skipped"]  # of a step
    config.scheduler_config.max_num_batched_tokens = 64
    assert "50 tokens at most" in child.prefill(tokens=51, count=3)["skipped"]  # of the KV cache


def test_what_does_not_fit_is_skipped_with_the_reason():
    child, core = fake_child(kv_tokens=100)
    assert "KV cache" in child.decode(rows=6, context=20, tokens=10, warm=3)["skipped"]
    assert core.added == []


# -- arguments and environments --------------------------------------------------------------------


def test_stock_and_spexis_get_the_same_options():
    options = {"max_num_batched_tokens": 4096}
    stock = llm_arguments(DecodeSpec(model="m", stages=2, options=options))
    spexis = llm_arguments(DecodeSpec(model="m", stages=2, options=options, drafter=SP))
    assert spexis.pop("additional_config") == {"spexis": {"drafter": SP}}
    assert spexis == stock
    assert stock["load_format"] == "dummy" and "enforce_eager" not in stock


def test_split_goes_in_through_the_users_door():
    spec = {"model": "m", "stages": 2, "split": [41, 39]}
    spexis = DecodeSpec(**spec, drafter=SP)
    block = llm_arguments(spexis)["additional_config"]["spexis"]
    assert block["placement"] == {"layers": [41, 39]}
    assert decode.PARTITION_ENV not in environment(spexis, {decode.PARTITION_ENV: "1,1"})
    assert environment(DecodeSpec(**spec), {})[decode.PARTITION_ENV] == "41,39"


def test_without_p2p():
    off = DecodeSpec(model="m", tensor=2, p2p=False)
    assert environment(off, {})["NCCL_P2P_DISABLE"] == "1"
    assert llm_arguments(off)["disable_custom_all_reduce"] is True
    on = DecodeSpec(model="m", tensor=2)
    assert "NCCL_P2P_DISABLE" not in environment(on, {"NCCL_P2P_DISABLE": "1"})
    assert "disable_custom_all_reduce" not in llm_arguments(on)


def test_stock_workers_get_one_thread_of_each_core(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 0, 1, 2})
    siblings = {0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"}

    def read(path):
        return siblings[int(path.parts[-3].removeprefix("cpu"))]

    monkeypatch.setattr(machine.Path, "exists", lambda path: True)
    monkeypatch.setattr(machine.Path, "read_text", read)
    assert [machine.stock_cpu_binding(n) for n in (1, 2, 3)] == ["0", "0|1", "0|1|0"]
    monkeypatch.setattr(machine.Path, "exists", lambda path: False)  # a kernel that does not say
    assert [machine.stock_cpu_binding(n) for n in (1, 2)] == ["0,1", "0,1|2,3"]


def test_cpu_engines():
    stock = DecodeSpec(model="m", device="cpu", stages=2)
    assert llm_arguments(stock)["worker_cls"].endswith("StockCPUWorker")
    assert environment(stock, {})["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1
    spexis = DecodeSpec(model="m", device="cpu", stages=2, drafter=SP)
    assert "worker_cls" not in llm_arguments(spexis)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(spexis, {})  # the plugin's to set


def test_a_spec_survives_the_way_to_the_child():
    spec = DecodeSpec(model="m", stages=2, split=[3, 3], drafter=SP, options={"a": 1})
    back = DecodeSpec(**json.loads(json.dumps(decode.dataclasses.asdict(spec))))
    assert back == spec


def test_flashinfer_is_not_asked_for_where_it_is_absent(monkeypatch):
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    spec = DecodeSpec(model="m")
    assert environment(spec, {})["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert environment(spec, {"VLLM_USE_FLASHINFER_SAMPLER": "1"})[
        "VLLM_USE_FLASHINFER_SAMPLER"
    ] == ("1")


def options(*argv):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_options(parser.parse_args(argv))


def test_engine_options():
    assert options() == {}
    given = options(
        "--compilation-config",
        '{"mode": 0}',
        "--capture-sizes",
        "64",
        "1",
        "--max-num-batched-tokens",
        "4096",
        "--engine-option",
        'kv-cache-dtype="fp8"',
        "--enforce-eager",
    )
    assert given == {
        "compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 64]},
        "max_num_batched_tokens": 4096,
        "kv_cache_dtype": "fp8",
        "enforce_eager": True,
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--compilation-config", "mode=0"], "--compilation-config is not JSON"),
        (["--compilation-config", "[1]"], "JSON object"),
        (["--engine-option", "seed"], "NAME=JSON"),
        (["--engine-option", "seed=x"], "--engine-option seed is not JSON"),
    ],
)
def test_bad_engine_options(argv, words):
    with pytest.raises(ConfigError, match=words):
        options(*argv)


# -- dimensions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "billions"), [("l8", 8.03), ("q32", 32.8), ("l70", 70.6)])
def test_dimensions_add_up_to_the_models_size(name, billions):
    d = dims.read_config(name)
    hidden, kv = d["hidden_size"], d["num_key_value_heads"] * 128
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * d["intermediate_size"]
    total = d["num_hidden_layers"] * layer + 2 * d["vocab_size"] * hidden
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_write_model_with_fewer_layers(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    config = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "hidden_size": 8}
    (source / "config.json").write_text(json.dumps(config))
    folder = dims.write_model(str(source), tmp_path / "out", 2)
    written = json.loads((Path(folder) / "config.json").read_text())
    assert written == {**config, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    assert dims.sizes(str(source))["name"] == "model"
    with pytest.raises(ConfigError, match=r"neither demo, nor a set of dimensions .l8, l70, q32"):
        dims.write_model("l7", tmp_path)


@pytest.mark.parametrize("config", ["[1]", "{}", '{"num_hidden_layers": "4"}', "\x00"])
def test_no_models_config_is_one_line(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        dims.sizes(str(tmp_path))
    assert "\n" not in str(error.value)


def test_layers_that_do_not_fit_into_a_cpus_memory_are_refused():
    dims.check_memory("tiny", 8, 10**8)
    # 40 layers of 855M parameters, embedding and head of 1.05e9 each, 4 bytes.
    with pytest.raises(ConfigError, match=r"40 layers of l70 take 145 GB .* 20 GB are free"):
        dims.check_memory("l70", 40, 20 * 10**9)


def test_an_output_that_cannot_be_is_found_before_anything_is_measured(tmp_path):
    machine.check_output(tmp_path / "new" / "p.json")
    assert (tmp_path / "new").is_dir() and not (tmp_path / "new" / "p.json").exists()
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    machine.check_output(kept)
    assert kept.read_text() == "{}"
    for bad in (tmp_path, kept / "p.json"):
        with pytest.raises(ConfigError, match=r"--output .* cannot be written"):
            machine.check_output(bad)


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 1)
    machine.check_devices("cuda", 1)
    machine.check_devices("cpu", 9)
    with pytest.raises(ConfigError, match="2 GPUs are needed and 1 can be seen"):
        machine.check_devices("cuda", 2)


def test_the_cpu_benchs_random_model_can_be_profiled():
    config = dims.read_config("cpu")
    assert set(cpu.RANDOM_SIZES) <= set(config)
    assert config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == 0  # for TP=2


# -- profile ---------------------------------------------------------------------------------------


class FakeEngine:
    """Answers as decode_child does: a stage step takes 10 ms, a head 1 ms."""

    made: list = []  # noqa: RUF012 (reset by the fixture)

    def __init__(self, spec, log, timeout=1.0):
        self.spec, self.calls = spec, []
        self.started = {"runner": "V2", "cudagraph_capture_sizes": []}
        FakeEngine.made.append(self)

    def call(self, do, **arguments):
        self.calls.append((do, arguments))
        if do == "head":
            return {"seconds": 0.001}
        if do == "decode" and arguments["rows"] > 100:
            return {"skipped": "needs a KV cache of 1 tokens"}
        if do == "decode":
            rate = arguments["rows"] / 0.011
            return {**arguments, "rate": rate, "spread": [rate * 0.9, rate * 1.1]}
        if do == "prefill" and arguments["tokens"] > 512:
            return {"skipped": "a step takes 512 tokens at most"}
        if do == "prefill":
            return {"tokens": arguments["tokens"], "seconds": 0.001 + 1e-4 * arguments["tokens"]}
        return {"scheduler": 0.0005, "worker": 0.002} if do == "take_host" else {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


@pytest.fixture
def fake_engine(monkeypatch):
    FakeEngine.made = []
    monkeypatch.setattr(profile, "DecodeEngine", FakeEngine)
    return FakeEngine


def test_profile_file_is_what_the_stage_curve_reads(fake_engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile.engines, "kill_on_signals", lambda: None)
    monkeypatch.setattr(machine, "num_gpus", lambda: 1)
    host = {"host": {"describe": 0.0002}}  # what one device has for links
    monkeypatch.setattr(profile, "links", lambda *args, **kwargs: host)
    output = tmp_path / "p.json"
    drafter = {"1": 0.0004, "64": 0.0005, "128": 0.0006}
    monkeypatch.setattr(profile, "drafter_seconds", lambda *args, **kwargs: (drafter, None))
    argv = ["l70", "--device", "cuda", "--batches", "1", "64", "128", "--contexts", "128"]
    assert profile.main([*argv, "--output", str(output)]) == 0
    assert fake_engine.made[0].spec.max_num_seqs == 128
    written = json.loads(output.read_text())
    curve = StageCurve.from_profile(written)
    assert curve.layers == 40  # half of them
    assert curve.seconds(64) == pytest.approx(0.010)
    assert curve.head_seconds(64) == 0.001
    assert written["skipped"][0]["rows"] == 128 and curve.max_rows == 64
    assert written["skipped"][1]["chunk"] == 2048
    (measured,) = ProfileFile.of(written).stage_profile().stages
    assert measured.prefill_points == ((128, pytest.approx(0.0128)), (512, pytest.approx(0.0512)))
    assert fake_engine.made[0].spec.max_model_len > 2048
    assert written["drafter_seconds"] == drafter and curve.drafter_seconds(64) == 0.0005
    # A layer takes .25 ms, the head 1 ms, the drafter .5 ms.
    assert written["balanced_split"]["2"] == [41, 39]
    file = ProfileFile.of(written)
    assert file.stage_profile().drafter[-1] == (128, 0.0006)
    assert (file.model.layers, file.model.head_dim) == (80, 128)
    assert written["host_seconds"]["64"] == {"scheduler": 0.0005, "worker": 0.002}
    assert written["link_seconds"] == host and "1 device" in written["link_note"]
    assert file.stage_profile().hidden_link == ()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "name": "profile",
        "ok": True,
        "output": str(output),
    }


def test_a_drafters_time_is_measured_or_absent_with_a_reason(monkeypatch):
    arguments = {"rows": [1], "layers": 2, "vocab": 99}
    assert drafter_time.drafter_seconds("tiny", device="cpu", **arguments)[0] is None

    def steps(command, **kwargs):
        output = Path(command[command.index("--output") + 1])
        output.write_text(json.dumps({"ms": [{"batch": 1, "draft": draft}]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(drafter_time.subprocess, "run", steps)
    draft = 0.5
    assert drafter_time.drafter_seconds("tiny", device="cuda", **arguments) == ({"1": 5e-4}, None)
    draft = None
    found, why = drafter_time.drafter_seconds("tiny", device="cuda", **arguments)
    assert found is None and "no graph" in why
    failed = SimpleNamespace(returncode=1, stderr="one\ntwo\n")
    monkeypatch.setattr(drafter_time.subprocess, "run", lambda *args, **kwargs: failed)
    assert drafter_time.drafter_seconds("tiny", device="cuda", **arguments) == (None, "failed: two")


def test_worker_host_time_is_not_claimed_on_a_cpu(fake_engine, tmp_path):
    stage = profile.measure_stage(
        "tiny",
        layers=4,
        tensor=1,
        device="cpu",
        batches=[2],
        contexts=[16],
        tokens=8,
        repeats=3,
        options={},
        log=tmp_path / "log",
    )
    assert stage["host_seconds"]["2"]["worker"] is None
    assert len([c for c in fake_engine.made[0].calls if c[0] == "decode"]) == 4  # 3 and the host's


def test_point_is_the_median_with_spread():
    runs = [
        {"rows": 10, "context": 5, "rate": rate, "spread": [rate - 100, rate + 100]}
        for rate in (1000, 500, 800)
    ]
    found = profile.point(runs, head_seconds=0.0025)
    assert found["step_seconds"] == pytest.approx(0.0125)
    assert found["seconds"] == pytest.approx(0.010)
    assert found["step_spread"] == pytest.approx([0.010, 0.020])
    assert profile.spread(found) == pytest.approx(0.6)


def test_one_device_has_no_link_but_a_host(monkeypatch):
    monkeypatch.setattr(links, "_measure", lambda order, extra: {"describe": 2e-4})
    found = links.links("cuda", hidden_size=8, rows=[1], num_devices=1)
    assert found == {"host": {"describe": 2e-4}}


def test_ranks_on_a_cpu_have_the_cores_of_workers(monkeypatch):
    orders = []
    monkeypatch.setattr(links, "_measure", lambda order, extra: orders.append(order) or {})
    monkeypatch.setattr(machine, "stock_cpu_binding", lambda workers: "0,1|2,3")
    links.links("cpu", hidden_size=8, rows=[1], num_devices=0)
    assert len(orders) == 3
    for order in orders:
        assert [links._cores(order, rank) for rank in (0, 1)] == [[0, 1], [2, 3]]
        assert links._threads(order, 1) == {"OMP_NUM_THREADS": "2"}
    orders.clear()
    links.links("cuda", hidden_size=8, rows=[1], num_devices=2)
    assert len(orders) == 5 and all(links._threads(order, 1) == {} for order in orders)


def test_links_keep_what_was_measured_when_vllms_all_reduce_fails(monkeypatch):
    asked = []

    def measure(order, extra):
        asked.append((order["what"], order.get("custom"), extra))
        if order["what"] == "host":
            raise subprocess.TimeoutExpired("python", 300)
        if order["what"] == "torch":
            return {"send": {"1": 1e-5}, "all_reduce": {"1": 4e-5}}
        if order["custom"]:
            raise RuntimeError("link times failed: first\nno kernel\n")
        return {"tp_all_reduce": {"1": 3e-5}}

    monkeypatch.setattr(links, "_measure", measure)
    found = links.links("cuda", hidden_size=8, rows=[1], num_devices=2)
    assert found["p2p"]["tp_all_reduce"] is None
    assert found["p2p"]["tp_note"] == "failed: no kernel"
    assert found["p2p"]["all_reduce"] == {"1": 4e-5}
    assert found["no_p2p"]["tp_all_reduce"] == {"1": 3e-5}
    off = {"NCCL_P2P_DISABLE": "1"}
    assert asked[0] == ("host", None, {})
    assert asked[3:] == [("torch", None, off), ("vllm", False, off)]
    assert found["host"]["describe"] is None and "timed out" in found["host"]["note"]


# -- the bench command chooses a preset ------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "module"),
    [
        ([], "cpu"),
        (["--pairs", "3"], "cpu"),
        (["--preset", "cpu"], "cpu"),
        (["--preset", "gpu2", "--dims", "tiny"], "gpu"),
        (["--dims", "l70", "--preset=gpu4"], "gpu"),
        (["--preset", "gpu2", "--p", "0.5", "0.8"], "gpu"),  # --p is not short for --preset
    ],
)
def test_presets_choose_a_module(monkeypatch, argv, module):
    def import_module(name):
        return SimpleNamespace(main=lambda args: (name, args))

    monkeypatch.setattr(presets.importlib, "import_module", import_module)
    assert presets.main(argv) == (f"spexis.bench.{module}", argv)


def test_bench_help_names_the_presets(capsys):
    assert presets.main(["--help"]) == 0
    assert "gpu2" in capsys.readouterr().out
