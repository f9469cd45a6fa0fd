# SPDX-License-Identifier: Apache-2.0
"""Does look-ahead save recomputing where KV memory is short, and cost nothing where it is not?

    python -m spexis.bench.memory                              # make bench-memory
    python -m spexis.bench.memory --trace azure2023_conv.csv.gz --blocks 128 --rounds 2
    python -m spexis.bench.memory --predictor oracle           # look-ahead that knows the ends
    python -m spexis.bench.memory --predictor shipped --ends own

The demo model at PP=2 on a CPU, few KV blocks, requests that come faster than they are served.
Three engines in alternation, each round with other requests: stock vLLM, Spexis, Spexis with
look-ahead. Then, where memory is ample, one engine with look-ahead on and off in turns of 32 steps
(lookahead_turns.py): it should cost nothing there. Lengths are the Azure
conversation trace's (2023), prompts scaled by 1/32, answers at most 384: its quantiles, or the
trace itself by --trace. Answers are long beside prompts then, as where memory runs short: requests
are let in because their prompts fit, and grow.

No engine may know an answer's length beforehand, so it is not the limit that ends it: a reference
run writes each answer longer than wanted, and the request's stop token is one that first occurs
about where the answer shall end. The reference also says what every answer must be.

Look-ahead runs without a length predictor (--predictor none), with the shipped one, or with an
oracle that is right about each threshold (oracle_lengths.py). Ends at a chosen stop token are not
those that a predictor was trained on: to see what the shipped one is worth, let answers end as the
model ends them (--ends own; --blocks must then suit their length).

Invariant: a ratio is of engines that were given the same requests at the same seconds; an answer
that differs from the reference's makes "ok" false.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spexis.bench import machine
from spexis.bench.engines import (
    EngineRun,
    EngineSpec,
    Work,
    first_answers,
    kill_on_signals,
    run_engine,
)
from spexis.bench.oracle_lengths import ANSWER_TOKENS
from spexis.bench.prompts import BUILT_IN, chat_token_ids
from spexis.lengths import shipped

# Quantiles 0, 5 .. 100 % of the Azure LLM inference trace 2023, conversations (19,366 requests).
PROMPTS = (2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020)
PROMPTS += (1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 14050)
ANSWERS = (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129)
ANSWERS += (151, 177, 217, 384, 395, 400, 411, 424, 451, 1000)
PROMPT_SCALE, ANSWER_SCALE = 1 / 32, 1
MOST = 384  # tokens of a prompt; of an answer
LIMIT = 400  # max_tokens that every request states
SLACK = 24  # tokens of the reference beyond the wanted end
WANTED = {"recomputed_ratio": 0.5, "throughput_ratio": 1.10, "p99_ratio": 1.05}
WANTED_PREEMPTED, WANTED_POLICY, WANTED_AMPLE = 0.30, 0.01, 0.97
ENGINES = ("stock", "off", "on")
AMPLE_RUNS = 4  # in one engine, half of them with look-ahead on first
AMPLE_BLOCKS = 2048
PREDICTORS = ("none", "shipped", "oracle")
ENDS = ("trace", "own")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.predictor == "shipped" and not shipped():
        sys.exit("bench.memory: no length predictor ships with this version (--predictor none)")
    kill_on_signals()
    bench = Bench(args)
    try:
        for number in range(args.rounds):
            bench.round(number)
        for number in range(args.ample_rounds):
            bench.ample(number)
    finally:
        bench.bar.close()
    result = bench.result()
    print(table(bench.runs, bench.ample_runs))
    keys = ("name", "ok", *WANTED, "different", "stock_preempted", "most_preemptions")
    keys += ("ample_throughput_ratio", "policy_share", "predictor", "ends")
    print(json.dumps({k: result[k] for k in keys}))
    return 0


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        from spexis.demo_model import demo_model_dir

        self.args, self.model = args, demo_model_dir()
        self.runs: list[dict[str, Any]] = []
        self.ample_runs: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.known: dict[tuple[int, int], tuple[list[dict], list[list[int]]]] = {}
        total = args.rounds * (1 + len(ENGINES)) + args.ample_rounds * 2
        self.bar = tqdm(total=total, unit="engine", file=sys.stderr, dynamic_ncols=True)

    def result(self) -> dict[str, Any]:
        return {
            **summary(self.runs, self.ample_runs, self.failures),
            "predictor": self.args.predictor,
            "ends": self.args.ends,
            "date": time.strftime("%Y-%m-%d"),
            "command": machine.command(),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "runs": self.runs,
            "ample_runs": self.ample_runs,
            "failures": self.failures,
        }

    def save(self) -> None:
        """After every engine: what was measured is not lost if a later one fails."""
        if self.args.output:
            Path(self.args.output).write_text(json.dumps(self.result(), indent=1) + "\n")

    def round(self, number: int) -> None:
        (rows, wanted), (warm, _) = self.requests(
            (number, self.args.requests), (1000 + number, self.args.warm)
        )
        # Another order each round: machines change slowly.
        order = ENGINES[number % 3 :] + ENGINES[: number % 3]
        for engine in order:
            work = [Work(name="warm", rows=warm), Work(name="requests", rows=rows)]
            what = f"short {number + 1}: {engine}"
            results = self.run(self.spec(engine, self.args.blocks), work, what).results
            self.keep(engine, number, rows, wanted, results["requests"])

    def ample(self, number: int) -> None:
        (rows, wanted), (warm, _) = self.requests(
            (2000 + number, self.args.ample_requests), (1000 + number, self.args.warm)
        )
        work = [Work(name="warm", rows=warm)]
        for run in range(AMPLE_RUNS):
            first = {"look_ahead_turns": (number + run) % 2 == 0}
            work.append(Work(name=f"turns {run}", rows=rows, prepare=first))
        results = self.run(self.spec("on", AMPLE_BLOCKS), work, f"ample {number + 1}").results
        found = [results[item.name] for item in work[1:]]
        taken = {way: np.sum([r["turns"][way] for r in found], axis=0) for way in ("on", "off")}
        self.ample_runs.append(
            {
                "round": number,
                "requests": len(rows),
                **{way: tokens / seconds for way, (seconds, tokens) in taken.items()},
                "turns": [r["turns"] for r in found],
                "different": sum(different(r, wanted) for r in found),
                "policy_share": sum(r["policy_seconds"] for r in found) / taken["on"][0],
                "blocks_leaked": max(map(blocks_leaked, found)),
            }
        )
        self.save()

    def requests(self, *sets: tuple[int, int]) -> list[tuple[list[dict], list[list[int]]]]:
        """For each (seed, count): rows for the engines, and the answers that they must give."""
        new = {key: self._drawn(*key) for key in sets if key not in self.known}
        if new:
            # One reference engine for all: its start takes as long as many answers.
            work = [
                Work(name=str(key), rows=list(map(self._asked, rows))) for key, rows in new.items()
            ]
            spec = EngineSpec(model=self.model, options=options(AMPLE_BLOCKS))
            results = self.run(spec, work, "reference").results
            for key, rows in new.items():
                answers = first_answers(results[str(key)])
                self.known[key] = rows, list(map(self._ended, rows, answers))
        return [self.known[key] for key in sets]

    def _drawn(self, seed: int, count: int) -> list[dict]:
        """Prompts and arrivals, and as "n" the length that the answer is to have."""
        rng = random.Random(seed)
        lengths = draw_lengths(rng, count, self.args.trace)
        pieces = chat_token_ids(self.model, list(BUILT_IN))
        rows, at = [], 0.0
        for prompt, answer in lengths:
            tokens: list[int] = []
            while len(tokens) < prompt:
                tokens += rng.choice(pieces)
            # The end of a question stays the end, whatever is cut off in front.
            rows.append({"prompt_token_ids": tokens[-prompt:], "arrive_seconds": at, "n": answer})
            at += rng.expovariate(self.args.rate)
        return rows

    def _asked(self, row: dict) -> dict:
        """Of the reference: longer than wanted, so that there is a choice of ends."""
        # Not beyond the limit, at which the others end.
        params: dict[str, Any] = {"max_tokens": min(row["n"] + SLACK, LIMIT), "ignore_eos": True}
        if self.args.ends == "own":
            params = {"max_tokens": LIMIT}
        return {"prompt_token_ids": row["prompt_token_ids"], "params": params}

    def _ended(self, row: dict, answer: list[int]) -> list[int]:
        """The answer as it is to end; tells the row how it will."""
        length = row.pop("n")
        stop: dict[str, Any] = {}
        if self.args.ends == "trace":
            end = stop_position(answer, length)
            stop = {"ignore_eos": True, "stop_token_ids": [answer[end]]}
            answer = answer[: end + 1]
        told = {ANSWER_TOKENS: len(answer)}  # read by the oracle alone
        row["params"] = {"max_tokens": LIMIT, **stop, "extra_args": told}
        return answer

    def spec(self, engine: str, blocks: int) -> EngineSpec:
        return EngineSpec(
            model=self.model,
            stages=2,
            drafter=None if engine == "stock" else {"method": "exit"},
            settings=lookahead_settings(self.args.predictor) if engine == "on" else {},
            options=options(blocks),
        )

    def keep(self, engine, number, rows, wanted, result) -> None:
        """Of one engine's answers, where memory is short."""
        answers = first_answers(result)
        latencies = [end - due for due, _, end in result["times"]]
        self.runs.append(
            {
                "engine": engine,
                "round": number,
                "requests": len(rows),
                "seconds": result["seconds"],
                "tokens_per_second": sum(map(len, answers)) / result["seconds"],
                "latency_p50": float(np.quantile(latencies, 0.5)),
                "latency_p99": float(np.quantile(latencies, 0.99)),
                "ttft_p50": float(np.quantile([t[1] - t[0] for t in result["times"]], 0.5)),
                "preempted": result["preempted"],
                "recomputed_tokens": result["recomputed_tokens"],
                "different": different(result, wanted),
                "blocks_leaked": blocks_leaked(result),
                "held": result["counters"].get("held", 0),
                "predictor": result["predictor"],
            }
        )
        self.save()

    def run(self, spec: EngineSpec, work: list[Work], what: str) -> EngineRun:
        self.bar.set_description(what)
        if spec.settings.get("lookahead") and self.args.predictor == "oracle":
            work = [dataclasses.replace(work[0], prepare={"oracle_lengths": {}}), *work[1:]]

        def show(event: dict) -> None:
            if event["event"] == "progress":
                self.bar.set_postfix_str(f"{event['name']} {event['done']}/{event['of']}")

        run = run_engine(spec, work, on_event=show)
        if run.error:
            self.failures.append(run.error)
            self.save()
            raise SystemExit(run.error)
        self.bar.update()
        return run


def different(result: dict, wanted: list[list[int]]) -> int:
    """Answers that are not the reference's."""
    return sum(a != b for a, b in zip(first_answers(result), wanted, strict=True))


def blocks_leaked(result: dict) -> int:
    return result["num_blocks"] - 1 - result["free_blocks"]  # one is vLLM's null block


def lookahead_settings(predictor: str) -> dict[str, Any]:
    """Of the spexis block."""
    name = next(iter(shipped())) if predictor == "shipped" else False
    return {"lookahead": True, "length_predictor": name}


def options(blocks: int) -> dict[str, Any]:
    return {
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "block_size": 32,
        "num_gpu_blocks_override": blocks,
        "max_num_batched_tokens": 256,
    }


def draw_lengths(
    rng: random.Random,
    count: int,
    trace: str | None,
    scales: tuple[float, float] = (PROMPT_SCALE, ANSWER_SCALE),
    most: int = MOST,
) -> list[tuple[int, int]]:
    """[(prompt, answer)] in tokens, scaled."""
    if trace:
        from spexis.simulator.trace import load

        loaded = load(trace)
        chosen = rng.sample(range(len(loaded)), count)
        pairs = [(int(loaded.prompt[i]), int(loaded.output[i])) for i in chosen]
    else:
        grid = np.linspace(0, 1, len(PROMPTS))
        draw = lambda quantiles: float(np.interp(rng.random(), grid, quantiles))  # noqa: E731
        # Prompt and answer hardly correlate there (.09 between logarithms).
        pairs = [(draw(PROMPTS), draw(ANSWERS)) for _ in range(count)]
    return [
        (min(max(round(p * scales[0]), 4), most), min(max(round(a * scales[1]), 2), most))
        for p, a in pairs
    ]


def stop_position(answer: Sequence[int], wanted: int) -> int:
    """Where the answer is to end: the position nearest to `wanted` whose token is new there."""
    first = {token: i for i, token in reversed(list(enumerate(answer)))}
    return min(first.values(), key=lambda i: (abs(i + 1 - wanted), i))


def summary(runs: list[dict], ample: list[dict], failures: list[str]) -> dict[str, Any]:
    """The figures asked for, medians over rounds of ratios within a round."""

    def ratio(top: str, bottom: str, key: str) -> float | None:
        found = {(r["engine"], r["round"]): r for r in runs}
        pairs = [
            (found[top, n][key], found[bottom, n][key])
            for engine, n in found
            if engine == top and (bottom, n) in found
        ]
        ratios = [a / b if b else (1.0 if not a else float("inf")) for a, b in pairs]
        return statistics.median(ratios) if ratios else None

    stock = [r for r in runs if r["engine"] == "stock"]
    on = [r for r in runs if r["engine"] == "on"]
    result = {
        "name": "bench-memory",
        "recomputed_ratio": ratio("on", "stock", "recomputed_tokens"),
        "throughput_ratio": ratio("on", "off", "tokens_per_second"),
        "p99_ratio": ratio("on", "off", "latency_p99"),
        "throughput_over_stock": ratio("on", "stock", "tokens_per_second"),
        "different": sum(r["different"] for r in (*runs, *ample)),
        "stock_preempted": min((len(r["preempted"]) / r["requests"] for r in stock), default=None),
        "most_preemptions": max((max(r["preempted"], default=0) for r in on), default=None),
        "ample_throughput_ratio": (
            statistics.median(r["on"] / r["off"] for r in ample) if ample else None
        ),
        "policy_share": max((r["policy_share"] for r in ample), default=None),
        "blocks_leaked": max((r["blocks_leaked"] for r in (*runs, *ample)), default=0),
    }
    complete = bool(stock) and bool(on) and result["ample_throughput_ratio"] is not None
    result["ok"] = bool(
        complete
        and not failures
        and result["different"] == 0
        and result["blocks_leaked"] == 0
        and result["recomputed_ratio"] <= WANTED["recomputed_ratio"]
        and result["throughput_ratio"] >= WANTED["throughput_ratio"]
        and result["p99_ratio"] <= WANTED["p99_ratio"]
        and result["stock_preempted"] >= WANTED_PREEMPTED
        and result["most_preemptions"] <= 2
        and result["ample_throughput_ratio"] >= WANTED_AMPLE
        and result["policy_share"] <= WANTED_POLICY
    )
    return result


def table(runs: list[dict], ample: list[dict]) -> str:
    lines = [
        f"{'memory':<7}{'round':>6}  {'engine':<7}{'tokens/s':>9}{'p50 s':>8}{'p99 s':>8}"
        f"{'preempted':>11}{'again':>8}{'held':>6}{'different':>11}"
    ]
    lines += (
        f"{'short':<7}{r['round'] + 1:>6}  {r['engine']:<7}{r['tokens_per_second']:>9.1f}"
        f"{r['latency_p50']:>8.1f}{r['latency_p99']:>8.1f}{len(r['preempted']):>11}"
        f"{r['recomputed_tokens']:>8}{r['held']:>6}{r['different']:>11}"
        for r in runs
    )
    lines += (
        f"{'ample':<7}{r['round'] + 1:>6}  {way:<7}{r[way]:>9.1f}{r['different']:>52}"
        for r in ample
        for way in ("off", "on")
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="lengths of this trace (CSV) instead of its quantiles")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--warm", type=int, default=12, help="requests before the measured ones")
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals a second")
    parser.add_argument("--blocks", type=int, default=128, help="KV blocks of 32 tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--ample-rounds", type=int, default=2, help=f"engines, of {AMPLE_RUNS} runs each"
    )
    parser.add_argument("--ample-requests", type=int, default=24)
    parser.add_argument(
        "--predictor", choices=PREDICTORS, default="none", help="that look-ahead asks"
    )
    parser.add_argument(
        "--ends",
        choices=ENDS,
        default="trace",
        help="answers end after the trace's lengths, or where the model ends them itself",
    )
    parser.add_argument("--output", help="JSON file of every run, written after each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
