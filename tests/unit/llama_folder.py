# SPDX-License-Identifier: Apache-2.0
"""A model folder that vLLM can make a configuration from: sizes of a Llama, no weights.

EngineArgs(model=llama_folder(path, max_position_embeddings=128), skip_tokenizer_init=True)
"""

import json
from pathlib import Path


def llama_folder(path: Path, max_position_embeddings: int) -> str:
    """Writes config.json into the folder `path` and returns it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": max_position_embeddings,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
