# SPDX-License-Identifier: Apache-2.0
"""`spexis bench --preset gpu2 | gpu4`: SP, PP and TP in one run on random weights.

    spexis bench --preset gpu2 --dims l70 --output gpu2-l70.json
    spexis bench --preset gpu2 --dims l70 --batches 64 128 --p 0.785 --rounds 3 --stop-after 540
    spexis bench --preset gpu2 --dims l70 ... --resume          # goes on where it stopped
    spexis bench --preset gpu2 --dims tiny --device cpu --batches 1 4 --p 0.8     # tries the tool

First `spexis profile` measures one stage, for the law's limit and SP's layer split. Then engines
take turns, by rounds: each starts once a round and measures every batch (SP: at every acceptance
of the synthetic drafter, which changes what is generated and is for measurements only). Every
other round goes through the engines backwards. What a measurement is: decode_child.py. Prints a
table, writes JSON and a plot, ends with one JSON line. Fields: docs/gpu.md.

Invariant: the file is complete after every measurement, so a run that was killed loses one; what
was measured with other settings is never mixed in.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spexis.bench import dims, engines, gpu_report, machine
from spexis.bench.decode import DecodeEngine, DecodeSpec
from spexis.bench.gpu_kinds import BATCHES, KINDS, Kind, engines_of
from spexis.bench.options import add_engine_options, engine_options
from spexis.bench.profile import measure_stage
from spexis.cli.numbers import positive, share, whole, whole_or_zero
from spexis.config import ConfigError
from spexis.core.placement import balanced_partition, read_partition
from spexis.core.profile_file import FORMAT
from spexis.core.stage_curve import StageCurve

DRAFTER_REPEATS = 50


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    engines.kill_on_signals()
    bench = GpuBench(args)
    bench.run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spexis bench", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=list(KINDS), default="gpu2")
    parser.add_argument(
        "--dims", default="l70", help=f"{', '.join(dims.DIMS)}, or a folder with a config.json"
    )
    parser.add_argument("--batches", type=whole, nargs="+", help="requests that decode at a time")
    parser.add_argument("--p", type=share, nargs="+", help="acceptances of the synthetic drafter")
    parser.add_argument("--p2p", choices=["on", "off", "both"], default="both")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="exactly these, in order")
    parser.add_argument("--rounds", type=whole, default=1)
    parser.add_argument("--prompt", type=whole, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=whole, default=64, help="tokens a request in the window")
    parser.add_argument(
        "--min-drafts",
        type=whole_or_zero,
        default=512,
        help="SP at few requests: a longer window, until about this many guesses (default: 512)",
    )
    parser.add_argument(
        "--warm", type=whole_or_zero, default=8, help="tokens a request before the window"
    )
    parser.add_argument("--max-model-len", type=whole, default=2048)
    parser.add_argument("--max-num-seqs", type=whole, help="default: the largest batch")
    parser.add_argument(
        "--split",
        default="auto",
        help="layers per stage of SP: auto (by the measured curve), even, or counts as 41,39",
    )
    parser.add_argument(
        "--stock-split", choices=["even", "same"], default="even", help="of stock pipelines"
    )
    parser.add_argument(
        "--capture-batches",
        action="store_true",
        help="CUDA graphs for the preset's batches and a stage's share of them only",
    )
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument(
        "--step-times", metavar="FILE", help="of `spexis profile`: what alpha2 selects drafts by"
    )
    parser.add_argument(
        "--sharpness",
        type=positive,
        help="drafts differ in how likely they are right, and say so: for alpha2 and device2",
    )
    parser.add_argument("--output", help="JSON file (default: PRESET-DIMS.json)")
    parser.add_argument("--resume", action="store_true", help="go on with what --output holds")
    parser.add_argument("--stop-after", type=positive, metavar="SECONDS", help="then stop in order")
    add_engine_options(parser)
    return parser


def capture_sizes(preset: str, batches: Sequence[int], max_num_seqs: int) -> list[int]:
    """Rows of the steps that any kind of the preset runs: a stock pipeline's are shares of B."""
    every = {*batches, *(b for b in BATCHES[preset] if b <= max_num_seqs)}
    stages = {kind.stages for kind in KINDS[preset]}
    return sorted({-(-rows // parts) for rows in every for parts in (1, *stages)})


def _device(args: argparse.Namespace) -> str:
    device = machine.resolve_device(args.device)
    if device == "cpu" and args.device == "auto":
        raise ConfigError(
            f"--preset {args.preset} measures GPUs and none can be seen here (on a CPU "
            "`--device cpu --dims tiny` tries the tool; `--preset cpu` measures)"
        )
    kind = KINDS[args.preset][0]
    machine.check_devices(device, kind.stages * kind.tensor)
    return device


def _counts(split: str, layers: int) -> list[int] | None:
    """Layers per stage where --split gives them."""
    if split in ("auto", "even"):
        return None
    counts = read_partition(split, layers)
    if counts is None:
        raise ConfigError(
            f"--split {split}: allowed are auto, even, or counts above 0 that add up to the "
            f"{layers} layers"
        )
    return counts


class GpuBench:
    """One run: what is asked, what is measured so far, what to measure next."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.device = _device(args)
        self.name = Path(args.dims).name
        self.output = Path(args.output or f"{args.preset}-{self.name}.json")
        self.batches = sorted(set(args.batches or BATCHES[args.preset]))
        self.max_num_seqs = args.max_num_seqs or max(self.batches)
        self.kinds = engines_of(args.preset, args.p2p, args.engines)
        selecting = [kind.name for kind in self.kinds if kind.selects]
        if selecting and not args.step_times:
            raise ConfigError(
                f"--engines {selecting[0]} needs --step-times FILE: write one with `spexis profile`"
            )
        if args.capture_batches:
            args.capture_sizes = capture_sizes(args.preset, self.batches, self.max_num_seqs)
        if args.step_times and not Path(args.step_times).is_file():
            raise ConfigError(f"--step-times {args.step_times}: no such file")
        self.options = engine_options(args)
        self.layers = dims.sizes(args.dims)["num_hidden_layers"]
        self.counts = _counts(args.split, self.layers)
        machine.check_output(self.output)
        self.record = self._record()

    # -- the file --------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What must be alike for measurements to stand in one file."""
        return {
            "preset": self.args.preset,
            "model": dims.sizes(self.args.dims),
            "device": self.device,
            "prompt": self.args.prompt,
            "tokens": self.args.tokens,
            "warm": self.args.warm,
            "min_drafts": self.args.min_drafts,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.args.max_model_len,
            "split": self.args.split,
            "stock_split": self.args.stock_split,
            "options": self.options,
            "step_times": self.args.step_times,
            "sharpness": self.args.sharpness,
        }

    def _record(self) -> dict[str, Any]:
        """The raw part of the file; the result is worked out from it anew each time."""
        record: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "commands": [],
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "settings": json.loads(json.dumps(self.settings())),
            "cells": [],
            "engines": [],
            "failures": [],
            "profiles": {},
            "splits": {},
            "drafter_seconds": {},
        }
        if self.args.resume and self.output.is_file():
            before = self._before()
            for what in ("settings", "versions"):
                for key, value in record[what].items():
                    if before[what].get(key) != value:
                        raise ConfigError(
                            f"--resume: {self.output} was measured with {key} = "
                            f"{before[what].get(key)!r}, not {value!r}; give another --output"
                        )
            # Failures are not carried over: what failed is tried again.
            record |= {key: before[key] for key in record if key not in ("failures", "hardware")}
        record["commands"].append(machine.command())
        return record

    def _before(self) -> dict[str, Any]:
        try:
            before = json.loads(self.output.read_text())
            if isinstance(before, dict) and before.get("name") == f"bench-{self.args.preset}":
                return before
            why = "no result of this preset"
        except ValueError as error:
            why = str(error)
        raise ConfigError(f"--resume: {self.output} cannot be gone on with: {why}")

    def save(self) -> None:
        temporary = self.output.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self.result(), **self.record}, indent=1) + "\n")
        temporary.replace(self.output)

    # -- what there is to do -----------------------------------------------------------------------

    def acceptances(self, kind: Kind) -> list[float | None]:
        """Acceptances to measure on an engine; [None] on stock."""
        if not kind.is_sp:
            return [None]
        return sorted(self.args.p or kind.acceptance)

    def missing(self, kind: Kind, number: int) -> list[tuple[int, float | None]]:
        """(rows, p) that an engine's round still lacks; largest batch first.

        The largest first: should memory not suffice, that shows at once.
        """
        have = {
            (c["rows"], c["p"])
            for c in self.record["cells"]
            if c["engine"] == kind.name and c["round"] == number
        }
        wanted = [(rows, p) for rows in self.batches[::-1] for p in self.acceptances(kind)]
        return [cell for cell in wanted if cell not in have]

    def tokens(self, rows: int, p: float | None) -> int:
        """Tokens a request in the window: of few guesses the share that is right is chance."""
        if p is None:
            return self.args.tokens
        return max(self.args.tokens, -(-self.args.min_drafts // rows))

    def turns(self) -> Iterator[tuple[int, Kind]]:
        """Engines in the order in which they run."""
        for number in range(self.args.rounds):
            for kind in self.kinds if number % 2 == 0 else self.kinds[::-1]:
                yield number, kind

    @property
    def out_of_time(self) -> bool:
        limit = self.args.stop_after
        return limit is not None and time.monotonic() - self.begin > limit

    # -- the run -----------------------------------------------------------------------------------

    def run(self) -> None:
        from tqdm import tqdm

        left = [len(self.missing(kind, number)) for number, kind in self.turns()]
        self.save()
        with tempfile.TemporaryDirectory() as folder, tqdm(total=sum(left), unit="cell") as bar:
            self.bar = bar
            model = dims.write_model(self.args.dims, folder)
            if self.args.profile:
                self._profile()
            for number, kind in self.turns():
                if self.missing(kind, number) and not self.out_of_time:
                    self._measure(kind, number, model)
        self._finish()

    def _profile(self) -> None:
        """The stage curves of the kinds of SP that run, by devices and stages."""
        batches = set(self.batches)
        if self.device == "cuda":  # also those that a later run may ask for
            batches |= {b for b in BATCHES[self.args.preset] if b <= self.max_num_seqs}
        for kind in self.kinds:
            key = f"pp{kind.stages}tp{kind.tensor}"
            if not kind.is_sp or key in self.record["profiles"] or self.out_of_time:
                continue
            self.bar.set_description(f"profile of a stage of {key}")
            try:
                stage = measure_stage(
                    self.args.dims,
                    layers=self.layers // kind.stages,
                    tensor=kind.tensor,
                    device=self.device,
                    batches=sorted(batches),
                    contexts=[self.args.prompt + self.args.tokens // 2],
                    tokens=min(32, self.args.tokens),
                    repeats=2,
                    options=self.options,
                    log=self._log(f"profile-{key}"),
                )
            except RuntimeError as error:
                self._fail(f"profile {key}", error)
                continue
            self.record["profiles"][key] = {"format": FORMAT, **stage}
            self.save()

    def _measure(self, kind: Kind, number: int, model: str) -> None:
        """One turn of one engine."""
        self.bar.set_description(f"round {number + 1}: {kind.name}, starting")
        try:
            with DecodeEngine(self.spec(kind, model), self._log(f"{kind.name}-{number}")) as engine:
                self.record["engines"].append(
                    {
                        "engine": kind.name,
                        "round": number,
                        **engine.started,
                        "split": self.split(kind),
                    }
                )
                self.bar.set_description(f"round {number + 1}: {kind.name}")
                if kind.is_sp:
                    self._drafter_seconds(engine, kind)
                for rows, p in self.missing(kind, number):
                    if self.out_of_time:
                        return
                    if p is not None:
                        engine.call("acceptance", acceptance=p)
                    found = engine.call(
                        "decode",
                        rows=rows,
                        context=self.args.prompt,
                        tokens=self.tokens(rows, p),
                        warm=self.args.warm,
                    )
                    cell = {"engine": kind.name, "round": number, "p": p, "rows": rows, **found}
                    self.record["cells"].append(cell)
                    self.save()
                    self.bar.update()
        except RuntimeError as error:
            self._fail(f"{kind.name} round {number}", error)

    def _drafter_seconds(self, engine: DecodeEngine, kind: Kind) -> None:
        known = self.record["drafter_seconds"]
        for rows in self.batches:
            found = engine.call("drafter", rows=rows, repeats=DRAFTER_REPEATS)
            known.setdefault(str(rows), found["seconds"])

    def _fail(self, what: str, error: RuntimeError) -> None:
        self.record["failures"].append({"what": what, "error": str(error)})
        self.save()
        print(f"\n{what} failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)

    def _log(self, name: str) -> Path:
        return Path(f"{self.output.with_suffix('')}-logs") / f"{name}.log"

    # -- engines -----------------------------------------------------------------------------------

    def spec(self, kind: Kind, model: str) -> DecodeSpec:
        return DecodeSpec(
            model=model,
            device=self.device,
            stages=kind.stages,
            tensor=kind.tensor,
            drafter=self.drafter(kind),
            settings=self.block(kind),
            split=self.split(kind),
            p2p=kind.p2p,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.args.max_model_len,
            options=self.options,
        )

    def drafter(self, kind: Kind) -> dict[str, Any] | None:
        if kind.drafter != "synthetic" or self.args.sharpness is None:
            return {"method": kind.drafter} if kind.drafter else None
        return {"method": kind.drafter, "sharpness": self.args.sharpness}

    def block(self, kind: Kind) -> dict[str, Any]:
        """Of the spexis block, all but drafter and placement."""
        if not kind.selects:
            return kind.settings
        return {**kind.settings, "profile": str(Path(self.args.step_times).resolve())}

    def split(self, kind: Kind) -> list[int] | None:
        """Layers per stage; None leaves it to vLLM, which splits evenly."""
        if kind.stages == 1 or (not kind.is_sp and self.args.stock_split == "even"):
            return None
        # Chosen once: a file never mixes measurements of two splits.
        splits = self.record["splits"]
        return splits.setdefault(f"pp{kind.stages}tp{kind.tensor}", self._choose_split(kind))

    def _choose_split(self, kind: Kind) -> list[int] | None:
        if self.args.split == "even":
            return None
        if self.counts is not None:
            return self.counts
        curve = self.curve(kind)
        if curve is None:
            return None
        # Where throughput matters most; the ratio of head to layer hardly depends on the batch.
        costs = curve.costs(min(self.max_num_seqs, curve.max_rows))
        return balanced_partition(self.layers, kind.stages, costs)

    def curve(self, kind: Kind) -> StageCurve | None:
        profile = self.record["profiles"].get(f"pp{kind.stages}tp{kind.tensor}")
        return StageCurve.from_profile(profile) if profile and profile["points"] else None

    # -- the result --------------------------------------------------------------------------------

    def steps(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Step times by the stage curve; see gpu_report.py."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for kind in self.kinds:
            curve = self.curve(kind) if kind.is_sp else None
            if curve is None or f"pp{kind.stages}tp{kind.tensor}" not in self.record["splits"]:
                continue  # not measured yet
            even = self.layers / kind.stages
            split = self.split(kind) or [even] * kind.stages
            for rows in self.batches:
                if rows > curve.max_rows:
                    continue
                drafter = self.record["drafter_seconds"].get(str(rows), 0.0)
                costs = curve.costs(rows, drafter)
                found.setdefault(kind.name, {})[str(rows)] = {
                    "stages": kind.stages,
                    "full": max(costs.of_split(split)),
                    "bare": even * costs.layer,
                }
        return found

    def result(self) -> dict[str, Any]:
        steps = self.steps()
        summary = gpu_report.summarise(self.args.preset, self.record["cells"], steps)
        wanted = gpu_report.verdict(self.args.preset, self.name, summary)
        complete = not self.record["failures"] and not any(
            self.missing(kind, number) for number, kind in self.turns()
        )
        return {
            "name": f"bench-{self.args.preset}",
            "ok": complete and all(holds for _, _, holds in wanted.values()),
            "complete": complete,
            **summary,
            "wanted": wanted,
            "law_limit": {
                kind.name: gpu_report.limits(kind, self.acceptances(kind), steps)
                for kind in self.kinds
                if kind.is_sp and kind.name in steps
            },
            "step_seconds": steps,
            "seconds": round(time.monotonic() - self.begin, 1),
        }

    def _finish(self) -> None:
        result = self.result()
        cells = self.record["cells"]
        summary = {
            key: value
            for key, value in result.items()
            if key.startswith(("sp_over", "law_share", "best", "single", "off_"))
        }
        print(gpu_report.table(self.args.preset, self.kinds, cells, summary))
        for kind, limits in result["law_limit"].items():
            print(f"\nlaw's limit of {kind}, tokens/s:")
            for rows, by_p in limits.items():
                print(f"  {rows}: " + "  ".join(f"p={p} {v:.0f}" for p, v in by_p.items()))
        for name, (measured, wanted, holds) in result["wanted"].items():
            print(f"{'holds' if holds else 'MISSED'}: {name} {measured:.3f}, wanted {wanted}")
        for failure in self.record["failures"]:
            print(f"FAILED: {failure['what']}: {failure['error'].splitlines()[0]}")
        self.save()
        if cells:
            title = f"{self.args.preset}, {self.name} dimensions, random weights"
            picture = str(self.output.with_suffix(".svg"))
            try:
                gpu_report.plot(title, self.kinds, cells, result["step_seconds"], picture)
            except ImportError as error:
                again = f"python -m spexis.bench.gpu_report {self.output}"
                print(f"no picture ({error}); `{again}` draws it elsewhere", file=sys.stderr)
        shown = ("name", "ok", "complete", *summary, "seconds")
        line = {key: result[key] for key in shown}
        print(json.dumps({**line, "output": str(self.output)}))


if __name__ == "__main__":
    sys.exit(main())
