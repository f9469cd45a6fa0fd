# SPDX-License-Identifier: Apache-2.0
"""The exit drafter: guesses the next token from the first stage's hidden states."""

from spexis.drafters.exit.config import ExitConfig

__all__ = ["ExitConfig"]
