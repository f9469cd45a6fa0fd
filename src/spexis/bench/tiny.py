# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models of every supported family, with tokenizer and trained parts.

    model = tiny_model("llama", folder)       # 6 layers, 384 tokens, about 1 MB, half a second
    drafter = tiny_drafter(model, folder)     # an exit drafter at layer 3 that is often right
    predictor = tiny_predictor(model, folder)     # a length predictor there, which knows nothing

Plain random weights make a poor test: a decoder that repeats one token hides wrong positions and
stale keys. Weights here are scaled so that answers are as varied as noise and any change to the
context changes everything after it, while the layers behind the exit alter little, so that the
drafter is right about half of the time. Invariant: the same seed gives the same files' content.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCAB, EOS = 384, 0
LAYERS, EXIT_LAYER = 6, 3
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 32, 128
CONTEXT = 1024
TIED = {"llama", "qwen3"}  # the other two have their own output head, and so have their drafters
WITH_STATES = {"llama", "qwen2"}  # drafters that use older final states


def tiny_model(family: str, folder: str | Path, seed: int = 0) -> str:
    """Writes a model folder and returns its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    own = {"head_dim": HEAD_DIM} if family != "qwen2" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=family in TIED,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
        sliding_window=None,
        initializer_range=0.2,
        **own,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 0.4)
        model.get_output_embeddings().weight.normal_(0, 0.4)
        for index, layer in enumerate(model.model.layers):
            for name, parameter in layer.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2)
            if index >= EXIT_LAYER:
                layer.self_attn.o_proj.weight.mul_(0.2)
                layer.mlp.down_proj.weight.mul_(0.2)
        model.model.norm.weight.copy_(1 + 0.1 * torch.rand(HIDDEN))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def _tokenizer():
    """256 bytes and the merges of a fixed text: any token sequence decodes to some string."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_drafter(model_dir: str | Path, folder: str | Path, seed: int = 1) -> str:
    """Writes an exit drafter for tiny_model(): the bridge is the identity, the rest is small."""
    from transformers import AutoConfig

    from spexis.drafters.exit.config import (
        ExitConfig,
        base_facts,
        expected_shapes,
        fingerprint,
        read_tensor,
    )

    hf_config = AutoConfig.from_pretrained(model_dir)
    family, tied = hf_config.model_type, hf_config.model_type in TIED
    config = ExitConfig(
        base_model=f"tiny-{family}",
        base_model_hash=fingerprint(model_dir),
        exit_layer=EXIT_LAYER,
        num_stages=2,
        num_drafter_layers=2,
        final_state_feature=family in WITH_STATES,
        draft_vocab_size=VOCAB if tied else 3 * VOCAB // 4,
        tied_head=tied,
        version="tiny-1",
        **base_facts(hf_config),
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.05 * noise if "norm" in name else 0.03 * noise
    tensors["bridge.weight"] = torch.eye(HIDDEN)
    ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].to(torch.int32)
    tensors["draft_vocab_ids"] = ids
    if not tied:
        tensors["lm_head.weight"] = read_tensor(Path(model_dir), "lm_head.weight")[ids.long()]
    config.save(folder, tensors)
    return str(folder)


def tiny_predictor(model_dir: str | Path, folder: str | Path, seed: int = 2) -> str:
    """Writes a length predictor for tiny_model(): random, so it says something else of each row."""
    from spexis.core.lengths import THRESHOLDS
    from spexis.drafters.exit.config import fingerprint
    from spexis.lengths.config import NEVER, LengthConfig, expected_shapes

    config = LengthConfig(
        base_model="tiny",
        base_model_hash=fingerprint(model_dir),
        exit_layer=EXIT_LAYER,
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        rms_norm_eps=1e-6,
        width=16,
        max_answered=CONTEXT,
        thresholds=list(THRESHOLDS),
        decisions=[NEVER] * len(THRESHOLDS),
        min_precision=0.75,
        version="tiny-1",
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(config).items()
    }
    tensors["norm.weight"] += 1
    tensors["answered.weight"] *= 10
    tensors["heads.bias"] -= 2
    config.save(folder, tensors)
    return str(folder)


def steep_profile(path: str | Path, row_seconds: float = 0.002, num_layers: int = LAYERS) -> str:
    """Writes a profile by which every row of a step is dear, so that drafts are left out.

    Not measured: it only says where "sp-alpha" begins; what steps take is learnt while running.
    """
    points = [
        {"rows": rows, "context": 64, "seconds": row_seconds * (1 + rows)}
        for rows in (1, 8, 16, 32)
    ]
    block = {
        "format": "spexis-profile-1",
        "device": "cpu",
        "hardware": {"cpu": "made up"},
        "model": {"name": "tiny", "num_hidden_layers": num_layers},
        "layers": num_layers // 2,
        "points": points,
        "head_seconds": {"1": 0.0},
    }
    Path(path).write_text(json.dumps(block))
    return str(path)


def is_tiny(model_dir: str | Path) -> bool:
    """Whether the folder was written by tiny_model()."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    return config["vocab_size"] == VOCAB and config["hidden_size"] == HIDDEN


_TEXT = """\
The first stage runs the lower layers and guesses the next token from what it has; the last
stage runs the upper layers and knows. While the last stage is still busy with one token, the
first one already works on the next, and where the guess was wrong it starts again from the true
token. Nothing that a reader sees ever depends on a guess. One two three four five six seven
eight nine ten eleven twelve. {"name": "value", "count": 12, "list": [1, 2, 3], "done": true,
"other": false, "none": null} Winter came early to the harbour that year, and the boats stayed
in. Children played on the ice near the old mill; their mothers called them home when the lamps
were lit. What would become of the town, asked the baker, if the herring did not return? The
priest said that they would, as they always had. for index, item in enumerate(items):
print(index, item, len(items)); return sum(values) / len(values) Rain fell on the roof. She
counted the seconds between lightning and thunder, as her father had once taught her, and found
that the storm was moving away towards the hills and would not come back today.
"""
