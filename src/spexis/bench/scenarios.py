# SPDX-License-Identifier: Apache-2.0
"""Every feature that speculative parallelism must leave untouched, as a small set of requests.

    SCENARIOS["stop_strings"].build(Context(...)) -> [Request, ...]
    SCENARIOS["stop_strings"].check(result)       -> ["no request stopped at a string", ...]

build() runs inside an engine's process (spexis.bench.engines), once for the stock engine and once
for the engine under test. check() says whether the scenario happened at all: a comparison of runs
that never stopped, never preempted or never aborted proves nothing.
"""

from __future__ import annotations

import json
import random
import re

from spexis.bench.scenario import (
    SCENARIOS,
    Context,
    Request,
    greedy,
    lengths,
    outputs,
    scenario,
    seeded,
    some,
    stopped_at,
)


@scenario(check=lambda r: [] if len(set(lengths(r))) > 1 else ["all answers are equally long"])
def base(ctx: Context) -> list[Request]:
    """Prompts and answers of different lengths, all at once."""
    return [
        Request(prompt=ctx.prompt("base", i, 5 + 7 * (i % 5)), params=greedy(24 + 3 * (i % 6)))
        for i in range(ctx.size)
    ]


@scenario(check=lambda r: [] if max(lengths(r)) <= 3 else ["an answer is too long"])
def short_answers(ctx: Context) -> list[Request]:
    """One to three tokens: the request ends before its first verdict is back."""
    return [
        Request(prompt=ctx.prompt("short", i), params=greedy(1 + i % 3, ignore_eos=True))
        for i in range(ctx.size)
    ]


@scenario(check=lambda r: [] if set(lengths(r)) == {1} else ["max_tokens=1 gave more"])
def one_token(ctx: Context) -> list[Request]:
    """max_tokens=1, arriving one by one: decode rows of these requests are all in vain."""
    return [
        Request(prompt=ctx.prompt("one", i, 3 + i), params=greedy(1), arrive=i)
        for i in range(ctx.size)
    ]


@scenario()
def long_prompts(ctx: Context) -> list[Request]:
    """Chunked prefill on engines with a small token budget, beside running decodes.

    Seeded ones among them: a chunk that is not the last must not draw from the seed.
    """
    return [
        Request(
            prompt=ctx.prompt("long", i, (30, 150, 260, 333, 400)[i % 5]),
            params=seeded(i, 20) if i % 3 == 1 else greedy(20),
            arrive=3 * i,
        )
        for i in range(ctx.size)
    ]


@scenario()
def staggered(ctx: Context) -> list[Request]:
    """Requests join while others run."""
    return [
        Request(prompt=ctx.prompt("stagger", i, 4 + 11 * (i % 4)), params=greedy(25), arrive=4 * i)
        for i in range(ctx.size)
    ]


@scenario()
def first_turn(ctx: Context) -> list[Request]:
    """Prompts and answers that fill blocks, for second_turn."""
    return [
        Request(
            prompt=ctx.prompt("first", i, ctx.block_size // 2 + 13 * (i % 4)),
            params=greedy(ctx.block_size + 9 * (i % 5), ignore_eos=True),
        )
        for i in range(max(4, ctx.size // 2))
    ]


@scenario(
    check=lambda r: (
        []
        if any(row["num_cached_tokens"] for row in r["rows"])
        else ["nothing came from the cache"]
    ),
    same_cached_tokens=True,
)
def second_turn(ctx: Context) -> list[Request]:
    """Prompts that contain an earlier answer: its blocks come from the prefix cache."""
    rows = ctx.previous["first_turn"]["rows"]
    return [
        Request(
            prompt=row["prompt_token_ids"]
            + row["outputs"][0]["token_ids"]
            + ctx.prompt("turn", i, 10),
            params=greedy(20),
        )
        for i, row in enumerate(rows)
    ]


def _preempted(result: dict) -> list[str]:
    if result["num_blocks"] > 200 or result["preemptions"]:  # a roomy engine has no reason to
        return []
    return ["nothing was preempted"]


@scenario(check=_preempted)
def pressure(ctx: Context) -> list[Request]:
    """More tokens than a small cache holds: preemption and resume, greedy and seeded."""
    return [
        Request(
            prompt=ctx.prompt("pressure", i, 40 + 9 * (i % 5)),
            params=seeded(i, 90, ignore_eos=True) if i % 4 == 3 else greedy(90, ignore_eos=True),
            arrive=2 * i,
        )
        for i in range(max(12, ctx.size))
    ]


def _aborted(result: dict) -> list[str]:
    partial = [
        row
        for row in result["rows"]
        if row["aborted"] and row["outputs"] and row["outputs"][0]["token_ids"]
    ]
    if result["stock"] or len(partial) >= 2:
        return []
    return [f"{len(partial)} requests were aborted in mid-answer, wanted 2"]


@scenario(check=_aborted)
def aborts(ctx: Context) -> list[Request]:
    """Aborts at random moments: waiting, in prefill, first row in flight, running; slots reused."""
    rng = random.Random("aborts")
    return [
        Request(
            prompt=ctx.prompt("abort", i, 20 + 40 * (i % 3)),
            params=greedy(30, ignore_eos=True),
            arrive=2 * i,
            abort=rng.choice((0, 1, 2, 3, 5, 8, 13, 21, 34)) if i % 3 else None,
        )
        for i in range(2 * ctx.size)
    ]


@scenario(check=stopped_at(str, "answers ended by a stop string"))
def stop_strings(ctx: Context) -> list[Request]:
    """The engine stops a request from outside, some steps after its stop token was sampled."""
    requests = []
    for i in range(ctx.size):
        prompt, _, text = ctx.base_answer(i)
        readable = [m.group() for m in re.finditer(r"[ -~]{2}", text)]
        stop = readable[len(readable) // 2] if readable else "e"
        params = greedy(40, stop=[stop, "\ufffe"], include_stop_str_in_output=bool(i % 2))
        requests.append(Request(prompt=prompt, params=params))
    return requests


@scenario(check=stopped_at(int, "answers ended by a stop token"))
def stop_token_ids(ctx: Context) -> list[Request]:
    requests = []
    for i in range(ctx.size):
        prompt, tokens, _ = ctx.base_answer(i)
        stop = [tokens[len(tokens) // (2 + i % 3)]]
        requests.append(Request(prompt=prompt, params=greedy(40, stop_token_ids=stop)))
    return requests


@scenario(
    check=lambda r: (
        [] if all(12 <= n <= 40 for n in lengths(r)) else [f"lengths {lengths(r)}, wanted 12..40"]
    )
)
def min_tokens(ctx: Context) -> list[Request]:
    """A stop token that would come early is masked until min_tokens."""
    requests = []
    for i in range(ctx.size):
        prompt, tokens, _ = ctx.base_answer(i)
        params = greedy(40, min_tokens=12, stop_token_ids=[tokens[min(4, len(tokens) - 1)]])
        requests.append(Request(prompt=prompt, params=params))
    return requests


@scenario(
    check=lambda r: (
        []
        if any(len({tuple(o["token_ids"]) for o in row["outputs"]}) == 3 for row in r["rows"])
        else ["no request gave three different answers"]
    )
)
def several_answers(ctx: Context) -> list[Request]:
    """n > 1, seeded (vLLM refuses greedy n > 1)."""
    return [
        Request(
            prompt=ctx.prompt("several", i),
            params=seeded(i, 16, n=2 + i % 2),
        )
        for i in range(max(3, ctx.size // 2))
    ]


@scenario(check=lambda r: some(r, "answers with logprobs", lambda o: bool(o["logprobs"])))
def logprobs(ctx: Context) -> list[Request]:
    """Logprobs of answers and prompts, with prompts longer than a chunk."""
    return [
        Request(
            prompt=ctx.prompt("logprobs", i, 12 + 60 * (i % 3)),
            params=(seeded(i, 16, logprobs=3) if i % 3 == 1 else greedy(16, logprobs=4))
            if i % 2
            else greedy(16, logprobs=2, prompt_logprobs=2),
            arrive=i,
        )
        for i in range(ctx.size)
    ]


@scenario()
def penalties(ctx: Context) -> list[Request]:
    """Penalties look at the verified tokens only, never at a guess in flight."""
    kinds = (
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    )
    return [
        Request(
            prompt=ctx.prompt("penalty", i),
            params=seeded(i, 40, **kinds[i % 4]) if i % 5 == 4 else greedy(40, **kinds[i % 4]),
        )
        for i in range(ctx.size)
    ]


@scenario()
def token_rules(ctx: Context) -> list[Request]:
    """logit_bias, bad_words, allowed_token_ids: rules over tokens, made from the base answers."""
    requests = []
    for i in range(ctx.size):
        prompt, tokens, text = ctx.base_answer(i)
        words = [w for w in re.findall(r"[a-z]{2,}", text) if w] or ["the"]
        options = (
            {"logit_bias": {tokens[3]: -100.0, tokens[6]: 5.0}},
            {"bad_words": [words[0], words[-1]]},
            {"allowed_token_ids": sorted({t + d for t in tokens for d in (0, 1)})},
        )[i % 3]
        requests.append(Request(prompt=prompt, params=greedy(40, **options)))
    return requests


@scenario(
    check=lambda r: (
        []
        if len({tuple(o["token_ids"][:4]) for o in outputs(r)}) > 2
        else ["seeds changed nothing"]
    )
)
def seeds(ctx: Context) -> list[Request]:
    """Seeded sampling, alone and with filters, several seeds of one prompt among them."""
    filters = ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}, {"temperature": 1.3})
    return [
        Request(prompt=ctx.prompt("seed", i // 3), params=seeded(100 + i, 40, **filters[i % 5]))
        for i in range(2 * ctx.size)
    ]


SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "pages": {"type": "integer", "maximum": 999},
    },
    "required": ["title", "pages"],
    "additionalProperties": False,
}


def _obeyed(result: dict) -> list[str]:
    problems, obeyed = [], 0
    for i, row in enumerate(result["rows"]):
        output = row["outputs"][0]
        if output["finish_reason"] != "stop":
            continue
        text = output["text"]
        if i % 4 == 0:
            ok = set(json.loads(text)) == {"title", "pages"}
        elif i % 4 == 1:
            ok = re.fullmatch(r"[a-c]{3}-\d{2}", text) is not None
        elif i % 4 == 2:
            ok = text in ("yes", "no", "maybe so")
        else:
            continue
        obeyed += ok
        if not ok:
            problems.append(f"answer {i} breaks its grammar: {text!r}")
    return problems or ([] if obeyed >= 2 else [f"{obeyed} answers ended inside their grammar"])


@scenario(check=_obeyed)
def structured(ctx: Context) -> list[Request]:
    """Grammars (json schema, regex, choice) beside free requests."""
    from vllm.sampling_params import StructuredOutputsParams as Rules

    kinds = ({"json": SCHEMA}, {"regex": r"[a-c]{3}-\d{2}"}, {"choice": ["yes", "no", "maybe so"]})
    requests = []
    for i in range(ctx.size):
        rules = {"structured_outputs": Rules(**kinds[i % 4])} if i % 4 < 3 else {}
        params = greedy(64 if i % 4 < 3 else 30, **rules)
        requests.append(Request(prompt=ctx.prompt("grammar", i), params=params, arrive=i % 5))
    return requests


@scenario(check=_preempted)
def priorities(ctx: Context) -> list[Request]:
    """Late urgent requests push others out (on an engine with scheduling_policy="priority")."""
    return [
        Request(
            prompt=ctx.prompt("priority", i, 30 + 17 * (i % 3)),
            params=greedy(80, ignore_eos=True),
            arrive=5 * i,
            priority=max(12, ctx.size) - i,
        )
        for i in range(max(12, ctx.size))
    ]


@scenario(
    check=lambda r: [] if r["stock"] or r["preemptions"] else ["nothing was running"],
    actions=dict.fromkeys((7, 8, 21, 40), "reset_prefix_cache"),
)
def cache_reset(ctx: Context) -> list[Request]:
    """The prefix cache is reset while requests run: all are preempted and resumed at once."""
    return [
        Request(
            prompt=ctx.prompt("reset", i, 20 + 5 * i),
            params=(seeded(i, 40) if i % 3 == 2 else greedy(40, ignore_eos=True)),
        )
        for i in range(ctx.size)
    ]


@scenario()
def block_boundaries(ctx: Context) -> list[Request]:
    """Prompts and answers that end just before, at and behind the border of a block."""
    block = ctx.block_size
    return [
        Request(
            prompt=ctx.prompt("block", i, block - 3 + i),
            params=greedy(block + 1 + i % 3, ignore_eos=True),
        )
        for i in range(7)
    ]


@scenario(
    check=lambda r: (
        []
        if all(
            r["max_model_len"] - row["prompt_len"] == len(row["outputs"][0]["token_ids"])
            for row in r["rows"]
        )
        else ["an answer ended before max_model_len"]
    )
)
def context_full(ctx: Context) -> list[Request]:
    """No max_tokens: the answer ends where the context is full."""
    from vllm import SamplingParams

    requests = []
    for i in range(5):
        prompt = ctx.prompt("full", i, ctx.max_model_len - 12 - i)
        if ctx.chat:  # filled up exactly
            prompt = (ctx.prompt("full", 0) * 99)[: ctx.max_model_len - 12 - i]
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        requests.append(Request(prompt=prompt, params=params))
    return requests


@scenario(check=_aborted)
def mixed(ctx: Context) -> list[Request]:
    """All of the above in one batch, arriving over time, some aborted."""
    rng = random.Random("mixed")
    names = [n for n in SCENARIOS if n not in ("mixed", "context_full", "cache_reset")]
    requests = []
    for name in names:
        for request in SCENARIOS[name].build(ctx)[1:4]:
            request.arrive = rng.randrange(0, 60)
            kind, steps, tokens = rng.random(), rng.randrange(2, 40), rng.randrange(1, 4)
            request.abort = steps if kind < 0.15 else None
            request.abort_at = tokens if 0.15 <= kind < 0.3 else None
            requests.append(request)
    rng.shuffle(requests)
    return requests
