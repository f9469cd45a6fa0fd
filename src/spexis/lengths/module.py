# SPDX-License-Identifier: Apache-2.0
"""The length predictor in plain PyTorch.

    x = gelu(inner(norm(h)) + answered(log(1 + tokens answered) / 4))     h: as the exit drafter's
    z = heads(x)                                                          one per threshold
    P(remaining < m_k) = 1 - exp(-(softplus(z_1) + ... + softplus(z_k)))

sigmoid(z_k) is the chance that the answer ends before m_k tokens given that it has not before
m_{k-1}, so the five probabilities rise with m whatever the weights.

    predictor = load_predictor(folder)
    ends = predictor(h, answered)                  # [rows, 5], for core/endings.py and lengths.py
    ends >= predictor.decisions                    # yes or no, as precision and recall count it

Invariant: a row's answer depends on that row only; probabilities are within FLOOR .. 1-FLOOR.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

from spexis.core.lengths import THRESHOLDS
from spexis.drafters.exit.module import RMSNorm
from spexis.lengths.config import LengthConfig

FLOOR = 1e-6
LOG_SCALE = 0.25  # log(1 + 500) is 6: brought near 1


class LengthPredictor(nn.Module):
    def __init__(self, config: LengthConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.inner = nn.Linear(config.hidden_size, config.width)
        self.answered = nn.Linear(1, config.width, bias=False)
        self.heads = nn.Linear(config.width, len(THRESHOLDS))
        decisions = torch.tensor(config.decisions, dtype=torch.float32)
        self.register_buffer("decisions", decisions, persistent=False)

    def log_alive(
        self,
        h: torch.Tensor,  # [rows, H] residual stream after exit_layer layers
        answered: torch.Tensor,  # [rows] int64: tokens of the answer up to and with this row's
    ) -> torch.Tensor:  # [rows, 5] float32: log P(at least m tokens remain)
        count = answered.clamp(0, self.config.max_answered).unsqueeze(-1)
        place = LOG_SCALE * torch.log1p(count.to(self.inner.weight.dtype))
        x = self.inner(self.norm(h.to(self.inner.weight.dtype))) + self.answered(place)
        return -F.softplus(self.heads(F.gelu(x)).float()).cumsum(-1)

    def forward(
        self,
        h: torch.Tensor,  # [rows, H]
        answered: torch.Tensor,  # [rows]
    ) -> torch.Tensor:  # [rows, 5] float32: P(fewer than m tokens remain)
        return (-torch.expm1(self.log_alive(h, answered))).clamp(FLOOR, 1 - FLOOR)

    @torch.no_grad()
    def start_at(self, shares: torch.Tensor) -> None:
        """Begin as if the state said nothing. shares: [5] how often fewer than m tokens remain."""
        alive = torch.cat([torch.ones(1), 1 - shares.float().cpu()])
        hazard = (1 - alive[1:] / alive[:-1].clamp_min(FLOOR)).clamp(1e-4, 1 - 1e-4)
        nn.init.zeros_(self.heads.weight)
        self.heads.bias.copy_(torch.logit(hazard))


def length_loss(
    log_alive: torch.Tensor,  # [rows, 5]
    ended: torch.Tensor,  # [rows, 5] bool: fewer than m tokens remained
    known: torch.Tensor,  # [rows, 5] bool: whether that can be known
) -> torch.Tensor:
    """Binary cross-entropy of what is known, its sum over rows and heads."""
    log_alive = log_alive.clamp_max(-FLOOR)  # so that log(1 - exp()) stays finite
    log_ended = torch.log(-torch.expm1(log_alive))
    loss = -torch.where(ended, log_ended, log_alive)
    return (loss * known).sum()


def load_predictor(folder: str | os.PathLike) -> LengthPredictor:
    """The predictor of a folder, ready to run, in float32."""
    config = LengthConfig.load(folder)
    predictor = LengthPredictor(config)
    predictor.load_state_dict(config.load_tensors(folder))
    return predictor.float().eval()
