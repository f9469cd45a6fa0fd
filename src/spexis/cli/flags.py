# SPDX-License-Identifier: Apache-2.0
"""Flags of a `vllm serve` command line, read without knowing vLLM's parser.

    given = Given(["-tp", "2", "--config", "serve.yaml"])
    given.has("--tensor-parallel-size", "-tp")         # on the command line or in the file
    value_of(flags, "--port"), without(flags, "--port")

Invariant: only reads; what is a flag's value and what a flag is decided by the callers, who name
the flags that take one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spexis.config import ConfigError

ADDITIONAL = "--additional-config"
# Ways users spell flags whose presence matters here.
PP_FLAGS = ("--pipeline-parallel-size", "-pp")
TP_FLAGS = ("--tensor-parallel-size", "-tp")


class Given:
    """Which flags the user gave, on the command line or in a --config file."""

    def __init__(self, flags: list[str]) -> None:
        self.flags = flags
        self.file: dict[str, Any] = {}
        path = value_of(flags, "--config")
        if path is not None:
            import yaml

            try:
                loaded = yaml.safe_load(Path(path).read_text())
            except (OSError, yaml.YAMLError) as err:
                raise ConfigError(
                    f"--config {path} cannot be read: {err}".replace("\n", " ")
                ) from None
            if isinstance(loaded, dict):
                self.file = {str(key).replace("_", "-"): value for key, value in loaded.items()}

    def has(self, *names: str) -> bool:
        for name in names:
            if name.lstrip("-") in self.file:
                return True
            if any(flag.split("=", 1)[0] == name for flag in self.flags):
                return True
        return False

    def additional(self) -> dict[str, Any]:
        """--additional-config as an object; {} when not given."""
        if any(flag.startswith(ADDITIONAL + ".") for flag in self.flags):
            raise ConfigError(f"give {ADDITIONAL} as one JSON object, not as {ADDITIONAL}.KEY")
        text = value_of(self.flags, ADDITIONAL)
        if text is None:
            found = self.file.get(ADDITIONAL.lstrip("-"), {})
            return found if isinstance(found, dict) else json_object(ADDITIONAL, str(found))
        return json_object(ADDITIONAL, text)


def dashes(flag: str) -> str:
    """--pipeline_parallel_size is --pipeline-parallel-size, as in vLLM's own parser."""
    if not flag.startswith("--"):
        return flag
    end = min((i for i in (flag.find("="), flag.find(".")) if i >= 0), default=len(flag))
    return flag[:end].replace("_", "-") + flag[end:]


def value_of(flags: list[str], name: str) -> str | None:
    """Value of `--name value` or `--name=value`, the last one if repeated."""
    found = None
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            found = flags[index + 1]
        elif flag.startswith(name + "="):
            found = flag.partition("=")[2]
    return found


def without(flags: list[str], name: str) -> list[str]:
    """`flags` without `--name value` and `--name=value`."""
    kept, skip = [], False
    for flag in flags:
        if skip:
            skip = False
        elif flag == name:
            skip = True
        elif not flag.startswith(name + "="):
            kept.append(flag)
    return kept


def json_object(name: str, text: str) -> dict[str, Any]:
    """The object that `text`, given as flag `name`, holds; ConfigError if it is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{name} is not JSON ({err}): {text}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {text}: allowed is a JSON object")
    return value
