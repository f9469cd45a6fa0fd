# SPDX-License-Identifier: Apache-2.0
"""The throughput law of speculative parallelism: what a pipeline of N stages can give one request.

    from spexis.core.law import rows_per_token, tokens_per_step

A request runs one row a step. With N stages the true token is known N steps after its row started,
so a wrong guess costs the N-1 rows behind it. With p the probability that a guess is right (each
guess counted once, when its truth is known):

    rows per token      1 + (1-p)(N-1)
    tokens per step     r = 1 / (N - (N-1)p)

The two are one law: 1 + (1-p)(N-1) = N - (N-1)p. Plain pipeline parallelism gives one request
1/N tokens a step. With drafts held back (selection) see selective().

Invariant: pure functions of numbers, no state, no imports beyond the standard
library.
"""

from __future__ import annotations


def rows_per_token(acceptance: float, num_stages: int) -> float:
    """Decode rows run per token returned, once the pipeline is full."""
    _check(acceptance, num_stages)
    return 1.0 + (1.0 - acceptance) * (num_stages - 1)


def tokens_per_step(acceptance: float, num_stages: int) -> float:
    """Tokens one request returns per stage step, between 1/N (p=0) and 1 (p=1)."""
    return 1.0 / rows_per_token(acceptance, num_stages)


def speedup(acceptance: float, num_stages: int) -> float:
    """Limit of one request's speed over plain PP when a step costs the same for both."""
    return num_stages * tokens_per_step(acceptance, num_stages)


def acceptance_for(tokens_step: float, num_stages: int) -> float:
    """The acceptance that gives this many tokens per step (inverse of tokens_per_step)."""
    if num_stages < 2 or not 1.0 / num_stages <= tokens_step <= 1.0:
        raise ValueError(f"tokens per step {tokens_step} is not within 1/N..1 for N={num_stages}")
    return (num_stages - 1.0 / tokens_step) / (num_stages - 1)


def selective(kept_acceptance, dropped, num_stages: int):
    """(tokens, rows) a step of one request that holds a share `dropped` of its drafts back.

    Numbers or arrays of them. kept_acceptance: probability that a draft that runs is right. A
    request that holds a draft waits until all its rows in flight have returned, then goes on from
    the truth:

        q = (1-d) p_k;  tokens = 1 / (N - (N-1) q);  rows = tokens (1 + (1-d)(1-p_k) W)
        W = 1 + (1-d) + ... + (1-d)^(N-2)

    d=0 is the plain law (rows = 1), d=1 is plain PP (tokens = rows = 1/N).
    """
    kept = 1.0 - dropped
    tokens = 1.0 / (num_stages - (num_stages - 1) * kept * kept_acceptance)
    behind = sum(kept**i for i in range(num_stages - 1))
    return tokens, tokens * (1.0 + kept * (1.0 - kept_acceptance) * behind)


def _check(acceptance: float, num_stages: int) -> None:
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance {acceptance} is not within 0..1")
    if num_stages < 1:
        raise ValueError(f"number of stages {num_stages} is below 1")
