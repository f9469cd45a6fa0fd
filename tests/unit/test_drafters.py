# SPDX-License-Identifier: Apache-2.0
"""The registry of exit drafters: found by the served model, refused for another, in one line."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from spexis import drafters
from spexis.config import ConfigError, DrafterConfig
from spexis.drafters.exit.config import ExitConfig, expected_shapes, fingerprint

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


def make_base(folder, seed=0, **changes):
    """A target's folder, as far as the fingerprint reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    norm = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    save_file({"model.norm.weight": norm}, folder / "model.safetensors")
    return folder


def make_drafter(folder, base, **changes):
    fields = {key: value for key, value in BASE.items() if key not in ("model_type", "vocab_size")}
    config = ExitConfig(
        **{
            **fields,
            "base_model": "base",
            "base_model_hash": fingerprint(base),
            "exit_layer": 4,
            "num_stages": 2,
            "num_drafter_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "max_position_embeddings": 512,
            "qkv_bias": False,
            "qk_norm": False,
            "final_state_feature": True,
            "draft_vocab_size": 128,
            "tied_head": True,
            "version": "7",
            **changes,
        }
    )
    shapes = expected_shapes(config)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors["draft_vocab_ids"] = torch.arange(config.draft_vocab_size, dtype=torch.int32)
    config.save(folder, tensors)
    return folder


@pytest.fixture
def base(tmp_path):
    return make_base(tmp_path / "base")


@pytest.fixture
def shipped(tmp_path, base, monkeypatch):
    """A package with one shipped drafter, made for `base`."""
    monkeypatch.setattr(drafters, "SHIPPED", tmp_path / "shipped")
    return make_drafter(tmp_path / "shipped" / "base-n2", base)


def served(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    return drafters.served_model("org/model", {**config, **changes}, folder=str(folder))


def test_found_by_the_served_model(base, shipped):
    found = drafters.resolve(DrafterConfig(), served(base))
    assert found == drafters.ResolvedDrafter(
        folder=str(shipped),
        exit_layer=4,
        version="7",
        draft_vocab_size=128,
        fingerprint_checked=True,
    )


@pytest.mark.parametrize("name", ["base-n2", None])
def test_found_by_name_or_folder(base, shipped, name):
    found = drafters.resolve(DrafterConfig(model=name or str(shipped)), served(base))
    assert found.folder == str(shipped)


def test_a_smaller_draft_vocabulary(base, shipped):
    assert drafters.resolve(DrafterConfig(draft_vocab_size=64), served(base)).draft_vocab_size == 64
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 129: .* allowed are 1 to 128"):
        drafters.resolve(DrafterConfig(draft_vocab_size=129), served(base))


def test_before_the_weights_are_here_sizes_decide(base, shipped):
    model = drafters.served_model("org/model", BASE, folder=None)
    assert not drafters.resolve(DrafterConfig(), model).fingerprint_checked


def test_from_vllms_model_config(base, shipped):
    model_config = SimpleNamespace(
        model=str(base), hf_text_config=SimpleNamespace(**BASE), max_model_len=512, revision=None
    )
    assert drafters.resolve_exit_folder(DrafterConfig(), model_config) == str(shipped)


def one_line(error):
    message = str(error.value)
    assert message.startswith("spexis") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 128}, "hidden_size is 64 there and 128 here"),
        ({"num_hidden_layers": 8}, "num_hidden_layers is 6 there and 8 here"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 2 there and 4 here"),
    ],
)
def test_another_models_sizes_are_refused(base, shipped, change, words):
    with pytest.raises(ConfigError) as error:
        drafters.resolve(DrafterConfig(model="base-n2"), served(base, **change))
    assert words in one_line(error) and "not for org/model" in str(error.value)
    with pytest.raises(ConfigError) as error:
        drafters.resolve(DrafterConfig(), served(base, **change))
    assert "no shipped drafter fits org/model (shipped: base-n2)" in one_line(error)


def test_same_sizes_other_weights_are_refused(tmp_path, shipped):
    other = make_base(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError) as error:
        drafters.resolve(DrafterConfig(model="base-n2"), served(other))
    assert "other weights" in one_line(error)
    with pytest.raises(ConfigError, match="no shipped drafter fits"):
        drafters.resolve(DrafterConfig(), served(other))


def test_a_context_beyond_the_drafters_is_refused(base, shipped):
    model = drafters.served_model("m", BASE, folder=str(base), context=1024)
    with pytest.raises(ConfigError) as error:
        drafters.resolve(DrafterConfig(model="base-n2"), model)
    assert "--max-model-len 512" in one_line(error)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (None, "is neither a folder with a config.json nor the name of a shipped drafter"),
        ("{", "is not JSON"),
        ('{"format": "eagle3"}', "has format 'eagle3'"),
        ('{"format": "spexis-exit-1"}', "has no model.safetensors"),
    ],
)
def test_folders_that_are_no_drafters(tmp_path, base, write, words):
    folder = tmp_path / "x"
    if write is not None:
        folder.mkdir()
        (folder / "config.json").write_text(write)
    with pytest.raises(ConfigError) as error:
        drafters.resolve(DrafterConfig(model=str(folder)), served(base))
    assert words in one_line(error)


def test_a_config_with_keys_missing_is_refused(base, shipped):
    path = shipped / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        drafters.resolve(DrafterConfig(model=str(shipped)), served(base))
    assert "rope_parameters" in one_line(error)
