# SPDX-License-Identifier: Apache-2.0
"""Shared options and fixtures: where the prompt data is, which tests need what.

    python -m pytest tests                       # everything that runs on this machine
    python -m pytest tests -m "not engine"       # milliseconds each, no vLLM
    python -m pytest tests --spec-data PATH      # the folder with eval_specbench.jsonl
    python -m pytest tests --run-slow            # also what takes minutes

Invariant: a test that cannot run here says why it was skipped; nothing else is skipped.
"""

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spec-data",
        default=None,
        metavar="PATH",
        help="folder with eval_specbench.jsonl (default: $SPEXIS_DATA, then ../shared/data)",
    )
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --run-slow"))
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device here"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def spec_data(request: pytest.FixtureRequest) -> Path:
    """The folder with the prompt data; the test is skipped where there is none."""
    asked = request.config.getoption("--spec-data") or os.environ.get("SPEXIS_DATA")
    folder = Path(asked) if asked else REPO.parent / "shared" / "data"
    if not (folder / "eval_specbench.jsonl").is_file():
        if asked:  # asked for and absent is a mistake, not a reason to skip
            pytest.fail(f"no eval_specbench.jsonl in {folder}")
        pytest.skip("no prompt data: give --spec-data PATH or set SPEXIS_DATA")
    return folder


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo model's folder, converted on first use."""
    from spexis.demo_model import demo_model_dir

    return demo_model_dir()
