# SPDX-License-Identifier: Apache-2.0
"""What a length predictor learns from: at every answer token, does the answer end within m more?

    limits = Limits.of(config)
    check_ends(store, limits, end_tokens(model))     # were the answers made with these limits
    facts = labels(batch, limits)                    # answered, ended, known of every answer row

An answer that reached its limit was cut: what it would still have given is unknown. A row counts
for m only where m more tokens fitted below the limit, whether or not its answer was cut. To leave
out the cut answers' rows alone would be wrong: near the limit only answers that ended would remain.

Invariant: `known` follows from the prompt's length and the limits alone, never from how the answer
ended; where it holds, `ended` is true of the uncut answer too.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from spexis.core.lengths import THRESHOLDS
from spexis.lengths.module import LengthPredictor
from spexis.training.batches import Batch, epoch_batches, make_batch
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How long an answer could become when it was generated."""

    max_tokens: int
    max_len: int  # of prompt and answer together

    @classmethod
    def of(cls, config: RunConfig) -> "Limits":
        return cls(config.generate.max_tokens, config.data.max_len)

    def answer(self, prompt_len):
        """Longest answer behind prompts of these lengths; an array or tensor of any shape."""
        return (self.max_len - prompt_len).clip(max=self.max_tokens)


@dataclasses.dataclass(slots=True)
class Labels:
    """Of the answer rows of a batch, in the order of batch.rows."""

    answered: torch.Tensor  # [rows] int64: tokens of the answer up to and with the row's own
    ended: torch.Tensor  # [rows, 5] bool: fewer than THRESHOLDS tokens remained
    known: torch.Tensor  # [rows, 5] bool
    sequence: torch.Tensor  # [rows] which sequence of the batch


def labels(batch: Batch, limits: Limits) -> Labels:
    """The row of position q has answered q - prompt_len + 1 tokens (the last prompt row: none)."""
    width = batch.ids.shape[1]
    sequence, q = batch.rows // width, batch.rows % width
    prompt_len = batch.prompt_len[sequence]
    answered = q - prompt_len + 1
    remaining = batch.length[sequence] - 1 - q
    within = torch.tensor(THRESHOLDS, device=q.device)
    return Labels(
        answered=answered,
        ended=remaining[:, None] < within,
        known=answered[:, None] + within <= limits.answer(prompt_len)[:, None],
        sequence=sequence,
    )


def shares(store: TokenStore, rows: np.ndarray, limits: Limits) -> np.ndarray:
    """[5] share of known answer rows with fewer than THRESHOLDS tokens to come."""
    length = (np.diff(store.offsets) - store.prompt_lens)[rows, None]
    limit = limits.answer(store.prompt_lens[rows].astype(np.int64))[:, None]
    within = np.array(THRESHOLDS)
    last = np.minimum(length - 1, limit - within)  # the last row that counts
    known = np.maximum(last + 1, 0)
    ended = np.maximum(last - np.maximum(length - within + 1, 0) + 1, 0)
    return ended.sum(axis=0) / np.maximum(known.sum(axis=0), 1)


def end_tokens(folder: str | Path) -> set[int]:
    """Tokens that end an answer of this model, as vLLM takes them from its files."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    if (Path(folder) / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(folder).eos_token_id
        found |= {ids} if isinstance(ids, int) else set()
    return found


def check_ends(store: TokenStore, limits: Limits, ends: Iterable[int]) -> int:
    """Refuse answers made with other limits; returns how many were cut by theirs."""
    length = np.diff(store.offsets) - store.prompt_lens
    limit = limits.answer(store.prompt_lens.astype(np.int64))
    if (length > limit).any():
        raise ValueError(
            f"an answer of {length.max()} tokens is longer than generate.max_tokens="
            f"{limits.max_tokens} and data.max_len={limits.max_len} allow: set those it was made "
            "with"
        )
    complete = np.isin(store.tokens[store.offsets[1:] - 1], list(ends))
    if stopped := int((~complete & (length < limit)).sum()):
        raise ValueError(
            f"{stopped} of {len(store)} answers stop before generate.max_tokens="
            f"{limits.max_tokens} without an end token: set the limit they were made with"
        )
    return int((~complete).sum())


@dataclasses.dataclass(slots=True)
class Predictions:
    """What a predictor said, and what was true. n answer rows."""

    ends: np.ndarray  # [n, 5] float32 probabilities
    ended: np.ndarray  # [n, 5] bool
    known: np.ndarray  # [n, 5] bool
    answer: np.ndarray  # [n] row of the store

    def of(self, answers: np.ndarray) -> "Predictions":
        """Of these answers only."""
        mine = np.isin(self.answer, answers)
        return Predictions(self.ends[mine], self.ended[mine], self.known[mine], self.answer[mine])


@torch.no_grad()
def predict(
    target: Target,
    predictors: dict[str, LengthPredictor],
    store: TokenStore,
    rows: np.ndarray,  # of the store
    limits: Limits,
    tokens_per_batch: int,
) -> dict[str, Predictions]:
    """Every predictor at every answer token of these rows."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in predictors}
    ended, known, answer = [], [], []
    exits = sorted({p.config.exit_layer for p in predictors.values()})
    for chosen in epoch_batches(np.diff(store.offsets), rows, tokens_per_batch, seed=0, epoch=0):
        batch = make_batch(store, chosen, target.device)
        facts = labels(batch, limits)
        states, _ = target.states(batch.ids, exits)
        for name, predictor in predictors.items():
            h = states[predictor.config.exit_layer].flatten(0, 1)[batch.rows]
            parts[name].append(predictor(h, facts.answered).cpu().numpy())
        ended.append(facts.ended.cpu().numpy())
        known.append(facts.known.cpu().numpy())
        answer.append(chosen[facts.sequence.cpu().numpy()])
    shared = [np.concatenate(x) for x in (ended, known, answer)]
    return {name: Predictions(np.concatenate(ends), *shared) for name, ends in parts.items()}
