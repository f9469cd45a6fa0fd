# SPDX-License-Identifier: Apache-2.0
"""Front end: the policies' gauges on /metrics (stat_logger.py has the counters).

    series = PolicySeries("model", [0], lookahead=True, live_mode=False)
    series.set(0, wire.read_state(scheduler_stats))

    spexis:held_requests               requests held back in the newest step
    spexis:kv_tokens                   KV tokens in blocks in use
    spexis:lookahead_kv_tokens{steps}  upper quantile so many steps ahead
    spexis:lookahead_due_kv_tokens, spexis:lookahead_came_kv_tokens
                                       the newest forecast that came due, and what came
    spexis:decision{policy,choice,reason}   1 for each policy's last decision, 0 for its others

A series exists from the start where the configuration has its policy, else from the first report
of one, so a server without policies has none of them.

Invariant: label values come from fixed lists (decisions.py, HORIZONS), whatever is reported. With
several API servers each sees some of the reports, so all values of a report are written, also
those that this process would not have to change: the most recent one counts.
"""

from __future__ import annotations

from prometheus_client import Gauge

from spexis.core.decisions import DECISIONS, Decision
from spexis.observability.policy_state import AHEAD, STEPS, PolicyState

GAUGES = {
    "held_requests": "Requests held back in the newest step.",
    "kv_tokens": "KV tokens in blocks in use.",
    "lookahead_due_kv_tokens": "The newest forecast of KV tokens that came due.",
    "lookahead_came_kv_tokens": "KV tokens that the requests of that forecast held then.",
    AHEAD: "Upper quantile of the KV tokens held so many steps ahead.",
}


class PolicySeries:
    def __init__(
        self, model_name: str, engine_indexes: list[int], *, lookahead: bool, live_mode: bool
    ):
        """lookahead, live_mode: whether the configuration has this policy."""
        self.model_name = model_name
        labels = ["model_name", "engine"]
        self._gauges = {
            name: _gauge(name, text, [*labels, "steps"] if name == AHEAD else labels)
            for name, text in GAUGES.items()
        }
        self._decision = _gauge(
            "decision",
            "1 for the last decision of each policy, 0 for its others.",
            [*labels, "policy", "choice", "reason"],
        )
        state = PolicyState()
        if lookahead or live_mode:
            state.gauges["held_requests"] = 0
        if lookahead:
            ahead = [f"{AHEAD}/{steps}" for steps in STEPS]
            state.gauges |= dict.fromkeys([*GAUGES.keys() - {AHEAD}, *ahead], 0)
        for policy, on in (("lookahead", lookahead), ("mode", live_mode)):
            if on:
                state.decisions[policy] = DECISIONS[policy][0]
        for index in engine_indexes:
            self.set(index, state)

    def set(self, index: int, state: PolicyState | None) -> None:
        if state is None:
            return
        labels = (self.model_name, str(index))
        for name, value in state.gauges.items():
            name, _, steps = name.partition("/")
            if name in self._gauges and (steps in STEPS) == (name == AHEAD):
                more = (steps,) if steps else ()
                self._gauges[name].labels(*labels, *more).set(value)
        for policy, decision in state.decisions.items():
            if decision in DECISIONS.get(policy, ()):
                self._decide(labels, policy, decision)

    def _decide(self, labels: tuple[str, str], policy: str, decision: Decision) -> None:
        for one in DECISIONS[policy]:
            self._decision.labels(*labels, policy, *one).set(one == decision)


def _gauge(name: str, text: str, labels: list[str]) -> Gauge:
    return Gauge(f"spexis:{name}", text, labelnames=labels, multiprocess_mode="mostrecent")
