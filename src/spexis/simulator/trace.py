# SPDX-License-Identifier: Apache-2.0
"""Requests to simulate: when they come, how long their prompts and answers are.

    trace = load("azure2023_conv.csv.gz")                 # by the file's own header
    trace = load("poisson:rate=4,requests=500,prompt=512,output=200")
    trace = load("batch:requests=64,prompt=512,output=256")
    trace.scaled(rate=2.0, requests=100_000)

Files: the CSV of the Azure LLM inference traces (TIMESTAMP,ContextTokens,GeneratedTokens) and the
same re-based to seconds (arrival_s,input_tokens,output_tokens); results of `vllm bench serve
--save-result --save-detailed` (JSON with input_lens, output_lens, start_times). May be gzipped.

Invariant: sorted by arrival, first arrival at 0, every answer has at least one token.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spexis.config import ConfigError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
REBASED = ("arrival_s", "input_tokens", "output_tokens")
SYNTHETIC = {
    "poisson": {"rate": 4.0, "requests": 500, "prompt": 512, "output": 200, "seed": 0},
    "batch": {"requests": 64, "prompt": 512, "output": 256, "seed": 0},
}


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    arrival: np.ndarray  # [R] seconds
    prompt: np.ndarray  # [R] tokens
    output: np.ndarray  # [R] tokens

    def __len__(self) -> int:
        return len(self.arrival)

    @classmethod
    def of(cls, name: str, arrival, prompt, output) -> Trace:
        arrival = np.asarray(arrival, float)
        order = np.argsort(arrival, kind="stable")
        if not len(order):
            raise ConfigError(f"trace {name} has no requests")
        return cls(
            name,
            arrival[order] - arrival.min(),
            np.maximum(np.asarray(prompt, np.int64)[order], 1),
            np.maximum(np.asarray(output, np.int64)[order], 1),
        )

    def scaled(self, rate: float = 1.0, requests: int | None = None) -> Trace:
        """rate: requests come so many times as fast. requests: the first ones; beyond the trace's
        length it begins again, a mean gap after its end."""
        count = requests or len(self)
        times = -(-count // len(self))
        span = self.arrival[-1] + self.arrival[-1] / max(len(self) - 1, 1)
        arrival = np.concatenate([self.arrival + i * span for i in range(times)])[:count]
        return Trace(
            self.name,
            arrival / rate,
            np.tile(self.prompt, times)[:count],
            np.tile(self.output, times)[:count],
        )


def load(source: str) -> Trace:
    kind = source.partition(":")[0]
    if kind in SYNTHETIC and ":" in source + ":" and not Path(source).exists():
        return _synthetic(kind, source.partition(":")[2])
    try:
        raw = Path(source).read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"trace {source} cannot be read: {error}") from error
    name = Path(source).name
    return _bench_result(name, text) if text.lstrip()[:1] == "{" else _csv(name, text)


def _csv(name: str, text: str) -> Trace:
    reader = csv.reader(io.StringIO(text))
    header = tuple(cell.strip() for cell in next(reader, ()))
    rows = [row for row in reader if row]
    if header == REBASED:
        arrival = [float(row[0]) for row in rows]
    elif header == AZURE:
        arrival = [_timestamp(row[0]) for row in rows]
    else:
        raise ConfigError(
            f"trace {name} has the columns {', '.join(header)}: allowed are {', '.join(AZURE)} "
            f"or {', '.join(REBASED)}"
        )
    return Trace.of(name, arrival, [int(r[1]) for r in rows], [int(r[2]) for r in rows])


def _timestamp(text: str) -> float:
    """Azure's times have seven decimals, of which Python reads six."""
    whole, _, fraction = text.strip().partition(".")
    at = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    return at.timestamp() + float(f"0.{fraction or 0}")


def _bench_result(name: str, text: str) -> Trace:
    try:
        block = json.loads(text)
        prompt, output = block["input_lens"], block["output_lens"]
        arrival = block["start_times"]
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"trace {name} is no detailed result of `vllm bench serve` "
            f"(--save-result --save-detailed): {error}"
        ) from error
    answered = [i for i, tokens in enumerate(output) if tokens > 0]  # the others failed
    return Trace.of(name, *([values[i] for i in answered] for values in (arrival, prompt, output)))


def _synthetic(kind: str, text: str) -> Trace:
    values = dict(SYNTHETIC[kind])
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in values:
            raise ConfigError(f"trace {kind}:{key} is not known: allowed are {', '.join(values)}")
        try:
            values[key] = type(values[key])(value)
        except ValueError as error:
            raise ConfigError(f"trace {kind}:{key}={value}: {error}") from error
        if not 0 < values[key] < math.inf and key != "seed":
            raise ConfigError(f"trace {kind}:{key}={value}: allowed is a number above 0")
    rng, count = np.random.default_rng(values["seed"]), values["requests"]
    if kind == "batch":
        arrival = np.zeros(count)
        prompt, output = np.full(count, values["prompt"]), np.full(count, values["output"])
    else:
        arrival = np.cumsum(rng.exponential(1 / values["rate"], count))
        prompt = rng.geometric(1 / values["prompt"], count)
        output = rng.geometric(1 / values["output"], count)
    return Trace.of(f"{kind}:{text}" if text else kind, arrival, prompt, output)
