# SPDX-License-Identifier: Apache-2.0
"""Muon for the drafters' matrices, fused AdamW for the rest.

Muon (Jordan et al. 2024): momentum, then the update's singular values are all pushed towards one by
a few Newton-Schulz steps, scaled to the RMS an AdamW update has, so learning rates carry over.

Invariant: matrices of one shape are orthogonalised as one batch, over all drafters of the run: the
cost is a handful of batched products whatever the number of drafters.
"""

import math

import torch
from torch import nn

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


@torch.no_grad()
def orthogonalise(updates: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration. updates: [count, rows, columns]; the same shape back."""
    a, b, c = NS_COEFFICIENTS
    x = updates.to(torch.bfloat16 if updates.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(updates.dtype)


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters only."""

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        if any(p.ndim != 2 for p in params):
            raise ValueError("Muon takes matrices only")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                momenta = []
                for p in params:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    momenta.append(state["momentum"])
                grads = [p.grad for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
                updates = orthogonalise(torch.stack(nesterov))
                # An orthogonal rows x columns matrix has RMS 1/sqrt(max side); AdamW's is near .2.
                scale = 0.2 * math.sqrt(max(shape))
                if group["weight_decay"]:
                    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(updates.unbind(0)), alpha=-group["lr"] * scale)


def make_optimizers(
    modules: list[nn.Module], kind: str, lr: float, adamw_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Optimizers for all drafters of a run together (their parameters never meet in a loss)."""
    params = [p for m in modules for p in m.parameters() if p.requires_grad]
    fused = {"fused": True} if params[0].is_cuda else {}
    betas = (0.9, 0.98)
    if kind == "adamw":
        return [torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=weight_decay, **fused)]
    matrices = [p for p in params if p.ndim == 2]
    vectors = [p for p in params if p.ndim != 2]
    return [
        Muon(matrices, lr=lr, weight_decay=weight_decay),
        torch.optim.AdamW(vectors, lr=adamw_lr, betas=betas, weight_decay=0.0, **fused),
    ]


@torch.no_grad()
def clip_each(modules: list[nn.Module], limit: float) -> None:
    """Clip each drafter's gradient norm on its own."""
    for module in modules:
        torch.nn.utils.clip_grad_norm_(module.parameters(), limit, foreach=True)
