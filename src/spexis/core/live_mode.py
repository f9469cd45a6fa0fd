# SPDX-License-Identifier: Apache-2.0
"""Speculate or not, by what was measured while serving: SP against plain PP, at the present load.

    control = LiveMode()
    mode = control.observe(seconds, tokens, running, prefill_tokens)     # once a step
    control.mode, control.reason

Nothing is known about the hardware and nothing has to be: for each load (running requests, in
classes half an octave wide) and mode, the tokens per second of looks of `look_steps` steps are
averaged. The mode changes for a gain of `margin`; where the other mode was never seen at this load,
or not for long, it is tried for a few looks. How often is set by its price: a mode that gives a
share `loss` less costs loss * (looks it was tried) / (looks between), which is kept under `price`.

A trial of plain PP ends after `glance` steps if it is then slower by `clear`: every request returns
a token in each of its steps, so little chance is in its rate. What speculation returns is chance,
and a trial of it takes its looks.

What a look leaves out: the first `settle` steps after a change (the pipeline holds rows of both
modes) and steps with prompt tokens (they take their time in either mode).

The loop needs no profile (mode.py predicts from one, and the simulator uses that).
Invariant: deterministic in its inputs; a change needs `margin` or a due trial; the share of looks
spent on trials of a worse mode is at most `price` / loss, and never above 1 / `shortest`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from spexis.core.mode import Mode

MODES = (Mode.SP, Mode.PP)


class Reason(enum.StrEnum):
    """What the last change of mode was for."""

    START = "start"
    MEASURED = "measured"
    TRIAL = "trial"


@dataclass(slots=True)
class _Seen:
    """One mode at one load."""

    rate: float = 0.0
    """Tokens per second and running request, averaged over looks."""
    looks: int = 0


@dataclass(slots=True)
class _Load:
    seen: dict[Mode, _Seen] = field(default_factory=lambda: {mode: _Seen() for mode in MODES})
    looks_since_trial: int = 0


class LiveMode:
    def __init__(
        self,
        mode: Mode = Mode.SP,
        *,
        look_steps: int = 48,
        settle: int = 8,
        trial_looks: int = 2,
        margin: float = 0.03,
        price: float = 0.01,
        shortest: int = 30,
        longest: int = 2000,
        memory: int = 12,
        glance: int = 12,
        clear: float = 0.1,
    ):
        """shortest, longest: looks between two trials; memory: looks that an average reaches back.

        settle: steps; more than the pipeline is deep.
        """
        self.mode, self.reason, self.num_changes = mode, Reason.START, 0
        self.look_steps, self.settle, self.trial_looks = look_steps, settle, trial_looks
        self.margin, self.price = margin, price
        self.shortest, self.longest, self.memory = shortest, longest, memory
        self.glance, self.clear = glance, clear
        self._loads: dict[int, _Load] = {}
        self._trial: int | None = None  # looks left of it
        self._since_change = 0  # steps
        self.last: dict[str, float] = {}
        """What observe() was last given, for the iteration log."""
        self._clear()

    def observe(self, seconds: float, tokens: int, running: int, prefill_tokens: int = 0) -> Mode:
        """A step came back: seconds since the one before, tokens it returned.

        running: requests past their prompt. Returns the mode that runs from now on.
        """
        self.last = {
            "seconds": seconds,
            "tokens": tokens,
            "running": running,
            "prefill_tokens": prefill_tokens,
            "settle": self.settle,
        }
        self._since_change += 1
        if self._since_change <= self.settle or prefill_tokens or running <= 0 or seconds <= 0:
            return self.mode
        self._seconds += seconds
        self._tokens += tokens
        self._running += running
        self._steps += 1
        if self._steps >= self.look_steps:
            self._look()
        elif self._steps >= self.glance and self._in_vain():
            self._trial = 0
            self._look()
        return self.mode

    def rates(self, running: int) -> dict[Mode, float]:
        """Tokens per second by mode at so many running requests, as far as seen."""
        load = self._loads.get(load_class(running))
        found = load.seen.items() if load else ()
        return {mode: seen.rate * running for mode, seen in found if seen.looks}

    # -- looks ---------------------------------------------------------------------------------

    def _in_vain(self) -> bool:
        """Whether this is a trial of plain PP that is clearly slower than SP was at this load."""
        if self._trial is None or self.mode is not Mode.PP:
            return False
        running = self._running / self._steps
        load = self._loads.get(load_class(running))
        rate = self._tokens / self._seconds / running
        return load is not None and rate < load.seen[Mode.SP].rate * (1 - self.clear)

    def _look(self) -> None:
        running = self._running / self._steps
        load = self._loads.setdefault(load_class(running), _Load())
        seen = load.seen[self.mode]
        rate = self._tokens / self._seconds / running
        seen.looks += 1
        share = 1.0 / min(seen.looks, self.memory)
        seen.rate += share * (rate - seen.rate)
        self._clear()
        if self._trial is not None:
            self._trial -= 1  # below 0: in vain
            if self._trial > 0:
                return
            self._trial = None
            load.looks_since_trial = 0
        self._decide(load)

    def _decide(self, load: _Load) -> None:
        other = next(mode for mode in MODES if mode is not self.mode)
        mine, theirs = load.seen[self.mode], load.seen[other]
        load.looks_since_trial += 1
        if theirs.looks and theirs.rate > mine.rate * (1 + self.margin):
            self._change(other, Reason.MEASURED)
        elif load.looks_since_trial >= self._looks_between(mine, theirs):
            self._trial = self.trial_looks
            load.looks_since_trial = 0
            self._change(other, Reason.TRIAL)

    def _looks_between(self, mine: _Seen, theirs: _Seen) -> float:
        """Looks in this mode before the other one is tried again."""
        if not theirs.looks:
            # The first look may stand for a load that passes at once.
            return 2
        loss = max(1.0 - theirs.rate / mine.rate, 0.0) if mine.rate > 0 else 0.0
        return min(max(self.trial_looks * loss / self.price, self.shortest), self.longest)

    def _change(self, mode: Mode, reason: Reason) -> None:
        self.mode, self.reason = mode, reason
        self.num_changes += 1
        self._since_change = 0
        self._clear()

    def _clear(self) -> None:
        self._seconds, self._tokens, self._running, self._steps = 0.0, 0, 0, 0


def load_class(running: float) -> int:
    """Half an octave: 1, 1.4, 2, 2.8, 4 ... requests."""
    return round(2 * math.log2(max(running, 1.0)))
