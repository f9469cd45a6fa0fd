# SPDX-License-Identifier: Apache-2.0
"""Is switching by itself never worse? A ladder of loads, then jumps across the switching load.

    python -m spexis.bench.ladder                       # make bench-ladder
    python -m spexis.bench.ladder --concurrency 4 64 --crossings 4
    python -m spexis.bench.ladder --concurrency --loads 1 16 --acceptance 0.3     # jumps alone

First `spexis bench --preset load` (load.py) with stock PP=2, Spexis, and Spexis with `mode`
"auto", at 1 to 64 streams over HTTP. Then the number of streams jumps between a load where
speculation pays and one where it does not, and tokens are counted in windows of five seconds:
none may hold fewer than 80 % of what the slower of the two modes gives, held all the time, at the
same moment after the same jump (prompts that come at once stall any engine). Where the ladder
shows no such pair of loads, drafts are made wrong on purpose (--acceptance), and the text with
them.

Invariant: windows are of the engine that switches, bounds of engines that do not, under the same
jumps by the same client in the same run. A jump down aborts the streams that are too many.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spexis.bench import load
from spexis.bench.load import Load, Point, awake
from spexis.bench.serving import Server
from spexis.cli.numbers import positive, whole
from spexis.config import ConfigError

RUNGS = (1, 4, 16, 64)
ENGINES = ("pp", "sp", "auto")
WINDOW = 5.0  # seconds
WANTED_WINDOW = 0.8
PROMPT = 40  # tokens
CLEAR = 0.02  # a mode is the faster one at a load if it is so much faster


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    points = [Point("concurrency", n) for n in args.concurrency]
    load.check(args)
    if args.phase < 2 * WINDOW:
        raise ConfigError(f"--phase {args.phase:g}: at least {2 * WINDOW:g} s, two windows")
    with tempfile.TemporaryDirectory(prefix="spexis-ladder-") as folder:
        ladder = Load(args, Path(folder), points)
        try:
            if points:
                ladder.run()
        finally:
            ladder.bar.close()
        result = ladder.result()
        load.save(args, result)  # the rest takes as long again
        loads = args.loads or switching_loads(result["throughput"])
        if loads is None:
            args.acceptance = args.acceptance or 0.3
            loads = args.made_up_loads
        crossing = crossings(Load(args, Path(folder), []), tuple(loads), args)
    result.update(
        name="bench-ladder",
        ok=result["ok"] and crossing["worst_window"] >= WANTED_WINDOW,
        worst_window=crossing["worst_window"],
        crossing=crossing,
    )
    load.save(args, result)
    print(load.table(result["rows"]))
    print(json.dumps({key: result[key] for key in ("name", "ok", "worst_share", "worst_window")}))
    return 0


def switching_loads(rates: dict[str, dict[str, float]]) -> tuple[int, int] | None:
    """Neighbouring loads, (speculation pays, it does not); None if there are none."""
    shared = sorted(rates.get("pp", {}).keys() & rates.get("sp", {}).keys(), key=float)
    for low, high in itertools.pairwise(shared):
        pays = rates["sp"][low] > rates["pp"][low] * (1 + CLEAR)
        if pays and rates["pp"][high] > rates["sp"][high] * (1 + CLEAR):
            return int(low), int(high)
    return None


def crossings(made: Load, loads: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Windows of the switching engine as the load jumps, against both modes under such jumps."""
    phases = [(loads[i % 2], args.phase) for i in range(args.crossings + 1)]
    pattern = [(streams, args.phase) for streams in (*loads, *loads)]
    made.bar.total, made.bar.unit = 2 * len(pattern) + len(phases), "phase"
    held: dict[str, list[float]] = {}
    for name in ("pp", "sp"):
        with made.started(name) as server, awake(server):
            made.bar.set_description(f"{name}, jumps")
            held[name] = asyncio.run(Stream(server).run(pattern, made.bar.update))
    with made.started("auto") as server, awake(server):
        made.bar.set_description("auto, jumps")
        before = server.metrics()
        times = asyncio.run(Stream(server).run(phases, made.bar.update))
        after = server.metrics()
    made.bar.close()
    found = windows(times, list(held.values()), args.phase, args.crossings)
    return {
        "loads": list(loads),
        "acceptance": args.acceptance,
        "held_tokens_per_second": {
            name: {
                # The second half of the third and of the second phase.
                str(streams): round(_rate(t, index * args.phase, args.phase / 2), 2)
                for streams, index in zip(loads, (2.5, 1.5), strict=True)
            }
            for name, t in held.items()
        },
        "crossings": args.crossings,
        "mode_changes": after.get("spexis:mode_changes_total", 0)
        - before.get("spexis:mode_changes_total", 0),
        "worst_window": round(min(found), 4) if found else 0.0,
        "windows": [round(share, 3) for share in found],
    }


def windows(
    times: Sequence[float], held: Sequence[Sequence[float]], phase: float, crossings: int
) -> list[float]:
    """Share of the bound in each window after the first jump, one a second.

    times: seconds of each token as the load jumps every `phase` seconds, first up; held: the same
    of four phases. A bound is the fewest tokens of any of them at the same moment after the same
    kind of jump, give or take a second.
    """
    shares = []
    for index in range(1, crossings + 1):
        same = (1 if index % 2 else 2) * phase
        for offset in range(int(phase)):
            begin = index * phase + offset
            if begin + WINDOW > (crossings + 1) * phase:
                break
            near = [same + offset + shift for shift in (-1, 0, 1)]
            bound = min(_count(t, at, at + WINDOW) for t in held for at in near)
            if bound:
                shares.append(_count(times, begin, begin + WINDOW) / bound)
    return shares


def _count(times: Sequence[float], begin: float, end: float) -> int:
    return bisect.bisect_left(times, end) - bisect.bisect_left(times, begin)


def _rate(times: Sequence[float], begin: float, seconds: float) -> float:
    """Tokens a second."""
    return _count(times, begin, begin + seconds) / seconds


class Stream:
    """Holds a number of streams busy and notes when each token comes."""

    def __init__(self, server: Server):
        self.server, self.times, self.next = server, [], 0

    async def run(
        self, phases: Sequence[tuple[int, float]], on_phase: Callable[[], object]
    ) -> list[float]:
        """Seconds of each token since the start, sorted."""
        import aiohttp

        self.begin = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            tasks: list[asyncio.Task] = []  # oldest first
            for streams, seconds in phases:
                stop = time.monotonic() + seconds
                while time.monotonic() < stop:
                    for task in [task for task in tasks if task.done()]:
                        tasks.remove(task)
                        task.result()  # a request that failed ends the run
                    while len(tasks) < streams:
                        tasks.append(asyncio.create_task(self._ask(session)))
                    for task in tasks[streams:]:
                        task.cancel()
                    del tasks[streams:]
                    await asyncio.sleep(0.05)
                on_phase()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return sorted(self.times)

    async def _ask(self, session) -> None:
        self.next += 1
        # As long as all others, and new to the prefix cache: every jump costs the same.
        prompt = random.Random(self.next).choices(range(1000, 2000), k=PROMPT)
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 96,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        seen = 0
        async with session.post(f"{self.server.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"HTTP {reply.status}: {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    # One chunk may bring several tokens, or a token without text.
                    usage = json.loads(line[6:])["usage"] or {}
                    tokens = usage.get("completion_tokens", seen)
                    self.times += [time.monotonic() - self.begin] * (tokens - seen)
                    seen = tokens


def _parser() -> argparse.ArgumentParser:
    parser = load._parser()
    parser.prog = "python -m spexis.bench.ladder"
    parser.description = __doc__.splitlines()[0]
    parser.add_argument(
        "--loads", type=whole, nargs=2, help="to jump between (default: by the ladder)"
    )
    parser.add_argument("--made-up-loads", type=whole, nargs=2, default=[1, 16])
    parser.add_argument("--crossings", type=whole, default=20)
    parser.add_argument("--phase", type=positive, default=20.0, help="seconds between two jumps")
    parser.set_defaults(concurrency=list(RUNGS), engines=list(ENGINES), rounds=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
