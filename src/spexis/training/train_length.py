# SPDX-License-Identifier: Apache-2.0
"""Trains length predictors: from the first stage's state, how near is the answer's end.

    spexis train length --config run.yaml [key=value ...]
    spexis train length --config examples/train_smollm2.yaml length.max_steps=100

The run file and the answers are those of `spexis train exit` (sections model, data, generate, and
length for this command); answers that are there already are used, else they are generated. Writes
into output_dir: length/{config.yaml, metrics.jsonl, checkpoint.pt} and
predictors/NAME/{config.json, model.safetensors, train_command.txt}. Run it again to resume. The
last line on stdout is one JSON object; ok means every predictor was trained to the end.
"""

import json
import sys
from pathlib import Path

import torch

from spexis.training.config import RunConfig
from spexis.training.data import data_hash
from spexis.training.generate import load_answers, model_folder
from spexis.training.length_data import Limits, check_ends, end_tokens
from spexis.training.length_scores import table
from spexis.training.length_trainer import LengthTrainer
from spexis.training.target import Target, pick_device
from spexis.training.train_exit import (
    ensure_answers,
    run_command,
    split_rows,
    write_train_command,
)


def train(config: RunConfig, command: str) -> dict:
    """The whole run; returns the fields of the JSON line."""
    resolved = Path(config.output_dir) / "length" / "config.yaml"
    config.dump(resolved)
    ensure_answers(config, resolved)
    folder = model_folder(config.model)
    store = load_answers(config)
    cut = check_ends(store, Limits.of(config), end_tokens(folder))
    train_rows, holdout_rows = split_rows(config, store)
    print(
        f"data: {len(store)} answers, {store.answer_tokens} answer tokens, {cut} answers cut at "
        "their limit",
        file=sys.stderr,
        flush=True,
    )
    torch.set_float32_matmul_precision("high")
    device = pick_device(config.length.device)
    target = Target(folder, device, keep_layers=max(config.length.exit_layers))
    trainer = LengthTrainer(config, target, store, train_rows, holdout_rows)
    if trainer.resume():
        print(f"resumed at step {trainer.step}", file=sys.stderr, flush=True)
    trainer.run()
    print(table(trainer.scores), file=sys.stderr, flush=True)
    paths = trainer.export(trainer.folders)
    facts = {
        "answers": len(store),
        "answers_cut": cut,
        "answer_tokens": store.answer_tokens,
        "answer_tokens_trained": trainer.answers_seen,
        "steps": trainer.step,
        "train_seconds": round(trainer.seconds, 1),
        "prompts_sha256": data_hash(config.data.prompts),
    }
    holdout = {name: scores.fields() for name, scores in trainer.scores.items()}
    for name, path in paths.items():
        measured = {"holdout": json.dumps(holdout[name])}
        write_train_command(path, resolved, {"command": command, **facts, **measured})
    return {"predictors": {n: str(p) for n, p in paths.items()}, "holdout": holdout, **facts}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return run_command("length", __doc__.split("\n")[0], train, argv)


if __name__ == "__main__":
    sys.exit(main())
