# SPDX-License-Identifier: Apache-2.0
"""Models by their dimensions alone: folders with a config.json and nothing else.

    write_model("l70", tmp)                # Llama-3-70B for load_format "dummy"
    write_model("l70", tmp, layers=40)     # one of two stages; also of any model's folder

Throughput does not depend on what the weights are, so speed is measured with random ones, which
vLLM makes on the device. Invariant: a folder written here has no weights and no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spexis.config import ConfigError

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

DIMS: dict[str, dict[str, Any]] = {
    "l8": {  # Llama-3-8B
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "l70": {  # Llama-3-70B
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "q32": {  # Qwen2.5-32B
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    },
    "tiny": {  # for trying the tools on a CPU; the figures mean nothing
        **_LLAMA3,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "cpu": {  # the random-weight model of `spexis bench --preset cpu`: near the demo model's sizes
        **_LLAMA3,
        "vocab_size": 16384,  # small: the last stage's head must not unbalance an even split
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,  # even, unlike the demo model's, so that TP can halve them
        "num_key_value_heads": 4,
        "head_dim": 64,  # vLLM's CPU attention has no 72
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}

FLOAT32 = 4  # bytes; weights of the CPU engines

SIZE_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def write_model(name: str, folder: str | Path, layers: int | None = None) -> str:
    """Writes the folder of a set of dimensions, or of another model's folder, and returns it.

    layers: layers to build instead of the model's own number.
    """
    config = read_config(name)
    if layers is not None:
        config["num_hidden_layers"] = layers
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = config["layer_types"][:layers]
    path = Path(folder) / f"{Path(name).name}-{config['num_hidden_layers']}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return str(path)


def read_config(name: str) -> dict[str, Any]:
    """config.json of a set of dimensions or of a model's folder."""
    if name in DIMS:
        return {**DIMS[name], "hidden_act": "silu", "torch_dtype": "bfloat16"}
    if name == "demo":
        from spexis.demo_model import demo_model_dir

        return read_config(demo_model_dir())
    try:
        config = json.loads((Path(name) / "config.json").read_text())
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"{name} is neither demo, nor a set of dimensions ({', '.join(DIMS)}), nor a folder "
            f"with a config.json ({err})"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: its config.json is no JSON object")
    return config


def check_memory(name: str, layers: int, free: int) -> None:
    """ConfigError if so many layers in float32 do not fit. free: bytes of memory."""
    from spexis.core.presets import Model

    try:
        model = Model.from_config(name, {**read_config(name), "num_hidden_layers": layers})
    except ValueError as err:
        raise ConfigError(f"{name}: no dense decoder's config.json: {err}") from None
    wanted = model.params * FLOAT32
    if wanted > free:
        raise ConfigError(
            f"{layers} layers of {name} take {wanted / 1e9:.0f} GB in float32 on a CPU and "
            f"{free / 1e9:.0f} GB are free: ask for fewer (--layers), or run it where GPUs are"
        )


def sizes(name: str) -> dict[str, Any]:
    """The dimensions that times depend on."""
    config = read_config(name)
    layers = config.get("num_hidden_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ConfigError(
            f"{name}: num_hidden_layers is {layers!r} in its config.json: allowed is a whole "
            "number above 0 (a text model's own config, not one nested in another)"
        )
    return {"name": Path(name).name, **{key: config.get(key) for key in SIZE_KEYS}}
