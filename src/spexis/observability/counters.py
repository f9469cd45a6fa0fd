# SPDX-License-Identifier: Apache-2.0
"""Counters of what the pipeline ran. Pure Python; the scheduler adds to the fields directly.

    counters = SpexisCounters(num_stages=2)
    counters.observe_step(num_rows=3, num_decode_rows=2, num_speculative_rows=1, num_in_flight=2)
    counters.tokens += 1                       # as verdicts come back
    counters.take()                            # what changed since the last take(), for the wire

Definitions (a row is one request in one step; every row passes every stage):
- token row: a row that returned a token. It either ran a guess that proved right (`accepted`) or
  a known token (first row after the prompt, restart after a rejection, stock cadence).
- discarded row: a row that ran and returned nothing.
- draft: a guess whose truth became known. It is counted once, then: accepted if the row that ran
  it returned a token, rejected if that row is the first one discarded after a token row. The rows
  behind a rejected guess were never verified, so they are discarded rows but not drafts.
- idle slot: a stage without a step. Counted as stages minus steps in flight when a step is
  scheduled; it says how well the scheduler fills the pipeline, not how long a stage waited
  (stages of unequal length idle too; the timeline shows that).

Invariant: decode rows that came back = tokens + discarded_rows + unrun_rows (+ stale_rows, whose
request was finished or preempted meanwhile), and rejected <= discarded_rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Sent to the front end; all are whole numbers that only grow.
FIELDS = (
    "steps",
    "rows",
    "decode_rows",
    "speculative_rows",
    "tokens",
    "discarded_rows",
    "stale_rows",
    "held",
    "unrun_rows",
    "preemptions",
    "drafts",
    "accepted",
    "idle_slots",
    "plain_steps",
    "mode_changes",
    "forecasts",
    "forecasts_exceeded",
)


@dataclass(kw_only=True, slots=True)
class SpexisCounters:
    num_stages: int
    """N; not a counter."""
    drafter_version: str = ""
    """Label of drafts counted from now on; "" means the one in the configuration."""
    steps: int = 0
    """Non-empty steps scheduled."""
    rows: int = 0
    """Rows scheduled, prompt chunks included."""
    decode_rows: int = 0
    """Rows scheduled that sample."""
    speculative_rows: int = 0
    """Decode rows scheduled while the request's last token was not verified yet."""
    tokens: int = 0
    """Rows that returned a token."""
    discarded_rows: int = 0
    """Rows that ran behind, or on, a wrong guess."""
    stale_rows: int = 0
    """Rows that came back after their request had finished or been preempted."""
    held: int = 0
    """Times a request that could have run a guess was left out on purpose."""
    unrun_rows: int = 0
    """Of these, rows that were scheduled and that the first stage did not run (selection)."""
    preemptions: int = 0
    """Requests preempted."""
    drafts: int = 0
    """Guesses whose truth is known."""
    accepted: int = 0
    """Guesses that were right."""
    idle_slots: int = 0
    """Stage steps without work, all stages together."""
    plain_steps: int = 0
    """Steps scheduled while speculation was off for all requests."""
    mode_changes: int = 0
    """Times that speculation was switched on or off (`mode`: "auto")."""
    forecasts: int = 0
    """Forecasts of KV memory whose time came (engine/kv_forecast.py)."""
    forecasts_exceeded: int = 0
    """Of these, those that were too low."""
    _taken: dict[str, int] = field(default_factory=dict, repr=False)

    def observe_step(
        self,
        *,
        num_rows: int,
        num_decode_rows: int,
        num_speculative_rows: int = 0,
        num_in_flight: int | None = None,
    ) -> None:
        """A non-empty step was scheduled; `num_in_flight` counts it."""
        self.steps += 1
        self.rows += num_rows
        self.decode_rows += num_decode_rows
        self.speculative_rows += num_speculative_rows
        if num_in_flight is not None:
            self.idle_slots += max(0, self.num_stages - num_in_flight)

    @property
    def acceptance(self) -> float | None:
        return ratio(self.accepted, self.drafts)

    @property
    def rows_per_token(self) -> float | None:
        """Decode rows run per token; the law says 1 + (1-p)(N-1)."""
        return ratio(self.tokens + self.discarded_rows, self.tokens)

    def snapshot(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in FIELDS}

    def take(self) -> dict[str, int]:
        """What grew since the last take(); unchanged counters are left out."""
        now = self.snapshot()
        grown = {
            name: value - self._taken.get(name, 0)
            for name, value in now.items()
            if value != self._taken.get(name, 0)
        }
        self._taken = now
        return grown


def ratio(part: float | None, whole: float | None) -> float | None:
    """None where there is nothing to divide, or a number is not known."""
    return None if part is None or not whole else part / whole
