# SPDX-License-Identifier: Apache-2.0
"""`spexis simulate`: a trace through the scheduling policies, on a profile's times; no GPU needed.

    spexis simulate --trace azure2023_conv.csv.gz --profile h200-llama-70b-pp2
    spexis simulate --trace poisson:rate=6,requests=2000 --policies sp sp-alpha pp --plot run.svg
    spexis simulate --table selection

Each policy runs the same trace; a line of figures for each, then one JSON line with "name" and
"ok" (every request answered or refused, blocks all given back).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from spexis.cli.numbers import positive, share, whole, whole_or_zero
from spexis.config import ConfigError


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(list(argv))
    return _table(options) if options.table else _traces(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spexis simulate",
        description="Simulates a server under a trace with the engine's own policies.",
    )
    parser.add_argument(
        "--trace",
        default="poisson",
        help="CSV of the Azure LLM traces, a detailed `vllm bench serve` result (JSON), or "
        "poisson:rate=,requests=,prompt=,output=,seed= or batch:requests=,prompt=,output=",
    )
    parser.add_argument(
        "--profile",
        default="h200-llama-70b-pp2",
        help="profile file, or a built-in one: h200-llama-70b-pp2 (measured), -pp4 (scaled), or "
        "estimated as HARDWARE/MODEL/STAGES/TENSOR, e.g. a100/llama-70b/2/4",
    )
    parser.add_argument("--policies", nargs="+", default=["pp", "sp", "sp-alpha"])
    parser.add_argument("--memory", choices=["lookahead", "stock"], default="lookahead")
    parser.add_argument(
        "--predictor",
        type=float,
        metavar="SHARPNESS",
        help="look-ahead asks a length predictor: 2.5 finds half of what ends soon, inf everything",
    )
    parser.add_argument("--acceptance", type=share, default=0.7, help="drafts that are right")
    parser.add_argument(
        "--sharpness", type=positive, default=1.5, help="small: the drafter knows when it is wrong"
    )
    parser.add_argument(
        "--distortion",
        type=positive,
        default=1.0,
        help="1: calibrated, above: overconfident",
    )
    parser.add_argument("--drop-ratio", type=share, default=0.15, help='of the policy "drop"')
    parser.add_argument("--rate-scale", type=positive, default=1.0, help="requests come faster")
    parser.add_argument("--requests", type=whole, help="the first ones, or the trace repeated")
    parser.add_argument("--max-num-seqs", type=whole, default=256)
    parser.add_argument("--max-num-batched-tokens", type=whole, default=2048)
    parser.add_argument("--kv-blocks", type=whole, help="default: the profile's, else 20000")
    parser.add_argument("--seed", type=whole_or_zero, default=0)
    parser.add_argument("--plot", help="picture of each policy's run: NAME.svg or NAME.png")
    parser.add_argument("--output", help="write all figures to this JSON file")
    parser.add_argument(
        "--table",
        choices=["selection", "choosers", "published", "measured"],
        help="instead of a trace: selection rules at constant batches on the measured H200 curve "
        "or a --profile FILE, selection by confidences and by outcomes there, SP against TP with "
        "presets beside the published rows, or --profile's steady decode rates of PP2 and SP "
        "beside those of --results",
    )
    parser.add_argument(
        "--results", help="file of `spexis bench --preset gpu2`, for --table measured"
    )
    return parser


def _traces(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from spexis.core.cost_model import CostModel
    from spexis.simulator import trace as traces
    from spexis.simulator.drafts import DraftSource
    from spexis.simulator.predicted import PredictedServing
    from spexis.simulator.serving import POLICIES, Serving, Settings

    for policy in options.policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policies {policy}: allowed are {', '.join(POLICIES)}")
    trace = traces.load(options.trace).scaled(options.rate_scale, options.requests)
    profile = load_profile(options.profile)
    blocks = options.kv_blocks or profile.kv_blocks or 20_000
    results, ok = {}, True
    for policy in options.policies:
        settings = Settings(
            policy=policy,
            memory=options.memory,
            drop_ratio=options.drop_ratio,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            kv_blocks=blocks,
            block_size=profile.block_size,
            calibrate=options.distortion != 1.0,
        )
        drafts = DraftSource(
            options.acceptance, options.sharpness, options.distortion, options.seed
        )
        parts = (
            CostModel.from_profile(profile),
            drafts,
            settings,
            CostModel.from_profile(profile, drafter=False),
        )
        if options.predictor is None:
            serving = Serving(*parts)
        else:
            serving = PredictedServing(*parts, sharpness=options.predictor, seed=options.seed)
        with tqdm(total=len(trace), desc=f"simulate {policy}", unit="request") as bar:
            result = serving.run(trace, bar.update)
        figures = results[policy] = result.summary()
        given_back = serving.free_blocks == blocks
        ok &= given_back and figures["answered"] + figures["refused"] == len(trace)
        if options.plot:
            path = Path(options.plot)
            name = path.with_stem(f"{path.stem}-{policy}") if len(options.policies) > 1 else path
            result.draw(str(name), f"{trace.name}, {options.profile}, {policy}")
            print(f"picture: {name}", file=sys.stderr)
    _print_results(results)
    summary = {
        "name": "simulate",
        "ok": ok,
        "trace": trace.name,
        "profile": options.profile,
        "profile_source": profile.source,
        "acceptance": options.acceptance,
        "memory": options.memory,
        # As text: infinity is no JSON number.
        "predictor": None if options.predictor is None else str(options.predictor),
        "policies": results,
    }
    return _end(summary, options.output)


def load_profile(name: str):
    """A built-in profile, one estimated from presets, or a file."""
    from spexis.core.presets import HARDWARE, MEASURED, MODELS, estimate_profile
    from spexis.core.profile_file import ProfileFile

    if name in MEASURED:
        return MEASURED[name]
    parts = name.split("/")
    if len(parts) == 4 and parts[0] in HARDWARE and parts[1] in MODELS:
        if not (parts[2].isdigit() and parts[3].isdigit() and int(parts[2]) and int(parts[3])):
            raise ConfigError(
                f"--profile {name}: stages and tensor ranks are whole numbers above 0"
            )
        return estimate_profile(
            HARDWARE[parts[0]], MODELS[parts[1]], stages=int(parts[2]), tensor=int(parts[3])
        )
    if not Path(name).exists():
        raise ConfigError(
            f"--profile {name}: no such file; built in are {', '.join(MEASURED)} and "
            f"HARDWARE/MODEL/STAGES/TENSOR of {', '.join(HARDWARE)} and {', '.join(MODELS)}"
        )
    return ProfileFile.load(name).stage_profile()


def _table(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from spexis.simulator import tables

    name = options.table
    drafts = {"sharpness": options.sharpness, "seed": options.seed}
    if Path(options.profile).is_file() and name in ("selection", "choosers"):
        drafts["profile"] = load_profile(options.profile)
    if name == "measured":
        file, record = _measured(options)
        cases, make = tables.measured_cells(record), partial(tables.measured_table, file, record)
    elif name == "published":
        cases, make = tables.PUBLISHED, tables.published_table
    elif name == "choosers":
        cases, make = tables.chooser_cases(), partial(tables.chooser_table, **drafts)
    else:
        cases, make = tables.selection_cases(), partial(tables.selection_table, **drafts)
    with tqdm(total=len(cases), desc=f"simulate {name}", unit="row") as bar:
        rows = make(bar.update)
    keys = list(rows[0])
    print("  ".join(f"{key:>12}" for key in keys))
    for row in rows:
        print("  ".join(f"{row[key]!s:>12}" for key in keys))
    summary = {"name": f"simulate-{name}"}
    if name == "selection":
        summary["sharpness"] = options.sharpness
        gains = [row["over_none"] for row in rows]
        summary["ok"] = min(gains) >= 0.99
        summary["worst_over_none"], summary["best_over_none"] = min(gains), max(gains)
        summary["worst_over_drop"] = min(row["over_drop"] for row in rows)
    elif name == "choosers":
        summary["sharpness"] = options.sharpness
        for way in ("stage", "device", "scheduler", "scheduler_late"):
            gains = [row[way] for row in rows]
            summary[way] = {"worst": min(gains), "mean": round(sum(gains) / len(gains), 3)}
        summary["ok"] = all(min(row["device"], row["scheduler_late"]) >= 0.99 for row in rows)
    elif name == "measured":
        errors = [row["error"] for row in rows]
        summary["ok"] = bool(errors)
        summary["lowest_error"], summary["highest_error"] = min(errors), max(errors)
    else:
        summary["same_winner"] = sum(row["same_winner"] for row in rows)
        summary["ok"] = summary["same_winner"] >= 4  # the fifth: docs/scheduling.md
    return _end({**summary, "rows": rows}, options.output)


def _measured(options: argparse.Namespace):
    """(ProfileFile, record of the measured rates)"""
    from spexis.core.profile_file import ProfileFile

    if not options.results:
        raise ConfigError(
            "--table measured needs --results: a file of `spexis bench --preset gpu2`"
        )
    try:
        record = json.loads(Path(options.results).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--results {options.results} cannot be read: {error}") from error
    name = record.get("name") if isinstance(record, dict) else None
    if name != "bench-gpu2":
        raise ConfigError(
            f"--results {options.results} is none of `spexis bench --preset gpu2`: name is {name!r}"
        )
    return ProfileFile.load(options.profile), record


def _print_results(results: dict[str, dict]) -> None:
    columns = {
        "tokens/s": "tokens_per_second",
        "TTFT p50": "ttft_p50",
        "p99": "ttft_p99",
        "TPOT p50": "tpot_p50",
        "p99 ": "tpot_p99",
        "KV mean": "kv_mean",
        "evicted": "evictions",
        "wasted rows": "wasted_share",
        "running": "running_mean",
    }
    print(f"{'policy':<10}" + "".join(f"{title:>12}" for title in columns))
    for policy, figures in results.items():
        print(f"{policy:<10}" + "".join(f"{figures.get(k, '-')!s:>12}" for k in columns.values()))


def _end(summary: dict, output: str | None) -> int:
    if output:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1
