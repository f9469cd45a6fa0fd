# SPDX-License-Identifier: Apache-2.0
"""Front end: `spexis:*` and `vllm:spec_decode_*` series on /metrics, and the log line.

vLLM makes its own `vllm:spec_decode_*` series only with a speculative_config, which Spexis has
not; they are made here with vLLM's own class, so stock dashboards work. The log line comes beside
vLLM's "SpecDecoding metrics" line, every VLLM_LOG_STATS_INTERVAL seconds.

Series (labels model_name, engine; counters end in _total):
    spexis:pipeline_slot{stage,kind}   row passes per stage: prompt, real, draft, discarded, stale;
                                       kind idle: steps the stage had no work
    spexis:steps, spexis:tokens, spexis:discarded_rows, spexis:held_rows
    spexis:plain_steps, spexis:mode_changes, spexis:forecasts, spexis:forecasts_exceeded
    spexis:drafts{drafter_version}, spexis:accepted_drafts{drafter_version}
What the policies see and decided are gauges, in policy_series.py.

Invariant: every series here is a counter, so several API servers add up; rates are the reader's
work.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from spexis.config import SpexisConfig
from spexis.core.law import rows_per_token
from spexis.observability import wire
from spexis.observability.counters import FIELDS, ratio
from spexis.observability.policy_series import PolicySeries

logger = init_logger("vllm.spexis")

SLOT_KINDS = ("prompt", "real", "draft", "discarded", "stale", "idle")


def slots_by_kind(counts: dict[str, int], num_stages: int) -> dict[str, float]:
    """Slots of ONE stage. Every row passes every stage; idle steps are shared out evenly."""
    return {
        "prompt": counts["rows"] - counts["decode_rows"],
        "real": counts["tokens"] - counts["accepted"],
        "draft": counts["accepted"],
        "discarded": counts["discarded_rows"],
        "stale": counts["stale_rows"],
        "idle": counts["idle_slots"] / num_stages,
    }


class SpexisStatLogger(AggregateStatLoggerBase):
    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        config = SpexisConfig.from_vllm(vllm_config)
        assert config is not None, "SpexisStatLogger is for engines that asked for Spexis"
        self.engine_indexes = engine_indexes
        self.num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self.version = _configured_version(config)
        self.model_name = vllm_config.model_config.served_model_name
        self._interval = {index: dict.fromkeys(FIELDS, 0) for index in engine_indexes}
        _unregister()
        labels = ["model_name", "engine"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"spexis:{name}", text, labelnames=[*labels, *more])

        self._slots = counter(
            "pipeline_slot",
            "Row passes by stage and kind; kind idle counts steps without work.",
            "stage",
            "kind",
        )
        self._plain = {
            "steps": counter("steps", "Non-empty scheduler steps."),
            "tokens": counter("tokens", "Tokens verified by the last stage."),
            "discarded_rows": counter("discarded_rows", "Rows run on or behind a wrong guess."),
            "held": counter("held_rows", "Guesses not run on purpose."),
            "plain_steps": counter("plain_steps", "Steps while speculation was off for all."),
            "mode_changes": counter("mode_changes", "Times speculation went off or on."),
            "forecasts": counter("forecasts", "Forecasts of KV memory whose time came."),
            "forecasts_exceeded": counter("forecasts_exceeded", "Of these, those too low."),
        }
        self._by_version = {
            "drafts": counter("drafts", "Guesses whose truth is known.", "drafter_version"),
            "accepted": counter("accepted_drafts", "Guesses that were right.", "drafter_version"),
        }
        self._stock = SpecDecodingProm(
            SimpleNamespace(num_speculative_tokens=1),
            labels,
            {index: [self.model_name, str(index)] for index in engine_indexes},
        )
        self._policies = PolicySeries(
            self.model_name,
            engine_indexes,
            lookahead=config.lookahead,
            live_mode=config.mode == "auto",
        )
        for index in engine_indexes:  # series exist from the start, at 0
            self._count(index, dict.fromkeys(FIELDS, 0), None)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None or engine_idx not in self._interval:
            return
        counts, version = wire.read(scheduler_stats)
        self._count(engine_idx, counts, version)
        self._policies.set(engine_idx, wire.read_state(scheduler_stats))
        if scheduler_stats.spec_decoding_stats is not None:
            self._stock.observe(scheduler_stats.spec_decoding_stats, engine_idx)
        interval = self._interval[engine_idx]
        for name, value in counts.items():
            interval[name] += value

    def _count(self, index: int, counts: dict[str, int], version: str | None) -> None:
        labels = (self.model_name, str(index))
        for kind, value in slots_by_kind(counts, self.num_stages).items():
            for stage in range(self.num_stages):
                # A row can be scheduled in one report and come back in the next: never below 0.
                self._slots.labels(*labels, str(stage), kind).inc(max(0, value))
        for name, series in self._plain.items():
            series.labels(*labels).inc(counts[name])
        for name, series in self._by_version.items():
            series.labels(*labels, version or self.version).inc(counts[name])

    def log(self) -> None:
        for index, interval in self._interval.items():
            if interval["steps"]:
                logger.info("Engine %03d: %s", index, log_line(interval, self.num_stages))
            self._interval[index] = dict.fromkeys(FIELDS, 0)

    def log_engine_initialized(self) -> None:
        pass


def log_line(counts: dict[str, int], num_stages: int) -> str:
    """One interval in vLLM's style: name: value, comma separated."""
    acceptance = ratio(counts["accepted"], counts["drafts"])
    rows = ratio(counts["tokens"] + counts["discarded_rows"], counts["tokens"])
    law = None if acceptance is None else rows_per_token(acceptance, num_stages)
    idle = ratio(counts["idle_slots"], counts["steps"] * num_stages)
    return (
        "Spexis metrics: "
        f"Draft acceptance rate: {_percent(acceptance)}, "
        f"Rows per token: {_number(rows)} (law: {_number(law)}), "
        f"Tokens per step: {_number(ratio(counts['tokens'], counts['steps']))}, "
        f"Discarded: {counts['discarded_rows']} rows, "
        f"Stage idle: {_percent(idle)}"
    )


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _configured_version(config: SpexisConfig) -> str:
    """Label for drafts: the exit drafter's own version, the method's name otherwise."""
    if config.drafter.method != "exit" or config.drafter.model is None:
        return config.drafter.method
    from pathlib import Path

    from spexis.drafters import read_config

    return str(read_config(Path(config.drafter.model)).get("version", "unknown"))


def _unregister() -> None:
    """A second engine in one process starts its series anew, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("spexis:"):
            REGISTRY.unregister(collector)
