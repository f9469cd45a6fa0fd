# SPDX-License-Identifier: Apache-2.0
"""The model answers the prompts: vLLM generates, token shards land in OUTPUT/answers.

    python -m spexis.training.generate --config run.yaml [key=value ...]

Passes run in order (greedy first, then for variety); each is cut into shards, and shard s belongs
to process s mod N in every pass, so several engines share one device without talking to each other.

Invariant: resuming costs at most one shard per process; a finished shard is never written again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from spexis.training.config import RunConfig
from spexis.training.data import (
    Message,
    TokenStore,
    chat_ids,
    join_prompts,
    read_prompts,
)

FOLLOW_UPS = (
    "Can you explain that in simpler words?",
    "Give me an example.",
    "Summarize your answer in two sentences.",
    "Rewrite your answer as a short poem.",
    "Rewrite your response. Start every sentence with the letter A.",
    "Now give me the opposite point of view.",
    "Are you sure? Check your answer step by step.",
    "Turn your answer into a bulleted list.",
    "What are the limits of this approach?",
    "Write a short story about it.",
    "Continue.",
    "Why?",
)


def model_folder(model: str) -> str:
    """The model to load; "demo" is the packaged demo model."""
    if model != "demo":
        return model
    from spexis.demo_model import demo_model_dir

    return demo_model_dir()


def all_chats(config: RunConfig) -> list[list[Message]]:
    """Every prompt of the run, joined ones last, in a fixed shuffled order."""
    chats = read_prompts(config.data.prompts)
    random.Random(config.seed).shuffle(chats)
    chats = chats[: config.data.max_prompts]
    return chats + join_prompts(chats, config.data.joined_prompts, config.seed)


def shard_path(config: RunConfig, index_pass: int, shard: int) -> Path:
    """Where one shard lies."""
    return Path(config.output_dir) / "answers" / f"pass{index_pass:02d}-shard{shard:04d}.npz"


def num_shards(config: RunConfig, chats: int) -> int:
    """Shards per pass."""
    return -(-chats // config.generate.shard_prompts)


# -- the engine -------------------------------------------------------------------------------


def open_engine(model: str, max_len: int, max_num_seqs: int, share: float, eager: bool) -> Any:
    """A vLLM engine for bulk generation; `share` is its part of the device's memory."""
    import torch

    if cuda():
        # In this process: no second start-up, one busy core per engine instead of two. Not on a
        # CPU, where vLLM binds its own process's threads to cores.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True}
    if cuda():
        total = torch.cuda.get_device_properties(0).total_memory
        options["gpu_memory_utilization"] = share
        # Fixed, not profiled: engines that start side by side would see each other's allocations.
        # Weights, activations and graphs get 40 % of the share, at most 8 GB.
        options["kv_cache_memory_bytes"] = int(total * share - min(8e9, 0.4 * total * share))
        if not eager:
            sizes = [s for s in (1, 8, 16, 32, 64, 128, 192, 256) if s < max_num_seqs]
            sizes += [*range(384, max_num_seqs, 128), max_num_seqs]
            options["enforce_eager"] = False
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            }
    else:
        options["kv_cache_memory_bytes"] = 2 << 30
        options["dtype"] = "float32"  # exact, and faster than bfloat16 on most CPUs
    return LLM(
        model=model,
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_len, 16384 if cuda() else 2048),
        disable_log_stats=True,
        **options,
    )


def answer(
    engine: Any,
    prompts: list[list[int]],
    max_tokens: int,
    max_len: int,
    temperature: float = 0.0,
    opening: int = 0,
    seed: int = 0,
) -> list[list[int]]:
    """Answers of the model, the end token included, in the prompts' order."""
    from vllm import SamplingParams

    def run(rows: list[list[int]], limits: list[int], heat: float, salt: int) -> list[Any]:
        params = [
            SamplingParams(
                temperature=heat,
                max_tokens=limit,
                detokenize=False,
                seed=seed * 1_000_003 + salt + i if heat and not cuda() else None,
            )
            for i, limit in enumerate(limits)
        ]
        inputs = [{"prompt_token_ids": row} for row in rows]
        return [r.outputs[0] for r in engine.generate(inputs, params, use_tqdm=False)]

    limits = [min(max_tokens, max_len - len(p)) for p in prompts]
    if not opening or not temperature:
        return [list(o.token_ids) for o in run(prompts, limits, temperature, 0)]
    first = run(prompts, [min(opening, n) for n in limits], temperature, 0)
    answers = [list(o.token_ids) for o in first]
    open_rows = [
        i
        for i, o in enumerate(first)
        if o.finish_reason == "length" and len(answers[i]) < limits[i]
    ]
    rest = run(
        [prompts[i] + answers[i] for i in open_rows],
        [limits[i] - len(answers[i]) for i in open_rows],
        0.0,
        0,
    )
    for i, output in zip(open_rows, rest, strict=True):
        answers[i] += list(output.token_ids)
    return answers


def cuda() -> bool:
    """Whether a CUDA device is in use (per-request seeds are slow there and not needed)."""
    import torch

    return torch.cuda.is_available()


# -- shards -----------------------------------------------------------------------------------


def follow_up(chat: list[Message], store: TokenStore, row: int, tok: Any, pool: list) -> list:
    """A second user turn after the first pass's answer."""
    ids = store.row(row)[store.prompt_lens[row] :].tolist()
    text = tok.decode(ids, skip_special_tokens=True).strip()
    rng = random.Random(row + 7919 * int(store.prompt_index[row]))
    turn = rng.choice(FOLLOW_UPS) if rng.random() < 0.5 else rng.choice(pool)
    return [*chat, {"role": "assistant", "content": text}, {"role": "user", "content": turn}]


def write_shard(
    config: RunConfig, engine: Any, tok: Any, chats: list, index_pass: int, shard: int
) -> TokenStore:
    """Generate and save one shard."""
    options = config.generate.passes[index_pass]
    size = config.generate.shard_prompts
    indices = list(range(shard * size, min((shard + 1) * size, len(chats))))
    todo = [(i, chats[i]) for i in indices]
    if options.get("follow_up"):
        first = TokenStore.load(shard_path(config, 0, shard))
        pool = [c[0]["content"] for c in chats[:2000] if len(c[0]["content"]) < 300]
        todo = [
            (
                int(first.prompt_index[r]),
                follow_up(chats[first.prompt_index[r]], first, r, tok, pool),
            )
            for r in range(len(first))
        ]
    limit = config.data.max_len - 32  # room for an answer
    prompts = [(i, chat_ids(tok, chat)) for i, chat in todo]
    prompts = [(i, ids) for i, ids in prompts if len(ids) <= limit]
    answers = answer(
        engine,
        [ids for _, ids in prompts],
        config.generate.max_tokens,
        config.data.max_len,
        options.get("temperature", 0.0),
        options.get("opening", 0),
        options.get("seed", index_pass) + shard,
    )
    greedy = not options.get("temperature") or bool(options.get("opening"))
    store = TokenStore.from_rows(
        ((ids, a, greedy, i) for (i, ids), a in zip(prompts, answers, strict=True) if a),
        vocab_size=len(tok),
    )
    store.save(shard_path(config, index_pass, shard))
    return store


def work(config: RunConfig, worker: int) -> dict[str, Any]:
    """One process: its shards of every pass, in order."""
    from transformers import AutoTokenizer

    started = time.monotonic()
    deadline = config.generate.max_seconds
    folder = model_folder(config.model)
    processes = config.generate.processes
    tok = AutoTokenizer.from_pretrained(folder)
    chats = all_chats(config)
    units = [
        (p, s)
        for p in range(len(config.generate.passes))
        for s in range(worker, num_shards(config, len(chats)), processes)
        if not shard_path(config, p, s).is_file()
    ]
    engine, made = None, 0
    for index_pass, shard in units:
        if deadline is not None and time.monotonic() - started > deadline:
            break
        if engine is None:
            engine = open_engine(
                folder,
                config.data.max_len,
                config.generate.max_num_seqs,
                config.generate.gpu_memory_utilization / processes,
                config.generate.enforce_eager,
            )
        began = time.monotonic()
        tokens = write_shard(config, engine, tok, chats, index_pass, shard).answer_tokens
        made += tokens
        rate = tokens / (time.monotonic() - began)
        print(
            f"generate[{worker}] pass {index_pass} shard {shard}: {tokens} tokens, "
            f"{rate:.0f} tokens/s, {time.monotonic() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return {"worker": worker, "tokens": made, "seconds": round(time.monotonic() - started, 1)}


def generate(config: RunConfig, config_path: Path) -> dict[str, Any]:
    """All processes of the run; progress by finished shards."""
    from tqdm import tqdm

    chats = len(all_chats(config))
    wanted = [
        shard_path(config, p, s)
        for p in range(len(config.generate.passes))
        for s in range(num_shards(config, chats))
    ]
    count = config.generate.processes
    command = [sys.executable, "-m", "spexis.training.generate", "--config", str(config_path)]
    # Each engine would otherwise run one thread per core of the whole machine.
    threads = str(max(1, (os.cpu_count() or 1) // count))
    env = os.environ | ({"OMP_NUM_THREADS": threads} if count > 1 else {})
    # The engines' chatter goes to our stderr: stdout is for the one JSON line at the end.
    workers = [
        subprocess.Popen([*command, "--worker", str(i)], stdout=2, env=env) for i in range(count)
    ]
    try:
        with tqdm(total=len(wanted), unit="shard", desc="generate", mininterval=5) as bar:
            while any(w.poll() is None for w in workers):
                bar.update(sum(p.is_file() for p in wanted) - bar.n)
                time.sleep(1.0)
            bar.update(sum(p.is_file() for p in wanted) - bar.n)
    finally:
        for w in workers:
            if w.poll() is None:
                w.terminate()
    failed = [i for i, w in enumerate(workers) if w.returncode]
    if len(failed) == count:
        raise RuntimeError(f"generation failed in every process, see above: {config_path}")
    return {"shards": sum(p.is_file() for p in wanted), "of": len(wanted), "failed": failed}


def load_answers(config: RunConfig) -> TokenStore:
    """Every finished shard of the run."""
    paths = sorted((Path(config.output_dir) / "answers").glob("pass*-shard????.npz"))
    return TokenStore.concat([TokenStore.load(p) for p in paths])


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m spexis.training.generate")
    parser.add_argument("--config", help="run file (YAML)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    config = RunConfig.load(args.config, args.overrides)
    if args.worker is not None:
        print(json.dumps({"name": "generate-worker", "ok": True, **work(config, args.worker)}))
        return 0
    resolved = Path(config.output_dir) / "config.yaml"
    config.dump(resolved)
    report = generate(config, resolved)
    ok = report["shards"] == report["of"]
    print(json.dumps({"name": "generate", "ok": ok, **report}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
