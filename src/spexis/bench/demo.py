# SPDX-License-Identifier: Apache-2.0
"""`spexis demo`: the same prompts through stock vLLM and through Spexis, on two pipeline stages.

    spexis demo --prompts 4 --max-tokens 48 --picture timeline.svg

One request at a time, since that is where idle stages hurt most. Both engines run the demo
model in float32 on the CPU, one core a stage; the picture shows what each stage did. Ends with
one JSON line: {"name": "demo", "ok", "texts_equal", "sp_over_pp", "acceptance", ...}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from spexis.bench import engines
from spexis.bench.engines import EngineSpec
from spexis.bench.live import Generated, LiveEngine
from spexis.bench.prompts import chat_token_ids, load_prompts
from spexis.core.law import rows_per_token, speedup
from spexis.observability import timeline

NUM_STAGES = 2
WINDOW_STEPS = 14  # stage steps that the picture shows


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    engines.kill_on_signals()
    begin = time.monotonic()
    from spexis.demo_model import demo_model_dir

    model = demo_model_dir()
    prompts = load_prompts(args.prompts, args.data)
    token_ids = chat_token_ids(model, prompts)
    with tempfile.TemporaryDirectory() as folder:
        runs, traces, starts = _run(_specs(model, args.drafter), token_ids, args.max_tokens, folder)
    stock, spexis = runs
    equal = [a.token_ids == b.token_ids for a, b in zip(stock, spexis, strict=True)]
    result = {
        "name": "demo",
        "ok": all(equal),
        "texts_equal": all(equal),
        "sp_over_pp": round(_rate(spexis) / _rate(stock), 3),
        "acceptance": round(_counted(spexis, "accepted") / _counted(spexis, "drafts"), 3),
        "rows_per_token": round(_rows_per_token(spexis), 3),
        "tokens_per_second": {"stock": round(_rate(stock), 1), "spexis": round(_rate(spexis), 1)},
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "start_seconds": starts,
        "seconds": round(time.monotonic() - begin, 1),
    }
    _show_texts(model, prompts, spexis, equal)
    _print_table(stock, spexis, traces, result)
    if args.picture:
        _draw(traces, args.picture)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spexis demo", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6, help="how many (default 6)")
    parser.add_argument("--max-tokens", type=int, default=64, help="answer length (default 64)")
    parser.add_argument("--data", help="Spec-Bench style JSONL to take the prompts from")
    parser.add_argument("--drafter", help="exit drafter folder (default: the shipped one)")
    parser.add_argument(
        "--picture", default="spexis-timeline.svg", help="SVG or PNG of the stages ('' for none)"
    )
    return parser


def _specs(model: str, folder: str | None) -> list[tuple[str, EngineSpec]]:
    options = {"max_model_len": 1024, "max_num_seqs": 4}
    drafter = {"method": "exit", "model": folder}
    return [
        ("stock vLLM, PP=2", EngineSpec(model=model, stages=NUM_STAGES, options=options)),
        (
            "Spexis, PP=2",
            EngineSpec(model=model, stages=NUM_STAGES, drafter=drafter, options=options),
        ),
    ]


def _run(
    specs: list[tuple[str, EngineSpec]], prompts: list[list[int]], max_tokens: int, folder: str
) -> tuple[list[list[Generated]], list[tuple[str, timeline.Trace]], dict[str, float]]:
    from tqdm import tqdm

    runs, traces, starts = [], [], {}
    for i, (title, spec) in enumerate(specs):
        print(f"{title}: starting the engine ...", file=sys.stderr, flush=True)
        engine = LiveEngine(spec, timeline_log=f"{folder}/{i}")
        with engine:
            starts["stock" if i == 0 else "spexis"] = round(engine.start_seconds, 1)
            engine.generate(prompts[:1], 8)  # warm-up
            done = []
            with tqdm(total=len(prompts) * max_tokens, unit="tok", desc=title) as bar:
                for ids in prompts:
                    done.append(engine.generate([ids], max_tokens))
                    bar.update(done[-1].num_tokens)
                end = time.monotonic()
            trace = timeline.read(f"{folder}/{i}", NUM_STAGES)
            # The last answer, after its prompt: what steady decoding looks like.
            traces.append((title, trace.window(end - done[-1].decode_seconds, end)))
        runs.append(done)
    return runs, traces, starts


def _rate(runs: list[Generated]) -> float:
    return sum(r.num_tokens for r in runs) / sum(r.seconds for r in runs)


def _counted(runs: list[Generated], name: str) -> int:
    return sum(r.counters[name] for r in runs)


def _rows_per_token(runs: list[Generated]) -> float:
    tokens = _counted(runs, "tokens")
    return (tokens + _counted(runs, "discarded_rows")) / tokens


def _show_texts(model: str, prompts: list[str], runs: list[Generated], equal: list[bool]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for prompt, run, same in zip(prompts, runs, equal, strict=True):
        text = " ".join(tokenizer.decode(run.token_ids[0], skip_special_tokens=True).split())
        print(f"> {prompt[:76]}\n  {text[:150]} ...\n  [{'same text' if same else 'DIFFERENT'}]\n")


def _print_table(stock, spexis, traces, result) -> None:
    def milliseconds(runs: list[Generated]) -> str:
        per_token = [1e3 * r.decode_seconds / max(1, r.num_tokens - len(r.token_ids)) for r in runs]
        return f"{statistics.median(per_token):.1f}"

    def idle(trace: timeline.Trace) -> str:
        return " / ".join(f"{1 - trace.busy_share(s):.0%}" for s in range(NUM_STAGES))

    p = result["acceptance"]
    rows = [
        ("", "stock vLLM PP=2", "Spexis PP=2"),
        ("tokens/s", f"{_rate(stock):.1f}", f"{_rate(spexis):.1f}"),
        ("ms per token (median)", milliseconds(stock), milliseconds(spexis)),
        ("idle share of stage 0 / 1", idle(traces[0][1]), idle(traces[1][1])),
        ("drafts accepted", "-", f"{p:.1%}"),
        (
            "rows per token (law)",
            "1.00",
            f"{result['rows_per_token']:.2f} ({rows_per_token(p, NUM_STAGES):.2f})",
        ),
        (
            "speed (limit if stages cost the same)",
            "1.00",
            f"{result['sp_over_pp']:.2f} ({speedup(p, NUM_STAGES):.2f})",
        ),
        ("texts equal", "-", "yes" if result["texts_equal"] else "NO"),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _draw(traces: list[tuple[str, timeline.Trace]], path: str) -> None:
    """Both panels on one time scale; a drawing problem must not cost the measurement."""
    seconds = WINDOW_STEPS * max(traces[1][1].step_seconds(s) for s in range(NUM_STAGES))
    try:
        timeline.draw(traces, path, seconds)
    except ImportError:
        print(f"no picture: pip install matplotlib to get {path}", file=sys.stderr)
    else:
        print(f"picture of the stages: {Path(path).resolve()}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
