# SPDX-License-Identifier: Apache-2.0
"""Any acceptance on any weights, for benchmarks only: NOT lossless.

Both ends compute the same pseudo-random guess from the row's position and token; the last
stage then makes the sampled token equal to it with the wanted probability, else different.

With `sharpness` s that probability is each guess's own, from Beta(s p, s (1-p)) as in
simulator/drafts.py, by the same hash on both ends, and the first stage reports it as confidence.
"""

import numpy as np
import torch

from spexis.config import DrafterConfig
from spexis.drafters.base import Drafter, DraftRows, Guesses
from spexis.engine import kernels

CHANCES = 4096  # different ones


class SyntheticDrafter(Drafter):
    name = "synthetic"
    lossless = False
    capturable = True

    def __init__(self, config: DrafterConfig, runner):
        self.sharpness = config.sharpness
        # One tensor for good: graphs read it.
        self.chances = torch.ones(CHANCES, dtype=torch.float32, device=runner.device)
        self.set_acceptance(config.acceptance)
        self.seed = config.seed
        self.vocab_size = runner.model_config.get_vocab_size()
        self.generator = torch.Generator(device=runner.device)
        self.generator.manual_seed(config.seed)

    def set_acceptance(self, acceptance: float) -> None:
        """For benchmarks, which measure several with one engine; idle engines only."""
        self.acceptance = acceptance
        self.version = f"synthetic-{acceptance}"
        chances = np.full(CHANCES, acceptance)
        if self.sharpness is not None and 0 < acceptance < 1:
            s = self.sharpness
            chances = np.random.default_rng(0).beta(s * acceptance, s * (1 - acceptance), CHANCES)
            chances = np.clip(chances, 1e-3, 1 - 1e-3)
        self.chances.copy_(torch.from_numpy(chances.astype(np.float32)))

    def _chance(self, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[R] float32, of the guess made behind each row."""
        at = kernels.hashed_tokens(positions, tokens, self.seed + 1, CHANCES, None, 1.0)
        return self.chances[at]

    def propose(self, rows: DraftRows) -> Guesses:
        tokens = kernels.hashed_tokens(
            rows.draft_positions, rows.tokens, self.seed, self.vocab_size, None, 1.0
        )
        if self.sharpness is None:
            return Guesses(tokens, torch.full_like(tokens, self.acceptance, dtype=torch.float32))
        return Guesses(tokens, self._chance(rows.draft_positions, rows.tokens))

    def overrule(
        self,
        draft_positions: torch.Tensor,  # [R]
        tokens: torch.Tensor,  # [R] as the first stage sent them
    ) -> torch.Tensor:
        """The tokens that the last stage returns in place of its samples, [R] int64."""
        drawn = torch.rand(tokens.shape, generator=self.generator, device=tokens.device)
        if self.sharpness is not None:  # below the common acceptance as often as below its own
            drawn = drawn * (self.acceptance / self._chance(draft_positions, tokens))
        return kernels.hashed_tokens(
            draft_positions, tokens, self.seed, self.vocab_size, drawn, self.acceptance
        )
