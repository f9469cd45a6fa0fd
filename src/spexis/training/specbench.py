# SPDX-License-Identifier: Apache-2.0
"""Spec-Bench prompts and the target's own greedy answers to them.

Rows: {"task": ..., "prompt_turns": [...], ...}; two-turn conversations (mt_bench) are continued
with the model's own first answer, and each turn counts as one answer.

Invariant: answers are kept beside their settings (model hash, data hash, tokens), so a stale file
is never taken for another model's.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from spexis.training.data import TokenStore, chat_ids, data_hash
from spexis.training.generate import answer, open_engine

# The paper's names for the six tasks, in its order.
TASKS = {
    "math_reasoning": "math",
    "qa": "qa",
    "summarization": "sum",
    "rag": "rag",
    "translation": "tran",
    "mt_bench": "mult",
}


def read_specbench(path: str | os.PathLike, per_task: int | None) -> list[dict[str, Any]]:
    """Rows of the six tasks, the first per_task of each (null: all)."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"no Spec-Bench file at {path}: give its place with --data (question.jsonl of the "
            "hemingkx/Spec-Bench repository as rows of task and prompt_turns)"
        )
    rows: dict[str, list] = {task: [] for task in TASKS}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row["task"]].append(row)
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a Spec-Bench row ({error!r})") from None
    return [row for task in TASKS for row in rows[task][:per_task]]


def greedy_answers(
    model: str,
    model_hash: str,
    data: str | os.PathLike,
    per_task: int | None,
    max_tokens: int,
    cache: Path,
    share: float = 0.6,
) -> tuple[TokenStore, list[str]]:
    """(answers, task of each). Generated once with vLLM, then read from the cache folder."""
    rows = read_specbench(data, per_task)
    facts = [model_hash, data_hash(data), per_task, max_tokens]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = cache / f"specbench-{key}.npz"
    tasks = [row["task"] for row in rows]
    second = [i for i, row in enumerate(rows) if len(row["prompt_turns"]) > 1]
    names = tasks + [tasks[i] for i in second]
    if path.is_file():
        return TokenStore.load(path), names
    print(f"generating {len(names)} greedy answers with vLLM", file=sys.stderr, flush=True)
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model)
    max_len = 2048 + max_tokens
    engine = open_engine(model, max_len, 256, share, eager=False)
    chats = [[{"role": "user", "content": row["prompt_turns"][0]}] for row in rows]
    prompts = [chat_ids(tok, chat)[: max_len - max_tokens] for chat in chats]
    answers = answer(engine, prompts, max_tokens, max_len)
    later = []
    for i in second:
        text = tok.decode(answers[i], skip_special_tokens=True).strip()
        turn = {"role": "user", "content": rows[i]["prompt_turns"][1]}
        chat = [*chats[i], {"role": "assistant", "content": text}, turn]
        later.append(chat_ids(tok, chat)[: max_len - max_tokens])
    answers += answer(engine, later, max_tokens, max_len)
    store = TokenStore.from_rows(
        ((p, a, True, i) for i, (p, a) in enumerate(zip(prompts + later, answers, strict=True))),
        vocab_size=len(tok),
    )
    store.save(path)
    del engine
    return store, names


def by_task(accepted: np.ndarray, drafted: np.ndarray, names: list[str]) -> dict[str, float]:
    """Share of drafts kept per task (all answer tokens of a task together), and their mean."""
    table = {}
    for task, short in TASKS.items():
        rows = [i for i, name in enumerate(names) if name == task]
        if rows and drafted[rows].sum():
            table[short] = round(float(accepted[rows].sum() / drafted[rows].sum()), 4)
    table["avg"] = round(float(np.mean(list(table.values()))), 4) if table else 0.0
    return table
