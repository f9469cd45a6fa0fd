# SPDX-License-Identifier: Apache-2.0
"""What the engine's policies see and last decided, as numbers and words for the front end.

    state = policy_state(scheduler)        # None where no policy is on: then nothing is computed
    state.gauges["kv_tokens"], state.decisions["lookahead"].reason

Names of gauges are those of the series without "spexis:"; a name/8 is the value of label steps="8".

Invariant: values of this moment, never sums; only reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spexis.core.decisions import Decision
from spexis.core.memory import HORIZONS

AHEAD = "lookahead_kv_tokens"
STEPS = tuple(str(steps) for steps in HORIZONS)  # values of its label


@dataclass(slots=True)
class PolicyState:
    gauges: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    """By policy."""


def policy_state(scheduler: Any) -> PolicyState | None:
    """`scheduler` is the SpexisScheduler."""
    lookahead, live_mode = scheduler.lookahead, scheduler.live_mode
    if lookahead is None and live_mode is None:
        return None
    state = PolicyState()
    if live_mode is not None:
        state.decisions["mode"] = Decision(str(live_mode.mode), str(live_mode.reason))
    if lookahead is not None:
        check = lookahead.check
        state.decisions["lookahead"] = lookahead.decision
        # Nothing is ahead of an engine that runs nothing.
        ahead = check.ahead if scheduler.running else (0,) * len(STEPS)
        state.gauges = {
            "kv_tokens": check.kv_tokens,
            "lookahead_due_kv_tokens": check.due,
            "lookahead_came_kv_tokens": check.came,
            **{f"{AHEAD}/{steps}": tokens for steps, tokens in zip(STEPS, ahead, strict=True)},
        }
    return state
