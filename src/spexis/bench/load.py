# SPDX-License-Identifier: Apache-2.0
"""Servers under load, by `vllm bench serve`: stock pipelines and tensor parallelism against Spexis.

    spexis bench --preset load --engines pp sp auto --concurrency 1 2 4 8 16 32 64      # CPU, demo
    spexis bench --preset load --model l70 --engines pp tp sp --trace azure2023_conv.csv.gz \\
        --rates 1 2 4 8 --requests 300                                                  # GPUs

By --concurrency: so many questions at a time, of the package's, whose answers end by themselves.
By --rates: requests arrive as in the trace, its clock scaled to so many a second, with the trace's
prompt and answer lengths (times --scale) on random tokens.

On a CPU every server is up and all but the one measured are stopped (SIGSTOP), in turns within each
round. On GPUs servers take turns, since memory holds one.

Invariant: every engine gets the same requests; a request that fails makes "ok" false.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spexis.bench import dims, machine
from spexis.bench.prompts import BUILT_IN
from spexis.bench.serving import SERVER_ENV, Server
from spexis.cli.numbers import positive, share, whole
from spexis.config import ConfigError

ENGINES: dict[str, dict[str, Any] | None] = {
    # The spexis block without its drafter; None: stock vLLM.
    "pp": None,
    "tp": None,
    "sp": {},
    "off": {"mode": "pp"},
    "auto": {"mode": "auto"},
    "look": {"lookahead": True},
    "auto-look": {"mode": "auto", "lookahead": True},
    # With --step-times:
    "alpha": {"mode": "sp-alpha", "selection": "scheduler"},
    "device": {"mode": "sp-alpha", "selection": "stage"},
    "alpha-look": {"mode": "sp-alpha", "selection": "scheduler", "lookahead": True},
}
START_TIMEOUT = 900.0  # seconds
END_TIMEOUT = 20.0  # then it is killed
CLIENT_TIMEOUT = 1800.0
WANTED_SHARE = 0.97  # of the better of stock PP and SP
HASHES = 16  # tokens that one hash of a timed trace stands for
FIELDS = ("output_throughput", "request_throughput", "completed", "failed", "duration")
LATENCIES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Point:
    """One load."""

    kind: str
    """"concurrency" or "rate"."""
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}" if self.kind == "concurrency" else f"{self.value:g}/s"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    points = [Point("concurrency", n) for n in args.concurrency]
    points += [Point("rate", r) for r in args.rates]
    if not points:
        raise ConfigError("give loads: --concurrency 1 2 4, or --rates 1 2 with --trace FILE")
    check(args)
    with tempfile.TemporaryDirectory(prefix="spexis-load-") as folder:
        load = Load(args, Path(folder), points)
        try:
            load.run()
        finally:
            load.bar.close()
            result = load.result()
            save(args, result)
    print(table(result["rows"]))
    short = ("name", "ok", "worst_share", "throughput", "output")
    print(json.dumps({key: result[key] for key in short}))
    return 0


def check(args: argparse.Namespace) -> None:
    """What can be wrong is found before servers start; from then on SIGTERM ends as Ctrl-C does."""
    selecting = [n for n in args.engines if (ENGINES[n] or {}).get("mode") == "sp-alpha"]
    if selecting and not args.step_times:
        raise ConfigError(
            f"--engines {selecting[0]} needs --step-times FILE: write one by `spexis profile`"
        )
    if args.rates and not args.trace:
        raise ConfigError("--rates needs --trace FILE: how requests arrive, and their lengths")
    if args.trace:  # says what is wrong with it before servers start
        trace_lines(args.trace, 2, rate=1.0, scale=args.scale, longest=args.max_model_len)
    if args.step_times and not Path(args.step_times).is_file():
        raise ConfigError(f"--step-times {args.step_times}: no such file")
    if args.output:
        machine.check_output(Path(args.output))
    # Servers that are stopped (SIGSTOP) would neither notice our end nor follow.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.output:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")


class Load:
    def __init__(self, args: argparse.Namespace, folder: Path, points: list[Point]):
        self.args, self.folder, self.points = args, folder, points
        self.device = machine.resolve_device(args.device)
        machine.check_devices(self.device, args.devices)
        if self.device == "cpu" and args.model != "demo":
            layers = dims.sizes(args.model)["num_hidden_layers"]
            dims.check_memory(args.model, layers, machine.free_memory())
        self.model = self._model()
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        total = len(points) * len(args.engines) * args.rounds
        self.bar = tqdm(total=total, unit="point", file=sys.stderr, dynamic_ncols=True)

    def _model(self) -> str:
        from spexis.demo_model import demo_model_dir

        demo = demo_model_dir()
        if self.args.model == "demo":
            return demo
        model = dims.write_model(self.args.model, self.folder)
        # Random weights need a tokenizer for the server's sake only.
        for file in Path(demo).glob("*token*"):
            (Path(model) / file.name).write_bytes(file.read_bytes())
        return model

    def run(self) -> None:
        if importlib.util.find_spec("pandas") is None:
            raise ConfigError(
                "`vllm bench serve` reads its questions with pandas: run `pip install pandas`"
            )
        if self.device == "cpu":
            with contextlib.ExitStack() as stack:
                servers = {name: stack.enter_context(self.started(name)) for name in self._order(0)}
                for number in range(self.args.rounds):
                    for point in self.points:
                        for name in self._order(number):
                            with awake(servers[name]):
                                self.measure(name, servers[name], point, number)
            return
        for number in range(self.args.rounds):
            for name in self._order(number):
                with self.started(name) as server, awake(server):
                    for point in self.points:
                        self.measure(name, server, point, number)

    def _order(self, number: int) -> list[str]:
        """Every other round backwards: machines change slowly."""
        return self.args.engines if number % 2 == 0 else self.args.engines[::-1]

    @contextlib.contextmanager
    def started(self, name: str) -> Iterator[Server]:
        """A server that answers, stopped until awake()."""
        self.bar.set_description(f"{name}, starting")
        stock = ENGINES[name] is None
        with Server(self.arguments(name), self.environment(name), stock=stock) as server:
            server.wait_ready(START_TIMEOUT)
            os.killpg(server.pid, signal.SIGSTOP)
            yield server
            os.killpg(server.pid, signal.SIGCONT)  # else it would not hear that it is to end
            server.send(signal.SIGTERM)
            server.wait_gone(END_TIMEOUT)

    def arguments(self, name: str) -> list[str]:
        args, block = self.args, ENGINES[name]
        stages, tensor = (1, args.devices) if name == "tp" else (args.devices, 1)
        found = [
            self.model,
            *("--served-model-name", "m", "--max-model-len", str(args.max_model_len)),
            *("--max-num-seqs", str(args.max_num_seqs)),
            *("--pipeline-parallel-size", str(stages), "--tensor-parallel-size", str(tensor)),
        ]
        if args.model != "demo":
            found += ["--load-format", "dummy"]
        if args.kv_blocks:
            found += ["--num-gpu-blocks-override", str(args.kv_blocks)]
        if self.device == "cpu":
            found += ["--dtype", "float32", "--enforce-eager"]
            if block is None and stages > 1:
                found += ["--worker-cls", machine.STOCK_CPU_WORKER]
        if args.no_p2p:  # vLLM's own kernels would reach over all the same
            found += ["--disable-custom-all-reduce"]
        if block is not None:
            if block.get("mode") == "sp-alpha":
                block = {**block, "profile": os.path.abspath(args.step_times)}
            drafter: dict[str, Any] = {"method": "exit"}
            if args.acceptance is not None:
                drafter = {"method": "synthetic", "acceptance": args.acceptance}
            found += ["--spexis", json.dumps({"drafter": drafter, **block})]
        return found + args.server_args.split()

    def environment(self, name: str) -> dict[str, str]:
        env = {"TORCHDYNAMO_DISABLE": "1"} if self.device == "cpu" else {}
        told = "VLLM_CPU_OMP_THREADS_BIND" in os.environ
        if self.device == "cpu" and ENGINES[name] is None and not told:
            # With Spexis the plugin does it.
            env["VLLM_CPU_OMP_THREADS_BIND"] = machine.stock_cpu_binding(self.args.devices)
        if self.args.no_p2p:
            env["NCCL_P2P_DISABLE"] = "1"
        return env

    # -- one point ---------------------------------------------------------------------------------

    def measure(self, name: str, server: Server, point: Point, number: int) -> None:
        self.bar.set_description(f"{name} at {point}")
        before = server.metrics()
        try:
            found = self.client(server, point)
        except RuntimeError as error:
            self.failures.append(f"{name} at {point}: {error}")
            self.bar.update()
            return
        after = server.metrics()
        grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
        drafts, steps = grown.get("spexis:drafts_total"), grown.get("spexis:steps_total")
        row = {
            "engine": name,
            point.kind: point.value,
            "round": number,
            **{field: found.get(field) for field in FIELDS},
            "preemptions": grown.get("vllm:num_preemptions_total"),
            "acceptance": grown["spexis:accepted_drafts_total"] / drafts if drafts else None,
            "plain_share": grown["spexis:plain_steps_total"] / steps if steps else None,
        }
        for latency in LATENCIES:
            for kind in ("mean", "median", "p99"):
                row[f"{kind}_{latency}_ms"] = found.get(f"{kind}_{latency}_ms")
        self.rows.append(row)
        save(self.args, self.result())  # what comes later may be cut off
        if found.get("failed"):
            self.failures.append(f"{name} at {point}: {found['failed']} requests failed")
        self.bar.update()

    def client(self, server: Server, point: Point) -> dict[str, Any]:
        """What `vllm bench serve` writes."""
        output = self.folder / "result.json"
        output.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "spexis.cli.launch", "bench", "serve", "--backend", "openai"),
            *("--base-url", server.url, "--endpoint", "/v1/completions", "--model", "m"),
            *("--tokenizer", self.model, "--temperature", "0", "--disable-tqdm"),
            *("--percentile-metrics", ",".join(LATENCIES), "--metric-percentiles", "99"),
            *("--save-result", "--result-dir", str(output.parent)),
            *("--result-filename", output.name),
            *(self._questions(point) if point.kind == "concurrency" else self._trace(point)),
        ]
        env = {**os.environ, **SERVER_ENV}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=CLIENT_TIMEOUT
        )
        if done.returncode or not output.exists():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise RuntimeError(f"vllm bench serve ended with {done.returncode}: {lines[-1]}")
        return json.loads(output.read_text())

    def _questions(self, point: Point) -> list[str]:
        file, streams = self.folder / "questions.jsonl", int(point.value)
        count = max(self.args.turns * streams, self.args.requests_at_least)
        lines = [{"prompt": BUILT_IN[i % len(BUILT_IN)]} for i in range(count)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [
            *("--dataset-name", "custom", "--dataset-path", str(file)),
            *("--custom-output-len", str(self.args.output_len), "--disable-shuffle"),
            *("--num-prompts", str(count), "--max-concurrency", str(streams)),
        ]

    def _trace(self, point: Point) -> list[str]:
        file = self.folder / "trace.jsonl"
        lines = trace_lines(
            self.args.trace,
            self.args.requests,
            rate=point.value,
            scale=self.args.scale,
            longest=self.args.max_model_len,
        )
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [
            *("--dataset-name", "timed_trace", "--dataset-path", str(file)),
            *("--num-prompts", str(len(lines)), "--timed-trace-chunk-hash-size", str(HASHES)),
        ]

    def result(self) -> dict[str, Any]:
        shares = worst_shares(self.rows)
        complete = len(self.rows) == len(self.points) * len(self.args.engines) * self.args.rounds
        return {
            "name": "bench-load",
            "ok": complete
            and not self.failures
            and all(share >= WANTED_SHARE for share in shares.values()),
            "complete": complete,
            "worst_share": shares,
            "throughput": medians(self.rows, "output_throughput"),
            "output": self.args.output,
            "date": time.strftime("%Y-%m-%d"),
            "command": machine.command(),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "failures": self.failures,
            "rows": self.rows,
        }


@contextlib.contextmanager
def awake(server: Server) -> Iterator[None]:
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGSTOP)


def trace_lines(
    trace: str, count: int, *, rate: float, scale: float, longest: int
) -> list[dict[str, Any]]:
    """Rows of vLLM's timed trace: the first `count` requests that fit into the context."""
    from spexis.simulator.trace import load

    loaded = load(trace)
    prompt = np.maximum(np.rint(loaded.prompt * scale), 1).astype(int)
    answer = np.maximum(np.rint(loaded.output * scale), 1).astype(int)
    chosen = np.flatnonzero(prompt + answer < longest)[:count]
    if len(chosen) < 2:
        raise ConfigError(f"--trace {trace}: no two requests below {longest} tokens")
    arrival = loaded.arrival[chosen] - loaded.arrival[chosen[0]]
    arrival = arrival * (len(chosen) / rate / max(float(arrival[-1]), 1e-9))
    lines, next_hash = [], 0
    for at, tokens, output in zip(arrival, prompt[chosen], answer[chosen], strict=True):
        hashes = -(-int(tokens) // HASHES)
        lines.append(
            {
                "timestamp": round(float(at), 4),
                "input_length": int(tokens),
                "output_length": int(output),
                # No two prompts share a beginning.
                "hash_ids": list(range(next_hash, next_hash + hashes)),
            }
        )
        next_hash += hashes
    return lines


def medians(rows: Sequence[dict], field: str) -> dict[str, dict[str, float]]:
    """{engine: {load: median over rounds}}"""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        load = row.get("concurrency", row.get("rate"))
        found.setdefault(row["engine"], {}).setdefault(f"{load:g}", []).append(row[field])
    return {
        name: {load: round(float(np.median(values)), 3) for load, values in loads.items()}
        for name, loads in found.items()
    }


def worst_shares(rows: Sequence[dict]) -> dict[str, float]:
    """By concurrency: of engines that switch, the share of the better of stock PP and SP."""
    rates = medians([row for row in rows if "concurrency" in row], "output_throughput")
    if not {"pp", "sp"} <= rates.keys():
        return {}
    switching = [name for name in rates if name.startswith("auto")]
    return {
        load: round(min(rates[name][load] for name in switching) / max(rate, rates["sp"][load]), 4)
        for load, rate in rates["pp"].items()
        if switching and all(load in rates[name] for name in (*switching, "sp"))
    }


def table(rows: Sequence[dict]) -> str:
    lines = [
        f"{'load':>10}  {'engine':<10}{'tokens/s':>10}{'TTFT p50':>10}{'p99 ms':>9}"
        f"{'TPOT p50':>10}{'p99 ms':>9}{'preempted':>11}{'right':>7}{'plain':>7}"
    ]
    for row in rows:
        load = row.get("concurrency", row.get("rate"))
        share = lambda value: "-" if value is None else f"{value:.2f}"  # noqa: E731
        lines += [
            f"{load:>10g}  {row['engine']:<10}{row['output_throughput']:>10.1f}"
            f"{row['median_ttft_ms']:>10.0f}{row['p99_ttft_ms']:>9.0f}"
            f"{row['median_tpot_ms']:>10.1f}{row['p99_tpot_ms']:>9.1f}"
            f"{row['preemptions'] or 0:>11.0f}{share(row['acceptance']):>7}"
            f"{share(row['plain_share']):>7}"
        ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spexis bench --preset load", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--preset", choices=["load"], default="load")
    parser.add_argument(
        "--model", default="demo", help=f"demo, a folder, or {', '.join(dims.DIMS)}"
    )
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["pp", "sp", "auto"])
    parser.add_argument("--devices", type=whole, default=2, help="stages, or ranks of tp")
    parser.add_argument("--concurrency", type=whole, nargs="*", default=[], metavar="N")
    parser.add_argument("--rates", type=positive, nargs="+", default=[], help="requests a second")
    parser.add_argument("--trace", help="CSV of the Azure LLM inference traces")
    parser.add_argument("--requests", type=whole, default=200, help="of the trace")
    parser.add_argument("--scale", type=positive, default=1.0, help="of the trace's lengths")
    parser.add_argument("--turns", type=whole, default=4, help="questions a stream")
    parser.add_argument("--requests-at-least", type=whole, default=12)
    parser.add_argument("--output-len", type=whole, default=96, help="of an answer at most")
    parser.add_argument("--rounds", type=whole, default=1)
    parser.add_argument("--acceptance", type=share, help="synthetic drafts, right so often")
    parser.add_argument(
        "--step-times", metavar="FILE", help="of `spexis profile`: what alpha selects drafts by"
    )
    parser.add_argument("--kv-blocks", type=whole, help="KV blocks (default: what memory holds)")
    parser.add_argument("--max-model-len", type=whole, default=2048)
    parser.add_argument("--max-num-seqs", type=whole, default=256)
    parser.add_argument("--no-p2p", action="store_true", help="NCCL_P2P_DISABLE=1")
    parser.add_argument("--server-args", default="", help="more flags for every server")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", help="also write everything to this JSON file")
    return parser
