# SPDX-License-Identifier: Apache-2.0
"""Drafts read from a reference run, right with a chosen probability. Lossless; for tests.

The reference is JSON lines {"prompt_token_ids": [...], "token_ids": [...]}. A prompt that is
not in it, or a position beyond the recorded answer, is guessed wrong.
"""

import json
import random
from pathlib import Path

import torch

from spexis.config import DrafterConfig
from spexis.drafters.base import Drafter, DraftRows, Guesses


class OracleDrafter(Drafter):
    name = "oracle"

    def __init__(self, config: DrafterConfig, runner):
        """runner gives prompt_token_ids(req_id) and the vocabulary size."""
        self.acceptance = config.acceptance
        self.version = f"oracle-{config.acceptance}"
        self.vocab_size = runner.model_config.get_vocab_size()
        self.prompt_token_ids = runner.prompt_token_ids
        self.random = random.Random(config.seed)
        self.answers: dict[tuple[int, ...], list[int]] = {}
        if config.reference:
            for line in Path(config.reference).read_text().splitlines():
                row = json.loads(line)
                self.answers[tuple(row["prompt_token_ids"])] = row["token_ids"]
        self._prompts: dict[str, tuple[int, ...]] = {}

    def forget(self, req_id: str) -> None:
        self._prompts.pop(req_id, None)

    def propose(self, rows: DraftRows) -> Guesses:
        guesses = [
            self._guess(req_id, position)
            for req_id, position in zip(rows.req_ids, rows.draft_positions.tolist(), strict=True)
        ]
        tokens = torch.tensor(guesses, dtype=torch.int64, device=rows.draft_positions.device)
        return Guesses(tokens, torch.full_like(tokens, self.acceptance, dtype=torch.float32))

    def _guess(self, req_id: str, position: int) -> int:
        prompt = self._prompts.get(req_id)
        if prompt is None:
            prompt = self._prompts[req_id] = tuple(self.prompt_token_ids(req_id))
        answer = self.answers.get(prompt, [])
        index = position - len(prompt)
        if not 0 <= index < len(answer):
            return 0
        right = self.random.random() < self.acceptance
        return answer[index] if right else (answer[index] + 1) % self.vocab_size
