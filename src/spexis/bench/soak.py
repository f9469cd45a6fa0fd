# SPDX-License-Identifier: Apache-2.0
"""Soak of the OpenAI server with Spexis at PP=2 on the CPU: many clients, few blocks, no mercy.

    python -m spexis.bench.soak                          # make soak
    python -m spexis.bench.soak --requests 200 --model demo

1. A stock engine at PP=1 answers every request; that is the reference.
2. 32 clients send them to `spexis serve`: random lengths, chunked prefill, shared prefixes, stop
   strings, stop tokens; a part of the clients leaves in the middle of a stream, before its first
   token, or while waiting for a whole answer. So few blocks that requests are preempted.
3. Every answer must be the reference's (tokens, text, reason), every partial one its beginning.
4. Idle again, no block is in use, one request that needs every block runs, counters agree, and
   after SIGTERM no process is left.
5. Under load a worker, the engine core and the API server are killed (-9), each on a fresh server:
   clients get an error within 30 s, and then nothing is left running, without further signals.

Invariant: only loopback addresses, every wait has an end, every process is gone afterwards.
"""

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tqdm import tqdm

from spexis.bench.engines import EngineSpec, Work, kill_on_signals, run_engine
from spexis.bench.serving import Answer, Server, complete

BLOCK_SIZE = 32  # the smallest that vLLM's CPU attention takes
CONTEXT = 1024
NUM_BLOCKS = CONTEXT // BLOCK_SIZE + 1  # one request can fill them all; one is vLLM's null block
CLIENTS = 32
ERROR_WITHIN = 30.0
GONE_WITHIN = 60.0


# ------------------------------------------------------------------- requests
@dataclass(slots=True)
class Request:
    prompt: list[int]
    params: dict  # of the HTTP body and of SamplingParams alike
    stream: bool = True
    leave_after: int | None = None
    leave_in: float | None = None


def make_requests(number: int, seed: int, vocab_size: int, decode) -> list[Request]:
    """decode: token ids to text, for stop strings that can occur."""
    r = Random(seed)

    def tokens(count: int) -> list[int]:
        return [r.randrange(3, vocab_size) for _ in range(count)]

    prefixes = [tokens(r.randrange(16, 140)) for _ in range(12)]
    requests = []
    for _ in range(number):
        prompt = tokens(r.choice((1, 7, 20, 60, 150)))
        if r.random() < 0.5:
            prompt = r.choice(prefixes) + prompt[: r.randrange(1, 9)]
        params = {"max_tokens": r.choice((1, 3, 10, 30, 60)), "ignore_eos": r.random() < 0.5}
        if r.random() < 0.25:
            params["stop_token_ids"] = tokens(r.randrange(1, 8))
        if r.random() < 0.25:
            texts = (decode(tokens(1)).strip() for _ in range(40))
            params["stop"] = [t for t in texts if t.isascii() and t.isprintable() and t][:3]
        request = Request(prompt, params, stream=r.random() < 0.8)
        if r.random() < 0.2:
            if request.stream and r.random() < 0.7:
                request.leave_after = r.randrange(1, 20)
            else:
                request.leave_in = r.choice((0.0, 0.05, 0.5, 2.0))
        requests.append(request)
    return requests


def crowd(vocab_size: int) -> list[Request]:
    """Come together and in the end need three times the blocks there are: some are preempted.

    Without them a fast server may be done with each request before the next ones press on it.
    """
    r = Random(2)
    return [
        Request(
            [r.randrange(3, vocab_size) for _ in range(60)], {"max_tokens": 200, "ignore_eos": True}
        )
        for _ in range(12)
    ]


def full_request(vocab_size: int) -> Request:
    """Needs every block there is, so it cannot end if one is lost."""
    r = Random(1)
    prompt = [r.randrange(3, vocab_size) for _ in range(CONTEXT - 40)]
    return Request(prompt, {"max_tokens": 40, "ignore_eos": True})


def reference(model: str, requests: list[Request], timeout: float) -> list[dict]:
    """What stock vLLM at PP=1 answers to each, nobody leaving."""
    rows = [{"prompt_token_ids": q.prompt, "params": q.params} for q in requests]
    spec = EngineSpec(model=model, options={"max_model_len": CONTEXT})
    with tqdm(total=len(rows), desc="reference", file=sys.stderr) as bar:
        run = run_engine(
            spec,
            [Work(name="soak", rows=rows)],
            timeout=timeout,
            on_event=lambda event: bar.update(event["event"] == "progress"),
        )
    return [row["outputs"][0] for row in run["soak"]["rows"]]


def difference(answer: Answer, want: dict) -> str | None:
    """Why the answer is wrong; None if it is right."""
    if answer.error is not None:
        return answer.error
    if answer.left and answer.finish_reason is None:
        if answer.token_ids != want["token_ids"][: len(answer.token_ids)]:
            return f"partial {answer.token_ids} does not begin {want['token_ids']}"
        return None
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        if getattr(answer, name) != want[name]:
            return f"{name} {getattr(answer, name)!r}, reference {want[name]!r}"
    return None


# ----------------------------------------------------------------------- load
def server_arguments(model: str, drafter: str | None) -> list[str]:
    return [
        model,
        *("--spexis", json.dumps({"drafter": {"model": drafter}} if drafter else {})),
        *("--served-model-name", "m"),
        *("--dtype", "float32"),
        *("--max-model-len", str(CONTEXT)),
        *("--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
        *("--max-num-seqs", "24"),
        *("--max-num-batched-tokens", "96"),
    ]


async def run_load(
    server: Server,
    requests: list[Request],
    clients: int,
    timeout: float,
    label: str = "soak",
    again: Callable[[Answer], bool] = lambda answer: False,
) -> list[Answer]:
    """All requests, `clients` at a time; their last answers. again: whether to repeat a request."""
    import aiohttp

    gate = asyncio.Semaphore(clients)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        with tqdm(total=len(requests), desc=label, file=sys.stderr) as bar:

            async def one(request: Request) -> Answer:
                body = {"prompt": request.prompt, "stream": request.stream, **request.params}
                async with gate:
                    while True:
                        answer = await complete(
                            session,
                            server.url,
                            body,
                            leave_after=request.leave_after,
                            leave_in=request.leave_in,
                            timeout=timeout,
                        )
                        if not again(answer):
                            break
                bar.update()
                return answer

            return await asyncio.gather(*map(one, requests))


def wait_idle(server: Server, timeout: float = 60.0) -> dict[str, float]:
    """Metrics once no request is left and they have stopped changing."""
    end, before = time.monotonic() + timeout, None
    while time.monotonic() < end:
        now = server.metrics()
        busy = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]
        counts = {k: v for k, v in now.items() if k.startswith(("vllm:", "spexis:"))}
        if not busy and counts == before:
            return now
        before = counts
        time.sleep(1.0)
    raise TimeoutError(f"requests are left after {timeout:.0f} s: {busy:.0f}")


def disagreements(m: dict[str, float], answers: list[Answer]) -> list[str]:
    """Counters on /metrics that contradict each other or what the clients saw."""
    left = sum(a.left for a in answers)
    reasons = Counter(a.finish_reason for a in answers)
    received = sum(len(a.token_ids) for a in answers)
    ended = {k: m.get(f"vllm:request_success_total{{{k}}}", 0) for k in ("stop", "length", "abort")}
    generated, verified = m["vllm:generation_tokens_total"], m["spexis:tokens_total"]
    slots = {
        k: m[f"spexis:pipeline_slot_total{{{k}}}"] for k in ("real", "draft", "discarded", "stale")
    }
    accepted, drafts = m["spexis:accepted_drafts_total"], m["spexis:drafts_total"]
    checks = {
        "every request ended once": len(answers) - left <= sum(ended.values()) <= len(answers),
        "stops were seen": ended["stop"] >= reasons["stop"],
        "length ends were seen": ended["length"] >= reasons["length"],
        "tokens received were generated": generated >= received,
        # A preempted request's late tokens are delivered, but run no row that counts.
        "tokens generated were verified": generated <= verified + slots["stale"] / 2,
        "tokens verified were generated": verified <= generated + 24 * left,
        "rows of tokens are tokens": slots["real"] + slots["draft"] == 2 * verified,
        "discarded rows": slots["discarded"] == 2 * m["spexis:discarded_rows_total"],
        "drafts are accepted or rejected": 0 < accepted < drafts,
        "vLLM's drafts": m["vllm:spec_decode_num_draft_tokens_total"] == drafts,
        "vLLM's accepted": m["vllm:spec_decode_num_accepted_tokens_total"] == accepted,
    }
    return [name for name, holds in checks.items() if not holds]


@dataclass(slots=True)
class Soak:
    """Findings of the first server."""

    wrong: list[str]
    left: int
    blocks_leaked: int
    disagreements: list[str]
    preemptions: int
    acceptance: float
    orphans: list[str]
    seconds: float


def run_soak(
    server: Server, requests: list[Request], wanted: list[dict], timeout: float, clients: int
) -> Soak:
    """requests: the last one fills all blocks and runs alone."""
    *many, full = requests
    begin = time.monotonic()
    answers = asyncio.run(run_load(server, many, clients, timeout))
    seconds = time.monotonic() - begin
    m = wait_idle(server)
    leaked = round(m["vllm:kv_cache_usage_perc"] * (NUM_BLOCKS - 1))
    contradictions = disagreements(m, answers)
    answers += asyncio.run(run_load(server, [full], 1, timeout, "all blocks"))
    leaked = max(leaked, round(wait_idle(server)["vllm:kv_cache_usage_perc"] * (NUM_BLOCKS - 1)))
    reasons = [
        f"request {i} ({dataclasses.asdict(q)}): {why}"
        for i, (q, a, want) in enumerate(zip(requests, answers, wanted, strict=True))
        if (why := difference(a, want))
    ]
    return Soak(
        wrong=reasons,
        left=sum(a.left for a in answers),
        blocks_leaked=leaked,
        disagreements=contradictions,
        preemptions=round(m["vllm:num_preemptions_total"]),
        acceptance=m["spexis:accepted_drafts_total"] / m["spexis:drafts_total"],
        orphans=[],
        seconds=seconds,
    )


# ---------------------------------------------------------------------- kills
VICTIMS = {"last worker": "PP1", "first worker": "PP0", "engine core": "EngineCore", "server": None}


@dataclass(slots=True)
class Kill:
    victim: str
    error_seconds: float  # until the last client knew
    gone_seconds: float
    left: list[str]
    errors: int
    clients: int

    @property
    def ok(self) -> bool:
        return self.errors == self.clients and self.error_seconds < ERROR_WITHIN and not self.left


def kill_under_load(
    server: Server,
    victim: str,
    vocab_size: int,
    clients: int = 8,
    strike: Callable[[], None] | None = None,
) -> Kill:
    """Kills one process while clients stream, and watches what becomes of the others.

    A client that is served to the end asks again, so that each of them meets the harm.

    strike: does the harm itself, where it is no process of this server's."""
    r = Random(2)
    requests = [
        Request(
            [r.randrange(3, vocab_size) for _ in range(10)],
            {"max_tokens": CONTEXT - 10, "ignore_eos": True},
            stream=i % 4 != 3,
        )
        for i in range(clients)
    ]
    killed = 0.0

    def unharmed(answer: Answer) -> bool:
        # Where cores are few, /metrics may answer seconds late: a client can be done by then.
        late = killed and time.monotonic() > killed + ERROR_WITHIN
        return answer.error is None and not late

    async def kill_when_busy() -> None:
        nonlocal killed
        for _ in range(600):
            metrics = await asyncio.to_thread(server.metrics)
            if metrics["vllm:generation_tokens_total"] > started_with + 3 * clients:
                break
            await asyncio.sleep(0.1)
        killed = time.monotonic()
        if strike is not None:
            strike()
            return
        part = VICTIMS[victim]
        found = server.find(part) if part else [None]
        if len(found) != 1:
            raise RuntimeError(f"{victim}: {len(found)} processes match {part}: {server.seen}")
        server.send(signal.SIGKILL, found[0])

    async def everything():
        load = run_load(server, requests, clients, 2 * ERROR_WITHIN, f"kill {victim}", unharmed)
        answers, _ = await asyncio.gather(load, kill_when_busy())
        return answers

    started_with = server.metrics()["vllm:generation_tokens_total"]
    answers = asyncio.run(everything())
    error_seconds = time.monotonic() - killed
    gone_seconds, left = server.wait_gone(GONE_WITHIN)
    return Kill(
        victim=victim,
        error_seconds=round(error_seconds, 1),
        gone_seconds=round(error_seconds + gone_seconds, 1),
        left=[f"{p.pid} {p.name}" for p in left],
        errors=sum(a.error is not None for a in answers),
        clients=clients,
    )


# ----------------------------------------------------------------------- main
@dataclass(slots=True)
class Model:
    path: str
    drafter: str | None  # None: the shipped one
    vocab_size: int

    def decoder(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path).decode


def prepare(name: str, folder: Path) -> Model:
    if name == "demo":
        from spexis.demo_model import demo_model_dir

        return Model(demo_model_dir(), None, 49152)
    from spexis.bench import tiny

    path = tiny.tiny_model("llama", folder / "model")
    return Model(path, tiny.tiny_drafter(path, folder / "drafter"), tiny.VOCAB)


def stop(server: Server) -> list[str]:
    """Ends the server as an operator does; what is still there half a minute later."""
    server.send(signal.SIGTERM)
    _, left = server.wait_gone(ERROR_WITHIN)
    return [f"{p.pid} {p.name}" for p in left]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model", choices=("tiny", "demo"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--kill", nargs="*", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for any one wait")
    options = parser.parse_args(argv)
    kill_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, prepare(options.model, Path(folder)))
    print(json.dumps(result))
    return not result["ok"]


def run(options: argparse.Namespace, model: Model) -> dict:
    requests = crowd(model.vocab_size)[: options.requests]
    rest = options.requests - len(requests)
    requests += make_requests(rest, options.seed, model.vocab_size, model.decoder())
    requests.append(full_request(model.vocab_size))
    wanted = reference(model.path, requests, options.timeout)
    arguments = server_arguments(model.path, model.drafter)
    with Server(arguments) as server:
        say(f"server ready in {server.wait_ready(300):.0f} s, {len(server.seen)} processes")
        soak = run_soak(server, requests, wanted, options.timeout, options.clients)
        soak.orphans = stop(server)
        if soak.wrong or soak.orphans:
            say(server.tail())
    say(*soak.wrong[:5], *soak.disagreements, *soak.orphans)
    kills = []
    for victim in options.kill:
        with Server(arguments) as server:
            server.wait_ready(300)
            kills.append(kill_under_load(server, victim, model.vocab_size))
            say(str(kills[-1]))
            if not kills[-1].ok:
                say(server.tail())
    ok = not (soak.wrong or soak.blocks_leaked or soak.disagreements or soak.orphans)
    return {
        "name": "soak",
        "ok": ok and soak.preemptions > 0 and all(kill.ok for kill in kills),
        "requests": options.requests,
        "wrong": len(soak.wrong),
        "blocks_leaked": soak.blocks_leaked,
        "orphans": len(soak.orphans) + sum(len(kill.left) for kill in kills),
        "clients_that_left": soak.left,
        "preemptions": soak.preemptions,
        "acceptance": round(soak.acceptance, 3),
        "counters_that_disagree": soak.disagreements,
        "requests_per_second": round(options.requests / soak.seconds, 1),
        "kill_error_seconds": {kill.victim: kill.error_seconds for kill in kills},
        "kill_gone_seconds": {kill.victim: kill.gone_seconds for kill in kills},
    }


def say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
