# SPDX-License-Identifier: Apache-2.0
"""Precision, recall and calibration of a length predictor, on Spec-Bench and held-out prompts.

    spexis eval length --predictor FOLDER [--model demo] [--data eval_specbench.jsonl] [--run DIR]

Spec-Bench: greedy answers of stock vLLM, none of whose prompts was trained on. Held-out prompts:
those of the training run that its decisions were not chosen on, read from --run (default: the run
that the folder lies in, if it lies in one). Answers are counted token by token; tokens so near the
limit of their answer that the truth is not known count for nothing (training/length_data.py).

The last line on stdout is one JSON object; ok means: at every threshold and on everything that was
measured precision is at least .75 and recall at least .5.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from spexis.demo_model import cache_root
from spexis.drafters.exit.config import fingerprint
from spexis.lengths import shipped
from spexis.lengths.config import LengthConfig
from spexis.lengths.module import load_predictor
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.generate import load_answers, model_folder
from spexis.training.length_data import Limits, Predictions, check_ends, end_tokens, predict
from spexis.training.length_scores import Scores, table
from spexis.training.length_trainer import halves
from spexis.training.specbench import TASKS, greedy_answers
from spexis.training.target import Target, pick_device
from spexis.training.train_exit import split_rows

WANTED_PRECISION = 0.75
WANTED_RECALL = 0.5
MAX_PROMPT = 2048  # tokens; greedy_answers cuts longer prompts


def find_predictor(asked: str | None) -> Path:
    """The folder asked for, or the shipped one."""
    if asked is not None:
        return Path(asked)
    folders = list(shipped().values())
    if not folders:
        raise ValueError(
            "no length predictor ships with this version: train one with `spexis train length` "
            "and give its folder with --predictor"
        )
    return folders[0]


def held_out(run: str | None, folder: Path) -> tuple[TokenStore, np.ndarray, Limits] | None:
    """(answers, the rows to measure on, limits) of the training run; None where there is none."""
    root = Path(run) if run is not None else folder.resolve().parent.parent
    path = root / "length" / "config.yaml"
    if not path.is_file():
        if run is not None:
            raise ValueError(f"--run {run}: no training run of `spexis train length`, no {path}")
        return None
    config = RunConfig.load(str(path), [f"output_dir={json.dumps(str(root))}"])
    store = load_answers(config)
    return store, halves(store, split_rows(config, store)[1])[1], Limits.of(config)


def by_task(found: Predictions, names: list[str], decisions: list[float]) -> dict[str, dict]:
    """Precision and recall of each Spec-Bench task that is there."""
    tasks = {}
    for task, short in TASKS.items():
        answers = np.array([i for i, name in enumerate(names) if name == task])
        if len(answers):
            scores = Scores.of(found.of(answers), decisions)
            tasks[short] = {"precision": scores.precision, "recall": scores.recall}
    return tasks


def evaluate(args: argparse.Namespace) -> dict:
    """The whole evaluation; returns the fields of the JSON line."""
    folder = find_predictor(args.predictor)
    config = LengthConfig.load(folder)  # refuse early, in one line
    model = model_folder(args.model)
    config.check_base(model, served_name=args.model)
    device = pick_device(args.device)
    on_gpu = device.type == "cuda"
    per_task = args.prompts_per_task
    if per_task is None:
        per_task = 0 if on_gpu else 4
    max_tokens = args.max_tokens or (512 if on_gpu else 256)
    held = held_out(args.run, folder)
    cache = Path(args.cache) if args.cache else cache_root()
    store, names = greedy_answers(
        model, fingerprint(model), args.data, per_task or None, max_tokens, cache
    )
    limits = Limits(max_tokens, MAX_PROMPT + max_tokens)
    cut = check_ends(store, limits, end_tokens(model))
    target = Target(model, device, keep_layers=config.exit_layer)
    predictor = {"": load_predictor(folder).to(device)}

    def measure(answers: TokenStore, rows: np.ndarray, within: Limits) -> Predictions:
        return predict(target, predictor, answers, rows, within, args.tokens_per_batch)[""]

    found = measure(store, np.arange(len(store)), limits)
    columns = {"SpecBench": Scores.of(found, config.decisions)}
    if held is not None:
        columns["held-out prompts"] = Scores.of(measure(*held), config.decisions)
    print("precision / recall, in percent\n" + table(columns), file=sys.stderr)
    for name, scores in columns.items():
        errors = ", ".join(f"< {m} by {e}" for m, e in scores.calibration_error.items())
        print(f"{name}: probabilities are off, on average: {errors}", file=sys.stderr, flush=True)
    return {
        "ok": all(s.good(WANTED_PRECISION, WANTED_RECALL) for s in columns.values()),
        "predictor": folder.name,
        "exit_layer": config.exit_layer,
        **columns["SpecBench"].fields(),
        "answers": len(store),
        "answers_cut": cut,
        "max_tokens": max_tokens,
        "by_task": by_task(found, names, config.decisions),
        "holdout": columns["held-out prompts"].fields() if held is not None else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="spexis eval length", description=description)
    parser.add_argument("--predictor", help="its folder (default: the shipped one)")
    parser.add_argument("--model", default="demo", help='folder, or "demo"')
    parser.add_argument("--data", default="../shared/data/eval_specbench.jsonl")
    parser.add_argument("--run", help="output_dir of the training run, for its held-out prompts")
    parser.add_argument("--prompts-per-task", type=int, help="0: all (default: all; 4 on a CPU)")
    parser.add_argument(
        "--max-tokens", type=int, help="of each answer (default: 512; 256 on a CPU)"
    )
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", help="folder for the answers (default: Spexis's cache)")
    args = parser.parse_args(argv)
    try:
        report = evaluate(args)
    except ValueError as error:
        print(f"spexis eval length: {error}", file=sys.stderr)
        report = {"ok": False, "error": str(error)}
    print(json.dumps({"name": "eval-length", **report}))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
