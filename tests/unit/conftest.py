# SPDX-License-Identifier: Apache-2.0
"""Unit tests use one torch thread.

The models here are tiny, so a second thread only waits for the first; on a busy machine it waits
for the processor too, which makes the same tests many times slower.
"""

import sys

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch = sys.modules.get("torch")  # never imported for a test that does not use it
    if torch is not None:
        torch.set_num_threads(1)
