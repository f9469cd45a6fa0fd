# SPDX-License-Identifier: Apache-2.0
"""The simulator against the engine: the same requests through both, on a CPU (for sim_check.py).

    recorded = EngineCheck(folder=folder).run()     # what the engine did; plain JSON
    rows, fitted = predict(recorded)                # sim_compare.compared() for each setting

What was recorded holds all that the simulator is given, so predict() can be asked again without an
engine (`--recorded`).

The demo model at PP=2. Each engine first runs other requests that arrive otherwise: the calibration
of the setting behind it. Fitted to the profile of one stage alone and to that calibration are stage
times, link and host (sim_fit.py). Taken as they are: arrivals, prompt lengths, the lengths that the
answers had, the drafts' acceptance as counted, KV blocks and limits, lengths of answers given
before. Nothing is fitted to a setting's times or preemptions.

Invariant: answers end by a stop token that a reference run found, so neither the engine's policies
nor the simulated ones know their lengths beforehand; one engine runs at a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spexis.bench import profile as profile_command
from spexis.bench import sim_fit
from spexis.bench.engines import (
    EngineSpec,
    Work,
    first_answers,
    run_engine,
    write_oracle_file,
)
from spexis.bench.memory import SLACK, draw_lengths, stop_position
from spexis.bench.prompts import BUILT_IN, chat_token_ids
from spexis.bench.sim_compare import (
    AMPLE,
    BLOCK_SIZE,
    BUDGET,
    LIMIT,
    MAX_LEN,
    MAX_SEQS,
    QUICK,
    SETTINGS,
    STAGES,
    Setting,
    compared,
    simulate,
    together,
)
from spexis.bench.step_watch import StepSize
from spexis.core.profile_file import ProfileFile
from spexis.engine.timeline import STOCK_TIMELINE_ENV
from spexis.simulator import trace as traces
from spexis.simulator.trace import Trace

SCALES, MOST = (1 / 16, 1 / 4), 192  # of the Azure trace's prompts and answers; tokens at most
CALIBRATION_RATE = 3.0  # requests a second, unlike any setting's


@dataclass(slots=True)
class Request:
    prompt: list[int]
    stop: int
    answer: list[int]
    """What the reference gave, up to and with the stop token."""


@dataclass(kw_only=True)
class EngineCheck:
    folder: Path
    """For the profile, timelines and the oracle's file."""
    quick: bool = False
    requests: int = 48
    calibration: int = 24
    trace: str | None = None
    """CSV of the Azure LLM inference traces: lengths and arrivals from there."""
    settings: Sequence[Setting] = SETTINGS
    note: Callable[[str], object] = print
    """Takes a line about what is going on."""

    def __post_init__(self) -> None:
        from spexis.demo_model import demo_model_dir

        self.model = demo_model_dir()
        self.gaps = None
        if self.trace:
            gaps = np.diff(traces.load(self.trace).arrival)
            self.gaps = gaps / gaps.mean()
        if self.quick:
            self.settings = [s for s in self.settings if s.name in QUICK]
            self.requests, self.calibration = 12, 8

    @property
    def num_steps(self) -> int:
        """Of run(), for a progress bar: profile, reference, engines."""
        return 2 + len({s.engine for s in self.settings})

    def run(self, progress: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """What predict() wants."""
        self.note("profile of one stage")
        recorded: dict[str, Any] = {"profile": self.profile(), "settings": {}, "failures": []}
        progress()
        self.note("reference answers")
        pool, reference = self.pool()
        progress()
        for engine in dict.fromkeys(s.engine for s in self.settings):
            settings = [s for s in self.settings if s.engine == engine]
            self.note(f"engine for {', '.join(s.name for s in settings)}")
            try:
                recorded["settings"] |= self.measure(settings, pool, reference)
            except (RuntimeError, ValueError) as error:  # the others are worth keeping
                self.note(f"failed: {error}")
                recorded["failures"].append(str(error).splitlines()[0])
            progress()
        return recorded

    # -- what the simulator is fitted to -----------------------------------------------------------

    def profile(self) -> dict[str, Any]:
        """The file of `spexis profile` of the same model: one stage alone on one core."""
        path = self.folder / "profile.json"
        batches, contexts, repeats = ("1", "4", "8", "16"), ("64", "192"), "2"
        if self.quick:
            batches, contexts, repeats = ("1", "8", "16"), ("64",), "1"
        arguments = [
            *(self.model, "--batches", *batches, "--contexts", *contexts, "--tokens", "12"),
            *("--chunks", str(BUDGET // 4), str(BUDGET)),
            *("--repeats", repeats, "--no-links", "--drafter-layers", "0", "--device", "cpu"),
            *("--output", str(path)),
        ]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = profile_command.main(arguments)
        if code:
            raise RuntimeError(f"spexis profile ended with {code}:\n{printed.getvalue()}")
        return json.loads(path.read_text())

    # -- requests ----------------------------------------------------------------------------------

    def pool(self) -> tuple[list[Request], str]:
        """(requests of all runs, file for the oracle). Calibration's come first."""
        rng = random.Random(0)
        count = self.calibration + self.requests
        lengths = draw_lengths(rng, count, self.trace, SCALES, MOST)
        pieces = chat_token_ids(self.model, list(BUILT_IN))
        prompts = []
        for length, _ in lengths:
            tokens: list[int] = []
            while len(tokens) < length:
                tokens += rng.choice(pieces)
            prompts.append(tokens[-length:])
        rows = [
            {
                "prompt_token_ids": prompt,
                "params": {"max_tokens": answer + SLACK, "ignore_eos": True},
            }
            for prompt, (_, answer) in zip(prompts, lengths, strict=True)
        ]
        spec = EngineSpec(model=self.model, options=options(AMPLE))
        results = self.start(spec, [Work(name="reference", rows=rows)])
        pool = []
        for row, (_, wanted) in zip(results["reference"]["rows"], lengths, strict=True):
            tokens = row["outputs"][0]["token_ids"]
            end = stop_position(tokens, wanted)
            pool.append(Request(row["prompt_token_ids"], tokens[end], tokens[: end + 1]))
        return pool, write_oracle_file(self.folder / "reference.jsonl", results)

    def rows(self, pool: Sequence[Request], rate: float | None, seed: int) -> list[dict]:
        """These requests in an order of their own, as the engine's driver wants them."""
        rng, at, rows = random.Random(seed), 0.0, []
        first = 0 if self.gaps is None else rng.randrange(len(self.gaps) - len(pool))
        for i, request in enumerate(rng.sample(pool, len(pool))):
            rows.append(
                {
                    "prompt_token_ids": request.prompt,
                    "arrive_seconds": at,
                    "answer": request.answer,
                    "params": {
                        "max_tokens": LIMIT,
                        "ignore_eos": True,
                        "stop_token_ids": [request.stop],
                    },
                }
            )
            if rate:
                gap = rng.expovariate(1.0) if self.gaps is None else float(self.gaps[first + i])
                at += gap / rate
        return rows

    # -- engine and simulator ----------------------------------------------------------------------

    def measure(
        self,
        settings: Sequence[Setting],  # of one engine
        pool: Sequence[Request],
        reference: str,
    ) -> dict[str, dict[str, Any]]:
        """By setting: steps of its calibration, and each round's requests and figures."""
        first = settings[0]
        timeline = str(self.folder / f"{first.name}.timeline")
        block = {"lookahead": first.lookahead, "timeline_log": timeline} if first.drafter else {}
        spec = EngineSpec(
            model=self.model,
            stages=STAGES,
            drafter=_drafter(first.drafter, reference),
            settings=block,
            options=options(first.blocks),
        )
        others, tested = pool[: self.calibration], pool[self.calibration :]
        plan = [("warm", self.rows(others[:6], None, 0), None)]
        for setting in settings:
            swap = None
            if setting.drafter != first.drafter:
                swap = {"drafter": _drafter(setting.drafter, reference)}
            rows = self.rows(others, CALIBRATION_RATE, 100 + setting.seed)
            plan.append((f"calibrate {setting.name}", rows, swap))
            for number in range(setting.rounds):
                rows = self.rows(tested, setting.rate, 1000 * number + setting.seed)
                plan.append((f"{setting.name} {number + 1}", rows, None))
        work = [
            Work(name=name, rows=rows, prepare=prepare, watch_steps=True)
            for name, rows, prepare in plan
        ]
        with _stock_timeline(timeline if first.drafter is None else None):
            results = self.start(spec, work)
        found: dict[str, dict[str, Any]] = {}
        ended: list[int] = []
        for name, rows, _ in plan:
            result = results[name]
            kind, _, setting = name.partition(" ")
            if kind == "calibrate":
                runs = sim_fit.stage_runs(timeline, result["step_log"], STAGES)
                steps = [[*run.size, run.begin, run.end] for run in runs]
                found[setting] = {"calibration": steps, "rounds": []}
            elif kind != "warm":
                one = {
                    **given(rows, result),
                    "ended": list(ended),
                    "figures": figures(rows, result),
                }
                found[kind]["rounds"].append(one)
            ended += [len(answer) for answer in first_answers(result)]
        return found

    def start(self, spec: EngineSpec, work: list[Work]) -> dict[str, dict]:
        def show(event: dict) -> None:
            if event["event"] == "result":
                self.note(f"{event['name']}: done")

        run = run_engine(spec, work, on_event=show, timeout=1500.0)
        if run.error:
            raise RuntimeError(run.error)
        return run.results


def predict(recorded: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each setting, what the simulator was fitted to)"""
    profile = ProfileFile.of(recorded["profile"]).stage_profile()
    rows, described = [], {}
    for setting in SETTINGS:
        if setting.name not in recorded["settings"]:
            continue
        record = recorded["settings"][setting.name]
        runs = [
            sim_fit.StageRun(StepSize(*size), tuple(begin), tuple(end))
            for *size, begin, end in record["calibration"]
        ]
        fitted = sim_fit.fit(profile, runs)
        described[setting.name] = fitted.described()
        simulated = [
            simulate(
                setting,
                Trace.of(setting.name, one["arrival"], one["prompt"], one["answer"]),
                blocks=one["blocks"],
                acceptance=one["acceptance"],
                cost=fitted.cost,
                ended=one["ended"],
            )
            for one in record["rounds"]
        ]
        measured = together([one["figures"] for one in record["rounds"]])
        rows.append(compared(setting.name, measured, together(simulated)))
    return rows, described


def given(rows: Sequence[dict], result: dict) -> dict[str, Any]:
    """What the simulator is told of these requests and the engine."""
    counters = result["counters"]
    return {
        "arrival": [row["arrive_seconds"] for row in rows],
        "prompt": [len(row["prompt_token_ids"]) for row in rows],
        "answer": [len(answer) for answer in first_answers(result)],
        "blocks": result["num_blocks"] - 1,  # one is vLLM's null block
        # None: nothing is drafted (stock vLLM).
        "acceptance": counters["accepted"] / max(counters["drafts"], 1) if counters else None,
    }


def figures(rows: Sequence[dict], result: dict) -> dict[str, float]:
    """What the engine did with these rows."""
    answers = first_answers(result)
    return {
        "seconds": result["seconds"],
        "tokens": sum(map(len, answers)),
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in rows),
        "recomputed_tokens": result["recomputed_tokens"],
        "preemptions": sum(result["preempted"]),
        "drafts": result["counters"].get("drafts", 0),
        "accepted": result["counters"].get("accepted", 0),
        "different": sum(a != row["answer"] for a, row in zip(answers, rows, strict=True)),
    }


def options(blocks: int) -> dict[str, Any]:
    return {
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks,
        # The simulator has none; it would give back part of what is computed again.
        "enable_prefix_caching": False,
    }


def _drafter(block: dict | None, reference: str) -> dict | None:
    return {**block, "reference": reference} if block and block["method"] == "oracle" else block


@contextlib.contextmanager
def _stock_timeline(path: str | None) -> Iterator[None]:
    """Stock workers record their steps where this variable says so; engines inherit it."""
    if path is None:
        yield
        return
    os.environ[STOCK_TIMELINE_ENV] = path
    try:
        yield
    finally:
        del os.environ[STOCK_TIMELINE_ENV]
