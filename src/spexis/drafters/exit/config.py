# SPDX-License-Identifier: Apache-2.0
"""Configuration and folder format of an exit drafter.

A drafter is a folder of two files, ``config.json`` and ``model.safetensors``:

    config = ExitConfig.load(folder)            # reads and checks config.json
    config.check_base(model_dir)                # refuses a drafter made for another model
    tensors = config.load_tensors(folder)       # reads and checks model.safetensors

Invariant: every refusal is a ValueError of one line that says what to do. The weights hash and the
base model's fingerprint travel inside config.json, so neither can be swapped unnoticed.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from spexis import weights_folder

FORMAT = "spexis-exit-1"
WHAT = "exit drafter"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExitConfig:
    """Everything the engine and the trainer must agree on about one drafter."""

    base_model: str  # name of the target, for people
    base_model_hash: str  # fingerprint() of the target, for machines
    exit_layer: int  # layers of the target below the exit = layers of the first stage
    num_stages: int  # pipeline stages it was trained for (2: older final states are fresh enough)
    num_hidden_layers: int  # layers of the target
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_drafter_layers: int  # attention-only layers
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # {"rope_type": "default", "rope_theta": ...}
    max_position_embeddings: int
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    final_state_feature: bool  # uses the last stage's final state of an older position
    draft_vocab_size: int
    tied_head: bool  # True: logits use the target's own head; False: lm_head.weight is stored
    version: str
    acceptance: float | None = None  # simulated serving of prompts not trained on; None: unknown
    weights_sha256: str = ""
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"drafter format {self.format!r} is not {FORMAT!r}: retrain or update")
        if not 0 < self.exit_layer < self.num_hidden_layers:
            raise ValueError(
                f"exit_layer {self.exit_layer} must lie in 1..{self.num_hidden_layers - 1}"
            )
        for name in ("num_drafter_layers", "num_stages", "draft_vocab_size", "hidden_size"):
            if getattr(self, name) < (0 if name == "num_drafter_layers" else 1):
                raise ValueError(f"{name} {getattr(self, name)} is too small")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance {self.acceptance} must lie in 0..1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        rope_type(self.rope_parameters)

    # -- from and to disk ---------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "ExitConfig":
        """Read config.json of a drafter folder."""
        return weights_folder.read_config(cls, folder, WHAT)

    def save(self, folder: str | os.PathLike, tensors: dict[str, torch.Tensor]) -> "ExitConfig":
        """Write both files; returns the config with the weights' hash filled in."""
        return weights_folder.write(self, folder, tensors, expected_shapes(self), WHAT)

    def load_tensors(self, folder: str | os.PathLike) -> dict[str, torch.Tensor]:
        """Read model.safetensors, checking its hash, names and shapes."""
        return weights_folder.read_tensors(self, folder, expected_shapes(self), WHAT)

    def check_base(self, model_dir: str | os.PathLike, served_name: str | None = None) -> None:
        """Refuse the drafter if it was trained for another model than the one in model_dir."""
        found = fingerprint(model_dir)
        if found != self.base_model_hash:
            raise ValueError(
                f"this exit drafter belongs to {self.base_model}, not to "
                f"{served_name or model_dir}: train one with `spexis train exit`"
            )


def expected_shapes(config: ExitConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of model.safetensors."""
    hidden = config.hidden_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "norm_in.weight": (hidden,),
        "bridge.weight": (hidden, hidden),
        "norm_out.weight": (hidden,),
        "draft_vocab_ids": (config.draft_vocab_size,),
    }
    if config.final_state_feature:
        shapes["state_1.weight"] = shapes["state_2.weight"] = (hidden, hidden)
    for i in range(config.num_drafter_layers):
        layer = f"layers.{i}"
        shapes[f"{layer}.norm.weight"] = (hidden,)
        shapes[f"{layer}.q_proj.weight"] = (q_size, hidden)
        shapes[f"{layer}.k_proj.weight"] = (kv_size, hidden)
        shapes[f"{layer}.v_proj.weight"] = (kv_size, hidden)
        shapes[f"{layer}.o_proj.weight"] = (hidden, q_size)
        if config.qkv_bias:
            shapes[f"{layer}.q_proj.bias"] = (q_size,)
            shapes[f"{layer}.k_proj.bias"] = shapes[f"{layer}.v_proj.bias"] = (kv_size,)
        if config.qk_norm:
            shapes[f"{layer}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.k_norm.weight"] = (config.head_dim,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes


# -- facts about the base model ---------------------------------------------------------------


def rope_type(rope_parameters: dict[str, Any]) -> str:
    """The rope type; anything but plain rotary embedding is refused."""
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported by exit drafters: only 'default'")
    if not isinstance(rope_parameters.get("rope_theta"), int | float):
        raise ValueError("rope_parameters lacks a number for rope_theta")
    if rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial rotary embedding is not supported by exit drafters")
    return kind


def base_facts(hf_config: Any) -> dict[str, Any]:
    """The fields of ExitConfig that follow from a transformers config of the target."""
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ValueError(f"model type {family!r} is not supported: one of {', '.join(FAMILIES)}")
    rope = dict(getattr(hf_config, "rope_parameters", None) or {})
    rope.setdefault("rope_theta", getattr(hf_config, "rope_theta", None))
    rope = {"rope_type": rope_type(rope), "rope_theta": float(rope["rope_theta"])}
    heads = hf_config.num_attention_heads
    return {
        "num_hidden_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(hf_config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "rms_norm_eps": hf_config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": hf_config.max_position_embeddings,
        "qkv_bias": family == "qwen2" or bool(getattr(hf_config, "attention_bias", False)),
        "qk_norm": family == "qwen3",
    }


def fingerprint(model_dir: str | os.PathLike) -> str:
    """SHA-256 over the target's essential sizes and its final norm's weights.

    Independent of dtype, tokenizer files and the folder's place: the same weights in bfloat16 and
    in float32 give the same hash, another checkpoint of the same architecture does not.
    """
    model_dir = Path(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    heads = config["num_attention_heads"]
    essentials = {
        "model_type": config["model_type"],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "vocab_size": config["vocab_size"],
    }
    norm = read_tensor(model_dir, "model.norm.weight").to(torch.float32).contiguous()
    digest = hashlib.sha256(json.dumps(essentials, sort_keys=True).encode())
    digest.update(norm.numpy().tobytes())
    return digest.hexdigest()


def read_tensor(model_dir: Path, name: str) -> torch.Tensor:
    """One tensor out of a Hugging Face folder of safetensors, sharded or not."""
    from safetensors import safe_open

    index = model_dir / "model.safetensors.index.json"
    file = "model.safetensors"
    if index.is_file():
        file = json.loads(index.read_text())["weight_map"].get(name, file)
    if not (model_dir / file).is_file():
        raise ValueError(f"{model_dir} holds no {file}: exit drafters need safetensors weights")
    with safe_open(model_dir / file, framework="pt") as handle:
        if name not in handle.keys():  # noqa: SIM118 (a safetensors handle is no dict)
            raise ValueError(f"{model_dir / file} has no tensor {name}")
        return handle.get_tensor(name)
