# SPDX-License-Identifier: Apache-2.0
"""Command line options that `spexis profile` and the GPU presets share: device and vLLM settings.

    add_engine_options(parser); engine_options(parser.parse_args())     # arguments of LLM()

Invariant: what is not given is left to vLLM's own defaults.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from spexis.cli.numbers import share, whole
from spexis.config import ConfigError


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine (default: vLLM's own choice)")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group.add_argument("--dtype", help="bfloat16 on CUDA, float32 on CPU unless given")
    group.add_argument("--compilation-config", metavar="JSON", help="as for `vllm serve`")
    group.add_argument("--max-num-batched-tokens", type=whole)
    group.add_argument("--gpu-memory-utilization", type=share)
    group.add_argument(
        "--capture-sizes",
        type=whole,
        nargs="+",
        metavar="ROWS",
        help="CUDA graphs for these numbers of rows only, which shortens an engine's start",
    )
    group.add_argument("--enforce-eager", action="store_true")
    group.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="any other argument of vllm.LLM(), e.g. kv_cache_dtype='\"fp8\"'; may be repeated",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of LLM() that were given."""
    options: dict[str, Any] = {}
    for name in ("dtype", "max_num_batched_tokens", "gpu_memory_utilization"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.enforce_eager:
        options["enforce_eager"] = True
    compilation = _json("--compilation-config", args.compilation_config or "{}")
    if not isinstance(compilation, dict):
        raise ConfigError(f"--compilation-config {compilation!r}: allowed is a JSON object")
    if args.capture_sizes:
        compilation = {**compilation, "cudagraph_capture_sizes": sorted(set(args.capture_sizes))}
    if compilation:
        options["compilation_config"] = compilation
    for given in args.engine_option:
        name, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--engine-option {given}: allowed is NAME=JSON")
        options[name.replace("-", "_")] = _json(f"--engine-option {name}", value)
    return options


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{what} is not JSON ({err}): {text}") from None
