# SPDX-License-Identifier: Apache-2.0
"""What an engine drafter is, and how one is built from the configuration.

A drafter lives behind the first stage: from that stage's output it guesses the token that
the last stage will sample. The last stage holds the same object for its other half (states
to send back, or the overruled samples of the synthetic drafter). Middle stages hold none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from spexis.config import DrafterConfig


@dataclass(slots=True)
class DraftRows:
    """One step as the drafter sees it. R requests, T tokens, H hidden size."""

    req_ids: Sequence[str]
    slots: torch.Tensor  # [R] int64
    hidden_states: torch.Tensor  # [T, H], with residual: the stream after the first stage
    residual: torch.Tensor  # [T, H]
    token_positions: torch.Tensor  # [T] int64
    last: torch.Tensor  # [R] int64, index of each row's last token
    start: torch.Tensor  # [R] int64, position of each row's first token
    tokens: torch.Tensor  # [R] int64, decode rows' input tokens (arbitrary on prefill rows)
    draft_positions: torch.Tensor  # [R] int64, position that the guess will take
    is_prefill: torch.Tensor  # [R] bool
    has_prefill: bool


class Guesses(NamedTuple):
    """One for every row."""

    tokens: torch.Tensor  # [R] int64
    confidence: torch.Tensor  # [R] float32 in 0..1: the drafter's own probability of its guess


class Drafter:
    name = "none"
    version = "0"
    state_size = 0  # hidden size of the final states wanted with verdicts, 0 for none
    lossless = True
    capturable = False  # whether propose() may be captured in a CUDA graph

    def bind(self, slot: int) -> None:
        """A new or resumed request took this slot."""

    def forget(self, req_id: str) -> None:
        """The request ended."""

    def observe(
        self,
        slots: torch.Tensor,  # [R]
        positions: torch.Tensor,  # [R] of the verdict's tokens
        tokens: torch.Tensor,  # [R] or NO_TOKEN
        alive: torch.Tensor,  # [R] bool
        states: torch.Tensor,  # [R, H] final states of the rows that sampled them
    ) -> None:
        """Truth came back (only called where state_size > 0)."""

    def propose(self, rows: DraftRows) -> Guesses:
        """Runs inside the step's forward context, on all tokens of the step, so that a drafter's
        own keys and values cover prompts."""
        raise NotImplementedError


class NoDrafter(Drafter):
    """Speculation off: guesses nothing worth running; rows wait for their verdict."""

    def propose(self, rows: DraftRows) -> Guesses:
        tokens = torch.zeros_like(rows.draft_positions)
        return Guesses(tokens, torch.zeros_like(tokens, dtype=torch.float32))


def load_drafter(config: DrafterConfig, runner) -> Drafter | None:
    """Builds this stage's drafter (after the model has loaded); None on middle stages."""
    if not (runner.pp.is_first_rank or runner.pp.is_last_rank):
        return None
    if config.method == "exit":
        from spexis.drafters.exit.engine import EngineExitDrafter

        return EngineExitDrafter.load(config, runner)
    if config.method == "oracle":
        from spexis.drafters.oracle import OracleDrafter

        return OracleDrafter(config, runner)
    if config.method == "synthetic":
        from spexis.drafters.synthetic import SyntheticDrafter

        return SyntheticDrafter(config, runner)
    return NoDrafter()
