# SPDX-License-Identifier: Apache-2.0
"""Prompts in, token arrays out: the row shapes accepted and the shards generation writes.

Rows (one JSON object a line; .gz too; a .json file may hold one list instead):
    {"prompt": "..."}                                             a prompt
    {"prompt_turns": ["...", "..."]}                              several user turns
    {"conversations": [{"from": "human", "value": "..."}, ...]}   ShareGPT
    {"conversations": [{"role": "user", "content": "..."}, ...]}  speculators
    {"messages": [{"role": "user", "content": "..."}, ...]}       chat
Only what stands before the last answer is kept: the model writes its own answers.

Invariant: a shard file that exists is complete (it is renamed into place), and every answer in it
lies behind its prompt in one token row: tokens[offsets[i]:offsets[i+1]], prompt_lens[i] of prompt.
"""

import dataclasses
import gzip
import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}
ROLES |= {"assistant": "assistant", "model": "assistant", "bard": "assistant", "system": "system"}

Message = dict[str, str]


# -- prompts ----------------------------------------------------------------------------------


def read_prompts(path: str | os.PathLike) -> list[list[Message]]:
    """All prompts of a file as chat messages, the last one a user's."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no prompt file {path}")
    chats = []
    for where, row in _rows(path):
        chat = to_messages(row, where)
        while chat and chat[-1]["role"] == "assistant":
            chat.pop()  # the model answers for itself
        if not any(m["role"] == "user" for m in chat):
            raise ValueError(f"{where}: no user turn")
        chats.append(chat)
    if not chats:
        raise ValueError(f"{path} holds no rows")
    return chats


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for messages, parsed row) of each non-empty line."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as handle:
        if path.name.removesuffix(".gz").endswith(".json"):
            try:
                rows = json.load(handle)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
            if not isinstance(rows, list):
                raise ValueError(f"{path}: a .json file must hold a list of rows")
            yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows, 1))
            return
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg})") from None


def to_messages(row: Any, where: str) -> list[Message]:
    """One row of any accepted shape as chat messages."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be an object, not {type(row).__name__}")
    if "prompt" in row or "prompt_turns" in row:
        turns = [row["prompt"]] if "prompt" in row else row["prompt_turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError(f"{where}: prompt must be text, prompt_turns a list of texts")
        return [{"role": "user", "content": t} for t in turns[:1]]
    turns = row.get("messages", row.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: no prompt, prompt_turns, messages or conversations in this row")
    chat = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        text = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if role not in ROLES or not isinstance(text, str):
            raise ValueError(f"{where}: a turn needs a role ({', '.join(ROLES)}) and a text")
        chat.append({"role": ROLES[role], "content": text})
    return chat


def join_prompts(chats: list[list[Message]], count: int, seed: int) -> list[list[Message]]:
    """Longer prompts out of given ones: retrieval-like contexts, long summaries, short pairs.

    A third each: unrelated long prompts put before a long one; the long prompts' text behind
    "Summarize: "; two or three short prompts that open with the same words, joined into one.
    """
    rng = random.Random(seed)
    texts = [c[0]["content"] for c in chats if len(c) == 1 and c[0]["role"] == "user"]
    long = [t for t in texts if len(t) >= 600]
    groups: dict[str, list[str]] = {}
    for text in texts:
        head, sep, rest = text.partition(": ")
        if sep and len(head) < 60 and len(rest) < 300:
            groups.setdefault(head, []).append(rest)
    groups = {head: rest for head, rest in groups.items() if len(rest) >= 100}
    joined = []
    for i in range(count if long and groups else 0):
        if i % 3 == 0:
            text = "\n".join(rng.sample(long, rng.randint(2, 3)))
        elif i % 3 == 1:
            text = "Summarize: " + " ".join(
                t.partition(": ")[2] or t for t in rng.sample(long, rng.randint(2, 4))
            )
        else:
            head = rng.choice(sorted(groups))
            text = f"{head}: " + " ".join(rng.sample(groups[head], rng.randint(2, 3)))
        joined.append([{"role": "user", "content": text}])
    return joined


def chat_ids(tokenizer: Any, chat: list[Message]) -> list[int]:
    """Token ids of a chat, ready for the model's answer."""
    if tokenizer.chat_template is None:
        text = "\n".join(m["content"] for m in chat)
        return tokenizer(text)["input_ids"]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def data_hash(path: str | os.PathLike) -> str:
    """SHA-256 of a prompt file, for train_command.txt."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# -- shards -----------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class TokenStore:
    """Token rows of many answers, flat."""

    tokens: np.ndarray  # [total] uint16 or uint32
    offsets: np.ndarray  # [rows + 1] int64
    prompt_lens: np.ndarray  # [rows] int32
    greedy: np.ndarray  # [rows] bool: the answer's end is the model's greedy one
    prompt_index: np.ndarray  # [rows] int32: which prompt of the prompt list

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def answer_tokens(self) -> int:
        return int(self.offsets[-1] - self.prompt_lens.sum())

    def row(self, i: int) -> np.ndarray:
        """Prompt and answer of row i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @classmethod
    def from_rows(
        cls, rows: Iterable[tuple[list[int], list[int], bool, int]], vocab_size: int
    ) -> "TokenStore":
        """Build from (prompt ids, answer ids, greedy, prompt index)."""
        rows = list(rows)
        dtype = np.uint16 if vocab_size <= 65536 else np.uint32
        flat = [np.array(p + a, dtype=dtype) for p, a, _, _ in rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(f) for f in flat], out=offsets[1:])
        return cls(
            tokens=np.concatenate(flat) if flat else np.zeros(0, dtype=dtype),
            offsets=offsets,
            prompt_lens=np.array([len(p) for p, _, _, _ in rows], dtype=np.int32),
            greedy=np.array([g for _, _, g, _ in rows], dtype=bool),
            prompt_index=np.array([i for _, _, _, i in rows], dtype=np.int32),
        )

    def save(self, path: Path) -> None:
        """Write one shard, complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> "TokenStore":
        """Read one shard."""
        with np.load(path) as file:
            return cls(**{f.name: file[f.name] for f in dataclasses.fields(cls)})

    @classmethod
    def concat(cls, parts: list["TokenStore"]) -> "TokenStore":
        """All rows of several stores, in order."""
        if not parts:
            raise ValueError("no answers to train on: run the generation first")
        starts = np.cumsum([0] + [len(p.tokens) for p in parts[:-1]])
        ends = [p.offsets[1:] + s for p, s in zip(parts, starts, strict=True)]
        return cls(
            tokens=np.concatenate([p.tokens for p in parts]),
            offsets=np.concatenate([np.zeros(1, dtype=np.int64), *ends]),
            prompt_lens=np.concatenate([p.prompt_lens for p in parts]),
            greedy=np.concatenate([p.greedy for p in parts]),
            prompt_index=np.concatenate([p.prompt_index for p in parts]),
        )

    def select(self, rows: np.ndarray) -> "TokenStore":
        """The given rows only."""
        return TokenStore.from_rows(
            (
                (
                    self.row(i)[: self.prompt_lens[i]].tolist(),
                    self.row(i)[self.prompt_lens[i] :].tolist(),
                    bool(self.greedy[i]),
                    int(self.prompt_index[i]),
                )
                for i in rows
            ),
            vocab_size=65536 if self.tokens.dtype == np.uint16 else 1 << 32,
        )


def answer_counts(store: TokenStore, vocab_size: int) -> np.ndarray:
    """How often each token id stands in an answer. Returns [vocab_size] int64."""
    lengths = np.diff(store.offsets)
    position = np.arange(len(store.tokens)) - np.repeat(store.offsets[:-1], lengths)
    in_answer = position >= np.repeat(store.prompt_lens, lengths)
    return np.bincount(store.tokens[in_answer], minlength=vocab_size).astype(np.int64)


def draft_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """Ids of the `size` most frequent tokens, most frequent first (ties by id)."""
    return np.argsort(-counts, kind="stable")[:size].astype(np.int32)
