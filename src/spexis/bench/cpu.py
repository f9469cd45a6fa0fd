# SPDX-License-Identifier: Apache-2.0
"""`spexis bench`: Spexis against stock vLLM, alternating in one run. Presets: cpu.

    spexis bench --preset cpu --pairs 5 --output benchmarks/results/cpu.json

Part 1, the demo model: SP with the shipped drafter against stock PP=2. Part 2, a random-weight
model of similar size with even head counts (the demo model's 9 heads cannot be split): SP with
oracle drafts, right as often as the shipped drafter was in part 1, against stock PP=2 and TP=2.
All engines of a part are started first; while one is measured the others are stopped. A pair is
one call of each engine with the same prompts, order reversed every other pair; the next pair has
other prompts. A call at B streams answers B + min(B, 8) prompts, B at a time: a request that ends
makes room for the next, and the rate is that of the time while all B streams are taken, prompts
included.
Ratios are taken within pairs, medians and spread over pairs. The law's limit at B streams is
B * r(p, 2) / T(B) with T the busy time of SP's slower stage per step of B rows in the same calls.
With --profile (a file of `spexis profile` for the demo model on this machine) part 1 has two more
engines, which leave out the drafts that do not pay (mode "sp-alpha"): "alpha", where the first
stage chooses, and "ahead", where the scheduler does.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from spexis.bench import dims, engines, machine
from spexis.bench.engines import EngineSpec
from spexis.bench.live import Generated, LiveEngine
from spexis.bench.prompts import chat_token_ids, load_prompts
from spexis.core.law import tokens_per_step
from spexis.observability import timeline

MAX_PROMPTS = 48  # distinct ones; more would cost only time
RANDOM_MAX_TOKENS = 64  # random weights stop nowhere and have no text: shorter answers will do
WANTED = {"1": 1.30, "2": 1.30, "4": 1.30}  # SP/PP on the demo model


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    engines.kill_on_signals()
    begin = time.monotonic()
    from spexis.demo_model import demo_model_dir

    model = demo_model_dir()
    count = min(args.pairs * _requests(max(args.streams)), MAX_PROMPTS)
    prompts = chat_token_ids(model, load_prompts(count, args.data, max_chars=300))
    with tempfile.TemporaryDirectory() as folder:
        drafter = {"method": "exit", "model": args.drafter}
        specs = {
            "pp": EngineSpec(model=model, stages=2, options=_OPTIONS),
            "sp": EngineSpec(model=model, stages=2, drafter=drafter, options=_OPTIONS),
        }
        if args.profile:
            chosen = {"mode": "sp-alpha", "profile": os.path.abspath(args.profile)}
            specs["alpha"] = dataclasses.replace(specs["sp"], settings=chosen)
            ahead = {**chosen, "selection": "scheduler"}
            specs["ahead"] = dataclasses.replace(specs["sp"], settings=ahead)
        demo = _part("demo model, shipped drafter", specs, prompts, args, folder)
        random = None
        if not args.demo_only:
            if args.output:  # should the second part fail, the first is kept
                _save(args.output, _result(demo, None, time.monotonic() - begin), demo, None, args)
            acceptance = statistics.mean(row["acceptance"] for row in demo.values())
            random = _random_part(prompts, acceptance, args, folder)
    result = _result(demo, random, time.monotonic() - begin)
    if args.output:
        _save(args.output, result, demo, random, args)
    print(json.dumps(result))
    return 0


_OPTIONS = {"max_model_len": 1024, "max_num_seqs": 16}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spexis bench", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=["cpu"], default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--data", help="Spec-Bench style JSONL to take the prompts from")
    parser.add_argument("--drafter", help="exit drafter folder (default: the shipped one)")
    parser.add_argument("--profile", help="of the demo model: measure selection of drafts too")
    parser.add_argument("--demo-only", action="store_true", help="part 1 only")
    parser.add_argument("--output", help="write everything to this JSON file")
    return parser


# -- measuring -------------------------------------------------------------------------------------


def _part(
    title: str,
    specs: dict[str, EngineSpec],
    prompts: list[list[int]],
    args: argparse.Namespace,
    folder: str,
    ignore_eos: bool = False,
) -> dict[str, dict]:
    """Measures one set of engines. Returns a row of figures for each number of streams."""
    from tqdm import tqdm

    max_tokens = min(args.max_tokens, RANDOM_MAX_TOKENS) if ignore_eos else args.max_tokens
    log = f"{folder}/{len(os.listdir(folder))}"
    live = {
        name: LiveEngine(spec, timeline_log=log if name == "sp" else None)
        for name, spec in specs.items()
    }
    rows = {}
    with ExitStack() as stack:
        for name, engine in live.items():
            print(f"{title}: starting {name} ...", file=sys.stderr, flush=True)
            stack.enter_context(engine)
        total = len(args.streams) * args.pairs * len(live)
        with tqdm(total=total, desc=title, unit="run") as bar:
            for streams in args.streams:
                for engine in live.values():
                    engine.generate(prompts[:streams], 8)  # warm-up at this batch size
                calls: dict[str, list[Generated]] = {name: [] for name in live}
                for pair in range(args.pairs):
                    batch = _batch(prompts, pair, _requests(streams))
                    for name in list(live) if pair % 2 == 0 else list(live)[::-1]:
                        calls[name].append(
                            live[name].generate(batch, max_tokens, streams, ignore_eos)
                        )
                        bar.update()
                trace = timeline.read(log, 2)
                rows[str(streams)] = _figures(streams, calls, trace)
    _print_rows(title, rows)
    return rows


def _requests(streams: int) -> int:
    """Requests of one call: enough that most of it runs with every stream taken."""
    return streams + min(streams, 8)


def _batch(prompts: list, pair: int, count: int) -> list:
    """The pair's own prompts, from where the last pair stopped, in a circle."""
    return [prompts[(pair * count + i) % len(prompts)] for i in range(count)]


def _figures(streams: int, calls: dict[str, list[Generated]], trace: timeline.Trace) -> dict:
    sp = calls["sp"]
    accepted = sum(c.counters["accepted"] for c in sp)
    acceptance = accepted / max(1, sum(c.counters["drafts"] for c in sp))
    # Only full steps: at the beginning and the end of a call fewer rows run.
    windows = [trace.window(*call.full_span).stages for call in sp]
    stages = [[w for wins in windows for w in wins[s] if w.rows == streams] for s in range(2)]
    full_steps = timeline.Trace(stages, {})
    step_seconds = [full_steps.step_seconds(s) for s in range(2)]
    limit = streams * tokens_per_step(acceptance, 2) / max(step_seconds)
    rates = {name: [c.full_tokens_per_second for c in cs] for name, cs in calls.items()}
    row = {
        "acceptance": round(acceptance, 4),
        "stage_ms": [round(1e3 * t, 2) for t in step_seconds],
        "law_limit": round(limit, 2),
        "law_share": round(statistics.median(rates["sp"]) / limit, 3),
        "tokens_per_second": {n: round(statistics.median(r), 2) for n, r in rates.items()},
        "rates": {n: [round(x, 2) for x in r] for n, r in rates.items()},
        "texts_equal": all(
            call.token_ids == mine.token_ids
            for name, others in calls.items()
            if name != "tp"  # sums over two ranks round differently: near ties may swap there
            for call, mine in zip(others, sp, strict=True)
        ),
    }
    for name in calls.keys() & {"alpha", "ahead"}:
        grown = {
            key: sum(call.counters[key] for call in calls[name])
            for key in ("held", "tokens", "discarded_rows", "accepted", "drafts")
        }
        ran = grown["tokens"] + grown["discarded_rows"]
        row[f"{name}_held_share"] = round(grown["held"] / max(ran + grown["held"], 1), 4)
        row[f"{name}_acceptance"] = round(grown["accepted"] / max(grown["drafts"], 1), 4)
    for name in rates:
        if name != "sp":
            ratios = sorted(a / b for a, b in zip(rates["sp"], rates[name], strict=True))
            row[f"sp_over_{name}"] = round(statistics.median(ratios), 3)
            row[f"sp_over_{name}_spread"] = [round(ratios[0], 3), round(ratios[-1], 3)]
    return row


def _random_part(prompts, acceptance: float, args, folder: str) -> dict[str, dict]:
    model = _random_model(f"{folder}/random-model")
    prompts = [[t % RANDOM_VOCAB for t in ids] for ids in prompts]
    print("random-weight model: reference answers for the oracle ...", file=sys.stderr)
    reference = f"{folder}/reference.jsonl"
    with LiveEngine(EngineSpec(model=model, options=_OPTIONS)) as stock:
        answers = stock.generate(prompts, RANDOM_MAX_TOKENS + 4, 16, ignore_eos=True).token_ids
    rows = [{"prompt_token_ids": p, "token_ids": a} for p, a in zip(prompts, answers, strict=True)]
    Path(reference).write_text("\n".join(map(json.dumps, rows)))
    drafter = {"method": "oracle", "reference": reference, "acceptance": round(acceptance, 3)}
    specs = {
        "pp": EngineSpec(model=model, stages=2, options=_OPTIONS),
        "tp": EngineSpec(model=model, tensor=2, options=_OPTIONS),
        "sp": EngineSpec(model=model, stages=2, drafter=drafter, options=_OPTIONS),
    }
    title = "random weights, even heads, oracle drafts"
    return _part(title, specs, prompts, args, folder, ignore_eos=True)


RANDOM_VOCAB = dims.DIMS["cpu"]["vocab_size"]
RANDOM_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "tie_word_embeddings"),
)


def _random_model(folder: str) -> str:
    """The dimensions called "cpu" (dims.py, which says why), with weights and a tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from spexis.demo_model import demo_model_dir

    torch.manual_seed(0)
    config = LlamaConfig(**{key: dims.DIMS["cpu"][key] for key in RANDOM_SIZES})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model_dir()).save_pretrained(folder)
    return folder


# -- reporting -------------------------------------------------------------------------------------


def _print_rows(title: str, rows: dict[str, dict]) -> None:
    names = list(next(iter(rows.values()))["tokens_per_second"])
    print(f"\n{title} (tokens/s, medians; ratio [lowest .. highest])")
    for streams, row in rows.items():
        rates = "  ".join(f"{n} {row['tokens_per_second'][n]:8.2f}" for n in names)
        ratios = "  ".join(
            f"sp/{n} {row[f'sp_over_{n}']:.2f} [{row[f'sp_over_{n}_spread'][0]:.2f} .. "
            f"{row[f'sp_over_{n}_spread'][1]:.2f}]"
            for n in names
            if n != "sp"
        )
        print(
            f"{streams:>3} streams  {rates}  {ratios}  acceptance {row['acceptance']:.3f}  "
            f"law share {row['law_share']:.2f}  stages {row['stage_ms']} ms"
        )


def _result(demo: dict, random: dict | None, seconds: float) -> dict:
    sp_over_pp = {s: row["sp_over_pp"] for s, row in demo.items()}
    wanted = {s: ratio for s, ratio in WANTED.items() if s in sp_over_pp}
    rows = [row for part in (demo, random or {}) for row in part.values()]
    equal = all(row["texts_equal"] for row in rows)
    return {
        "name": "bench-cpu",
        "ok": bool(wanted) and equal and all(sp_over_pp[s] >= r for s, r in wanted.items()),
        "sp_over_pp": sp_over_pp,
        "sp_over_tp": {s: row["sp_over_tp"] for s, row in (random or {}).items()},
        "sp_over_pp_random": {s: row["sp_over_pp"] for s, row in (random or {}).items()},
        "law_share": {s: row["law_share"] for s, row in demo.items()},
        "acceptance": {s: row["acceptance"] for s, row in demo.items()},
        "texts_equal": equal,
        "seconds": round(seconds, 1),
    }


def _save(path: str, result: dict, demo: dict, random: dict | None, args) -> None:
    from importlib.metadata import version

    record = {
        **result,
        "date": datetime.date.today().isoformat(),
        "command": machine.command(),
        "machine": {
            "cpu": machine.cpu_name(),
            "cores": os.cpu_count(),
            "system": machine.system(),
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "settings": vars(args),
        "demo": demo,
        "random": random,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
