# SPDX-License-Identifier: Apache-2.0
"""Rows per token against the law 1 + (1-p)(N-1), with an oracle that is right with probability p.

    python -m spexis.bench.exact --parts law

Enough tokens are run that the noise of p itself is far below the 1 % allowed; p = 0 and 1 have no
noise and need only answers so long that their ends do not count (an answer ends N-1 rows short of
the law's cost). Invariant: the texts are compared with the stock engine's like everywhere else.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from spexis.bench.engines import EngineSpec, Work, write_oracle_file
from spexis.core.law import rows_per_token

if TYPE_CHECKING:
    from spexis.bench.exact import Exact

ACCEPTANCES = (0.0, 0.5, 0.8, 1.0)
TOLERANCE = 0.01
STREAMS = 64
TOKENS = {0.0: 400, 0.5: 1000, 0.8: 1000, 1.0: 400}


def law_work(streams: int, tokens: int, name: str) -> Work:
    """Answers of exactly `tokens` tokens each."""
    import random

    from spexis.bench import tiny

    rng = random.Random("law")
    rows = [
        {
            "prompt_token_ids": [rng.randrange(1, tiny.VOCAB) for _ in range(8)],
            "params": {"max_tokens": tokens, "ignore_eos": True},
        }
        for _ in range(streams)
    ]
    return Work(name=name, rows=rows)


def deviation(counters: dict, acceptance: float, num_stages: int) -> dict:
    """Measured rows per token, and how far it is from the law at the nominal and the real p."""
    measured = (counters["tokens"] + counters["discarded_rows"]) / counters["tokens"]
    real = counters["accepted"] / counters["drafts"]
    return {
        "stages": num_stages,
        "p": acceptance,
        "p_measured": round(real, 4),
        "drafts": counters["drafts"],
        "rows_per_token": round(measured, 4),
        "law": round(rows_per_token(acceptance, num_stages), 4),
        "error": round(measured / rows_per_token(acceptance, num_stages) - 1, 5),
        "error_at_measured_p": round(measured / rows_per_token(real, num_stages) - 1, 5),
    }


def measure(exact: Exact, stages: list[int]) -> None:
    """The part `law` of make exact: N x p, each within 1 %."""
    model, _ = exact.tiny("llama")
    options = {"max_model_len": 1024, "max_num_seqs": STREAMS, "num_gpu_blocks_override": 2048}
    lengths = sorted(set(TOKENS.values()))
    work = [law_work(STREAMS, tokens, f"law {tokens}") for tokens in lengths]
    stock = exact.reference(EngineSpec(model=model, options=options), work)
    reference = write_oracle_file(exact.folder / "law.jsonl", stock)
    by_name = {item.name: item for item in work}
    for n in stages:
        runs = [
            dataclasses.replace(
                by_name[f"law {TOKENS[p]}"],
                name=f"law {TOKENS[p]} p={p}",
                prepare={"drafter": {"method": "oracle", "reference": reference, "acceptance": p}},
            )
            for p in ACCEPTANCES
        ]
        first = {"method": "oracle", "reference": reference, "acceptance": 0.0}
        spec = EngineSpec(model=model, stages=n, drafter=first, options=options)
        run = exact.compare(spec, runs, stock, lambda name: name.split(" p=")[0])
        for p, item in zip(ACCEPTANCES, runs, strict=True):
            if item.name not in run.results:
                continue
            found = deviation(run.results[item.name]["counters"], p, n)
            exact.note(f"law: {found}")
            if abs(found["error"]) > TOLERANCE:
                exact.fail(f"law: more than {TOLERANCE:.0%} off: {found}")
