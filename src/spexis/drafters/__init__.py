# SPDX-License-Identifier: Apache-2.0
"""Drafter registry: from a DrafterConfig and a served model to the folder with the weights.

    resolve(DrafterConfig(method="exit"), model) -> Path of the shipped drafter made for `model`

    resolve_exit_folder(config, model_config) -> the same from vLLM's ModelConfig, as a string

Invariant: a drafter made for another model is refused here, in the front-end process, before any
worker starts. Sizes are compared from the two config.json files; the weights are compared by the
fingerprint when they are on this machine (`fingerprint_checked` says so), and once more by the
workers, where they always are. No torch at import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spexis.config import ConfigError, DrafterConfig

EXIT_FORMAT = "spexis-exit-1"
SHIPPED = Path(__file__).parent / "shipped"

# Compared between the drafter's folder and the served model's config, in this order.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What of the target matters to a drafter."""

    name: str
    """As the user wrote it; for messages."""
    sizes: Mapping[str, int]
    """The SIZES of its config."""
    folder: str | None = None
    """Local folder with config.json and weights, None when they are not on this machine yet."""
    context: int | None = None
    """Longest context it will be served with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedDrafter:
    """An exit drafter that fits the served model."""

    folder: str
    """Folder with config.json and model.safetensors."""
    exit_layer: int
    """Number of layers on the first stage."""
    version: str
    """The drafter's own version, a label in metrics."""
    draft_vocab_size: int
    """Tokens it can draft."""
    fingerprint_checked: bool
    """False when the target's weights are not on this machine, so only sizes were compared."""
    acceptance: float | None = None
    """Share of drafts that are right, as measured by who trained it; None: not known, or not for
    a draft vocabulary cut down."""


def shipped() -> dict[str, Path]:
    """Drafters inside the package, by name."""
    if not SHIPPED.is_dir():
        return {}
    folders = (path.parent for path in sorted(SHIPPED.glob("*/config.json")))
    return {folder.name: folder for folder in folders}


def served_model(
    name: str, hf_config: Any, folder: str | None = None, context: int | None = None
) -> ServedModel:
    """ServedModel from a Hugging Face (text) config object or dict."""
    get = (
        hf_config.get
        if isinstance(hf_config, Mapping)
        else (lambda key: getattr(hf_config, key, None))
    )
    sizes = {key: get(key) for key in SIZES}
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    if not sizes["head_dim"] and sizes["hidden_size"] and heads:
        sizes["head_dim"] = sizes["hidden_size"] // heads
    return ServedModel(name=name, sizes=sizes, folder=folder, context=context)


def resolve(drafter: DrafterConfig, model: ServedModel) -> ResolvedDrafter:
    """Find and check the exit drafter; raises a one-line ConfigError when there is none."""
    if drafter.model is None:
        folder = _find_shipped(model)
    else:
        folder = shipped().get(drafter.model) or Path(drafter.model).expanduser()
    config = read_config(folder)
    if reason := mismatch(config, model):
        raise ConfigError(
            f"spexis: drafter {folder} was made for {config.get('base_model')}, not for "
            f"{model.name}: {reason}; train one with `spexis train exit`"
        )
    exit_config = _load_exit_config(folder)
    vocab = exit_config.draft_vocab_size
    if drafter.draft_vocab_size is not None and drafter.draft_vocab_size > vocab:
        raise ConfigError(
            f"spexis.drafter.draft_vocab_size is {drafter.draft_vocab_size}: "
            f"drafter {folder} has {vocab}, so allowed are 1 to {vocab}"
        )
    return ResolvedDrafter(
        folder=os.path.abspath(folder),
        exit_layer=exit_config.exit_layer,
        version=exit_config.version,
        draft_vocab_size=drafter.draft_vocab_size or vocab,
        fingerprint_checked=weights_fingerprint(model) is not None,
        acceptance=exit_config.acceptance if drafter.draft_vocab_size is None else None,
    )


def served_by_vllm(model_config: Any) -> ServedModel:
    """ServedModel from vLLM's ModelConfig."""
    return served_model(
        str(model_config.model),
        model_config.hf_text_config,
        folder=_local_folder(model_config),
        context=model_config.max_model_len,
    )


def resolve_exit_folder(drafter: DrafterConfig, model_config: Any) -> str:
    """The drafter's folder, checked against the served model; for the workers."""
    return resolve(drafter, served_by_vllm(model_config)).folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exit drafter folder, with the fields this module needs."""
    path = Path(folder) / "config.json"
    names = ", ".join(shipped()) or "none"
    if not path.is_file():
        raise ConfigError(
            f"spexis.drafter.model: {folder} is neither a folder with a config.json "
            f"nor the name of a shipped drafter (shipped: {names})"
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as err:
        raise ConfigError(f"spexis.drafter.model: {path} is not JSON ({err})") from None
    if config.get("format") != EXIT_FORMAT:
        raise ConfigError(
            f"spexis.drafter.model: {path} has format {config.get('format')!r}, not "
            f"{EXIT_FORMAT!r}: it is not an exit drafter of this Spexis version"
        )
    if not (Path(folder) / "model.safetensors").is_file():
        raise ConfigError(f"spexis.drafter.model: {folder} has no model.safetensors")
    return config


def mismatch(config: Mapping[str, Any], model: ServedModel) -> str | None:
    """Why the drafter does not fit the model, or None."""
    for key in SIZES:
        theirs, ours = config.get(key), model.sizes.get(key)
        if theirs is not None and ours is not None and theirs != ours:
            return f"{key} is {theirs} there and {ours} here"
    limit = config.get("max_position_embeddings")
    if limit and model.context and model.context > limit:
        return f"it was made for {limit} positions; pass --max-model-len {limit} or less"
    ours = weights_fingerprint(model)
    if ours is not None and config.get("base_model_hash") not in (None, ours):
        return "same sizes, other weights (base_model_hash differs)"
    return None


def _load_exit_config(folder: Path) -> Any:
    """The strictly checked ExitConfig; imports torch, so only once a drafter is really used."""
    from spexis.drafters.exit.config import ExitConfig

    try:
        return ExitConfig.load(folder)
    except (ValueError, TypeError) as err:
        raise ConfigError(f"spexis.drafter.model: {err}") from None


def _find_shipped(model: ServedModel) -> Path:
    for folder in shipped().values():
        if mismatch(read_config(folder), model) is None:
            return folder
    names = ", ".join(shipped()) or "none"
    raise ConfigError(
        f"spexis: no shipped drafter fits {model.name} (shipped: {names}); train one with `spexis "
        'train exit` and give its folder as spexis.drafter.model, or use method "none"'
    )


def weights_fingerprint(model: ServedModel) -> str | None:
    """Fingerprint of the target's weights; None where they are not on this machine."""
    if model.folder is None:
        return None
    from spexis.drafters.exit.config import fingerprint

    try:
        return fingerprint(model.folder)
    except (OSError, KeyError, ValueError):  # no weights yet, or not in safetensors
        return None


def _local_folder(model_config: Any) -> str | None:
    """Folder of the target's files, without downloading anything."""
    if os.path.isdir(model_config.model):
        return model_config.model
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            model_config.model, revision=model_config.revision, local_files_only=True
        )
    except Exception:  # not cached, or not a hub name: many error types, one meaning
        return None
