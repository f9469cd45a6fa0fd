# SPDX-License-Identifier: Apache-2.0
"""The loss of an exit drafter, without ever keeping a [rows, vocabulary] tensor for backward.

With p the target's full softmax restricted to the draft vocabulary V, y its most likely token (when
in V) and q the drafter's softmax over V, the loss of a row is

    (1 - w) * -sum_V p log q   +   w * -log q(y)            w = hard_weight

The head E is frozen, so with m = sum_V p E_v and S = sum_V p, both known before any drafter runs,
    soft loss = S * lse - out.m      d loss/d out = ((1-w) S + w [y in V]) q.E - (1-w) m - w E_y
which is one softmax and two products per drafter. The gradient is computed in the forward pass.

Invariant: identical (to rounding) with torch's autograd of the formula above; a test compares them.
"""

import dataclasses

import torch


@dataclasses.dataclass(slots=True)
class Teacher:
    """What a chunk of answer rows learns from; computed once for all drafters."""

    mean: torch.Tensor  # [rows, hidden] sum over V of p E_v
    mass: torch.Tensor  # [rows] sum over V of p
    top: torch.Tensor  # [rows] the target's most likely token, as an index into its permuted head
    hard: torch.Tensor  # [rows] float: 1 where top lies in the draft vocabulary


@torch.no_grad()
def teach(final: torch.Tensor, head: torch.Tensor, size: int) -> Teacher:
    """final: [rows, hidden]; head: [vocab, hidden], its first `size` rows the draft vocabulary."""
    logits = final @ head.T  # [rows, vocab]
    top = logits.argmax(-1)
    p = logits.float().softmax(-1) if logits.dtype == torch.float32 else logits.softmax(-1)
    p = p[:, :size]
    return Teacher(
        mean=(p @ head[:size]).float(),
        mass=p.sum(-1, dtype=torch.float32),
        top=top,
        hard=(top < size).float(),
    )


class _DraftLoss(torch.autograd.Function):
    """Weighted sum of the rows' losses; gradient to `out` only."""

    @staticmethod
    def forward(ctx, out, head, teacher, weight, hard_weight):
        logits = out @ head.T  # [rows, size]
        best, draft = logits.max(-1)
        q = logits.softmax(-1)
        lse = best.float() - q.gather(-1, draft[:, None])[:, 0].float().clamp_min(1e-30).log()
        label = teacher.top.clamp_max(head.shape[0] - 1)
        soft = teacher.mass * lse - (out.float() * teacher.mean).sum(-1)
        hard = teacher.hard * (lse - (out.float() * head[label].float()).sum(-1))
        loss = (1 - hard_weight) * soft + hard_weight * hard
        scale = (1 - hard_weight) * teacher.mass + hard_weight * teacher.hard
        grad = scale[:, None] * (q @ head).float() - (1 - hard_weight) * teacher.mean
        grad -= (hard_weight * teacher.hard)[:, None] * head[label].float()
        ctx.save_for_backward((grad * weight[:, None]).to(out.dtype))
        ctx.mark_non_differentiable(draft)
        return (loss * weight).sum(), draft

    @staticmethod
    def backward(ctx, grad_loss, _):
        (grad,) = ctx.saved_tensors
        return grad * grad_loss, None, None, None, None


def draft_loss(
    out: torch.Tensor,  # [rows, hidden] of the drafter
    head: torch.Tensor,  # [size, hidden], frozen, in out's dtype
    teacher: Teacher,
    weight: torch.Tensor,  # [rows] 0 for padding
    hard_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of weighted losses, draft of each row as an index into the draft vocabulary)."""
    return _DraftLoss.apply(out, head, teacher, weight, hard_weight)
