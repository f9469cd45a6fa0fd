# SPDX-License-Identifier: Apache-2.0
"""Compares results of an engine under test with those of the stock engine, row by row.

    differences(SCENARIOS["base"], stock_result, result)  -> ["row 3: token 17 is 5, stock 9"]
    problems(SCENARIOS["base"], result)                   -> ["2 blocks leaked"]

Invariant: equality is strict for tokens, texts, reasons and cached tokens; only logprobs have a
tolerance (1e-4, the rounding of float32 sums in another order), and only requests aborted on
purpose may be shorter than the stock answer, of which they must be a prefix.
"""

from __future__ import annotations

from spexis.bench.scenario import Scenario

LOGPROB_TOLERANCE = 1e-4


def differences(scenario: Scenario | None, stock: dict, result: dict) -> list[str]:
    """One line for each row that differs from the stock engine's."""
    found = []
    if len(stock["rows"]) != len(result["rows"]):
        return [f"{len(result['rows'])} rows, stock {len(stock['rows'])}"]
    for i, (theirs, ours) in enumerate(zip(stock["rows"], result["rows"], strict=True)):
        reason = row_difference(theirs, ours)
        if reason is None and scenario is not None and scenario.same_cached_tokens:
            reason = _unequal(
                "cached tokens", theirs["num_cached_tokens"], ours["num_cached_tokens"]
            )
        if reason is not None:
            found.append(f"row {i}: {reason}")
    return found


def row_difference(stock: dict, ours: dict) -> str | None:
    """What differs between two rows, None if nothing."""
    if stock["prompt_token_ids"] != ours["prompt_token_ids"]:
        return "another prompt, so the comparison is broken"
    if not ours["aborted"] and len(stock["outputs"]) != len(ours["outputs"]):
        return f"{len(ours['outputs'])} answers, stock {len(stock['outputs'])}"
    reason = _logprobs_difference("prompt", stock["prompt_logprobs"], ours["prompt_logprobs"])
    if reason is not None and ours["outputs"]:
        return reason
    by_index = {output["index"]: output for output in stock["outputs"]}
    for our in ours["outputs"]:  # of an aborted request with n > 1 some may be missing
        if our["index"] not in by_index:
            return f"an answer {our['index']} that stock has not"
        reason = _output_difference(by_index[our["index"]], our, ours["aborted"])
        if reason is not None:
            return reason
    return None


def _output_difference(stock: dict, ours: dict, aborted: bool) -> str | None:
    tokens, theirs = ours["token_ids"], stock["token_ids"]
    if aborted:
        theirs = theirs[: len(tokens)]
    for at, (token, other) in enumerate(zip(tokens, theirs, strict=False)):
        if token != other:
            return f"token {at} is {token}, stock {other}"
    if len(tokens) != len(theirs):
        return f"{len(tokens)} tokens, stock {len(theirs)}"
    if not aborted:
        for key in ("text", "finish_reason", "stop_reason"):
            if reason := _unequal(key, stock[key], ours[key]):
                return reason
    logprobs = stock["logprobs"]
    if aborted and logprobs is not None:
        logprobs = logprobs[: len(tokens)]
    return _logprobs_difference("answer", logprobs, ours["logprobs"])


def _logprobs_difference(what: str, stock: list | None, ours: list | None) -> str | None:
    if (stock is None) != (ours is None):
        return f"{what} logprobs are {'missing' if ours is None else 'there, not in stock'}"
    for at, (theirs, our) in enumerate(zip(stock or [], ours or [], strict=False)):
        # At the border of the top k, two tokens within the tolerance may trade places.
        values, others = sorted(our.values()), sorted(theirs.values())
        if len(values) != len(others):
            return f"{what} position {at} has {len(values)} logprobs, stock {len(others)}"
        apart = max((abs(a - b) for a, b in zip(values, others, strict=True)), default=0.0)
        common = our.keys() & theirs.keys()
        apart = max([apart] + [abs(our[token] - theirs[token]) for token in common])
        if apart > LOGPROB_TOLERANCE:
            return f"{what} logprobs at {at} differ by {apart:.2g}"
        if len(common) < len(our) - 1:
            return f"{what} logprobs at {at} are of other tokens"
    if stock is not None and len(stock) != len(ours):
        return f"{len(ours)} {what} logprobs, stock {len(stock)}"
    return None


def _unequal(what: str, stock, ours) -> str | None:
    return None if stock == ours else f"{what} {ours!r}, stock {stock!r}"


def problems(scenario: Scenario | None, result: dict) -> list[str]:
    """What is wrong with a run by itself."""
    found = list(scenario.check(result)) if scenario else []
    if result["free_blocks"] != result["num_blocks"] - 1:
        found.append(f"{result['num_blocks'] - 1 - result['free_blocks']} blocks leaked")
    if result["requests_left"]:
        found.append(f"{result['requests_left']} requests left in the scheduler")
    counted = result["counters"]
    if counted:
        kinds = ("tokens", "discarded_rows", "stale_rows", "unrun_rows")
        back = sum(counted[kind] for kind in kinds)
        if back != counted["decode_rows"]:
            found.append(f"{counted['decode_rows']} decode rows went out, {back} came back")
    return found
