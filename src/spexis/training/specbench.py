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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spexis.training.data import TokenStore, chat_ids, data_hash
from spexis.training.generate import answer, cuda, open_engine

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
    """(answers, task of each). Generated once by stock vLLM, then read from the cache folder."""
    rows = read_specbench(data, per_task)
    facts = [model_hash, data_hash(data), per_task, max_tokens]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = cache / f"specbench-{key}.npz"
    tasks = [row["task"] for row in rows]
    second = [i for i, row in enumerate(rows) if len(row["prompt_turns"]) > 1]
    names = tasks + [tasks[i] for i in second]
    if path.is_file():
        return TokenStore.load(path), names
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model)
    max_len = 2048 + max_tokens
    ask = _asker(model, max_tokens, max_len, share)
    chats = [[{"role": "user", "content": row["prompt_turns"][0]}] for row in rows]
    prompts = [chat_ids(tok, chat)[:2048] for chat in chats]
    answers = ask(prompts, "first turns")
    later = []
    for i in second:
        text = tok.decode(answers[i], skip_special_tokens=True).strip()
        turn = {"role": "user", "content": rows[i]["prompt_turns"][1]}
        chat = [*chats[i], {"role": "assistant", "content": text}, turn]
        later.append(chat_ids(tok, chat)[:2048])
    if later:
        answers += ask(later, "second turns")
    store = TokenStore.from_rows(
        ((p, a, True, i) for i, (p, a) in enumerate(zip(prompts + later, answers, strict=True))),
        vocab_size=len(tok),
    )
    store.save(path)
    return store, names


def _asker(
    model: str, max_tokens: int, max_len: int, share: float
) -> Callable[[list[list[int]], str], list[list[int]]]:
    """A function that answers prompts with stock vLLM."""
    if cuda():
        engine = open_engine(model, max_len, 256, share, eager=False)
        return lambda prompts, _: answer(engine, prompts, max_tokens, max_len)

    def ask(prompts: list[list[int]], what: str) -> list[list[int]]:
        # Two stages keep two cores busy; the engine has a process of its own.
        rows = [{"prompt_token_ids": p, "params": {"max_tokens": max_tokens}} for p in prompts]
        return serve({"stock": rows}, model, None, max_len, what)["stock"][0]

    return ask


def serve(
    work: dict[str, list[dict]], model: str, drafter: dict | None, max_len: int, what: str
) -> dict[str, tuple[list[list[int]], dict[str, int]]]:
    """{name: (answers, engine counters)} of a CPU engine at PP=2; drafter None is stock vLLM."""
    from tqdm import tqdm

    from spexis.bench.engines import EngineSpec, Work, first_answers, run_engine

    options = {"max_model_len": max_len, "max_num_batched_tokens": max_len}
    spec = EngineSpec(model=model, stages=2, drafter=drafter, options=options)
    with tqdm(total=sum(map(len, work.values())), desc=what, unit="answer", mininterval=2) as bar:

        def progress(event: dict) -> None:
            if event["event"] == "progress":
                bar.update(1)

        run = run_engine(
            spec,
            [Work(name=name, rows=rows) for name, rows in work.items()],
            timeout=3600.0,
            on_event=progress,
        )
    if run.error:
        raise ValueError(f"the engine failed: {' '.join(run.error.split())[-400:]}")
    return {name: (first_answers(run[name]), run[name]["counters"]) for name in work}


def by_task(accepted: np.ndarray, drafted: np.ndarray, names: list[str]) -> dict[str, float]:
    """Share of drafts kept per task (all answer tokens of a task together), and their mean."""
    table = {}
    for task, short in TASKS.items():
        rows = [i for i, name in enumerate(names) if name == task]
        if rows and drafted[rows].sum():
            table[short] = round(float(accepted[rows].sum() / drafted[rows].sum()), 4)
    table["avg"] = round(float(np.mean(list(table.values()))), 4) if table else 0.0
    return table
