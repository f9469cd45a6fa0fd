# SPDX-License-Identifier: Apache-2.0
"""What the devices of a pipeline do in a step, from traces of a measurement.

    python -m spexis.bench.gpu_timeline TRACES --output timeline.svg

TRACES holds one Chrome trace a rank (rank-0.json.gz, ...), as the measurement of a decode engine
writes them (`trace` of spexis.bench.decode_child). A step on a rank ends with its verdict's
broadcast kernel. Prints medians over the steps in the middle as one JSON line, draws three steps.

Invariant: kernels only; a device counts as idle while no kernel of the model runs, also when a
receive waits there. Ranks are laid beside each other by the host's clock.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
COLOURS = {"model": "#4c72b0", "hidden states": "#dd8452", "verdict": "#c44e52"}
SHOWN_STEPS = 3
# Pauses between launches of a CUDA graph are no idling; final states follow on a verdict's tokens.
JOIN_US = {"model": 20.0, "verdict": 100.0, "hidden states": 0.0}


@dataclass(frozen=True, slots=True)
class Span:
    kind: str  # a key of COLOURS
    start: float  # microseconds of the host's clock
    end: float


def read_spans(path: Path) -> list[Span]:
    """Device work of one rank by start; neighbours of a kind are joined."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") in ON_DEVICE]
    if not events:
        raise ValueError(f"{path} has no kernels: was it traced on a GPU?")
    # Copies to the host have a stream of their own and delay nothing.
    (model_stream, _), *_ = Counter(e["args"]["stream"] for e in events).most_common(1)
    spans: dict[str, list[Span]] = {kind: [] for kind in COLOURS}
    for event in sorted(events, key=lambda e: e["ts"]):
        name = event["name"]
        if re.search("nccl.*SendRecv", name):
            kind = "hidden states"
        elif re.search("nccl.*Broadcast", name):
            kind = "verdict"
        elif event["args"]["stream"] == model_stream:
            kind = "model"
        else:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        mine = spans[kind]
        if mine and start - mine[-1].end < JOIN_US[kind]:
            mine[-1] = Span(kind, mine[-1].start, max(end, mine[-1].end))
        else:
            mine.append(Span(kind, start, end))
    return sorted(itertools.chain(*spans.values()), key=lambda span: span.start)


def steps_of(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Start and end of each whole step, by the ends of the verdicts."""
    ends = [span.end for span in spans if span.kind == "verdict"]
    return list(itertools.pairwise(ends))


def within(spans: Sequence[Span], kind: str, start: float, end: float) -> float:
    """Microseconds that this kind of work takes between the two."""
    mine = (s for s in spans if s.kind == kind)
    return sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in mine)


def summary(spans: Sequence[Span]) -> dict[str, float]:
    """Medians in ms of one rank's steps, without the first and the last, which are not steady."""
    steps = steps_of(spans)[1:-1]
    if len(steps) < 2:
        raise ValueError(f"only {len(steps)} whole steps: trace more tokens")

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values) / 1000, 4)

    lengths = [end - start for start, end in steps]
    busy = [within(spans, "model", *step) for step in steps]
    return {
        "steps": len(steps),
        "step": median(lengths),
        "model": median(busy),
        "idle": median([length - b for length, b in zip(lengths, busy, strict=True)]),
        "hidden_states": median([within(spans, "hidden states", *step) for step in steps]),
        "verdict": median([within(spans, "verdict", *step) for step in steps]),
    }


def draw(ranks: Sequence[Sequence[Span]], path: str, title: str) -> None:
    """SHOWN_STEPS steps of the first rank and what the others did meanwhile."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "spexis"
    from matplotlib import pyplot as plt

    steps = steps_of(ranks[0])
    middle = steps[len(steps) // 2 :][:SHOWN_STEPS]
    begin, end = middle[0][0] - 1000, middle[-1][1] + 1000
    figure, axis = plt.subplots(figsize=(11, 0.9 + 0.9 * len(ranks)), layout="constrained")
    for number, spans in enumerate(ranks):
        for lane, (kind, colour) in enumerate(COLOURS.items()):
            shown = [s for s in spans if s.kind == kind and s.end > begin and s.start < end]
            bars = [
                (
                    (max(s.start, begin) - begin) / 1000,
                    (min(s.end, end) - max(s.start, begin)) / 1e3,
                )
                for s in shown
            ]
            y = len(ranks) - 1 - number + (0.3, 0.12, 0.0)[lane]
            height = (0.45, 0.16, 0.1)[lane]
            label = kind if number == 0 else None
            axis.broken_barh(bars, (y, height), color=colour, lw=0, label=label)
    axis.set_yticks(
        [len(ranks) - 0.6 - n for n in range(len(ranks))],
        [f"stage {n + 1}" for n in range(len(ranks))],
    )
    axis.set(xlabel="ms", xlim=(0, (end - begin) / 1000), title=title)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spexis.bench.gpu_timeline", description=__doc__.splitlines()[0]
    )
    parser.add_argument("traces", help="folder with rank-0.json.gz, rank-1.json.gz, ...")
    parser.add_argument("--output", default="timeline.svg", help="picture")
    parser.add_argument("--title", default="steady state")
    args = parser.parse_args(argv)
    paths = sorted(
        Path(args.traces).glob("rank-*.json.gz"), key=lambda p: int(re.sub(r"\D", "", p.name))
    )
    if not paths:
        print(f"{args.traces} holds no rank-*.json.gz", file=sys.stderr)
        return 1
    ranks = [read_spans(path) for path in paths]
    found = [summary(spans) for spans in ranks]
    draw(ranks, args.output, args.title)
    print(json.dumps({"name": "gpu-timeline", "ms": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
