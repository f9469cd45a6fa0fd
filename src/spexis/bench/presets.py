# SPDX-License-Identifier: Apache-2.0
"""`spexis bench`: one command per kind of machine, chosen by --preset.

    main(["--preset", "gpu2", "--dims", "l70"])

Invariant: this module only chooses; a preset parses its own arguments.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

HELP = """usage: spexis bench --preset PRESET [arguments]

Spexis against stock vLLM, side by side in one run.

  spexis bench --preset cpu                    the demo model on a CPU
  spexis bench --preset gpu2 --dims l70        two GPUs, random weights, so no download; gpu4: four
  spexis bench --preset load --concurrency 4   servers under load, over HTTP

`spexis bench --preset PRESET --help` for the arguments of one."""
PRESETS = {"cpu": "cpu", "gpu2": "gpu", "gpu4": "gpu", "load": "load"}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="spexis bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=list(PRESETS))
    chosen, _ = parser.parse_known_args(args)
    if chosen.preset is None and any(arg in ("-h", "--help") for arg in args):
        print(HELP)
        return 0
    module = importlib.import_module(f"spexis.bench.{PRESETS[chosen.preset or 'cpu']}")
    return module.main(args)
