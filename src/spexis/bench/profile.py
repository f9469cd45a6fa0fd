# SPDX-License-Identifier: Apache-2.0
"""`spexis profile`: the present hardware's times, in one file that planner and simulator read.

    spexis profile l70 --output profile.json              # dimensions by name, random weights
    spexis profile MODEL_FOLDER --layers 20 --batches 1 64 128 --contexts 128 2048

One pipeline stage runs as a stock vLLM engine of that many layers (random weights, so MODEL needs
a config.json only) and its decode steps are timed at steady state for each number of rows and
each context length, then steps that are one prompt chunk each. Apart from that: the output head, an
exit drafter (on a GPU), the host's work per step, and the links between two devices; and how many
layers a stage should have then. What each figure is and is not: docs/profile.md. Ends with one JSON
line.

Invariant: every figure in the file was measured in this run; what was not is null, with a reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spexis.bench import dims, engines, machine
from spexis.bench.decode import DecodeEngine, DecodeSpec
from spexis.bench.drafter_time import drafter_seconds
from spexis.bench.links import links
from spexis.bench.options import add_engine_options, engine_options
from spexis.cli.numbers import whole, whole_or_zero
from spexis.config import ConfigError
from spexis.core.placement import balanced_partition
from spexis.core.profile_file import FORMAT
from spexis.core.stage_curve import StageCurve

HEAD_REPEATS = 30
CHUNK_STEPS = 4  # steps of one measurement
WARM = 4  # tokens of every request before the window


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    engines.kill_on_signals()
    begin = time.monotonic()
    device = machine.resolve_device(args.device)
    sizes = dims.sizes(args.model)
    most = sizes["num_hidden_layers"]
    layers = args.layers or max(1, most // 2)
    if layers > most:
        raise ConfigError(f"--layers {layers}: {args.model} has {most}")
    machine.check_devices(device, args.tensor_parallel_size)
    if device == "cpu" and args.dtype is None:
        dims.check_memory(args.model, layers, machine.free_memory())
    output = Path(args.output or f"profile-{sizes['name']}.json")
    machine.check_output(output)
    from tqdm import tqdm

    total = len(args.batches) * len(args.contexts) + len(args.chunks)
    with tqdm(total=total, desc="profile", unit="point") as bar:
        stage = measure_stage(
            args.model,
            layers=layers,
            tensor=args.tensor_parallel_size,
            device=device,
            batches=args.batches,
            contexts=args.contexts,
            chunks=args.chunks,
            tokens=args.tokens,
            repeats=args.repeats,
            options=engine_options(args),
            log=output.with_name(f"{output.stem}-engine.log"),
            on_point=bar.update,
        )
    link, why = None, "not asked for (--no-links)"
    if args.links:
        num_devices = machine.num_gpus()
        link = links(
            device,
            hidden_size=sizes["hidden_size"],
            rows=args.batches,
            num_devices=num_devices,
        )
        why = None if len(link) > 1 else f"{num_devices} device: no link between devices to measure"
    drafter, why_no_drafter = measure_drafter(args, device)
    profile = {
        "format": FORMAT,
        "name": "profile",
        "ok": len(stage["points"]) > 0,
        "date": datetime.date.today().isoformat(),
        "command": machine.command(),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "device": device,
        **stage,
        "drafter": {"layers": args.drafter_layers, "draft_vocab_size": args.draft_vocab},
        "drafter_seconds": drafter,
        "drafter_note": why_no_drafter,
        "link_seconds": link,
        "link_note": why,
        "seconds_total": round(time.monotonic() - begin, 1),
    }
    profile["balanced_split"] = balanced_splits(profile)
    output.write_text(json.dumps(profile, indent=1) + "\n")
    _print(profile)
    print(json.dumps({"name": "profile", "ok": profile["ok"], "output": str(output)}))
    return 0 if profile["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spexis profile", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", help=f"folder with a config.json, or dimensions by name: {', '.join(dims.DIMS)}"
    )
    parser.add_argument("--layers", type=whole, help="of one stage (default: half of the model's)")
    parser.add_argument(
        "--tensor-parallel-size", type=whole, default=1, help="devices of one stage"
    )
    batches = [1, 8, 16, 32, 64, 96, 128, 192, 256]
    number = {"type": whole, "metavar": "N"}
    parser.add_argument(
        "--batches",
        **number,
        nargs="+",
        default=batches,
        help=f"requests that decode at a time (default: {' '.join(map(str, batches))})",
    )
    parser.add_argument(
        "--contexts",
        **number,
        nargs="+",
        default=[128, 1024],
        help="tokens that each of them has in memory (default: 128 1024)",
    )
    parser.add_argument(
        "--chunks",
        **number,
        nargs="*",
        default=[128, 512, 2048],
        help="prompt tokens of a step without decoding rows (default: 128 512 2048)",
    )
    parser.add_argument(
        "--tokens", **number, default=32, help="decode steps of one measurement (default: 32)"
    )
    parser.add_argument(
        "--repeats", **number, default=3, help="measurements of each point (default: 3)"
    )
    parser.add_argument(
        "--no-links",
        dest="links",
        action="store_false",
        help="leave out how long hidden states take between devices, and all-reduces",
    )
    parser.add_argument(
        "--drafter-layers",
        type=whole_or_zero,
        default=2,
        metavar="N",
        help="of an exit drafter to time (default: 2); 0: none",
    )
    parser.add_argument(
        "--draft-vocab", **number, default=16384, help="tokens it can draft (default: 16384)"
    )
    parser.add_argument("--output", help="JSON file (default: profile-MODEL.json)")
    add_engine_options(parser)
    return parser


def measure_stage(
    model: str,
    *,
    layers: int,
    tensor: int,
    device: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    tokens: int,
    repeats: int,
    options: dict[str, Any],
    log: str | Path,
    chunks: Sequence[int] = (),
    on_point: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Times of one stage; the part of the profile between "device" and "link_seconds"."""
    # Longer chunks are skipped, with the reason.
    longest = max(chunks, default=0) + 1
    longest = min(longest, dims.read_config(model).get("max_position_embeddings") or longest)
    with tempfile.TemporaryDirectory() as folder:
        spec = DecodeSpec(
            model=dims.write_model(model, folder, layers),
            device=device,
            tensor=tensor,
            max_num_seqs=max(batches),
            max_model_len=max(2048, max(contexts) + tokens + 64 + max(batches) // 4, longest),
            options=options,
        )
        points, skipped = [], []
        with DecodeEngine(spec, log) as engine:
            head = {
                rows: engine.call("head", rows=rows, repeats=HEAD_REPEATS)["seconds"]
                for rows in batches
            }
            for context in contexts:
                for rows in batches:
                    runs = [
                        engine.call("decode", rows=rows, context=context, tokens=tokens, warm=WARM)
                        for _ in range(repeats)
                    ]
                    if "skipped" in runs[0]:
                        skipped.append({"rows": rows, "context": context, **runs[0]})
                    else:
                        points.append(point(runs, head[rows]))
                    on_point()
            prompts = []
            for size in chunks:
                runs = [
                    engine.call("prefill", tokens=size, count=CHUNK_STEPS) for _ in range(repeats)
                ]
                if "skipped" in runs[0]:
                    skipped.append({"chunk": size, **runs[0]})
                else:
                    prompts.append(chunk(runs, head[min(batches)]))
                on_point()
            host = _host_seconds(engine, batches, contexts[0], tokens, device)
        return {
            # Not in sizes(), which decides whether a GPU preset's file may be continued.
            "model": {**dims.sizes(model), "head_dim": dims.read_config(model).get("head_dim")},
            "layers": layers,
            "tensor_parallel_size": tensor,
            "weights": "random",
            "dtype": options.get("dtype", "float32" if device == "cpu" else "bfloat16"),
            "engine": engine.started,
            "points": points,
            "chunks": prompts,
            "skipped": skipped,
            "head_seconds": {str(rows): seconds for rows, seconds in head.items()},
            "host_seconds": host,
            "spread": max((spread(p) for p in points), default=None),
        }


def measure_drafter(
    args: argparse.Namespace, device: str
) -> tuple[dict[str, float] | None, str | None]:
    """(seconds by rows, None), or (None, why not)."""
    if not args.drafter_layers:
        return None, "not asked for (--drafter-layers 0)"
    if args.tensor_parallel_size > 1:
        return None, "timed on one device only"
    return drafter_seconds(
        args.model,
        device=device,
        rows=args.batches,
        layers=args.drafter_layers,
        vocab=args.draft_vocab,
    )


def balanced_splits(profile: dict[str, Any]) -> dict[str, list[int]]:
    """Layers of each of 2 to 4 stages that are equally busy at the most rows measured, the first
    with the drafter, the last with the head: the first number is the exit layer to train for."""
    if not profile["points"]:
        return {}
    curve, num_layers = StageCurve.from_profile(profile), profile["model"]["num_hidden_layers"]
    costs = curve.costs(curve.max_rows, curve.drafter_seconds(curve.max_rows))
    return {
        str(stages): balanced_partition(num_layers, stages, costs)
        for stages in (2, 3, 4)
        if stages <= num_layers and costs.layer > 0
    }


def point(runs: Sequence[dict], head_seconds: float) -> dict[str, Any]:
    """One point of the curve from repeated measurements of it."""
    rows = runs[0]["rows"]
    steps = [rows / run["rate"] for run in runs]
    median = statistics.median(steps)
    return {
        "rows": rows,
        "context": runs[0]["context"],
        # A head that takes longer than the whole step (launches overlap in it) is no time.
        "seconds": max(0.0, median - head_seconds),
        "step_seconds": median,
        "step_spread": [min(steps), max(steps)],
        "within_spread": [
            min(rows / run["spread"][1] for run in runs),
            max(rows / run["spread"][0] for run in runs),
        ],
    }


def chunk(runs: Sequence[dict], head_seconds: float) -> dict[str, Any]:
    """A prompt chunk's time from repeated measurements of it; one row of it goes into the head."""
    steps = [run["seconds"] for run in runs]
    median = statistics.median(steps)
    return {
        "tokens": runs[0]["tokens"],
        "seconds": max(0.0, median - head_seconds),
        "step_seconds": median,
        "step_spread": [min(steps), max(steps)],
    }


def spread(point: dict) -> float:
    """Largest deviation of a repeated measurement, as a share of the median."""
    low, high = point["step_spread"]
    return max(high - point["step_seconds"], point["step_seconds"] - low) / point["step_seconds"]


def _host_seconds(
    engine: DecodeEngine, batches: Sequence[int], context: int, tokens: int, device: str
) -> dict[str, dict[str, float | None]]:
    """By rows: seconds of a step in the scheduler, and the worker's own CPU time."""
    engine.call("watch_host")
    found = {}
    for rows in batches:
        engine.call("take_host")
        if "skipped" in engine.call("decode", rows=rows, context=context, tokens=tokens, warm=WARM):
            continue
        host = engine.call("take_host")
        if device == "cpu":
            host["worker"] = None  # there the worker's CPU time is the model itself
        found[str(rows)] = host
    return found


def _print(profile: dict) -> None:
    print(f"{profile['model']['name']}: one stage of {profile['layers']} layers")
    print("   rows  context   stage ms    head ms    step ms  [lowest .. highest]")
    for p in profile["points"]:
        low, high = (1e3 * s for s in p["step_spread"])
        print(
            f"{p['rows']:>7}  {p['context']:>7}  {1e3 * p['seconds']:>9.3f}  "
            f"{1e3 * profile['head_seconds'][str(p['rows'])]:>9.3f}  "
            f"{1e3 * p['step_seconds']:>9.3f}  [{low:.3f} .. {high:.3f}]"
        )
    for p in profile["chunks"]:
        low, high = (1e3 * s for s in p["step_spread"])
        print(
            f"prompt chunk of {p['tokens']} tokens: {1e3 * p['step_seconds']:.3f} ms "
            f"[{low:.3f} .. {high:.3f}]"
        )
    for skipped in profile["skipped"]:
        what = ", ".join(f"{key} {skipped[key]}" for key in skipped if key != "skipped")
        print(f"skipped: {what}: {skipped['skipped']}")
    if profile["drafter_seconds"]:
        times = (f"{rows}: {1e3 * s:.3f}" for rows, s in profile["drafter_seconds"].items())
        print(f"exit drafter, ms by rows: {', '.join(times)}")
    for stages, split in profile["balanced_split"].items():
        print(f"{stages} stages are equally busy with {' + '.join(map(str, split))} layers")
    for what in ("drafter", "link"):
        if profile[f"{what}_note"]:
            print(f"{what}: {profile[f'{what}_note']}")


if __name__ == "__main__":
    sys.exit(main())
