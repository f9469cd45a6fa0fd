# SPDX-License-Identifier: Apache-2.0
"""The exit drafter inside vLLM: its attention layers are extra layers of the first stage.

They register in vLLM's forward context like any attention layer, so they get their keys and
values from the same paged cache and block tables as the target's layers: chunked prefill,
prefix hits and preemption hold for the drafter without further code. The maths is that of
drafters/exit/module.py; a test compares the two.
"""

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from spexis.config import DrafterConfig
from spexis.drafters import resolve_exit_folder
from spexis.drafters.base import Drafter, DraftRows, Guesses
from spexis.drafters.exit.config import ExitConfig
from spexis.drafters.exit.head import LARGEST_TOKEN, best_of_share, over_shares
from spexis.engine.kernels import keep_states
from spexis.engine.verdict import NO_POSITION

STATE_LAGS = (1, 2)  # a final state helps if it is that of the token one or two back


class _AttentionLayer(nn.Module):
    """x + o_proj(attention(norm(x))): a decoder layer without its MLP."""

    def __init__(self, config: ExitConfig, index: int, cache_config, quant_config=None):
        super().__init__()
        prefix = f"spexis_drafter.layers.{config.num_hidden_layers + index}"
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=False,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.rotary = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads
        self.head_dim = config.head_dim
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self,
        positions: torch.Tensor,  # [T]
        x: torch.Tensor,  # [T, H]
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(self.norm(x))
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        if self.q_norm is not None:
            q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).view(k.shape)
        q, k = self.rotary(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return x + out

    def load(self, weights: dict[str, torch.Tensor], prefix: str) -> None:
        self.norm.weight.data.copy_(weights[f"{prefix}.norm.weight"])
        kinds = ("weight", "bias") if self.qkv_proj.bias is not None else ("weight",)
        for kind in kinds:
            parameter = getattr(self.qkv_proj, kind)
            for shard in "qkv":
                loaded = weights[f"{prefix}.{shard}_proj.{kind}"]
                parameter.weight_loader(parameter, loaded.to(parameter.dtype), shard)
        parameter = self.o_proj.weight
        parameter.weight_loader(parameter, weights[f"{prefix}.o_proj.weight"].to(parameter.dtype))
        if self.q_norm is not None:
            self.q_norm.weight.data.copy_(weights[f"{prefix}.q_norm.weight"])
            self.k_norm.weight.data.copy_(weights[f"{prefix}.k_norm.weight"])


class EngineExitDrafter(nn.Module, Drafter):
    name = "exit"
    capturable = True

    @classmethod
    def load(cls, config: DrafterConfig, runner) -> "EngineExitDrafter":
        folder = resolve_exit_folder(config, runner.model_config)
        exit_config = ExitConfig.load(folder)
        with (
            set_current_vllm_config(runner.vllm_config),
            set_default_torch_dtype(runner.model_config.dtype),
            torch.device(runner.device),
        ):
            drafter = cls(exit_config, config, runner)
            if runner.pp.is_first_rank:
                drafter._load_weights(exit_config.load_tensors(folder), runner)
        return drafter.eval()

    def __init__(self, exit_config: ExitConfig, config: DrafterConfig, runner):
        super().__init__()
        self.exit_config, self.version = exit_config, exit_config.version
        self.draft_vocab_size = config.draft_vocab_size or exit_config.draft_vocab_size
        if self.draft_vocab_size > exit_config.draft_vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the drafter's "
                f"{exit_config.draft_vocab_size}: give at most that"
            )
        self.state_size = exit_config.hidden_size if exit_config.final_state_feature else 0
        if not runner.pp.is_first_rank:
            return
        hidden = exit_config.hidden_size
        self.norm_in = RMSNorm(hidden, eps=exit_config.rms_norm_eps)
        self.norm_out = RMSNorm(hidden, eps=exit_config.rms_norm_eps)
        self.layers = nn.ModuleList(
            _AttentionLayer(exit_config, i, runner.vllm_config.cache_config)
            for i in range(exit_config.num_drafter_layers)
        )
        num_slots = runner.num_slots
        if self.state_size:
            self.states = torch.zeros(num_slots + 1, hidden)  # [S+1, H] newest final state
            self.state_positions = torch.full((num_slots + 1,), NO_POSITION, dtype=torch.int64)

    def _load_weights(self, weights: dict[str, torch.Tensor], runner) -> None:
        dtype, device = runner.model_config.dtype, runner.device

        def tensor(name: str) -> torch.Tensor:
            return weights[name].to(device=device, dtype=dtype)

        self.norm_in.weight.data.copy_(weights["norm_in.weight"])
        self.norm_out.weight.data.copy_(weights["norm_out.weight"])
        self.bridge = tensor("bridge.weight")  # [H, H]
        if self.state_size:
            self.state_projections = [tensor(f"state_{lag}.weight") for lag in STATE_LAGS]
        for i, layer in enumerate(self.layers):
            layer.load(weights, f"layers.{i}")
        self._load_head(weights, runner)
        # Lets vLLM repack the linear layers for the device's kernels.
        process_weights_after_loading(self, runner.model_config, torch.device(device))

    def _load_head(self, weights: dict[str, torch.Tensor], runner) -> None:
        """This rank's share of the draft vocabulary: head rows [V', H] and their token ids."""
        ids = weights["draft_vocab_ids"][: self.draft_vocab_size].to(torch.int64)
        tp = get_tp_group()
        if self.exit_config.tied_head:
            embedding = runner.model.model.embed_tokens
            shard = embedding.shard_indices
            begin, end = shard.org_vocab_start_index, shard.org_vocab_end_index
            ids = ids[(ids >= begin) & (ids < end)].to(runner.device)
            head = embedding.weight.data[ids - begin]
        else:
            rows = slice(tp.rank_in_group, None, tp.world_size)
            ids = ids[rows].to(runner.device)
            head = weights["lm_head.weight"][: self.draft_vocab_size][rows]
        if len(ids) and int(ids.max()) > LARGEST_TOKEN:
            raise ValueError(f"token {int(ids.max())} in the draft vocabulary: too large to draft")
        # Each rank's share is a plain linear layer: shares differ in length, so no vLLM
        # parallel layer fits, and propose() gathers only the best of each. A rank without any
        # of the drafter's tokens (they are cut as the embedding is) keeps one row, unused.
        self.head = ReplicatedLinear(head.shape[1], max(1, len(ids)), bias=False, prefix="head")
        self.head.weight.data.zero_()[: len(ids)].copy_(head)
        self.head_ids = ids

    # ---------------------------------------------------------------- hot path
    def propose(self, rows: DraftRows) -> Guesses:
        x = F.linear(self.norm_in(rows.hidden_states + rows.residual), self.bridge)
        if self.state_size:
            self._add_states(x, rows)
        for layer in self.layers:
            x = layer(rows.token_positions, x)
        logits, _ = self.head(self.norm_out(x[rows.last]))  # [R, V']
        found = best_of_share(logits, self.head_ids).unsqueeze(1)  # [R, 1, 3]
        tp = get_tp_group()
        return over_shares(tp.all_gather(found, dim=1) if tp.world_size > 1 else found)

    def _add_states(self, x: torch.Tensor, rows: DraftRows) -> None:
        """Adds the newest final state of each decode row's request, projected by its age."""
        lag = rows.start - self.state_positions[rows.slots]  # [R]
        states = self.states[rows.slots]
        for wanted, projection in zip(STATE_LAGS, self.state_projections, strict=True):
            use = (lag == wanted) & ~rows.is_prefill
            x.index_add_(0, rows.last, F.linear(states, projection) * use.unsqueeze(1))

    def bind(self, slot: int) -> None:
        if self.state_size and hasattr(self, "states"):
            # Not `[slot] = ...`, which copies a scalar from the host and waits for the device.
            self.state_positions[slot].fill_(NO_POSITION)

    def observe(self, slots, positions, tokens, alive, states) -> None:
        kept = self.states, self.state_positions
        keep_states(slots, positions, tokens, alive, states, *kept)
