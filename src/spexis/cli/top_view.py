# SPDX-License-Identifier: Apache-2.0
"""Draws what `spexis top` shows: a Snapshot and a short history as a rich renderable.

    console.print(view(snapshot, history, title="http://localhost:8000/metrics"))

A stage's bar is its time: the idle part by steps without work, the rest shared out over the rows
that ran, by kind (R real, K draft kept, D draft discarded, P prompt, S stale).

Invariant: draws only what the snapshot holds; a value that is None is a dash, a part the server
does not export is left out and named in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spexis.observability.scrape import Latency
from spexis.observability.snapshot import ROW_KINDS, Snapshot, Stage

BAR_WIDTH = 20
NONE = "-"
SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.-=+*#@"
# Kind -> (style, letter in the bar, word); the timeline's colours as far as terminals have them.
KINDS = {
    "real": ("blue", "R", "real"),
    "draft": ("green", "K", "kept"),
    "discarded": ("red", "D", "discarded"),
    "prompt": ("cyan", "P", "prompt"),
    "stale": ("magenta", "S", "stale"),
    "idle": ("bright_black", ".", "idle"),
}


def view(
    now: Snapshot, history: Sequence[Snapshot] = (), title: str = "", ascii_only: bool = False
) -> RenderableType:
    """history: oldest first, with `now` as the last one; drawn if it holds two or more."""
    parts: list[RenderableType] = [_title(now, title)]
    if now.restarted:
        parts.append(Text("the server restarted; counted from its start", style="yellow"))
    parts += [Text(note, style="yellow") for note in now.notes]
    parts.append(_facts(now))
    if now.stages:
        parts.append(_stages(now))
    if now.drafters:
        parts.append(_drafters(now))
    if len(history) > 1:
        parts.append(_history(history, ascii_only))
    return Group(*parts)


def sparkline(values: Iterable[float | None], marks: str = SPARKS, top: float | None = None) -> str:
    """One mark a value, from 0 to the largest, or to `top`; None is a space."""
    values = list(values)
    if top is None:
        top = max((v for v in values if v is not None), default=0.0)
    if top <= 0:
        return "".join(" " if v is None else marks[0] for v in values)
    last = len(marks) - 1
    return "".join(" " if v is None else marks[round(max(0.0, v) / top * last)] for v in values)


def bar_parts(stage: Stage, width: int = BAR_WIDTH) -> dict[str, int]:
    """Cells by kind (idle last), `width` together; empty for a stage that ran nothing."""
    rows = sum(stage.rows.values())
    if rows <= 0 or stage.idle is None:
        return {}
    busy = 1.0 - min(1.0, stage.idle)
    shares = {kind: busy * stage.rows.get(kind, 0.0) / rows for kind in ROW_KINDS}
    parts, reached, given = {}, 0.0, 0
    for kind, share in shares.items():  # ends are rounded, so that the parts fill the bar
        reached += share
        end = round(reached * width)
        parts[kind], given = end - given, end
    return parts | {"idle": width - given}


def _title(now: Snapshot, title: str) -> Text:
    engines = f"{now.engines} engines" if now.engines > 1 else ""
    facts = (title, ", ".join(now.models), engines, f"over {now.seconds:.1f} s")
    return Text("spexis top  ", style="bold") + Text("  ".join(f for f in facts if f), style="")


def _facts(now: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()

    def row(label: str, *facts: str | None) -> None:
        table.add_row(label, Text("   ".join(fact for fact in facts if fact)))

    row(
        "requests",
        f"running {_count(now.running)}",
        f"waiting {_count(now.waiting)}",
        _if(now.held_requests, f"held {_count(now.held_requests)}"),
        f"preemptions {_count(now.preemptions)}",
        _if(now.preemptions_since_start, f"since start {_count(now.preemptions_since_start)}"),
    )
    row(
        "tokens/s",
        f"generated {_rate(now.tokens_per_second)}",
        f"prompt {_rate(now.prompt_tokens_per_second)}",
    )
    row("first token", *_latency(now.ttft))
    row("per token", *_latency(now.time_per_token))
    row(
        "KV cache",
        f"used {_share(now.kv_usage)}",
        _if(now.kv_tokens, f"tokens {_count(now.kv_tokens)}"),
    )
    if now.lookahead_kv_tokens is not None:
        seen = bool(now.forecasts)
        row(
            "KV forecast",
            f"at most {_count(now.lookahead_kv_tokens)} in {now.lookahead_steps} steps",
            f"due now {_count(now.due_kv_tokens if seen else None)}",
            f"came {_count(now.came_kv_tokens if seen else None)}",
            f"too low {_share(now.forecasts_exceeded)} of {_count(now.forecasts)}",
        )
    if now.stages:
        row(
            "rows/token",
            f"{_number(now.rows_per_token)}",
            f"law {_number(now.rows_per_token_law)}",
            f"since start {_number(now.rows_per_token_since_start)}",
            f"held rows/s {_rate(now.held_rows_per_second)}",
        )
        row(
            "steps/s",
            f"{_rate(now.steps_per_second)}",
            f"tokens/step {_number(now.tokens_per_step)}",
        )
    if now.plain_share is not None:
        changes = _if(now.mode_changes, f"changes since start {_count(now.mode_changes)}")
        row("speculation", f"on {_share(1 - now.plain_share)} of steps", changes)
    for one in now.decisions:
        row(one.policy, one.choice, one.reason.replace("_", " "))
    return table


def _stages(now: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("its time", min_width=BAR_WIDTH, no_wrap=True)
    for style, letter, word in KINDS.values():
        table.add_column(Text(f"{letter} {word}", style=style), justify="right")
    for stage in now.stages:
        bar = Text()
        for kind, cells in bar_parts(stage).items():
            style, letter, _ = KINDS[kind]
            bar.append(letter * cells, style=f"{style} reverse" if kind != "idle" else style)
        rows = (f"{_rate(stage.rows.get(kind))}/s" for kind in ROW_KINDS)
        table.add_row(stage.stage, bar, *rows, _share(stage.idle))
    return table


def _drafters(now: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("drafter", "drafts/s", "right", "since start"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for drafter in now.drafters:
        table.add_row(
            Text(drafter.version),
            _rate(drafter.drafts_per_second),
            _share(drafter.acceptance),
            _share(drafter.acceptance_since_start),
        )
    return table


def _history(history: Sequence[Snapshot], ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    marks = ASCII_SPARKS if ascii_only else SPARKS
    due, came = [s.due_kv_tokens for s in history], [s.came_kv_tokens for s in history]
    both = max((tokens for tokens in (*due, *came) if tokens is not None), default=0.0)
    for label, values, shown, top in (
        ("tokens/s", [s.tokens_per_second for s in history], _rate, None),
        ("running", [s.running for s in history], _count, None),
        ("KV used", [s.kv_usage for s in history], _share, None),
        ("KV due", due, _count, both),
        ("KV came", came, _count, both),
        ("right", [s.acceptance for s in history], _share, None),
        ("rows/token", [s.rows_per_token for s in history], _number, None),
    ):
        known = [v for v in values if v is not None]
        if known:
            line = Text(sparkline(values, marks, top), style="green")
            table.add_row(label, line, f"max {shown(max(known))}")
    return table


def _latency(latency: Latency | None) -> tuple[str, ...]:
    if latency is None or not latency.count:
        return (NONE,)
    named = (("mean", latency.mean), ("p50", latency.p50), ("p99", latency.p99))
    return (*(f"{name} {_seconds(value)}" for name, value in named), f"of {latency.count:.0f}")


def _if(value: float | None, text: str) -> str | None:
    return None if value is None else text


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"
