# SPDX-License-Identifier: Apache-2.0
"""`spexis plan`: which split of a model over GPUs is fastest, TP, PP, SP or a mix, and why.

    spexis plan llama-70b --hardware h100 --gpus 8 --batch 64
    spexis plan path/to/config.json --hardware rtx-pro-6000 --gpus 4 --acceptance 0.7
    spexis plan --profile profile.json --batch 128 --acceptance 0.66        # measured: better
    spexis plan --profile profile.json --gpus 4 --no-p2p --acceptance 0.66
    spexis plan --profile profile.json --trace azure2023_conv.csv.gz --acceptance 0.66

With --profile (a file that `spexis profile` wrote) times are measured ones, without it presets with
stated assumptions (core/presets.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from spexis.cli.numbers import OneLineParser, share, whole
from spexis.config import ConfigError

DEFAULT_HARDWARE, DEFAULT_MODEL = "h100", "llama-70b"
DEFAULT_GPUS = 8
TOO_HIGH = "TP may be priced too high"
BY_PRESET = "assumed - all-reduce"
DEFAULT_BATCH, DEFAULT_CONTEXT, DEFAULT_PROMPT = 64, 1000, 512
MOST_STREAMS = 256  # vLLM's max_num_seqs on most devices


def main(argv: Sequence[str]) -> int:
    from spexis.core.presets import HARDWARE, MODELS, STACKS

    parser = OneLineParser(prog="spexis plan", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model",
        nargs="?",
        help=f"{', '.join(MODELS)}, or a Hugging Face config.json; default: the profile's, else "
        f"{DEFAULT_MODEL}",
    )
    parser.add_argument("--hardware", choices=list(HARDWARE), help=f"default: {DEFAULT_HARDWARE}")
    parser.add_argument("--gpus", type=whole, help="default: those of the profile's stages, else 8")
    parser.add_argument("--batch", type=whole, help="requests running at once (64)")
    parser.add_argument("--context", type=whole, help="mean tokens of a request (1000)")
    parser.add_argument("--prompt", type=whole, help="tokens, for the time to prefill (512)")
    parser.add_argument("--trace", help="take these three from a trace, as `spexis simulate` does")
    parser.add_argument("--acceptance", type=share, help="drafts right; default: published ones")
    parser.add_argument("--stack", choices=list(STACKS), default="vllm-0.32")
    parser.add_argument("--profile", help="measured file instead of presets")
    parser.add_argument(
        "--no-p2p", action="store_true", help="links of the profile without peer access"
    )
    parser.add_argument("--top", type=whole, default=12, help="rows shown")
    options = parser.parse_args(list(argv))
    if options.profile and options.hardware:
        raise ConfigError("--profile and --hardware: give one of them")
    if options.no_p2p and not options.profile:
        raise ConfigError("--no-p2p needs --profile; of presets choose --hardware h200-no-p2p")
    if options.trace and (options.batch or options.context or options.prompt):
        raise ConfigError("--trace says batch, context and prompt: leave them out, or the trace")
    found, assumptions = rank_splits(options)
    _print(found[: options.top], assumptions)
    best = {**dataclasses.asdict(found[0]), "label": found[0].label} if found else None
    ranking = [
        {"label": o.label, "tokens_per_second": round(o.tokens_per_second, 1)} for o in found
    ]
    print(json.dumps({"name": "plan", "ok": bool(found), "best": best, "ranking": ranking}))
    return 0 if found else 1


def rank_splits(options: argparse.Namespace, most: int = MOST_STREAMS) -> tuple[list, list[str]]:
    """(options of core/plan.py, best first, what they rest on), for the load that is asked for.

    options: as parsed by main(); what was planned for in place of defaults is written into them.
    most: requests that may run at once, for a trace.
    """
    rank = _measured if options.profile else _estimated
    if options.trace:
        from spexis.core.load import Load
        from spexis.simulator import trace as traces

        trace = traces.load(options.trace)

        def seconds(load: Load, tokens: float) -> float:
            _set_load(options, load)
            found, _ = rank(options)
            return found[0].prefill_seconds + tokens * found[0].seconds_per_token if found else 0.0

        load = Load.of_trace(trace.arrival, trace.prompt, trace.output, seconds, most)
        _set_load(options, load)
        found, notes = rank(options)
        text = f"trace {trace.name}: {load.streams} requests at once of {load.context} tokens"
        return found, [*notes, text + (", all that may run" if load.streams == most else "")]
    options.batch = options.batch or DEFAULT_BATCH
    options.context = options.context or DEFAULT_CONTEXT
    options.prompt = options.prompt or DEFAULT_PROMPT
    return rank(options)


def _set_load(options: argparse.Namespace, load) -> None:
    options.batch, options.context, options.prompt = load.streams, load.context, load.prompt


def _estimated(options: argparse.Namespace):
    from spexis.core.plan import plan
    from spexis.core.presets import HARDWARE, STACKS

    hardware, stack = HARDWARE[options.hardware or DEFAULT_HARDWARE], STACKS[options.stack]
    model = load_model(options.model or DEFAULT_MODEL)
    found = plan(
        hardware,
        model,
        options.gpus or DEFAULT_GPUS,
        options.batch,
        options.context,
        options.prompt,
        options.acceptance,
        stack,
    )
    assumptions = [
        f"assumed - links: {hardware.source}",
        f"assumed - host ({stack.name}): {stack.source}",
    ]
    if options.acceptance is None and not model.accepted:
        assumptions.append("no SP: how often drafts are right is not known; give --acceptance")
    return found, assumptions


def _measured(options: argparse.Namespace):
    from spexis.core.plan import plan_measured
    from spexis.core.profile_file import ProfileFile

    file = ProfileFile.load(options.profile)
    profile, model = file.stage_profile(p2p=not options.no_p2p), file.model
    if options.model:
        asked = load_model(options.model)
        for key in ("layers", "hidden", "intermediate", "vocab"):
            here, there = getattr(asked, key), getattr(model, key)
            if here != there:
                raise ConfigError(
                    f"--profile {options.profile} is of another model ({key} is {there} there and "
                    f"{here} in {options.model}): measure this one with `spexis profile`"
                )
        model = dataclasses.replace(model, accepted=asked.accepted)
    options.gpus = options.gpus or profile.num_stages * profile.tensor_parallel
    found = plan_measured(
        profile,
        model,
        file.device_memory,
        options.gpus,
        options.batch,
        options.context,
        options.prompt,
        options.acceptance,
    )
    notes = [f"measured - times: {profile.source}"]
    if options.acceptance is None and not any(o.mode == "sp" for o in found):
        notes.append("no SP: how often drafts are right is not known; give --acceptance")
    if file.device_memory is None:
        notes.append("not looked at - memory: the profile names no device with its own")
    return found, notes + measured_notes(profile, options.no_p2p)


def measured_notes(profile, no_p2p: bool) -> list[str]:
    """What a ranking from a measured stage rests on."""
    if profile.tensor_parallel > 1:
        ranks = profile.tensor_parallel
        return [f"measured - all-reduces: in the stage's times, so only TP{ranks} is priced"]
    if not profile.all_reduce:
        return ["no TP: the profile has no all-reduce times; measure it on two devices"]
    notes = [
        "assumed - TP: L layers halved over two devices take what L/2 layers take on one (nothing "
        "is lost to narrower matrices), and two all-reduces a layer"
    ]
    if no_p2p:
        notes.append("measured - links: without peer access between devices")
    if profile.all_reduce_by == "preset":
        notes.append(
            f"{BY_PRESET}: vLLM's own on such devices, by the presets, since this profile has "
            "NCCL's only; measure it with `spexis profile` on two devices"
        )
    if profile.all_reduce_by == "torch":
        notes.append(
            "measured - all-reduce: NCCL's or Gloo's own time, this profile has none of vLLM's"
            + ("" if no_p2p else f", which is faster with peer access: {TOO_HIGH}")
        )
    return notes


def load_model(name: str):
    """A preset, dimensions by the name they have in `spexis profile`, or a config.json's."""
    from spexis.bench.dims import DIMS
    from spexis.core.presets import MODELS, Model

    if name in MODELS:
        return MODELS[name]
    if name in DIMS:
        return Model.from_config(name, DIMS[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
        return Model.from_config(name, config)
    except OSError as error:
        raise ConfigError(f"model {name}: no preset ({', '.join(MODELS)}) and {error}") from error
    except ValueError as error:
        raise ConfigError(f"model {name}: no dense decoder's config: {error}") from error


def _print(options: list, assumptions: list[str]) -> None:
    for text in assumptions:
        print(text)
    print(f"{'split':<26}{'tokens/s':>9}{'TPOT ms':>9}{'prefill ms':>11}{'KV tokens':>11}  why")
    for o in options:
        print(
            f"{o.label:<26}{o.tokens_per_second:>9.0f}{1e3 * o.seconds_per_token:>9.1f}"
            f"{1e3 * o.prefill_seconds:>11.0f}{o.kv_tokens or '-':>11}  {o.reason}"
        )
