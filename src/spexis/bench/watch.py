# SPDX-License-Identifier: Apache-2.0
"""Something that watches a vLLM scheduler in this process: recompute.py, step_watch.py.

    watch = Recomputed.on(scheduler)         # the same one at every call

Invariant: one watch of a kind on a scheduler, so nothing is wrapped or counted twice.
"""

from __future__ import annotations

from typing import Any, Self


class Watch:
    @classmethod
    def on(cls, scheduler: Any) -> Self:
        """The watch of this scheduler; it stays for the scheduler's life."""
        name = f"_spexis_{cls.__name__}"
        watch = getattr(scheduler, name, None)
        if watch is None:
            watch = cls()
            setattr(scheduler, name, watch)
            watch._wrap(scheduler)
        return watch

    def _wrap(self, scheduler: Any) -> None:
        """Puts the watch around the scheduler's methods."""
        raise NotImplementedError
