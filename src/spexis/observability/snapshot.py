# SPDX-License-Identifier: Apache-2.0
"""What a running server does, from two looks at its /metrics. Pure: scrapes in, one record out; who
fetches is cli/top.py, who draws is cli/top_view.py.

    before, after = parse(text, time=10.0), parse(later_text, time=11.0)
    take_snapshot(before, after).tokens_per_second

A histogram's quantiles and a counter's rate are differences between the looks (scrape.py), summed
over engines.

Invariant: a series the server does not export gives None or an empty tuple, and a line in `notes`;
nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from spexis.core.law import rows_per_token
from spexis.observability.counters import ratio
from spexis.observability.scrape import Latency, Scrape, Window

ROW_KINDS = ("real", "draft", "discarded", "prompt", "stale")

TTFT = "vllm:time_to_first_token_seconds"
TIME_PER_TOKEN = "vllm:inter_token_latency_seconds"
VLLM_SERIES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    f"{TTFT}_count",
    f"{TIME_PER_TOKEN}_count",
)
SPEXIS_SERIES = (
    "spexis:pipeline_slot_total",
    "spexis:steps_total",
    "spexis:tokens_total",
    "spexis:discarded_rows_total",
    "spexis:held_rows_total",
    "spexis:plain_steps_total",
    "spexis:mode_changes_total",
    "spexis:forecasts_total",
    "spexis:forecasts_exceeded_total",
    "spexis:drafts_total",
    "spexis:accepted_drafts_total",
)
AHEAD = "spexis:lookahead_kv_tokens"
DECISION = "spexis:decision"
# Of servers that have such a policy on; without one they are not missed.
POLICY_SERIES = (
    "spexis:held_requests",
    "spexis:kv_tokens",
    AHEAD,
    "spexis:lookahead_due_kv_tokens",
    "spexis:lookahead_came_kv_tokens",
    DECISION,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    stage: str
    rows: dict[str, float]
    """Row passes per second by kind (ROW_KINDS)."""
    idle: float | None
    """Share of its steps without work, 0 to 1; None if no step was scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    version: str
    drafts_per_second: float
    acceptance: float | None
    acceptance_since_start: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The last decision of a policy; several engines may differ."""

    policy: str
    choice: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Per second and shares (0 to 1) between the two looks, where nothing else is said."""

    seconds: float
    """Between the looks."""
    restarted: bool
    """The server restarted between the looks."""
    models: tuple[str, ...]
    engines: int
    running: float | None
    waiting: float | None
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    ttft: Latency | None
    time_per_token: Latency | None
    kv_usage: float | None
    """Mean over engines."""
    preemptions: float | None
    """Number between the looks."""
    preemptions_since_start: float | None
    stages: tuple[Stage, ...]
    drafters: tuple[Drafter, ...]
    acceptance: float | None
    """Of all versions' drafts."""
    steps_per_second: float | None
    tokens_per_step: float | None
    rows_per_token: float | None
    rows_per_token_law: float | None
    """1 + (1-p)(N-1) at the acceptance p between the looks."""
    rows_per_token_since_start: float | None
    held_rows_per_second: float | None
    plain_share: float | None
    """Share of steps for which speculation was off for all requests."""
    mode_changes: float | None
    """Since the server's start."""
    # From here to `decisions`: POLICY_SERIES, and what look-ahead counted.
    held_requests: float | None
    kv_tokens: float | None
    lookahead_kv_tokens: float | None
    """The highest of the upper quantiles ahead."""
    lookahead_steps: int | None
    """How many steps ahead that is."""
    due_kv_tokens: float | None
    """The newest forecast that came due."""
    came_kv_tokens: float | None
    """What its requests held then."""
    forecasts: float | None
    """That came due, since the server's start."""
    forecasts_exceeded: float | None
    """Share of these that were too low."""
    decisions: tuple[Decided, ...]
    notes: tuple[str, ...]
    """What could not be shown and why, one line each."""


def take_snapshot(before: Scrape, after: Scrape) -> Snapshot:
    """`after` must be later than `before`."""
    window = Window(before, after)
    stages = _stages(window)
    drafts, accepted = (window.grown(f"spexis:{n}_total") for n in ("drafts", "accepted_drafts"))
    tokens, discarded = (window.grown(f"spexis:{n}_total") for n in ("tokens", "discarded_rows"))
    total = {n: window.now(f"spexis:{n}_total") for n in ("tokens", "discarded_rows")}
    acceptance = ratio(accepted, drafts)
    law = None
    if acceptance is not None and stages:
        law = rows_per_token(min(1.0, acceptance), len(stages))
    ahead = window.now_by(AHEAD, "steps")
    highest = max(ahead, key=lambda steps: ahead[steps], default=None)
    forecasts = window.now("spexis:forecasts_total")
    return Snapshot(
        seconds=window.seconds,
        restarted=window.restarted,
        models=window.values_of("model_name"),
        engines=len(window.values_of("engine")),
        running=window.now("vllm:num_requests_running"),
        waiting=window.now("vllm:num_requests_waiting"),
        tokens_per_second=window.rate("vllm:generation_tokens_total"),
        prompt_tokens_per_second=window.rate("vllm:prompt_tokens_total"),
        ttft=window.latency(TTFT),
        time_per_token=window.latency(TIME_PER_TOKEN),
        kv_usage=window.mean("vllm:kv_cache_usage_perc"),
        preemptions=window.grown("vllm:num_preemptions_total"),
        preemptions_since_start=window.now("vllm:num_preemptions_total"),
        stages=stages,
        drafters=_drafters(window),
        acceptance=acceptance,
        steps_per_second=window.rate("spexis:steps_total"),
        tokens_per_step=ratio(tokens, window.grown("spexis:steps_total")),
        rows_per_token=_rows_per_token(tokens, discarded),
        rows_per_token_law=law,
        rows_per_token_since_start=_rows_per_token(total["tokens"], total["discarded_rows"]),
        held_rows_per_second=window.rate("spexis:held_rows_total"),
        plain_share=ratio(
            window.grown("spexis:plain_steps_total"), window.grown("spexis:steps_total")
        ),
        mode_changes=window.now("spexis:mode_changes_total"),
        held_requests=window.now("spexis:held_requests"),
        kv_tokens=window.now("spexis:kv_tokens"),
        lookahead_kv_tokens=None if highest is None else ahead[highest],
        lookahead_steps=None if highest is None else int(highest),
        due_kv_tokens=window.now("spexis:lookahead_due_kv_tokens"),
        came_kv_tokens=window.now("spexis:lookahead_came_kv_tokens"),
        forecasts=forecasts,
        forecasts_exceeded=ratio(window.now("spexis:forecasts_exceeded_total"), forecasts),
        decisions=_decisions(window),
        notes=_notes(after),
    )


def _stages(window: Window) -> tuple[Stage, ...]:
    slots = window.grown_by("spexis:pipeline_slot_total", "stage", "kind")
    steps = window.grown("spexis:steps_total")
    names = sorted({stage for stage, _ in slots}, key=lambda s: (len(s), s))  # 2 before 10
    return tuple(
        Stage(
            stage=stage,
            rows={kind: slots.get((stage, kind), 0.0) / window.seconds for kind in ROW_KINDS},
            idle=ratio(slots.get((stage, "idle")), steps),
        )
        for stage in names
    )


def _drafters(window: Window) -> tuple[Drafter, ...]:
    label = "drafter_version"
    drafts, accepted = "spexis:drafts_total", "spexis:accepted_drafts_total"
    grown, grown_accepted = window.grown_by(drafts, label), window.grown_by(accepted, label)
    total, total_accepted = window.now_by(drafts, label), window.now_by(accepted, label)
    return tuple(
        Drafter(
            version=version,
            drafts_per_second=number / window.seconds,
            acceptance=ratio(grown_accepted.get((version,)), number),
            acceptance_since_start=ratio(total_accepted.get(version), total[version]),
        )
        for (version,), number in sorted(grown.items())
    )


def _decisions(window: Window) -> tuple[Decided, ...]:
    labels = [dict(key) for key, value in window.after.get(DECISION, {}).items() if value > 0]
    names = ("policy", "choice", "reason")
    found = sorted({tuple(which.get(name, "") for name in names) for which in labels})
    return tuple(Decided(**dict(zip(names, values, strict=True))) for values in found)


def _notes(scrape: Scrape) -> tuple[str, ...]:
    notes = []
    for prefix, names, why in (
        ("vllm:", VLLM_SERIES, "no vLLM server, or its statistics are off (--disable-log-stats)"),
        (
            "spexis:",
            SPEXIS_SERIES,
            "Spexis is not on in this server, or it runs vLLM's Rust front end",
        ),
    ):
        if not any(name.startswith(prefix) for name in scrape.series):
            notes.append(f"no {prefix}* series: {why}")
        elif missing := [name for name in names if name not in scrape.series]:
            notes.append(f"this server does not export {', '.join(missing)}")
    return tuple(notes)


def _rows_per_token(tokens: float | None, discarded: float | None) -> float | None:
    return None if tokens is None or discarded is None else ratio(tokens + discarded, tokens)
