# SPDX-License-Identifier: Apache-2.0
"""What serving would draft, from one teacher-forced pass.

In serving, row q restarts (and sees the final state of q-1, lag 1) exactly when the draft for
position q was wrong; otherwise it sees that of q-2 (lag 2). So the drafts depend on the drafter's
own earlier mistakes. `serve_drafts` starts from "all right" and recomputes until nothing changes.

Invariant: the fixed point is the serving order's own result: position q depends on earlier ones
only, so by induction every pass settles at least one more position for good.
"""

import dataclasses

import torch

from spexis.drafters.exit.head import best_of_share, over_shares
from spexis.drafters.exit.module import LAG_1, LAG_2, NO_STATE, ExitDrafter


def state_lags(
    wrong: torch.Tensor,  # [batch, length] bool: the draft FOR this position was wrong
    prompt_len: torch.Tensor,  # [batch]
) -> torch.Tensor:  # [batch, length] which older final state each row sees
    """Final states exist from the last prompt position on."""
    q = torch.arange(wrong.shape[1], device=wrong.device)[None]
    first = prompt_len[:, None] - 1  # first position with a final state
    lag = torch.full(wrong.shape, NO_STATE, dtype=torch.int8, device=wrong.device)
    lag[~wrong & (q - 2 >= first)] = LAG_2
    lag[wrong & (q - 1 >= first)] = LAG_1
    return lag


def answer_rows(
    prompt_len: torch.Tensor,  # [batch]
    length: torch.Tensor,  # [batch] prompt and answer
    width: int,
) -> torch.Tensor:  # [batch, width] bool
    """Rows that draft an answer token: row q drafts q + 1."""
    q = torch.arange(width, device=length.device)[None]
    return (q >= prompt_len[:, None] - 1) & (q <= length[:, None] - 2)


@dataclasses.dataclass(slots=True)
class Drafts:
    """Result of serve_drafts."""

    accepted: torch.Tensor  # [rows] bool, over the answer rows in order
    confidence: torch.Tensor  # [rows] float32, the drafter's probability of its guess
    sequence: torch.Tensor  # [rows] which sequence of the batch each row belongs to
    passes: int  # passes until the fixed point
    settled: bool  # False: max_passes was reached first


@torch.no_grad()
def serve_drafts(
    drafter: ExitDrafter,
    head: torch.Tensor,  # [size, hidden] rows of the drafter's vocabulary, most frequent first
    h: torch.Tensor,  # [batch, length, hidden]
    final: torch.Tensor,  # [batch, length, hidden]
    ids: torch.Tensor,  # [batch, length]
    prompt_len: torch.Tensor,  # [batch]
    length: torch.Tensor,  # [batch]
    vocab: torch.Tensor | None = None,  # [size] tokens of the head's rows; None: the drafter's own
    use_state: bool = True,
    max_passes: int = 100,
    chunk: int = 8192,
) -> Drafts:
    """Which drafts serving would keep."""
    rows = answer_rows(prompt_len, length, ids.shape[1])
    where = rows.nonzero(as_tuple=True)
    next_ids = ids[where[0], where[1] + 1]
    if vocab is None:
        vocab = drafter.draft_vocab_ids[: head.shape[0]]
    vocab = vocab.to(ids.device).long()
    wrong = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    use_state = use_state and drafter.config.final_state_feature
    passes, settled = 0, False
    while not settled and passes < max_passes:
        passes += 1
        lag = state_lags(wrong, prompt_len) if use_state else None
        out = drafter(h, final if use_state else None, lag)[where].to(head.dtype)
        best = [(part @ head.T).argmax(-1) for part in out.split(chunk)]
        accepted = vocab[torch.cat(best)] == next_ids
        now = torch.zeros_like(wrong)
        now[where[0], where[1] + 1] = ~accepted
        settled = torch.equal(now, wrong) or not use_state
        wrong = now
    found = [best_of_share(part @ head.T, vocab).unsqueeze(1) for part in out.split(chunk)]
    guesses = over_shares(torch.cat(found))
    return Drafts(accepted, guesses.confidence, where[0], passes, settled)
