# SPDX-License-Identifier: Apache-2.0
"""Any acceptance on any weights, for benchmarks only: NOT lossless.

Both ends compute the same pseudo-random guess from the row's position and token; the last
stage then makes the sampled token equal to it with the wanted probability, else different.
"""

import torch

from spexis.config import DrafterConfig
from spexis.drafters.base import Drafter, DraftRows, Guesses
from spexis.engine import kernels


class SyntheticDrafter(Drafter):
    name = "synthetic"
    lossless = False
    capturable = True

    def __init__(self, config: DrafterConfig, runner):
        self.set_acceptance(config.acceptance)
        self.seed = config.seed
        self.vocab_size = runner.model_config.get_vocab_size()
        self.generator = torch.Generator(device=runner.device)
        self.generator.manual_seed(config.seed)

    def set_acceptance(self, acceptance: float) -> None:
        """For benchmarks, which measure several with one engine; idle engines only."""
        self.acceptance = acceptance
        self.version = f"synthetic-{acceptance}"

    def propose(self, rows: DraftRows) -> Guesses:
        tokens = kernels.hashed_tokens(
            rows.draft_positions, rows.tokens, self.seed, self.vocab_size, None, 1.0
        )
        return Guesses(tokens, torch.full_like(tokens, self.acceptance, dtype=torch.float32))

    def overrule(
        self,
        draft_positions: torch.Tensor,  # [R]
        tokens: torch.Tensor,  # [R] as the first stage sent them
    ) -> torch.Tensor:
        """The tokens that the last stage returns in place of its samples, [R] int64."""
        drawn = torch.rand(tokens.shape, generator=self.generator, device=tokens.device)
        return kernels.hashed_tokens(
            draft_positions, tokens, self.seed, self.vocab_size, drawn, self.acceptance
        )
