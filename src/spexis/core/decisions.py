# SPDX-License-Identifier: Apache-2.0
"""What the policies can have decided and why, in words for people: /metrics and `spexis top`.

    lookahead.decision = decisions.WAIT
    decisions.DECISIONS["mode"]            # all that one policy can say

Invariant: a small fixed set, because each of them is a time series; numbers belong elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from spexis.core.live_mode import Reason
from spexis.core.mode import Mode


class Decision(NamedTuple):
    choice: str
    reason: str


# Memory look-ahead.
NONE = Decision("none", "start")
ADMIT = Decision("admit", "peak_fits")
WAIT = Decision("wait", "peak_above_memory")
HOLD = Decision("hold", "blocks_short")
EVICT = Decision("evict", "blocks_short")

DECISIONS: dict[str, tuple[Decision, ...]] = {
    "lookahead": (NONE, ADMIT, WAIT, HOLD, EVICT),
    "mode": tuple(Decision(str(mode), str(why)) for mode in Mode for why in Reason),
}
