# SPDX-License-Identifier: Apache-2.0
"""`spexis model`: make the demo model's folder in the cache, once; the last line is JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="spexis model",
        description="Convert the demo model (SmolLM2-135M-Instruct) into a Hugging Face folder in "
        "the cache, $SPEXIS_CACHE or ~/.cache/spexis. Done once; later calls only check it.",
    )
    parser.parse_args(list(argv))
    from spexis.demo_model import main as convert

    return convert()
