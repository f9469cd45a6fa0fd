# SPDX-License-Identifier: Apache-2.0
"""From the engine core to the front end: Spexis' counters inside vLLM's own SchedulerStats.

Scheduler side:   stats = attach(super().make_stats(...), self.counters, policy_state(self))
Front-end side:   counts, version = read(scheduler_stats)
                  state = read_state(scheduler_stats)

SchedulerStats crosses processes as msgpack and is decoded by its declared fields, so a new field
or a subclass would be dropped on the way. `running_lora_adapters` is a dict[str, int] that vLLM
reads only with LoRA on, which Spexis refuses; a front end that knows nothing of Spexis ignores
it. (`kv_connector_stats` would be free-form too, but stock loggers crash on it without a
connector.) `spec_decoding_stats` is filled the stock way: one draft token per draft.

Invariant: sums over what read() returns equal the counters, whichever front end got which part;
read_state() is what holds now, whole or None.
"""

from __future__ import annotations

from typing import Any

from spexis.core.decisions import Decision
from spexis.observability.counters import FIELDS, SpexisCounters
from spexis.observability.policy_state import PolicyState

PREFIX = "spexis:"
VERSION = "version:"
NOW = "now:"
WHY = "why:"


def attach(stats: Any, counters: SpexisCounters, state: PolicyState | None = None) -> Any:
    """Add what `counters` gained since the last call, and `state`, to `stats` (None stays None)."""
    if stats is None:  # statistics are off
        return None
    grown = counters.take()
    carrier = stats.running_lora_adapters
    for name, value in grown.items():
        carrier[PREFIX + name] = value
    if grown and counters.drafter_version:
        carrier[PREFIX + VERSION + counters.drafter_version] = 1
    if grown.get("drafts"):
        stats.spec_decoding_stats = spec_decoding_stats(grown)
    if state is None and counters.held:  # held by a policy that has nothing else to show
        state = PolicyState()
    if state is not None:
        held = grown.get("held", 0) / max(grown.get("steps", 0), 1)
        carrier[f"{PREFIX}{NOW}held_requests"] = round(held)
        for name, value in state.gauges.items():
            carrier[f"{PREFIX}{NOW}{name}"] = value
        for policy, (choice, reason) in state.decisions.items():
            carrier[f"{PREFIX}{WHY}{policy}:{choice}:{reason}"] = 1
    return stats


def spec_decoding_stats(grown: dict[str, int]) -> Any:
    """vLLM's own speculation statistics: every draft is one token at position 0."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    drafts, accepted = grown["drafts"], grown.get("accepted", 0)
    return SpecDecodingStats(
        num_spec_tokens=1,
        num_drafts=drafts,
        num_draft_tokens=drafts,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=[accepted],
        num_draft_tokens_per_pos=[drafts],
    )


def read(stats: Any) -> tuple[dict[str, int], str | None]:
    """Counters gained (all FIELDS, zeros included) and the drafter's version if it was sent."""
    carrier = stats.running_lora_adapters
    version = None
    for key in carrier:
        if key.startswith(PREFIX + VERSION):
            version = key[len(PREFIX + VERSION) :]
    return {name: carrier.get(PREFIX + name, 0) for name in FIELDS}, version


def read_state(stats: Any) -> PolicyState | None:
    """What the policies said; None if no policy is on."""
    state = PolicyState()
    for key, value in stats.running_lora_adapters.items():
        if key.startswith(PREFIX + NOW):
            state.gauges[key[len(PREFIX + NOW) :]] = value
        elif key.startswith(PREFIX + WHY):
            policy, choice, reason = key[len(PREFIX + WHY) :].split(":")
            state.decisions[policy] = Decision(choice, reason)
    return state if state.gauges or state.decisions else None
