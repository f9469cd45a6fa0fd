# SPDX-License-Identifier: Apache-2.0
"""Any acceptance on any weights, for benchmarks only: NOT lossless.

Both ends compute the same pseudo-random guess from the row's position and token; the last
stage then makes the sampled token equal to it with the wanted probability, else different.
"""

import torch

from spexis.config import DrafterConfig
from spexis.drafters.base import Drafter, DraftRows


class SyntheticDrafter(Drafter):
    name = "synthetic"
    lossless = False
    capturable = True

    def __init__(self, config: DrafterConfig, runner):
        self.acceptance = config.acceptance
        self.version = f"synthetic-{config.acceptance}"
        self.seed = config.seed
        self.vocab_size = runner.model_config.get_vocab_size()
        self.generator = torch.Generator(device=runner.device)
        self.generator.manual_seed(config.seed)

    def _guess(
        self,
        draft_positions: torch.Tensor,  # [R]
        tokens: torch.Tensor,  # [R]
    ) -> torch.Tensor:
        # Knuth's multiplicative hash; 63 bits so that int64 products stay positive enough.
        mixed = (draft_positions * 2654435761 + tokens * 40503 + self.seed) & 0x7FFFFFFF
        return (mixed * 69069 + 1) % self.vocab_size

    def propose(self, rows: DraftRows) -> torch.Tensor:
        return self._guess(rows.draft_positions, rows.tokens)

    def overrule(
        self,
        draft_positions: torch.Tensor,  # [R]
        tokens: torch.Tensor,  # [R] as the first stage sent them
    ) -> torch.Tensor:
        """The tokens that the last stage returns in place of its samples, [R] int64."""
        guess = self._guess(draft_positions, tokens)
        hit = torch.rand(guess.shape, generator=self.generator, device=guess.device)
        return torch.where(hit < self.acceptance, guess, (guess + 1) % self.vocab_size)
