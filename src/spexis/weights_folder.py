# SPDX-License-Identifier: Apache-2.0
"""The folder of a trained part: ``config.json`` and ``model.safetensors``, nothing pickled.

    write(config, folder, tensors, shapes, "exit drafter")      # config: a dataclass
    config = read_config(Config, folder, "exit drafter")        # strict about its keys
    tensors = read_tensors(config, folder, shapes, "exit drafter")

The config is a frozen dataclass with the fields ``format`` and ``weights_sha256``.

Invariant: every refusal is a ValueError of one line; the weights' hash travels inside config.json,
so neither file can be swapped unnoticed, and a half-written folder never loads.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
Shapes = dict[str, tuple[int, ...]]
Config = TypeVar("Config")


def read_config(cls: type[Config], folder: str | os.PathLike, what: str) -> Config:
    """config.json of a folder as a `cls`."""
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"no {what} in {folder}: {CONFIG_NAME} is missing")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    wanted = known["format"].default
    if not isinstance(fields, dict) or fields.get("format", wanted) != wanted:
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"{path} has format {found!r}, not {wanted!r}: retrain or update")
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"{path} has unknown keys {unknown}: made by a newer Spexis?")
    required = {name for name, f in known.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(fields)):
        raise ValueError(f"{path} lacks keys {missing}: not a folder of format {wanted}")
    return cls(**fields)


def write(
    config: Any,
    folder: str | os.PathLike,
    tensors: dict[str, torch.Tensor],
    shapes: Shapes,
    what: str,
) -> Any:
    """Write both files; returns the config with the weights' hash filled in."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    check_tensors(shapes, tensors, what)
    # Weights first, config last, each renamed into place: a half-written folder never loads.
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as handle:
        temporary = Path(handle.name)
    save_file(tensors, temporary)
    os.chmod(temporary, 0o644)
    done = dataclasses.replace(config, weights_sha256=file_sha256(temporary))
    temporary.replace(folder / WEIGHTS_NAME)
    text = json.dumps(dataclasses.asdict(done), indent=2) + "\n"
    temporary = folder / (CONFIG_NAME + ".tmp")
    temporary.write_text(text)
    temporary.replace(folder / CONFIG_NAME)
    return done


def read_tensors(
    config: Any, folder: str | os.PathLike, shapes: Shapes, what: str
) -> dict[str, torch.Tensor]:
    """model.safetensors, its hash, names and shapes checked."""
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS_NAME
    if not path.is_file():
        raise ValueError(f"no {what} in {folder}: {WEIGHTS_NAME} is missing")
    if file_sha256(path) != config.weights_sha256:
        raise ValueError(
            f"{path} does not match weights_sha256 in {CONFIG_NAME}: copy both files again"
        )
    tensors = load_file(path)
    check_tensors(shapes, tensors, what)
    return tensors


def check_tensors(shapes: Shapes, tensors: dict[str, torch.Tensor], what: str) -> None:
    """Refuse tensors whose names or shapes do not follow from the config."""
    if set(shapes) != set(tensors):
        raise ValueError(
            f"{what} weights do not fit the config: missing {sorted(set(shapes) - set(tensors))},"
            f" unexpected {sorted(set(tensors) - set(shapes))}"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{what} weight {name} has shape {tuple(tensors[name].shape)}, expected {shape}"
            )


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
