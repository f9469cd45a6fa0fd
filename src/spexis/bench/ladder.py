# SPDX-License-Identifier: Apache-2.0
"""Is switching by itself never worse? A ladder of loads, then jumps across the switching load.

    python -m spexis.bench.ladder                       # make bench-ladder
    python -m spexis.bench.ladder --concurrency 4 64 --crossings 4

First `spexis bench --preset load` (load.py) with stock PP=2, Spexis, and Spexis with `mode`
"auto", at 1 to 64 streams over HTTP. Then the number of streams jumps between a load where
speculation pays and one where it does not, and tokens are counted in windows of five seconds:
none may hold fewer than 80 % of what the slower of the two modes gives at that load when it is
held there. Where the ladder shows no such pair of loads, drafts are made wrong on purpose
(--acceptance), and the text with them.

Invariant: windows are of the engine that switches, bounds of engines that do not, measured by the
same client in the same run; a window that spans a jump is held against the lower of both loads.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spexis.bench import load
from spexis.bench.load import Load, Point, awake
from spexis.bench.prompts import BUILT_IN
from spexis.bench.serving import Server
from spexis.cli.numbers import positive, whole

RUNGS = (1, 4, 16, 64)
ENGINES = ("pp", "sp", "auto")
WINDOW = 5.0  # seconds
WANTED_WINDOW = 0.8
CLEAR = 0.02  # a mode is the faster one at a load if it is so much faster


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    points = [Point("concurrency", n) for n in args.concurrency]
    load.check(args)
    with tempfile.TemporaryDirectory(prefix="spexis-ladder-") as folder:
        ladder = Load(args, Path(folder), points)
        try:
            ladder.run()
        finally:
            ladder.bar.close()
        result = ladder.result()
        load.save(args, result)  # the rest takes as long again
        loads = args.loads or switching_loads(result["throughput"])
        if loads is None:
            args.acceptance = args.acceptance or 0.3
            loads = args.made_up_loads
        crossing = crossings(Load(args, Path(folder), points), tuple(loads), args)
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
    """Windows of the switching engine as the load jumps, against both modes held at each load."""
    made.bar.close()
    held: dict[str, dict[int, float]] = {}
    for name in ("pp", "sp"):
        with made.started(name) as server, awake(server):
            held[name] = {
                streams: _rate(asyncio.run(Stream(server).run([(streams, args.hold)])), args.hold)
                for streams in loads
            }
    bounds = {streams: min(held["pp"][streams], held["sp"][streams]) for streams in loads}
    phases = [(loads[i % 2], args.phase) for i in range(args.crossings + 1)]
    with made.started("auto") as server, awake(server):
        before = server.metrics()
        times = asyncio.run(Stream(server).run(phases))
        after = server.metrics()
    found = windows(times, phases, bounds)
    return {
        "loads": list(loads),
        "acceptance": args.acceptance,
        "held_tokens_per_second": {k: {str(n): v for n, v in r.items()} for k, r in held.items()},
        "crossings": args.crossings,
        "mode_changes": after.get("spexis:mode_changes_total", 0)
        - before.get("spexis:mode_changes_total", 0),
        "worst_window": round(min(found), 4) if found else 0.0,
        "windows": [round(share, 3) for share in found],
    }


def windows(
    times: Sequence[float], phases: Sequence[tuple[int, float]], bounds: dict[int, float]
) -> list[float]:
    """Share of the bound in each window, one a second. times: seconds of each token, sorted."""
    ends, end = [], 0.0
    for streams, seconds in phases:
        end += seconds
        ends.append((end, streams))
    shares, begin = [], WINDOW  # not the very first: all prompts at once
    while begin + WINDOW <= end:
        inside = sum(begin <= t < begin + WINDOW for t in times)
        active = {
            n
            for (stop, n), (_, length) in zip(ends, phases, strict=True)
            if stop > begin and stop - length < begin + WINDOW
        }
        shares.append(inside / WINDOW / min(bounds[n] for n in active))
        begin += 1.0
    return shares


class Stream:
    """Holds a number of streams busy and notes when each token comes."""

    def __init__(self, server: Server):
        self.server, self.times, self.wanted, self.next = server, [], 0, 0

    async def run(self, phases: Sequence[tuple[int, float]]) -> list[float]:
        """Seconds of each token since the start, sorted."""
        import aiohttp

        self.begin = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            tasks: set[asyncio.Task] = set()
            for streams, seconds in phases:
                self.wanted = streams
                stop = time.monotonic() + seconds
                while time.monotonic() < stop:
                    tasks = {task for task in tasks if not task.done()}
                    while len(tasks) < streams:
                        tasks.add(asyncio.create_task(self._ask(session)))
                    await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return sorted(self.times)

    async def _ask(self, session) -> None:
        question = BUILT_IN[self.next % len(BUILT_IN)]
        self.next += 1
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 96,
            "temperature": 0,
            "stream": True,
        }
        async with session.post(f"{self.server.url}/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"HTTP {reply.status}: {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data: {") and b'"content":' in line:
                    self.times.append(time.monotonic() - self.begin)


def _rate(times: Sequence[float], seconds: float) -> float:
    """Tokens a second, without the first window: all prompts at once."""
    return sum(t >= WINDOW for t in times) / (seconds - WINDOW)


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
    parser.add_argument(
        "--hold", type=positive, default=40.0, help="seconds a mode is held at a load"
    )
    parser.set_defaults(concurrency=list(RUNGS), engines=list(ENGINES), rounds=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
