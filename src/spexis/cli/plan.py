# SPDX-License-Identifier: Apache-2.0
"""`spexis plan`: which split of a model over GPUs is fastest, TP, PP, SP or a mix, and why.

    spexis plan --hardware h100 --gpus 8 --model llama-70b --batch 64
    spexis plan --hardware rtx-pro-6000 --gpus 4 --model path/to/config.json --acceptance 0.7
    spexis plan --profile measured.json --batch 128 --acceptance 0.66

With --profile only the splits of that measured profile are priced; else presets with stated
assumptions (core/presets.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from spexis.config import ConfigError


def main(argv: Sequence[str]) -> int:
    from spexis.core.presets import HARDWARE, MODELS, STACKS

    parser = argparse.ArgumentParser(prog="spexis plan", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", choices=list(HARDWARE), default="h100")
    parser.add_argument(
        "--model", default="llama-70b", help=f"{', '.join(MODELS)}, or a Hugging Face config.json"
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="requests running at once")
    parser.add_argument("--context", type=int, default=1000, help="mean tokens of a request")
    parser.add_argument("--prompt", type=int, default=512, help="tokens, for the time to prefill")
    parser.add_argument("--acceptance", type=float, help="drafts right; default: published ones")
    parser.add_argument("--stack", choices=list(STACKS), default="vllm-0.32")
    parser.add_argument("--profile", help="measured profile file instead of presets")
    parser.add_argument("--top", type=int, default=12, help="rows shown")
    options = parser.parse_args(list(argv))
    for name in ("gpus", "batch", "context", "prompt"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: allowed is a number above 0")
    if options.acceptance is not None and not 0 <= options.acceptance <= 1:
        raise ConfigError(f"--acceptance {options.acceptance}: allowed is a number from 0 to 1")
    found, assumptions = _measured(options) if options.profile else _estimated(options)
    _print(found[: options.top], assumptions)
    best = {**dataclasses.asdict(found[0]), "label": found[0].label} if found else None
    ranking = [
        {"label": o.label, "tokens_per_second": round(o.tokens_per_second, 1)} for o in found
    ]
    print(json.dumps({"name": "plan", "ok": bool(found), "best": best, "ranking": ranking}))
    return 0 if found else 1


def _estimated(options: argparse.Namespace):
    from spexis.core.plan import plan
    from spexis.core.presets import HARDWARE, STACKS

    hardware, stack = HARDWARE[options.hardware], STACKS[options.stack]
    model = load_model(options.model)
    found = plan(
        hardware,
        model,
        options.gpus,
        options.batch,
        options.context,
        options.prompt,
        options.acceptance,
        stack,
    )
    assumptions = [f"links: {hardware.source}", f"host ({stack.name}): {stack.source}"]
    if options.acceptance is None and not model.accepted:
        assumptions.append("no SP: how often drafts are right is not known; give --acceptance")
    return found, assumptions


def _measured(options: argparse.Namespace):
    from spexis.cli.simulate import load_profile
    from spexis.core.plan import price

    profile = load_profile(options.profile)
    modes = ("tp",) if profile.num_stages == 1 else ("pp", "sp")
    found = []
    for mode in modes:
        if mode == "sp" and options.acceptance is None:
            continue
        found += price(
            profile, mode, options.batch, options.context, options.prompt, options.acceptance
        )
    if profile.num_stages > 1 and options.acceptance is None:
        raise ConfigError("--profile needs --acceptance: how often drafts are right")
    found.sort(key=lambda o: -o.tokens_per_second)
    return found, [f"profile: {profile.source or options.profile}"]


def load_model(name: str):
    """A preset, or the dimensions in a Hugging Face config.json (or its folder)."""
    from spexis.core.presets import MODELS, Model

    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        block = json.loads(path.read_text())
        heads = block["num_attention_heads"]
        return Model(
            name=name,
            layers=block["num_hidden_layers"],
            hidden=block["hidden_size"],
            intermediate=block["intermediate_size"],
            heads=heads,
            kv_heads=block.get("num_key_value_heads") or heads,
            head_dim=block.get("head_dim") or block["hidden_size"] // heads,
            vocab=block["vocab_size"],
        )
    except OSError as error:
        raise ConfigError(f"--model {name}: no preset ({', '.join(MODELS)}) and {error}") from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--model {name}: no dense decoder's config: {error}") from error


def _print(options: list, assumptions: list[str]) -> None:
    for text in assumptions:
        print(f"assumed - {text}")
    print(f"{'split':<26}{'tokens/s':>9}{'TPOT ms':>9}{'prefill ms':>11}{'KV tokens':>11}  why")
    for o in options:
        print(
            f"{o.label:<26}{o.tokens_per_second:>9.0f}{1e3 * o.seconds_per_token:>9.1f}"
            f"{1e3 * o.prefill_seconds:>11.0f}{o.kv_tokens or '-':>11}  {o.reason}"
        )
