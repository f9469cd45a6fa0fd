# SPDX-License-Identifier: Apache-2.0
"""From the engine core to the front end: Spexis' counters inside vLLM's own SchedulerStats.

Scheduler side:   stats = attach(super().make_stats(...), self.counters)
Front-end side:   counts = read(scheduler_stats)

SchedulerStats crosses processes as msgpack and is decoded by its declared fields, so a new field
or a subclass would be dropped on the way. `running_lora_adapters` is a dict[str, int] that vLLM
reads only with LoRA on, which Spexis refuses; a front end that knows nothing of Spexis ignores
it. (`kv_connector_stats` would be free-form too, but stock loggers crash on it without a
connector.) `spec_decoding_stats` is filled the stock way: one draft token per draft.

Invariant: sums over what read() returns equal the counters, whichever front end got which part.
"""

from __future__ import annotations

from typing import Any

from spexis.observability.counters import FIELDS, SpexisCounters

PREFIX = "spexis:"
VERSION = "version:"


def attach(stats: Any, counters: SpexisCounters) -> Any:
    """Add what `counters` gained since the last call to `stats` (None stays None)."""
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
