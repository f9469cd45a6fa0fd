# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 texts may part, but only where the two best tokens tie within rounding.

    python -m spexis.bench.exact --parts bfloat16

Two engines sum in other orders, so even equal inputs give logits that differ by rounding. How much
is measured where both texts are still the same: the change of the best token's logit from engine to
engine. Where the texts part, the two tokens must be the best two in both engines, and no further
apart than twice that rounding. Invariant: a wrong key, position or token moves logits by far more,
so it is found (tests/engine/test_exact_rounding.py shows it on a broken engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spexis.bench.engines import EngineSpec, Work, write_oracle_file

if TYPE_CHECKING:
    from spexis.bench.exact import Exact

# Two engines' rounding errors of one logit; 99.9 % of what is measured, since one maximum of many
# thousand would let a single wrong row hide itself.
QUANTILE = 0.999


@dataclass(kw_only=True, slots=True)
class Ties:
    rows: int = 0
    parted: int = 0
    """Rows whose texts differ."""
    rounding: float = 0.0
    """Change of a logit between the engines, QUANTILE of all compared positions."""
    positions: int = 0
    gaps: list[float] = field(default_factory=list)
    """How far apart the two tokens were where texts part, in the stock engine."""
    bad: list[str] = field(default_factory=list)
    """Rows whose texts part without a tie."""


def find_ties(stock: dict, ours: dict) -> Ties:
    """Compares results whose rows carry the two best raw logits of every position."""
    ties, changes, partings = Ties(rows=len(stock["rows"])), [], []
    for i, (theirs, row) in enumerate(zip(stock["rows"], ours["rows"], strict=True)):
        a, b = theirs["outputs"][0], row["outputs"][0]
        for at, (x, y) in enumerate(zip(a["token_ids"], b["token_ids"], strict=False)):
            here, there = a["logprobs"][at], b["logprobs"][at]
            if x != y:
                partings.append((i, at, str(x), str(y), here, there))
                break
            changes.append(abs(here[str(x)] - there[str(x)]))
    ties.positions, ties.parted = len(changes), len(partings)
    changes.sort()
    ties.rounding = changes[min(len(changes) - 1, int(QUANTILE * len(changes)))]
    for i, at, x, y, here, there in partings:
        if y not in here or x not in there:
            ties.bad.append(f"row {i}: at {at} tokens {x} and {y} are not the best two in both")
            continue
        gap = here[x] - here[y]
        ties.gaps.append(gap)
        if gap > 2 * ties.rounding:
            ties.bad.append(f"row {i}: at {at} the logits are {gap:.3g} apart, no tie")
    return ties


def rounding_options(options: dict) -> dict:
    return {**options, "dtype": "bfloat16", "logprobs_mode": "raw_logits"}


def with_logits(rows: list[dict]) -> list[dict]:
    return [{**row, "params": {**row["params"], "logprobs": 2}} for row in rows]


def measure(exact: Exact) -> None:
    """The part `bfloat16` of make exact: the demo model at PP=2, oracle right at random."""
    from spexis.bench.exact import DEMO, oracle
    from spexis.bench.prompts import BUILT_IN, chat_token_ids
    from spexis.demo_model import demo_model_dir

    model = demo_model_dir()
    ids = chat_token_ids(model, list(BUILT_IN))
    rows = with_logits(
        [{"prompt_token_ids": p, "params": {"max_tokens": exact.args.tokens}} for p in ids]
    )
    options, work = rounding_options(DEMO), [Work(name="prompts", rows=rows)]
    stock = exact.reference(EngineSpec(model=model, options=options), work)
    reference = write_oracle_file(exact.folder / "bfloat16.jsonl", stock)
    spec = EngineSpec(model=model, stages=2, drafter=oracle(reference, 0.6), options=options)
    run = exact.run(spec, work, previous=stock)
    if run.error:
        return
    ties = find_ties(stock["prompts"], run.results["prompts"])
    exact.note(
        f"bfloat16: {ties.parted} of {ties.rows} texts part; rounding of a logit "
        f"{ties.rounding:.3g}, gaps where they part {[round(g, 3) for g in sorted(ties.gaps)]}"
    )
    exact.cases += ties.rows
    for line in ties.bad:
        exact.different += 1
        exact.fail(f"bfloat16: {line}")
