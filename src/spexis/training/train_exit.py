# SPDX-License-Identifier: Apache-2.0
"""Trains exit drafters: the model answers the prompts, then drafters learn to foresee it.

    spexis train exit --config run.yaml [key=value ...]
    python -m spexis.training.train_exit --config examples/train_smollm2.yaml train.max_steps=100

Writes into output_dir: config.yaml (resolved), answers/ (token shards), metrics.jsonl,
checkpoint.pt, drafters/NAME/{config.json, model.safetensors, train_command.txt}. Run it again to
resume. The last line on stdout is one JSON object; ok means every drafter was trained to the end.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from spexis.training.config import RunConfig
from spexis.training.data import TokenStore, answer_counts, data_hash, draft_vocabulary
from spexis.training.generate import all_chats, load_answers, model_folder
from spexis.training.target import Target, pick_device
from spexis.training.trainer import Trainer


def ensure_answers(
    config: RunConfig,
    resolved: Path,  # the same configuration as a file
) -> None:
    """Generate, in a process of its own (the engine's memory is gone afterwards), unless done."""
    done = Path(config.output_dir) / "answers" / "done.json"
    if done.is_file():
        return
    command = [sys.executable, "-m", "spexis.training.generate", "--config", str(resolved)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    if not lines or not list(done.parent.glob("pass*.npz")):
        raise ValueError("generation wrote no answers: its messages stand above")
    report = json.loads(lines[-1])
    if run.returncode and config.generate.max_seconds is None:
        raise ValueError(f"generation is incomplete ({lines[-1]}): run the command again to resume")
    done.write_text(json.dumps(report) + "\n")


def split_rows(config: RunConfig, store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, held-out rows): split by prompt; held-out answers are greedy ones."""
    count = len(all_chats(config))
    holdout = min(config.data.holdout, count // 5)
    chosen = random.Random(config.seed + 1).sample(range(count), holdout)
    held = np.isin(store.prompt_index, chosen)
    rows = np.arange(len(store))
    _, first = np.unique(store.prompt_index, return_index=True)  # the first pass's answer
    is_first = np.zeros(len(store), dtype=bool)
    is_first[first] = True
    return rows[~held], rows[held & is_first & store.greedy]


def write_train_command(folder: Path, resolved: Path, facts: dict) -> None:
    """Provenance beside the weights: command, versions, data, the resolved run file."""
    names = ("spexis", "torch", "transformers", "vllm", "numpy", "safetensors")
    versions = []
    for name in names:
        try:
            versions.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    lines = [
        f"date: {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC",
        f"command: {facts.pop('command')}",
        f"versions: python=={platform.python_version()} {' '.join(versions)}",
        f"device: {device or platform.machine()}",
        *(f"{key}: {value}" for key, value in facts.items()),
        "",
        "# resolved configuration",
    ]
    (folder / "train_command.txt").write_text("\n".join(lines) + "\n")
    with open(folder / "train_command.txt", "a") as handle:
        handle.write(resolved.read_text())


def train(config: RunConfig, command: str) -> dict:
    """The whole run; returns the fields of the JSON line."""
    out = Path(config.output_dir)
    resolved = out / "config.yaml"
    config.dump(resolved)
    ensure_answers(config, resolved)
    torch.manual_seed(config.seed)
    device = pick_device(config.train.device)
    torch.set_float32_matmul_precision("high")
    target = Target(model_folder(config.model), device)
    store = load_answers(config)
    train_rows, holdout_rows = split_rows(config, store)
    vocab_size = target.head.shape[0]
    counts = answer_counts(store, vocab_size)
    vocab_ids = draft_vocabulary(counts, min(config.drafter.draft_vocab_size, vocab_size))
    coverage = {
        str(n): round(float(counts[vocab_ids[:n]].sum() / counts.sum()), 4)
        for n in sorted({1024, 2048, 4096, 8192, 12288, len(vocab_ids)})
        if n <= len(vocab_ids)
    }
    print(
        f"data: {len(store)} answers, {store.answer_tokens} answer tokens, "
        f"{len(store.tokens)} with prompts; vocabulary coverage {coverage}",
        file=sys.stderr,
        flush=True,
    )
    trainer = Trainer(config, target, store, vocab_ids, train_rows, holdout_rows)
    if trainer.resume():
        print(f"resumed at step {trainer.step}", file=sys.stderr, flush=True)
    holdout = trainer.run()
    paths = trainer.export(out / "drafters")
    facts = {
        "answers": len(store),
        "answer_tokens": store.answer_tokens,
        "answer_tokens_trained": trainer.answers_seen,
        "steps": trainer.step,
        "train_seconds": round(trainer.seconds, 1),
        "vocabulary_coverage": json.dumps(coverage),
        "prompts_sha256": data_hash(config.data.prompts),
    }
    for path in paths.values():
        write_train_command(path, resolved, {"command": command, **facts})
    facts["vocabulary_coverage"] = coverage
    return {"drafters": {n: str(p) for n, p in paths.items()}, "holdout": holdout, **facts}


def run_command(
    what: str,  # "exit" or "length"
    description: str,
    train: Callable[[RunConfig, str], dict],
    argv: list[str] | None,
) -> int:
    """The command line of `spexis train WHAT`: one run, one JSON line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"spexis train {what}", description=description)
    parser.add_argument("--config", help="run file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    name = f"train-{what}"
    try:
        config = RunConfig.load(args.config, args.overrides)
        report = train(config, " ".join(["spexis train", what, *argv]))
    except ValueError as error:
        print(f"spexis train {what}: {error}", file=sys.stderr)
        print(json.dumps({"name": name, "ok": False, "error": str(error)}))
        return 2
    print(json.dumps({"name": name, "ok": True, **report}))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return run_command("exit", __doc__.split("\n")[0], train, argv)


if __name__ == "__main__":
    sys.exit(main())
