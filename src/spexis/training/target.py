# SPDX-License-Identifier: Apache-2.0
"""The frozen target model as training and evaluation see it: hidden states, final states, head.

Invariant: sequences are padded on the right and attention is causal, so no mask is needed and a
row's states never depend on the padding.
"""

from typing import Any

import torch

from spexis.drafters.exit.config import base_facts, fingerprint


class Target:
    """A transformers causal LM, frozen."""

    def __init__(self, folder: str, device: torch.device, keep_layers: int | None = None) -> None:
        """keep_layers: for states at exits up to there only; final states then mean nothing."""
        from transformers import AutoModelForCausalLM

        self.folder, self.device = folder, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.dtype, attn_implementation="sdpa"
        )
        if keep_layers is not None:
            model.model.layers = model.model.layers[:keep_layers]
        self.model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        self.facts = base_facts(model.config)
        self.tied = bool(model.config.tie_word_embeddings)
        self.hash = fingerprint(folder)

    @property
    def head(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def states(
        self,
        ids: torch.Tensor,  # [batch, length]
        exit_layers: list[int],
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """({exit layer: residual stream after it}, final normed states), each [batch, length, H]"""
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                kept[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        layers = self.model.model.layers
        hooks = [layers[n - 1].register_forward_hook(keep(n)) for n in sorted(set(exit_layers))]
        try:
            out = self.model.model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return kept, out.last_hidden_state


def pick_device(name: str) -> torch.device:
    """auto: CUDA if there, else CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
