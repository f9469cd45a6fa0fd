# SPDX-License-Identifier: Apache-2.0
"""From the head's logits to a guess and how sure the drafter is of it, also where ranks share it.

    found = best_of_share(logits, ids)              # [R, 3], on every rank
    tokens, confidence = over_shares(found_of_all)  # [R, ranks, 3] -> [R], [R]

Confidence is the probability that the drafter's softmax over its whole vocabulary gives the guess
(the paper's definition: float32, that of the drafted token). Invariant: both are the same however
the vocabulary is shared, up to rounding; a share may be empty.
"""

import torch

from spexis.drafters.base import Guesses

LARGEST_TOKEN = 2**24  # ids travel as float32, which is exact up to here


def best_of_share(
    logits: torch.Tensor,  # [R, V'] of this share of the vocabulary
    ids: torch.Tensor,  # [V'] int64, their tokens
) -> torch.Tensor:
    """[R, 3] float32: best logit, logarithm of the sum of exponentials, token of the best."""
    if not len(ids):
        nothing = logits.new_full((len(logits), 3), float("-inf"), dtype=torch.float32)
        nothing[:, 2] = 0.0
        return nothing
    best, index = logits.max(dim=-1)
    total = logits.float().logsumexp(dim=-1)
    return torch.stack((best.float(), total, ids[index].float()), dim=-1)


def over_shares(
    found: torch.Tensor,  # [R, shares, 3] of best_of_share()
) -> Guesses:
    """The best of all shares; of equal ones the first share's."""
    best, total, tokens = found.unbind(dim=-1)  # [R, shares] each
    top, share = best.max(dim=-1, keepdim=True)
    confidence = (top.squeeze(-1) - total.logsumexp(dim=-1)).exp()
    return Guesses(tokens.gather(-1, share).squeeze(-1).to(torch.int64), confidence)
