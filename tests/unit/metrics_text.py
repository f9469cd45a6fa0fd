# SPDX-License-Identifier: Apache-2.0
"""/metrics of a server as text, for tests of what reads it: vLLM's series and Spexis' own.

    served(tokens=150, discarded=50) + stock(generation_tokens=150)
    look(BEFORE, AFTER)                     # the snapshot of two looks two seconds apart

Invariant: names and labels are those of vLLM 0.32 and of stat_logger.py (a
test in test_snapshot.py compares the names).
"""

from spexis.observability.scrape import parse
from spexis.observability.snapshot import Snapshot, take_snapshot

HOST = 'model_name="demo",engine="0"'
STAGES = ("0", "1")


def stock(
    running=2.0,
    waiting=1.0,
    generation_tokens=0.0,
    prompt_tokens=0.0,
    kv_usage=0.25,
    preemptions=0.0,
    ttft=(0, 0, 0),
    per_token=(0, 0, 0),
    engine="0",
) -> str:
    """ttft, per_token: observations within the first bucket, within the second, above both. Bounds
    .1 and .2 s for the first, .01 and .02 s for the second; sums take each at its bucket's middle,
    those above at twice the last bound."""
    labels = HOST.replace('engine="0"', f'engine="{engine}"')
    return "\n".join(
        (
            _plain("vllm:num_requests_running", "gauge", running, labels),
            _plain("vllm:num_requests_waiting", "gauge", waiting, labels),
            _plain("vllm:kv_cache_usage_perc", "gauge", kv_usage, labels),
            _plain("vllm:num_preemptions_total", "counter", preemptions, labels),
            _plain("vllm:prompt_tokens_total", "counter", prompt_tokens, labels),
            _plain("vllm:generation_tokens_total", "counter", generation_tokens, labels),
            _histogram("vllm:time_to_first_token_seconds", (0.1, 0.2), ttft, labels),
            _histogram("vllm:inter_token_latency_seconds", (0.01, 0.02), per_token, labels),
            "",
        )
    )


def served(
    steps=0.0,
    tokens=0.0,
    discarded=0.0,
    drafts=None,
    accepted=None,
    held=0.0,
    plain=0.0,
    mode_changes=0.0,
    forecasts=0.0,
    exceeded=0.0,
    prompt=0.0,
    stale=0.0,
    idle_steps=0.0,
    stages=STAGES,
) -> str:
    """Spexis' series; drafts, accepted: by drafter version. idle_steps: of each stage."""
    drafts, accepted = drafts or {"v1": 0.0}, accepted or {"v1": 0.0}
    right = sum(accepted.values())
    kinds = {
        "prompt": prompt,
        "real": tokens - right,
        "draft": right,
        "discarded": discarded,
        "stale": stale,
        "idle": idle_steps,
    }
    lines = ["# TYPE spexis:pipeline_slot_total counter"]
    lines += [
        f'spexis:pipeline_slot_total{{{HOST},stage="{stage}",kind="{kind}"}} {value}'
        for kind, value in kinds.items()
        for stage in stages
    ]
    for name, value in (
        ("steps", steps),
        ("tokens", tokens),
        ("discarded_rows", discarded),
        ("held_rows", held),
        ("plain_steps", plain),
        ("mode_changes", mode_changes),
        ("forecasts", forecasts),
        ("forecasts_exceeded", exceeded),
    ):
        lines.append(_plain(f"spexis:{name}_total", "counter", value))
    for name, values in (("drafts", drafts), ("accepted_drafts", accepted)):
        lines.append(f"# TYPE spexis:{name}_total counter")
        lines += [
            f'spexis:{name}_total{{{HOST},drafter_version="{version}"}} {value}'
            for version, value in values.items()
        ]
    return "\n".join([*lines, ""])


def policies(held=1, kv=4000, ahead=None, due=4200, came=3900, on=()) -> str:
    """The gauges of policies; ahead: KV tokens by steps. on: (policy, choice, reason, value)."""
    gauges = {
        "held_requests": held,
        "kv_tokens": kv,
        "lookahead_due_kv_tokens": due,
        "lookahead_came_kv_tokens": came,
    }
    lines = [_plain(f"spexis:{name}", "gauge", value) for name, value in gauges.items()]
    lines.append("# TYPE spexis:lookahead_kv_tokens gauge")
    for steps, tokens in (ahead or {"1": 4010, "32": 5000, "256": 800}).items():
        lines.append(f'spexis:lookahead_kv_tokens{{{HOST},steps="{steps}"}} {tokens}')
    lines.append("# TYPE spexis:decision gauge")
    for policy, choice, reason, value in on:
        labels = f'{HOST},policy="{policy}",choice="{choice}",reason="{reason}"'
        lines.append(f"spexis:decision{{{labels}}} {value}")
    return "\n".join([*lines, ""])


def _plain(name: str, kind: str, value: float, labels: str = HOST) -> str:
    return f"# HELP {name} text\n# TYPE {name} {kind}\n{name}{{{labels}}} {value}"


def _histogram(name, bounds, counts, labels) -> str:
    first, second = bounds
    total = counts[0] * first / 2 + counts[1] * (first + second) / 2 + counts[2] * 2 * second
    return "\n".join(
        (
            f"# TYPE {name} histogram",
            f'{name}_bucket{{{labels},le="{first}"}} {counts[0]}',
            f'{name}_bucket{{{labels},le="{second}"}} {counts[0] + counts[1]}',
            f'{name}_bucket{{{labels},le="+Inf"}} {sum(counts)}',
            f"{name}_count{{{labels}}} {sum(counts)}",
            f"{name}_sum{{{labels}}} {total}",
        )
    )


def look(before: str, after: str, seconds: float = 2.0) -> Snapshot:
    return take_snapshot(parse(before, 100.0), parse(after, 100.0 + seconds))


BEFORE = stock(generation_tokens=1000, prompt_tokens=500, preemptions=3) + served(
    steps=1000,
    tokens=1000,
    discarded=300,
    drafts={"v1": 900},
    accepted={"v1": 600},
    idle_steps=100,
)
AFTER = stock(
    running=3,
    waiting=5,
    generation_tokens=1200,
    prompt_tokens=540,
    preemptions=4,
    kv_usage=0.5,
    ttft=(1, 3, 0),
    per_token=(90, 10, 0),
) + served(
    steps=1100,
    tokens=1200,
    discarded=360,
    drafts={"v1": 1000, "v2": 80},
    accepted={"v1": 680, "v2": 72},
    held=8,
    plain=25,
    mode_changes=2,
    prompt=10,
    stale=2,
    idle_steps=105,
)
