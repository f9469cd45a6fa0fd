# SPDX-License-Identifier: Apache-2.0
"""A quantised checkpoint: 8-bit weights and activations in the form of compressed-tensors.

Slow, since it starts two engines and the other tests take most of the half hour that there is.
Activations are rounded by token and products of 8-bit integers are exact, so texts equal stock
vLLM's token for token. The drafter's own layers are not quantised; its hash is the checkpoint's.
"""

import json
from pathlib import Path

import pytest
import torch
from exact_work import PROMPTS, start, stock_results
from safetensors.torch import load_file, save_file

from spexis.bench import tiny
from spexis.bench.compare import differences, problems
from spexis.bench.engines import EngineSpec
from spexis.bench.exact import ROOMY

pytestmark = pytest.mark.engine

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def quantise(folder: Path) -> None:
    """Rounds the linear layers of a model folder to 8 bits, a scale for each output channel."""
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127  # [out, 1]
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))


@pytest.mark.slow
def test_a_quantised_checkpoint_equals_stock(tmp_path):
    model = tmp_path / "int8"
    tiny.tiny_model("llama", model)
    quantise(model)
    drafter = {"method": "exit", "model": tiny.tiny_drafter(model, tmp_path / "drafter")}
    stock = stock_results(EngineSpec(model=str(model), options=ROOMY), [PROMPTS])
    run = start(
        EngineSpec(model=str(model), stages=2, drafter=drafter, options=ROOMY), [PROMPTS], stock
    )
    result = run["prompts"]
    assert differences(None, stock["prompts"], result) == []
    assert problems(None, result) == []
    assert 0.05 < result["counters"]["accepted"] / result["counters"]["drafts"] < 0.98
