# SPDX-License-Identifier: Apache-2.0
"""`spexis serve MODEL [any vllm serve flag]`: add the defaults, print them once, run `vllm serve`.

    spexis serve demo
    spexis serve Qwen/Qwen3-8B --pipeline-parallel-size 4 --port 9000
    spexis serve MODEL --spexis '{"drafter": {"method": "exit", "model": "my-drafter"}}'
    spexis serve MODEL --auto --hardware h100             # sizes by the planner (auto.py)
    spexis serve MODEL --dry-run

Invariant: what runs is the printed command and environment, nothing else; every flag the user gave
is passed on unchanged (but --additional-config, into which the spexis block is merged), and a
default is added only where the user, on the command line or in --config, said nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spexis.bench.machine import STOCK_CPU_WORKER, stock_cpu_binding
from spexis.cli import auto, platform
from spexis.cli.flags import (
    ADDITIONAL,
    PP_FLAGS,
    TP_FLAGS,
    Given,
    dashes,
    json_object,
    value_of,
    without,
)
from spexis.config import CONFIG_KEY, DRAFTER_KEYS, ConfigError, SpexisConfig

DEMO = "demo"

EAGER_FLAGS = ("--enforce-eager", "--no-enforce-eager")
KV_MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
CPU_KV_GIB = "2"  # of keys and values per worker, where the user says nothing


def main(argv: Sequence[str]) -> int:
    options, flags = parse(argv)
    if not platform.plugin_installed():
        raise ConfigError(
            "vLLM cannot discover the Spexis plugin in this environment; install Spexis with pip "
            "(`make setup` in a checkout)"
        )
    if platform.vllm_distribution() is None:
        raise ConfigError("vLLM is not installed; `pip install 'spexis[cpu]'` or 'spexis[cuda]'")
    block = spexis_block(options, flags)
    if options.auto:
        model = demo_folder() if options.model == DEMO else options.model
        choice = auto.choose(options, flags, model, block)
        print(*(f"auto: {line}" for line in choice.lines), sep="\n", file=sys.stderr)
        flags, block = [*choice.flags, *flags], choice.block
    config = None if block is None else SpexisConfig.from_dict(block)
    command, environment = build(options, flags, block)
    print(_table(options, command, config), file=sys.stderr, flush=True)
    if options.dry_run:
        print(shlex.join(_shown(environment) + command))
        return 0
    os.environ.update(environment)
    sys.stdout.flush()
    os.execvp(command[0], command)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Spexis' own options, and the flags for vLLM in the order given.

    Not by argparse: it does not know vLLM's flags, so it would take the 9000 of `--port 9000` for
    the model. As with `vllm serve`, MODEL comes first.
    """
    parser = _parser()
    if any(arg in ("-h", "--help") for arg in argv):
        parser.print_help()
        raise SystemExit(0)
    flags = [dashes(arg) for arg in argv]
    model = flags.pop(0) if flags and not flags[0].startswith("-") else None
    own: dict[str, Any] = {"model": model}
    for name in ("--dry-run", "--auto", *auto.SWITCHES):
        own[_attribute(name)] = name in flags
        flags = [flag for flag in flags if flag != name]
    for name in ("--spexis", "--drafter", *auto.OPTIONS):
        own[_attribute(name)] = value_of(flags, name)
        if own[_attribute(name)] is None and name in flags:
            raise ConfigError(f"{name} needs a value; see `spexis serve --help`")
        flags = without(flags, name)
    for name in (*auto.OPTIONS, *auto.SWITCHES):
        if own[_attribute(name)] and not own["auto"]:
            raise ConfigError(f"{name} is for --auto: give both, or neither")
    return argparse.Namespace(**own), flags


def _attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def demo_folder() -> str:
    from spexis.demo_model import demo_model_dir

    return demo_model_dir()


def build(
    options: argparse.Namespace, flags: list[str], block: dict[str, Any] | None
) -> tuple[list[str], dict[str, str]]:
    """The `vllm serve` command and the environment variables to add.

    block: None for vLLM without Spexis; `flags` then have the parallel sizes.
    """
    given = Given(flags)
    model = options.model
    command = [*_vllm(), "serve"]
    environment: dict[str, str] = {}
    if model == DEMO:
        model = demo_folder()
        if not given.has("--served-model-name"):
            flags = [*flags, "--served-model-name", DEMO]
        if platform.is_cpu() and not given.has("--dtype"):
            # What the figures are of, and faster than bfloat16 on most CPUs.
            flags = [*flags, "--dtype", "float32"]
    if model is not None:
        command.append(model)
    if not given.has(*PP_FLAGS):
        command += [PP_FLAGS[0], "2"]
    if platform.is_cpu() and not given.has(*EAGER_FLAGS):
        # The CPU runner is tested in eager mode only, and compiling needs a C++ compiler.
        command.append(EAGER_FLAGS[0])
        if not platform.has_compiler() and "TORCHDYNAMO_DISABLE" not in os.environ:
            # vLLM compiles small helpers (ranks of logprobs) even in eager mode.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    if (
        platform.is_cpu()
        and not given.has(*KV_MEMORY_FLAGS)
        and "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    ):
        # Else each worker asks for 92 % of the machine's memory, and two of them never start.
        environment["VLLM_CPU_KVCACHE_SPACE"] = CPU_KV_GIB
    if block is None:
        if platform.is_cpu():
            command, environment = _stock_on_cpu(command, environment, given)
        return [*command, *flags], environment
    command += [ADDITIONAL, json.dumps({**given.additional(), CONFIG_KEY: block})]
    command += without(flags, ADDITIONAL)
    if not platform.plugin_allowed():
        environment["VLLM_PLUGINS"] = os.environ["VLLM_PLUGINS"] + ",spexis"
    return command, environment


def _stock_on_cpu(
    command: list[str], environment: dict[str, str], given: Given
) -> tuple[list[str], dict[str, str]]:
    """What several stock workers need on a CPU; with Spexis its plugin sees to it.

    vLLM refuses two workers on one NUMA node unless it is told their cores, and in eager mode its
    later stages start with this worker only (worker_cpu.py).
    """
    stages, tensor = (
        int(next(filter(None, (value_of(given.flags, name) for name in names)), 1))
        for names in (PP_FLAGS, TP_FLAGS)
    )
    if stages * tensor > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        binding = stock_cpu_binding(stages * tensor)
        environment = {**environment, "VLLM_CPU_OMP_THREADS_BIND": binding}
    if stages > 1 and not given.has("--worker-cls"):
        command = [*command, "--worker-cls", STOCK_CPU_WORKER]
    return command, environment


def spexis_block(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The spexis block from --spexis, --drafter and a block inside --additional-config."""
    block = json_object("--spexis", options.spexis) if options.spexis is not None else {}
    inside = Given(flags).additional()
    if CONFIG_KEY in inside:
        if options.spexis is not None:
            raise ConfigError("give the spexis block once: --spexis or --additional-config")
        block = inside[CONFIG_KEY]
    if options.drafter is not None:
        if isinstance(block, dict) and "drafter" in block:
            raise ConfigError("give the drafter once: --drafter or the spexis block")
        is_method = options.drafter in DRAFTER_KEYS
        key = "method" if is_method else "model"
        block = {**block, "drafter": {key: options.drafter}}
    return block


def _vllm() -> list[str]:
    """The vllm command of this environment."""
    script = Path(sys.executable).parent / "vllm"
    if platform.installed("vllm") is None:
        return [sys.executable, "-m", "spexis.cli.launch"]  # says why
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _shown(environment: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def _table(options: argparse.Namespace, command: list[str], config: SpexisConfig | None) -> str:
    """The resolved configuration, for people."""
    found = platform.vllm_distribution()
    rows = [
        ("model", options.model or "vLLM's default, or from --config"),
        *(_spexis_rows(command, config) if config else [("Spexis", "off, vLLM by itself")]),
        ("platform", "CPU" if platform.is_cpu() else "CUDA"),
        ("vLLM", f"{found[0]} {found[1]}" if found else "none"),
        ("command", shlex.join(command)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["Spexis", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _spexis_rows(command: list[str], config: SpexisConfig) -> list[tuple[str, Any]]:
    given = (value_of(command, flag) for flag in PP_FLAGS)
    stages = next(filter(None, given), "as in --config")
    drafter = config.drafter.to_dict()
    method = drafter.pop("method")
    words = method + "".join(f", {k} {v}" for k, v in drafter.items() if v is not None)
    if method == "exit" and config.drafter.model is None:
        words = "exit, the shipped one made for the model"
    rows = [
        ("stages", f"{stages} ({_split(config)})"),
        ("drafter", words),
        ("mode", config.mode),
        ("steps in flight", config.steps_in_flight or "vLLM's choice"),
    ]
    if config.iteration_log:
        rows.append(("iteration log", config.iteration_log))
    if config.timeline_log:
        rows.append(("timeline log", config.timeline_log))
    if not config.drafter.lossless:
        rows.append(("NOTE", "the synthetic drafter changes the output: for measurements only"))
    return rows


def _split(config: SpexisConfig) -> str:
    """How layers are split over stages, in words; the plugin logs the numbers at start."""
    given = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if given is not None:
        return f"{given} layers, by VLLM_PP_LAYER_PARTITION"
    placement = config.placement
    if placement is not None and placement.layers is not None:
        return f"{','.join(map(str, placement.layers))} layers"
    if placement is not None:
        return f"split by the times in {placement.profile}"
    if config.drafter.method == "exit":
        return "the split follows the drafter's exit layer"
    return "layers split evenly"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spexis serve",
        usage="spexis serve MODEL [--spexis JSON | --drafter NAME | --auto ...] "
        "[any vllm serve flag]",
        description="Run `vllm serve` with Spexis on. Flags that are not listed here go to vLLM "
        "unchanged (`vllm serve --help=all`).",
        epilog="The same by hand: vllm serve MODEL --pipeline-parallel-size 2 "
        "--additional-config '{\"spexis\": {}}'",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help='name or folder; "demo" is the demo model'
    )
    parser.add_argument("--spexis", metavar="JSON", help="the spexis block; {} is the default")
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help=f"a drafter's folder or shipped name, or a method ({', '.join(DRAFTER_KEYS)})",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command on standard output and stop"
    )
    group = parser.add_argument_group(
        "--auto",
        "TP, PP, SP or a mix by `spexis plan`: the first of its ranking that can run here. "
        "Needs --profile or --hardware; never changes a parallel size that you give.",
    )
    group.add_argument("--auto", action="store_true", help="choose the parallel sizes")
    group.add_argument("--gpus", metavar="N", help="devices to use; default: all that are seen")
    group.add_argument("--profile", metavar="FILE", help="times that `spexis profile` measured")
    group.add_argument("--no-p2p", action="store_true", help="its links without peer access")
    group.add_argument("--hardware", metavar="NAME", help="a preset of `spexis plan` instead")
    group.add_argument("--streams", metavar="B", help="requests at once to plan for (64)")
    group.add_argument("--trace", metavar="FILE", help="or the load of a trace")
    group.add_argument(
        "--acceptance", metavar="P", help="how often drafts are right (`spexis eval exit`), for SP"
    )
    return parser
