# SPDX-License-Identifier: Apache-2.0
"""Look-ahead switched off and on in a running engine, so that both are measured in one process.

    Work(name="off 1", rows=rows, prepare={"look_ahead": False, "length_predictor": False})

Two engines of one kind differ by some 5 % on a small machine, more than look-ahead costs.

Invariant: switched off, the scheduler and the workers are as if the engine had started without it,
and every switch empties the prefix cache, so that each piece of work computes its prompts.
"""

from __future__ import annotations

from typing import Any


def switch_scheduler(scheduler: Any, on: bool) -> None:
    """On an idle SpexisScheduler that was started with look-ahead."""
    if scheduler.lookahead is not None:
        scheduler.spare_lookahead = scheduler.lookahead
    scheduler.lookahead = scheduler.spare_lookahead if on else None
    if not scheduler.reset_prefix_cache():
        raise RuntimeError("the prefix cache is in use: switch look-ahead in an idle engine")


def switch_predictor(worker: Any, on: bool) -> None:
    """Runs in a worker: its length predictor, where it has one."""
    runner = worker.model_runner
    if runner.length_predictor is not None:
        runner.spare_length_predictor = runner.length_predictor
    runner.length_predictor = getattr(runner, "spare_length_predictor", None) if on else None
