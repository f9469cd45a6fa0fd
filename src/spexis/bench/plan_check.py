# SPDX-License-Identifier: Apache-2.0
"""`make plan-check`: does the planner choose what was measured to be fastest?

    python -m spexis.bench.plan_check         # the stored results of two H200s and of two CPU cores
    python -m spexis.bench.plan_check --profile P.json --results A.json B.json
    python -m spexis.bench.plan_check --cpu-profile P.json --cpu-results bench-cpu.json

For every batch, acceptance and kind of link in results of `spexis bench --preset gpu2`, and for
1, 4 and 16 streams of the random-weight model in those of `spexis bench --preset cpu`, the planner
ranks PP2, TP2 and SP2 from the profile (a file of `spexis profile`, measured apart). A case is
right if its first choice was measured within 3 % of the fastest of the three. The acceptance is
the counted one; no drafter is priced, since those of the benchmarks (synthetic, oracle) take no
time. SP-alpha was not measured: where the planner would put it first, that is said and the first of
the three is judged. A pipeline without peer access was not measured everywhere: then its rate with
it counts (two messages a step). Prints a table, ends with one JSON line.

Invariant: nothing is fitted here; a case without all three rates is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spexis.config import ConfigError
from spexis.core.plan import plan_measured
from spexis.core.profile_file import ProfileFile

RESULTS = Path("benchmarks/results")
PROFILE = RESULTS / "2026-11-30-gpu-profile-l70.json"
GPU_RESULTS = (RESULTS / "gpu2-l70-2026-11-30.json", RESULTS / "gpu2-l70-2026-11-30-b.json")
CPU_PROFILE = RESULTS / "2026-11-30-cpu-profile-avx512.json"
CPU_RESULTS = (RESULTS / "2026-11-30-cpu-streams-avx512.json",)
STREAMS = ("1", "4", "16")  # of the CPU's results
MODES = ("pp", "tp", "sp")
WANTED = 0.97


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    source: str
    batch: int
    acceptance: float
    """Counted."""
    p2p: bool
    context: int
    measured: dict[str, float]
    """Tokens per second of pp, tp and sp over two devices."""


@dataclass(frozen=True, slots=True)
class Checked:
    case: Case
    predicted: dict[str, float]
    choice: str
    alpha_first: bool
    """SP-alpha is predicted to be faster than all three."""
    all_reduce_by: str
    """StageProfile.all_reduce_by"""

    @property
    def share(self) -> float:
        """Measured rate of the choice over that of the best."""
        return self.case.measured[self.choice] / max(self.case.measured.values())

    def error(self, mode: str) -> float:
        """Predicted over measured, less 1."""
        return self.predicted[mode] / self.case.measured[mode] - 1


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        checked = check_all(args)
    except ConfigError as error:
        print(f"plan-check: {error}", file=sys.stderr)
        return 2
    print_table(checked)
    result = summary(checked)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plan-check", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default=str(PROFILE), help="of the GPUs")
    parser.add_argument("--results", nargs="*", help="of GPUs; nothing given: all stored ones")
    parser.add_argument("--cpu-profile", help="of the CPU and the random-weight model")
    parser.add_argument("--cpu-results", nargs="*")
    parser.add_argument("--cpu-context", type=int, default=128, help="mean tokens of a request")
    return parser


def check_all(args: argparse.Namespace) -> list[Checked]:
    if args.results is None and args.cpu_results is None:
        args.results, args.cpu_results = GPU_RESULTS, CPU_RESULTS
        args.cpu_profile = args.cpu_profile or CPU_PROFILE
    if args.cpu_results and not args.cpu_profile:
        raise ConfigError("--cpu-results needs --cpu-profile: write one with `spexis profile`")
    checked = []
    for profile, paths in ((args.profile, args.results), (args.cpu_profile, args.cpu_results)):
        if not paths:
            continue
        file = ProfileFile.load(profile)
        for path in paths:
            checked += [check(case, file) for case in cases(path, args.cpu_context)]
    if not checked:
        raise ConfigError("no case with PP2, TP2 and SP2 measured in these results")
    return checked


# -- what was measured -----------------------------------------------------------------------------


def cases(path: str | Path, cpu_context: int = 128) -> Iterator[Case]:
    """From a result file of `spexis bench`, GPU or CPU preset."""
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    name = Path(path).stem
    if record.get("name") == "bench-gpu2":
        yield from _gpu_cases(record, name)
    elif record.get("name") == "bench-cpu":
        yield from _cpu_cases(record, name, cpu_context)
    else:
        raise ConfigError(f"{path} is no result of `spexis bench --preset gpu2` or `cpu`")


def _gpu_cases(record: dict[str, Any], name: str) -> Iterator[Case]:
    rates: dict[tuple[str, int], float] = {}  # of stock engines
    for cell in record["cells"]:
        rates[cell["engine"], cell["rows"]] = cell["rate"]
    for cell in record["cells"]:
        engine, rows = cell["engine"], cell["rows"]
        if engine not in ("sp2", "sp2_no_p2p"):
            continue
        link = engine.removeprefix("sp2")
        tensor = rates.get((f"tp2{link}", rows))
        pipeline = rates.get((f"pp2{link}", rows), rates.get(("pp2", rows)))
        if tensor is None or pipeline is None:
            continue
        yield Case(
            source=name,
            batch=rows,
            acceptance=cell["acceptance"],
            p2p=not link,
            context=cell["context"],
            measured={"pp": pipeline, "tp": tensor, "sp": cell["rate"]},
        )


def _cpu_cases(record: dict[str, Any], name: str, context: int) -> Iterator[Case]:
    for streams in STREAMS:
        row = (record.get("random") or {}).get(streams)
        if row is None or not set(MODES) <= set(row["tokens_per_second"]):
            continue
        yield Case(
            source=name,
            batch=int(streams),
            acceptance=row["acceptance"],
            p2p=True,
            context=context,
            measured={mode: row["tokens_per_second"][mode] for mode in MODES},
        )


# -- what is predicted -----------------------------------------------------------------------------


def check(case: Case, file: ProfileFile) -> Checked:
    profile = replace(file.stage_profile(case.p2p), drafter=())
    options = plan_measured(
        profile,
        file.model,
        file.device_memory,
        gpus=2,
        batch=case.batch,
        context=case.context,
        acceptance=case.acceptance,
        replicas=[1],
    )
    rates = {option.mode: option.tokens_per_second for option in options}
    missing = [mode for mode in MODES if mode not in rates]
    if missing:
        raise ConfigError(
            f"{file.path} does not price {missing[0].upper()}2 at batch {case.batch}: it needs "
            "link_seconds and one device a stage"
        )
    predicted = {mode: rates[mode] for mode in MODES}
    choice = max(predicted, key=predicted.get)
    alpha_first = options[0].mode == "sp-alpha"
    return Checked(case, predicted, choice, alpha_first, profile.all_reduce_by)


# -- reporting -------------------------------------------------------------------------------------


def summary(checked: Sequence[Checked]) -> dict[str, Any]:
    shares = [c.share for c in checked]
    settings: dict[str, dict[str, Any]] = {}
    for c in checked:
        link = "p2p" if c.case.p2p else "no_p2p"
        start = {"all_reduce_by": c.all_reduce_by, "cases": 0, "wrong": 0, "worst": 1}
        group = settings.setdefault(f"{c.case.source} {link}", start)
        group["cases"] += 1
        group["wrong"] += c.share < WANTED
        group["worst"] = min(group["worst"], round(c.share, 4))
        for mode in MODES:
            low, high = group.setdefault(f"{mode}_error", [1.0, -1.0])
            error = round(c.error(mode), 4)
            group[f"{mode}_error"] = [min(low, error), max(high, error)]
    return {
        "name": "plan-check",
        "ok": min(shares) >= WANTED,
        "worst": round(min(shares), 4),
        "cases": len(shares),
        "wrong": sum(share < WANTED for share in shares),
        "sp_alpha_first": sum(c.alpha_first for c in checked),
        "settings": settings,
    }


def print_table(checked: Sequence[Checked]) -> None:
    print("tokens/s measured (and predicted over measured, less 1); share: of the best measured")
    print(
        f"{'result':<24}{'links':>7}{'batch':>6}{'p':>6}"
        + "".join(f"{mode.upper() + '2':>17}" for mode in MODES)
        + "  choice  share"
    )
    for c in checked:
        case = c.case
        rates = "".join(f"{case.measured[mode]:>9.1f} {c.error(mode):>+7.1%}" for mode in MODES)
        note = "" if c.share >= WANTED else "  wrong"
        note += "  (SP-alpha first)" if c.alpha_first else ""
        print(
            f"{case.source:<24}{'p2p' if case.p2p else 'no p2p':>7}{case.batch:>6}"
            f"{case.acceptance:>6.3f}{rates}  {c.choice.upper() + '2':>6} {c.share:>6.3f}{note}"
        )
    if any(c.case.p2p and c.all_reduce_by == "torch" for c in checked):
        print(
            "TP2 with peer access is priced too high, with NCCL's or Gloo's all-reduce: the "
            "profile has none of vLLM's own"
        )


if __name__ == "__main__":
    sys.exit(main())
