# SPDX-License-Identifier: Apache-2.0
"""The exit drafter in plain PyTorch: what training, evaluation and tests run.

    x   = bridge(norm_in(h)) + state_lag(f)                    h: residual stream at the exit
    x  += o_proj(attention(q, k, v of norm_i(x)))              k times, causal, rotary, grouped KV
    out = norm_out(x);  logits = out @ head[draft_vocab_ids].T

Invariant: row q depends on rows <= q only, and its final-state feature f on rows q-1 (lag 1, after
a rejection) or q-2 (lag 2, draft kept) only: exactly what the first stage knows when it serves q.
The engine's paged version (engine.py beside this) computes the same function.
"""

import torch
import torch.nn.functional as F
from torch import nn

from spexis.drafters.exit.config import ExitConfig

NO_STATE, LAG_1, LAG_2 = 0, 1, 2  # values of `lag`: which older final state a row sees


class RMSNorm(nn.Module):
    """RMS norm computed in float32 whatever the input's dtype, as vLLM's layers do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x.dtype)


class AttentionLayer(nn.Module):
    """One residual attention layer without a feed-forward part."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,  # [batch, length, hidden]
        rope: tuple[torch.Tensor, torch.Tensor],  # cos, sin, each [length, head_dim]
    ) -> torch.Tensor:  # [batch, length, hidden]
        batch, length, _ = x.shape
        normed = self.norm(x)
        q = self.q_proj(normed).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(normed).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.v_proj(normed).view(batch, length, self.num_kv_heads, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q.transpose(1, 2), *rope)
        k = rotate(k.transpose(1, 2), *rope)
        attended = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return x + self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class ExitDrafter(nn.Module):
    """The drafter for training. Sequences are padded on the right; causality hides that."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.norm_in = RMSNorm(hidden, config.rms_norm_eps)
        self.bridge = nn.Linear(hidden, hidden, bias=False)
        if config.final_state_feature:
            self.state_1 = nn.Linear(hidden, hidden, bias=False)
            self.state_2 = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList(
            AttentionLayer(config) for _ in range(config.num_drafter_layers)
        )
        self.norm_out = RMSNorm(hidden, config.rms_norm_eps)
        if not config.tied_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size, dtype=torch.int32)
        self.register_buffer("draft_vocab_ids", ids)

    def forward(
        self,
        h: torch.Tensor,  # [batch, length, hidden] residual stream after exit_layer layers
        final: torch.Tensor | None = None,  # [batch, length, hidden] the target's final states
        lag: torch.Tensor | None = None,  # [batch, length] NO_STATE, LAG_1 or LAG_2
    ) -> torch.Tensor:  # [batch, length, hidden] what the head multiplies
        x = self.bridge(self.norm_in(h))
        if self.config.final_state_feature and final is not None and lag is not None:
            seen_1 = shift(self.state_1(final), 1) * (lag == LAG_1).unsqueeze(-1)
            seen_2 = shift(self.state_2(final), 2) * (lag == LAG_2).unsqueeze(-1)
            x = x + seen_1 + seen_2
        rope = rope_table(self.config, h.shape[1], h.device)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm_out(x)

    @torch.no_grad()
    def init_from_target(self, target: nn.Module, scale: float) -> None:
        """Start as the target with everything after the exit removed but some attention.

        The bridge is the identity at the residual stream's own size (`scale`, its RMS), layer i has
        the weights of the target's attention in layer exit_layer + i, the norm before the head is
        the target's. Training then starts from "read the answer off at the exit", not from noise.
        """
        base = target.model
        self.norm_in.weight.fill_(scale)
        nn.init.eye_(self.bridge.weight)
        if self.config.final_state_feature:
            nn.init.zeros_(self.state_1.weight)
            nn.init.zeros_(self.state_2.weight)
        for i, layer in enumerate(self.layers):
            source = base.layers[min(self.config.exit_layer + i, len(base.layers) - 1)]
            layer.norm.weight.copy_(source.input_layernorm.weight)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                mine, theirs = getattr(layer, name), getattr(source.self_attn, name)
                mine.weight.copy_(theirs.weight)
                if mine.bias is not None and theirs.bias is not None:
                    mine.bias.copy_(theirs.bias)
            if self.config.qk_norm:
                layer.q_norm.weight.copy_(source.self_attn.q_norm.weight)
                layer.k_norm.weight.copy_(source.self_attn.k_norm.weight)
        self.norm_out.weight.copy_(base.norm.weight)
        if not self.config.tied_head:
            ids = self.draft_vocab_ids.long().to(target.lm_head.weight.device)
            self.lm_head.weight.copy_(target.lm_head.weight[ids])

    def export(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """Tensors in the folder format's names and order, float weights rounded to dtype."""
        return {
            name: value.detach().to(dtype) if value.is_floating_point() else value.detach()
            for name, value in self.state_dict().items()
        }


def load_drafter(folder: str, dtype: torch.dtype = torch.float32) -> ExitDrafter:
    """The drafter of a folder, ready to run."""
    config = ExitConfig.load(folder)
    drafter = ExitDrafter(config)
    drafter.load_state_dict(config.load_tensors(folder))
    return drafter.to(dtype).eval()


def shift(x: torch.Tensor, lag: int) -> torch.Tensor:
    """Row q of the result is row q - lag of x; zeros before the start. x: [batch, length, ...]."""
    if x.shape[1] <= lag:
        return torch.zeros_like(x)
    return F.pad(x[:, :-lag], (0, 0, lag, 0))


def rope_table(
    config: ExitConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for positions 0..length-1, each [length, head_dim] float32, NeoX halves."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    inverse = config.rope_parameters["rope_theta"] ** (-half / config.head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float32. x: [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
