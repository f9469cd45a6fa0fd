# SPDX-License-Identifier: Apache-2.0
"""The six settings in which the simulator is held against the engine, and how they are compared.

    run = simulate(setting, trace, blocks=31, acceptance=0.65, cost=cost)   # means of some seeds
    row = compared(setting.name, together(measured), together([run]))       # what is off, "ok"

Drafts are right at random in the simulator, so it runs SEEDS times and its means count. Recomputed
tokens agree within WANTED_RECOMPUTED of the engine's, or where they differ by hardly anything of
what was run at all (FEW_TOKENS): a setting in which next to nothing is preempted has no ratio.

Invariant: no setting's measured times or evictions are looked at by simulate().
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spexis.core.cost_model import CostModel
from spexis.simulator.drafts import DraftSource
from spexis.simulator.serving import Serving, Settings
from spexis.simulator.trace import Trace

STAGES, BLOCK_SIZE, AMPLE = 2, 32, 512
MAX_SEQS, BUDGET = 16, 256
MAX_LEN = 640  # of a request; vLLM starts only where the blocks hold one
LIMIT = 400  # max_tokens that every request states
SEEDS = 8
WANTED_THROUGHPUT, WANTED_RECOMPUTED = 0.10, 0.15
FEW_TOKENS = 0.01  # of all tokens run: a difference so small is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run of the engine that is to be predicted."""

    name: str
    blocks: int
    rate: float | None
    """Requests a second, Poisson; None: all at once."""
    drafter: dict | None = None
    """None: stock vLLM. An oracle's "reference" is filled in."""
    lookahead: bool = False
    seed: int = 0
    rounds: int = 1
    """Times that the requests come, in another order each; where chance says much, more."""

    @property
    def policy(self) -> str:
        return "pp-stock" if self.drafter is None else "sp"

    @property
    def memory(self) -> str:
        return "lookahead" if self.lookahead else "stock"

    @property
    def engine(self) -> tuple:
        """Settings with the same one share an engine; an oracle takes the exit drafter's place."""
        return self.drafter is None, self.blocks, self.lookahead


EXIT = {"method": "exit"}
SHORT = 32  # blocks: about half of what 16 requests want
SETTINGS = (
    Setting(name="pp", blocks=AMPLE, rate=1.2, seed=1),
    Setting(name="pp-short", blocks=SHORT, rate=4.0, seed=2, rounds=3),
    Setting(name="sp", blocks=AMPLE, rate=1.5, drafter=EXIT, seed=3),
    Setting(
        name="sp-oracle",
        blocks=AMPLE,
        rate=None,
        drafter={"method": "oracle", "acceptance": 0.5},
        seed=4,
    ),
    Setting(name="sp-short", blocks=SHORT, rate=4.0, drafter=EXIT, seed=5, rounds=4),
    Setting(
        name="sp-short-lookahead", blocks=SHORT, rate=4.0, drafter=EXIT, lookahead=True, seed=6
    ),
)
QUICK = ("pp-short", "sp")


def simulate(
    setting: Setting,
    trace: Trace,
    *,
    blocks: int,
    acceptance: float | None,
    cost: CostModel,
    ended: Sequence[int] = (),
) -> dict[str, float]:
    """One round: means over SEEDS runs. acceptance: None where nothing is drafted.

    ended: lengths of the answers that the engine had given before, which look-ahead learns from.
    """
    settings = Settings(
        policy=setting.policy,
        memory=setting.memory,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BUDGET,
        kv_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_tokens=LIMIT,
    )
    found = []
    # Without drafts nothing is random.
    for seed in range(1 if acceptance is None else SEEDS):
        serving = Serving(cost, DraftSource(acceptance or 0.0, seed=seed), settings)
        for tokens in ended:
            serving.memory.lengths.observe(tokens)
        result = serving.run(trace)
        record = result.record
        found.append((result.seconds, record.recomputed_tokens, record.evictions))
    seconds, recomputed, evictions = (
        statistics.mean(values) for values in zip(*found, strict=True)
    )
    return {
        "seconds": seconds,
        "tokens": int(trace.output.sum()),
        "recomputed_tokens": recomputed,
        "preemptions": evictions,
    }


def together(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over rounds, and the throughput of all of them."""
    total = {key: sum(r[key] for r in rounds) for key in rounds[0]}
    return total | {"tokens_per_second": total["tokens"] / total["seconds"]}


def compared(name: str, measured: dict[str, Any], simulated: dict[str, Any]) -> dict[str, Any]:
    """One row of the table. measured: also prompt_tokens."""
    throughput = simulated["tokens_per_second"] / measured["tokens_per_second"] - 1
    apart = simulated["recomputed_tokens"] - measured["recomputed_tokens"]
    run = measured["prompt_tokens"] + measured["tokens"] + measured["recomputed_tokens"]
    few = abs(apart) <= FEW_TOKENS * run
    again = measured["recomputed_tokens"]
    recomputed = apart / again if again else None
    close = few or (recomputed is not None and abs(recomputed) <= WANTED_RECOMPUTED)
    return {
        "setting": name,
        "measured": measured,
        "simulated": simulated,
        "throughput_error": throughput,
        "recomputed_error": recomputed,
        "recomputed_few": few,
        "ok": abs(throughput) <= WANTED_THROUGHPUT and close,
    }


def table(rows: Sequence[dict]) -> str:
    lines = [
        f"{'setting':<20}{'tokens/s':>10}{'simulated':>11}{'off':>8}{'again':>8}{'simulated':>11}"
        f"{'off':>8}{'preempted':>11}{'simulated':>11}{'right':>7}"
    ]
    for row in rows:
        real, run = row["measured"], row["simulated"]
        share = lambda value: "-" if value is None else f"{value:+.1%}"  # noqa: E731
        right = f"{real['accepted'] / real['drafts']:.2f}" if real["drafts"] else "-"
        lines.append(
            f"{row['setting']:<20}{real['tokens_per_second']:>10.1f}"
            f"{run['tokens_per_second']:>11.1f}{share(row['throughput_error']):>8}"
            f"{real['recomputed_tokens']:>8}{run['recomputed_tokens']:>11.0f}"
            f"{share(row['recomputed_error']):>8}{real['preemptions']:>11}"
            f"{run['preemptions']:>11.1f}{right:>7}{'' if row['ok'] else '  off'}"
        )
    return "\n".join(lines)
