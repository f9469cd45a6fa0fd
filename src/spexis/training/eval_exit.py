# SPDX-License-Identifier: Apache-2.0
"""Accuracy of exit drafters on Spec-Bench, by task, and acceptance in the real engine beside it.

    spexis eval exit [FOLDER ...] [--model demo] [--data eval_specbench.jsonl]
    spexis eval exit FOLDER ... --no-engine --vocab 4096 8192 16384    # choose among candidates
    spexis eval exit --no-engine --full-vocab      # what the reduced draft vocabulary loses

The simulation is teacher-forced on the target's own greedy answers, with the restarts that the
drafter's own mistakes cause (training/simulate.py), so it counts what serving would accept. The
engine part serves a sample of the same prompts at PP=2 and reads the engine's own counters.

The last line on stdout is one JSON object; ok means: average at least .60 and, where the engine
ran, engine and simulation (on the same prompts) agree within .02.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from spexis.demo_model import cache_root
from spexis.drafters.exit.config import ExitConfig, fingerprint
from spexis.drafters.exit.module import load_drafter
from spexis.training.batches import epoch_batches, make_batch
from spexis.training.data import TokenStore
from spexis.training.generate import model_folder
from spexis.training.simulate import serve_drafts
from spexis.training.specbench import TASKS, by_task, greedy_answers, serve
from spexis.training.target import Target, pick_device

WANTED_AVERAGE = 0.60
WANTED_AGREEMENT = 0.02
FULL = -1  # in place of a size: every token of the model, for drafters that have the model's head
BINS = 10  # of confidence, for the reliability of a drafter's own probabilities


def shipped_folders() -> list[Path]:
    """The drafters in the package."""
    import spexis.drafters

    root = Path(spexis.drafters.__file__).parent / "shipped"
    return sorted(p.parent for p in root.glob("*/config.json"))


class Counts:
    """Of one drafter: drafts by answer, and by confidence."""

    def __init__(self, num_answers: int) -> None:
        self.accepted = np.zeros(num_answers, dtype=np.int64)
        self.drafted = np.zeros(num_answers, dtype=np.int64)
        self.by_confidence = np.zeros((BINS, 3))  # drafts, sum of confidence, accepted

    def add(self, answers: np.ndarray, accepted: np.ndarray, confidence: np.ndarray) -> None:
        """Drafts of one batch, each [rows]."""
        np.add.at(self.accepted, answers, accepted.astype(np.int64))
        np.add.at(self.drafted, answers, 1)
        bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        facts = np.stack([np.ones(len(bins)), confidence, accepted], axis=1)
        np.add.at(self.by_confidence, bins, facts)

    def reliability(self) -> list[dict[str, float]]:
        """By bin that has drafts: how sure the drafter was, how often it was right."""
        return [
            {
                "drafts": int(count),
                "confidence": round(total / count, 4),
                "accepted": round(right / count, 4),
            }
            for count, total, right in self.by_confidence.tolist()
            if count
        ]

    def calibration_error(self) -> float:
        """Expected calibration error: mean distance of confidence and acceptance over drafts."""
        _, total, right = self.by_confidence.T
        return round(float(np.abs(total - right).sum() / max(1, self.drafted.sum())), 4)


@torch.no_grad()
def simulate(
    target: Target,
    folders: list[Path],
    store: TokenStore,
    sizes: list[int | None],  # prefixes of the draft vocabulary; None: all of it; FULL
    tokens_per_batch: int,
    states: list[bool],  # with and without the final-state feature
) -> dict[tuple[str, int, bool], Counts]:
    """By drafter's folder, vocabulary and whether it sees final states."""
    half = target.device.type == "cuda"
    drafters = {}
    for folder in folders:
        drafter = load_drafter(str(folder)).to(target.device)
        config = drafter.config
        if config.base_model_hash != target.hash:
            raise ValueError(
                f"the drafter in {folder} belongs to {config.base_model}, not to {target.folder}: "
                "train one with `spexis train exit`"
            )
        ids = drafter.draft_vocab_ids.long()
        head = target.head[ids] if config.tied_head else drafter.lm_head.weight
        drafters[str(folder)] = (drafter, head.to(target.dtype))
    exits = [d.config.exit_layer for d, _ in drafters.values()]
    counts: dict[tuple[str, int, bool], Counts] = {}
    batches = epoch_batches(
        np.diff(store.offsets), np.arange(len(store)), tokens_per_batch, seed=0, epoch=0
    )
    for rows in tqdm(batches, desc="simulate", unit="batch", mininterval=2):
        batch = make_batch(store, rows, target.device)
        kept, final = target.states(batch.ids, exits)
        for name, (drafter, head) in drafters.items():
            for size in sizes:
                if size == FULL:
                    rows_of_head, vocab = target.head, torch.arange(len(target.head))
                else:
                    rows_of_head, vocab = head[: size or len(head)], None
                    size = len(rows_of_head)
                for state in states:
                    with torch.autocast(target.device.type, torch.bfloat16, half):
                        drafts = serve_drafts(
                            drafter,
                            rows_of_head,
                            kept[drafter.config.exit_layer],
                            final,
                            batch.ids,
                            batch.prompt_len,
                            batch.length,
                            vocab=vocab,
                            use_state=state,
                        )
                    if not drafts.settled:
                        print(f"{name}: simulation did not settle", file=sys.stderr)
                    key = name, size, state
                    counts.setdefault(key, Counts(len(store))).add(
                        rows[drafts.sequence.cpu().numpy()],
                        drafts.accepted.cpu().numpy(),
                        drafts.confidence.cpu().numpy(),
                    )
    return counts


def print_table(tables: list[tuple[str, dict[str, float]]]) -> None:
    """The paper's accuracy table on stderr."""
    columns = [*TASKS.values(), "avg"]
    width = max(len(name) for name, _ in tables)
    print(f"{'':{width}} | " + " | ".join(f"{c:>5}" for c in columns), file=sys.stderr)
    for name, table in tables:
        cells = " | ".join(
            f"{table[c]:.3f}".lstrip("0").rjust(5) if c in table else "    -" for c in columns
        )
        print(f"{name:{width}} | {cells}", file=sys.stderr, flush=True)


def measure_in_engine(
    model: str, folder: Path, size: int, store: TokenStore, names: list[str], max_len: int
) -> tuple[dict[str, float], int]:
    """Serve the same prompts at PP=2. Returns (acceptance by task, answers unlike stock's)."""
    rows: dict[str, list[dict]] = {}
    expected: dict[str, list[list[int]]] = {}
    for i, name in enumerate(names):
        ids, prompt_len = store.row(i).tolist(), int(store.prompt_lens[i])
        params = {"max_tokens": len(ids) - prompt_len}
        rows.setdefault(name, []).append({"prompt_token_ids": ids[:prompt_len], "params": params})
        expected.setdefault(name, []).append(ids[prompt_len:])
    drafter = {"method": "exit", "model": str(folder), "draft_vocab_size": size}
    served = serve(rows, model, drafter, max_len, "engine")
    table, different = {}, 0
    for task, short in TASKS.items():
        if task in served:
            answers, counters = served[task]
            table[short] = round(counters["accepted"] / max(1, counters["drafts"]), 4)
            different += sum(a != b for a, b in zip(answers, expected[task], strict=True))
    table["avg"] = round(float(np.mean(list(table.values()))), 4)
    return table, different


def evaluate(args: argparse.Namespace) -> dict:
    """The whole evaluation; returns the fields of the JSON line."""
    device = pick_device(args.device)
    folders = [Path(f) for f in args.drafter] or shipped_folders()
    if not folders:
        raise ValueError("no drafter: name a folder, or train one with `spexis train exit`")
    for folder in folders:
        ExitConfig.load(folder)  # refuse early, in one line
    per_task = args.prompts_per_task
    if per_task is None:
        per_task = 0 if device.type == "cuda" else 8
    cache = Path(args.cache) if args.cache else cache_root()
    model = model_folder(args.model)
    store, names = greedy_answers(
        model, fingerprint(model), args.data, per_task or None, args.max_tokens, cache
    )
    target = Target(model, device)
    states = [True, False] if args.without_state else [True]
    sizes: list[int | None] = list(args.vocab) if args.vocab else [None]
    if args.full_vocab:
        _check_tied(folders)
        sizes.append(FULL)
    counts = simulate(target, folders, store, sizes, args.tokens_per_batch, states)
    del target
    tables = {key: by_task(c.accepted, c.drafted, names) for key, c in counts.items()}
    lines = [
        (f"{Path(n).name} V={_words(size)}" + ("" if state else " no state"), table)
        for (n, size, state), table in tables.items()
    ]
    best = max((key for key in tables if key[1] != FULL), key=lambda key: tables[key]["avg"])
    average = tables[best]["avg"]
    report = {
        "drafter": Path(best[0]).name,
        "draft_vocab_size": best[1],
        "average": average,
        "by_task": {k: v for k, v in tables[best].items() if k != "avg"},
        "answers": len(store),
        "answer_tokens": store.answer_tokens,
        "acceptance_in_engine": None,
        "calibration_error": counts[best].calibration_error(),
        "reliability": counts[best].reliability(),
    }
    ok = average >= WANTED_AVERAGE
    if args.engine and device.type == "cpu":
        measured, different = measure_in_engine(
            model, Path(best[0]), best[1], store, names, 2048 + args.max_tokens
        )
        lines.append((f"{Path(best[0]).name} V={best[1]} in the engine", measured))
        report["acceptance_in_engine"] = measured["avg"]
        report["engine_by_task"] = {k: v for k, v in measured.items() if k != "avg"}
        report["texts_different"] = different
        agree = abs(report["acceptance_in_engine"] - average) <= WANTED_AGREEMENT
        ok = ok and agree and not different
    print_table(lines)
    print(f"confidence is off by {report['calibration_error']:.3f} on average", file=sys.stderr)
    if len(tables) > 1:
        report["tables"] = [
            {"drafter": Path(n).name, "vocab": _words(size), "final_state": state, **table}
            for (n, size, state), table in tables.items()
        ]
    return {"ok": ok, **report}


def _words(size: int) -> int | str:
    return "all" if size == FULL else size


def _check_tied(folders: list[Path]) -> None:
    for folder in folders:
        if not ExitConfig.load(folder).tied_head:
            raise ValueError(f"--full-vocab: the drafter in {folder} has a head of its own only")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="spexis eval exit", description=__doc__.split("\n")[0])
    parser.add_argument("drafter", nargs="*", help="drafter folders (default: the shipped ones)")
    parser.add_argument("--model", default="demo", help='folder, or "demo"')
    parser.add_argument("--data", default="../shared/data/eval_specbench.jsonl")
    parser.add_argument("--prompts-per-task", type=int, help="0: all (default: all; 8 on a CPU)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--vocab", type=int, nargs="*", help="prefixes of the draft vocabulary")
    parser.add_argument(
        "--full-vocab",
        action="store_true",
        help="also with every token of the model, to see what a reduced draft vocabulary loses",
    )
    parser.add_argument("--without-state", action="store_true", help="also without final states")
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", help="folder for the answers (default: Spexis's cache)")
    parser.add_argument(
        "--engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also serve the prompts at PP=2 (CPU only)",
    )
    args = parser.parse_args(argv)
    try:
        report = evaluate(args)
    except ValueError as error:
        print(f"spexis eval exit: {error}", file=sys.stderr)
        report = {"ok": False, "error": str(error)}
    print(json.dumps({"name": "eval-drafter", **report}))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
