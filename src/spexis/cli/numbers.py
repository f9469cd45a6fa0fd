# SPDX-License-Identifier: Apache-2.0
"""Numbers on the command line, refused where they are read.

    parser.add_argument("--batches", type=whole, nargs="+")     # 0, -3, x: one line, exit code 2

Invariant: a refusal names what was given and what is allowed.
"""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from spexis.config import ConfigError


class OneLineParser(argparse.ArgumentParser):
    """Mistakes are a ConfigError, which `spexis` prints as one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def whole(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a whole number above 0")
    return int(text)


def whole_or_zero(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: allowed is a whole number, 0 or more")
    return int(text)


def positive(text: str) -> float:
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a number above 0")
    return value


def share(text: str) -> float:
    value = _float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a number from 0 to 1")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
