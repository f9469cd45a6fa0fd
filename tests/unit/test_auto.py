# SPDX-License-Identifier: Apache-2.0
"""`spexis serve --auto`: the command it would run, and what it refuses. No engine starts."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spexis import cli
from spexis.cli import auto, serve
from spexis.core.load import Load
from spexis.drafters import ResolvedDrafter

STORED = str(Path(__file__).parents[2] / "benchmarks/results/2026-11-30-gpu-profile-l70.json")
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """vLLM for CUDA with two GPUs and the plugin in place; .cpu() and .exit(layer) change it."""
    monkeypatch.setattr(serve, "_vllm", lambda: ["vllm"])
    for name, value in (
        ("plugin_installed", True),
        ("vllm_distribution", ("vllm", "0.32.0")),
        ("is_cpu", False),
        ("has_compiler", True),
    ):
        monkeypatch.setattr(serve.platform, name, lambda value=value: value)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    counted = []
    monkeypatch.setattr(auto, "num_gpus", lambda: counted.append(1) or 2)

    def exit_at(layer, acceptance=None):
        def resolve(drafter, model):
            assert model.sizes["num_attention_heads"] == LLAMA_70B["num_attention_heads"]
            return ResolvedDrafter(
                folder=drafter.model,
                exit_layer=layer,
                version="1",
                draft_vocab_size=100,
                fingerprint_checked=True,
                acceptance=acceptance,
            )

        monkeypatch.setattr("spexis.drafters.resolve", resolve)

    exit_at(40)
    return SimpleNamespace(
        counted=counted,
        exit=exit_at,
        cpu=lambda: monkeypatch.setattr(serve.platform, "is_cpu", lambda: True),
        gpus=lambda n: monkeypatch.setattr(auto, "num_gpus", lambda: n),
    )


@pytest.fixture
def model(tmp_path):
    """folder(**changes) of a config.json."""

    def folder(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, **changes}))
        return str(tmp_path)

    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*argv) -> (the argv that would be executed, the spexis block or None, printed lines)."""

    def run(*argv):
        ran = []
        monkeypatch.setattr(serve.os, "execvp", lambda file, command: ran.append(command))
        assert cli.main(["serve", *argv]) == 0, capsys.readouterr().err
        printed = capsys.readouterr()
        (command,) = ran
        block = None
        if serve.ADDITIONAL in command:
            block = json.loads(command[command.index(serve.ADDITIONAL) + 1]).get("spexis")
        lines = [line for line in printed.err.splitlines() if line.startswith("auto: ")]
        return command, block, lines

    return run


def sizes(command):
    """(tensor, pipeline) parallel size, each given once."""
    found = []
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        assert command.count(flag) == 1
        found.append(int(command[command.index(flag) + 1]))
    return tuple(found)


# -- what is chosen -------------------------------------------------------------------------------


def test_tensor_parallel_runs_without_spexis(run, model):
    argv = ("--auto", "--hardware", "h200", "--acceptance", "0.6", "--port", "9000")
    command, block, lines = run(model(), *argv)
    assert sizes(command) == (2, 1) and block is None and serve.ADDITIONAL not in command
    assert command[:3] == ["vllm", "serve", model()] and command[-2:] == ["--port", "9000"]
    assert lines[0].startswith("auto: TP2, estimated for h200, at 64 requests of 1000 tokens: ")
    assert lines[1].startswith("auto: next SP 2 stages: ") and 2 <= len(lines) <= 3


def test_sp_falls_back_live(run, model):
    argv = ("--auto", "--hardware", "h200-no-p2p", "--acceptance", "0.7", "--drafter", "mine")
    command, block, lines = run(model(), *argv)
    assert sizes(command) == (1, 2)
    assert block == {"mode": "auto", "drafter": {"model": "mine"}}
    assert lines[0].startswith("auto: SP 2 stages, ") and "p = 0.700" in lines[0]
    assert lines[1].startswith("auto: next TP2: ") and "of it)" in lines[1]


def test_a_mix_of_both(run, model, machine):
    argv = ("--auto", "--hardware", "h200-no-p2p", "--gpus", "4", "--acceptance", "0.7")
    command, block, _ = run(model(), *argv)
    assert sizes(command) == (2, 2) and block["mode"] == "auto"
    assert not machine.counted, "--gpus was given"
    machine.exit(20)  # the first of four stages
    command, _, lines = run(model(), *argv)
    assert sizes(command) == (1, 4)
    assert "the drafter's exit, layer 20 of 80, is not made for it" in lines[2]


def test_gpus_are_counted_where_nobody_says(run, model, machine):
    run(model(), "--auto", "--hardware", "h200")
    assert machine.counted == [1]
    machine.gpus(8)
    command, *_ = run(model(), "--auto", "--hardware", "h200", "--streams", "1")
    assert sizes(command) == (8, 1)


def test_from_a_measured_profile(run, model):
    argv = ("--auto", "--profile", STORED, "--no-p2p", "--acceptance", "0.785", "--streams", "64")
    command, block, lines = run(model(), *argv)
    assert sizes(command) == (1, 2) and block["mode"] == "auto"
    assert f"by {STORED}, at 64 requests" in lines[0] and len(lines) == 3
    command, block, lines = run(model(), *(flag for flag in argv if flag != "--no-p2p"))
    assert sizes(command) == (2, 1) and block is None  # with NVLink, as measured
    assert "assumed - all-reduce: vLLM's own" in lines[-1]


def test_what_cannot_run_is_passed_over(run, model, machine):
    """Several servers, held-back drafts, and SP of a model that Spexis does not take."""
    machine.gpus(4)
    small = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
    argv = ("--auto", "--hardware", "h200", "--streams", "256")
    command, block, lines = run(model(**small), *argv)
    assert sizes(command)[0] * sizes(command)[1] == 4 and block is None
    assert "servers, to be started each by itself" in lines[2]
    argv = ("--auto", "--hardware", "h200-no-p2p", "--acceptance", "0.7", "--streams", "256")
    machine.gpus(2)
    command, _, lines = run(model(), *argv)
    assert sizes(command) == (1, 2)
    assert "SP-alpha 2 stages (drafts are selected only where" in lines[2]
    command, block, lines = run(model(architectures=["GptOssForCausalLM"]), *argv)
    assert sizes(command) == (1, 2) and block is None, "plain PP"
    argv = argv[:-2]
    for changes, words in (
        ({"architectures": ["GptOssForCausalLM"]}, "not tested on GptOssForCausalLM"),
        ({"sliding_window": 4096}, "sliding windows (4096) are not tested"),
        ({"layer_types": ["linear_attention"] * 80}, "recurrent or linear-attention"),
        ({"vision_config": {}}, "is multimodal"),
    ):
        command, block, lines = run(model(**changes), *argv)
        assert sizes(command) == (2, 1) and block is None
        assert "passed over" in lines[2] and words in lines[2], lines
    unused = {"sliding_window": 4096, "use_sliding_window": False}
    assert sizes(run(model(**unused), *argv)[0]) == (1, 2)
    sliding = model(sliding_window=4096)
    assert sizes(run(sliding, *argv, "--disable-sliding-window")[0]) == (1, 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--enable-lora"], "LoRA is not tested"),
        (["--speculative-config", "{}"], "vLLM's own speculative_config"),
        (["--scheduler-cls", "x.Y"], "scheduler_cls x.Y"),
        (["--drafter", "none"], "drafter none makes no drafts"),
    ],
)
def test_flags_that_spexis_refuses_leave_vllm(run, model, flags, words):
    argv = ("--auto", "--hardware", "h200-no-p2p", "--acceptance", "0.7")
    command, block, lines = run(model(), *argv, *flags)
    assert sizes(command) == (2, 1) and block is None and words in lines[2]


def test_no_drafter_for_the_model(run, model, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(serve, "_vllm", lambda: ["vllm"])
    monkeypatch.setattr(serve.platform, "is_cpu", lambda: False)
    argv = ("--auto", "--hardware", "h200-no-p2p", "--gpus", "2", "--acceptance", "0.7")
    command, block, lines = run(model(), *argv)
    assert sizes(command) == (2, 1) and block is None
    assert "no shipped drafter fits" in lines[2] and "spexis train exit" in lines[2]


def test_a_drafter_that_says_how_good_it_is_needs_no_acceptance(run, model, machine):
    argv = ("--auto", "--hardware", "h200-no-p2p", "--drafter", "mine")
    machine.exit(40, acceptance=0.7)
    command, block, lines = run(model(), *argv)
    assert sizes(command) == (1, 2) and block["mode"] == "auto"
    assert lines[-1].startswith("auto: 70% of its drafts are right")
    command, block, lines = run(model(), *argv, "--acceptance", "0.05")  # the user knows better
    assert sizes(command) == (2, 1) and "its drafts" not in lines[-1]


def test_sp_needs_an_acceptance(run, model):
    *_, lines = run(model(), "--auto", "--hardware", "h200-no-p2p")
    assert "give --acceptance" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "flags"), [({"quantization_config": {}}, ()), ({}, ("--quantization", "fp8"))]
)
def test_a_quantised_model_is_priced_as_bfloat16(run, model, changes, flags):
    *_, lines = run(model(**changes), "--auto", "--hardware", "h200", *flags)
    assert "the plan is for bfloat16" in lines[-1]


def test_on_a_cpu_with_a_profile(run, model, machine, tmp_path):
    machine.cpu()
    block = json.loads(Path(STORED).read_text())
    block |= {"device": "cpu", "hardware": {"cpu": "some"}}
    (tmp_path / "p.json").write_text(json.dumps(block))
    argv = ("--auto", "--profile", str(tmp_path / "p.json"), "--streams", "4")
    command, block, _ = run(model(), *argv, "--acceptance", "0.9")
    assert sizes(command) == (1, 2) and block == {"mode": "auto"}
    assert "--enforce-eager" in command and not machine.counted


def test_dry_run_prints_the_command(model, capsys):
    argv = ["serve", model(), "--auto", "--hardware", "h200", "--dry-run"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"vllm serve {shlex.quote(model())} --tensor-parallel-size 2")
    assert "off, vLLM by itself" in printed.err


def test_stock_workers_on_a_cpu_are_told_their_cores(monkeypatch):
    """Else vLLM refuses two of them on one NUMA node; a user's own word stands."""
    monkeypatch.setattr(serve.platform, "is_cpu", lambda: True)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    options = SimpleNamespace(model="m")
    worker = ["--worker-cls", "spexis.engine.worker_cpu.StockCPUWorker"]
    for flags, stages in (
        (["--pipeline-parallel-size", "2"], 2),
        (["--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"], 1),
    ):
        command, environment = serve.build(options, flags, None)
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == serve.stock_cpu_binding(2)
        assert (
            (command[command.index("--worker-cls") :][:2] == worker)
            if stages > 1
            else ("--worker-cls" not in command)
        )
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    own = ["--pipeline-parallel-size", "2", "--worker-cls", "mine"]
    command, environment = serve.build(options, own, None)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment and command.count("--worker-cls") == 1
    one = ["--pipeline-parallel-size", "1", "--tensor-parallel-size", "1"]
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in serve.build(options, one, None)[1]


# -- the load -------------------------------------------------------------------------------------


def test_streams_of_a_trace(run, model):
    argv = ("--auto", "--hardware", "h200", "--acceptance", "0.6")
    *_, slow = run(model(), *argv, "--trace", "poisson:rate=0.2,requests=200")
    *_, fast = run(model(), *argv, "--trace", "poisson:rate=50,requests=2000")
    *_, few = run(model(), *argv, "--trace", "batch:requests=8", "--max-num-seqs", "4")
    assert ": 1 requests" in slow[0] or ": 2 requests" in slow[0], slow[0]
    assert ": 256 requests at once" in fast[0] and "all that may run" in fast[0]
    assert ": 4 requests at once of 640 tokens" in few[0]


def test_little_s_law():
    arrival, ones = np.arange(101) * 0.1, np.ones(101)

    def of(seconds, most=64):
        return Load.of_trace(arrival, 100 * ones, 50 * ones, seconds, most)

    # Ten a second, each two seconds however many there are.
    load = of(lambda load, tokens: 2.0)
    assert (load.streams, load.context, load.prompt) == (20, 125, 100)
    # A tenth of a second and 50 ms a request beside it: b = 10 (.1 + .05 b) at b = 2.
    assert of(lambda load, tokens: 0.1 + 0.05 * load.streams).streams == 2
    assert of(lambda load, tokens: 0.2 * load.streams).streams == 64, "never keeps up"
    assert of(lambda load, tokens: tokens / 50).streams == 10


def test_plan_takes_a_trace(capsys):
    argv = ["plan", "llama-8b", "--hardware", "h100", "--gpus", "2"]
    assert cli.main([*argv, "--trace", "batch:requests=32,prompt=100,output=50"]) == 0
    assert "32 requests at once of 125 tokens" in capsys.readouterr().out
    assert cli.main([*argv, "--trace", "batch", "--batch", "3"]) == 2
    assert "leave them out" in capsys.readouterr().err


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-tp", "2"], "leave out -tp, or leave out --auto"),
        (["--pipeline_parallel_size=2"], "leave out --pipeline-parallel-size"),
        (["--data-parallel-size", "2"], "leave out --data-parallel-size"),
        (["--spexis", "{}"], "leave out --spexis (--drafter is allowed)"),
        (["--additional-config", '{"spexis": {}}'], "leave out spexis in --additional-config"),
        (["--gpus", "0"], "--gpus 0: allowed is a whole number above 0"),
        (["--gpus"], "--gpus needs a value"),
        (["--streams", "many"], "--streams many"),
        (["--acceptance", "2"], "from 0 to 1"),
        (["--streams", "2", "--trace", "batch"], "give one of them"),
        (["--profile", STORED], "--profile and --hardware"),
        (["--no-p2p"], "--no-p2p needs --profile"),
        (["--trace", "/no/such"], "trace /no/such cannot be read"),
        (["--gpus", "1"], "no split of"),
    ],
)
def test_contradictions_are_one_line(model, capsys, argv, words):
    assert cli.main(["serve", model(), "--auto", "--hardware", "h100", *argv]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_sizes_in_the_config_file_are_the_users(model, tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text("tensor_parallel_size: 2\n")
    argv = ["--auto", "--hardware", "h100", "--config", str(tmp_path / "serve.yaml")]
    assert cli.main(["serve", model(), *argv]) == 2
    assert "leave out --tensor-parallel-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--auto needs --profile FILE (`spexis profile MODEL --output FILE`"),
        (["--hardware", "tpu"], "allowed are h200"),
        (["--profile", "/no/such"], "cannot be read"),
    ],
)
def test_what_to_plan_from(model, capsys, argv, words):
    assert cli.main(["serve", model(), "--auto", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_cpu_has_no_preset_and_no_gpu_profile(model, machine, capsys):
    machine.cpu()
    for argv, words in (
        (["--hardware", "h100"], "--auto on a CPU needs --profile FILE"),
        ([], "`spexis profile MODEL_FOLDER --output FILE`"),
        (["--profile", STORED], "is of device 'cuda', and vLLM here runs on 'cpu'"),
    ):
        assert cli.main(["serve", model(), "--auto", *argv]) == 2
        printed = capsys.readouterr().err
        assert words in printed and printed.count("\n") == 1


def test_no_gpu_is_a_refusal(model, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.undo()
    monkeypatch.setattr(serve.platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["serve", model(), "--auto", "--hardware", "h100"]) == 2
    printed = capsys.readouterr().err
    assert "--auto sees no GPU" in printed and "--gpus N" in printed and printed.count("\n") == 1


def test_the_model_s_sizes_are_needed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, words in (
        (str(tmp_path), "has no config.json"),
        ("nobody/nothing-at-all", "cannot read the config.json of nobody/nothing-at-all"),
    ):
        assert cli.main(["serve", name, "--auto", "--hardware", "h100", "--gpus", "2"]) == 2
        printed = capsys.readouterr().err
        assert words in printed and printed.count("\n") == 1
    assert cli.main(["serve", "--auto", "--hardware", "h100"]) == 2
    assert "--auto needs MODEL" in capsys.readouterr().err


def test_another_models_profile(model, capsys):
    argv = ["--auto", "--profile", STORED]
    assert cli.main(["serve", model(hidden_size=4096), *argv]) == 2
    assert "of another model" in capsys.readouterr().err


def test_options_of_auto_need_auto(capsys):
    for argv in (["--hardware", "h100"], ["--gpus=2"], ["--no-p2p"]):
        assert cli.main(["serve", "m", "--dry-run", *argv]) == 2
        assert "is for --auto" in capsys.readouterr().err
