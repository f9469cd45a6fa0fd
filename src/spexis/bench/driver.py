# SPDX-License-Identifier: Apache-2.0
"""The inside of an engine process: feeds requests step by step and reports what came out.

    serve(spec, work, previous, emit)     # called by spexis.bench.engines in its child

Requests arrive, are aborted and caches are reset at chosen calls of the engine's step(). After
every piece of work the pipeline is drained and the block pool is counted: invariant of a result is
that it was taken from an idle engine. Results are plain JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from spexis.bench import lookahead_turns, oracle_lengths
from spexis.bench.engines import EngineSpec, Work, build_llm
from spexis.bench.recompute import Recomputed
from spexis.bench.scenario import Context, Request
from spexis.bench.scenarios import SCENARIOS
from spexis.bench.step_watch import StepWatch


def serve(
    spec: EngineSpec, work: list[Work], previous: dict | None, emit: Callable[..., None]
) -> None:
    begin = time.monotonic()
    llm = build_llm(spec)
    core = llm.llm_engine.engine_core.engine_core
    if any(item.watch_steps for item in work):
        StepWatch.on(core.scheduler)  # before the first step, which workers count too
    emit(event="started", seconds=time.monotonic() - begin)
    is_stock = spec.drafter is None
    own: dict[str, dict] = {}
    for item in work:
        for what, argument in (item.prepare or {}).items():
            if what in PREPARE_SCHEDULER:
                PREPARE_SCHEDULER[what](core.scheduler, argument)
            else:
                llm.collective_rpc(PREPARE[what], args=(argument,))
        context = Context(
            tokenizer=None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer(),
            vocab_size=llm.model_config.get_vocab_size(),
            max_model_len=llm.model_config.max_model_len,
            block_size=core.scheduler.block_size,
            chat=spec.chat,
            size=item.size,
            previous=own if previous is None else previous,
        )
        result = run_work(llm, item, context, is_stock, emit)
        own[item.name] = result
        emit(event="result", name=item.name, result=result)
    slots_left = None
    if not is_stock:
        _flush(llm, context)
        slots_left = max(llm.collective_rpc(count_slots))
    emit(event="end", slots_left=slots_left)
    core.shutdown()


def run_work(llm, item: Work, context: Context, is_stock: bool, emit) -> dict:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    actions: dict[int, str] = {}
    if item.rows is not None:
        requests = [_request_from_row(row) for row in item.rows]
    else:
        scenario = SCENARIOS[item.scenario or item.name]
        requests, actions = scenario.build(context), scenario.actions
    counters = getattr(scheduler, "counters", None)
    before = counters.snapshot() if counters else {}
    lookahead = getattr(scheduler, "lookahead", None)
    policy_before = lookahead.seconds if lookahead else 0.0
    recomputed = Recomputed.on(scheduler)
    recomputed.reset()
    watch = StepWatch.on(scheduler) if item.watch_steps else None
    if watch:
        watch.take()
    begin = time.monotonic()
    finals, times, steps = drive(
        llm, requests, {} if is_stock else actions, is_stock, emit, item.name
    )
    seconds = time.monotonic() - begin
    _drain(llm)
    turns = lookahead_turns.finish(scheduler)
    after = counters.snapshot() if counters else {}
    pool = scheduler.kv_cache_manager.block_pool
    grown = {key: value - before[key] for key, value in after.items()}
    return {
        "rows": [_row(r, final, is_stock) for r, final in zip(requests, finals, strict=True)],
        "times": times,
        "stock": is_stock,
        "counters": grown,
        "preemptions": grown.get("preemptions", 0),
        "preempted": sorted(recomputed.preemptions.values(), reverse=True),
        "recomputed_tokens": recomputed.tokens,
        "policy_seconds": lookahead.seconds - policy_before if lookahead else 0.0,
        "turns": turns,
        "predictor": _predictor(lookahead),
        "free_blocks": pool.get_num_free_blocks(),
        "num_blocks": pool.num_gpu_blocks,  # one of them is vLLM's null block
        "requests_left": len(scheduler.requests),
        "max_model_len": context.max_model_len,
        "steps": steps,
        "seconds": seconds,
        "step_log": watch.take() if watch else None,
    }


def drive(llm, requests: list[Request], actions, is_stock: bool, emit, name: str):
    """(newest outputs, seconds, number of steps).

    Outputs are by request, None where nothing came. So are the seconds since this call began: [the
    request was due, its first token, its end], the latter two None where they never came.
    """
    engine = llm.llm_engine
    drive.run = getattr(drive, "run", 0) + 1  # request ids are never used twice
    ids = [f"{drive.run}-{i}" for i in range(len(requests))]
    arrivals = sorted(
        range(len(requests)), key=lambda i: (requests[i].arrive_seconds, requests[i].arrive)
    )
    times = {ids[i]: [requests[i].arrive_seconds, None, None] for i in arrivals}
    begin = time.monotonic()
    aborts: dict[int, list[str]] = {}
    finals: dict[str, Any] = {}
    step = done = 0
    while arrivals or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            step = max(step, requests[arrivals[0]].arrive)  # nothing to wait for
            time.sleep(max(requests[arrivals[0]].arrive_seconds - (time.monotonic() - begin), 0))
        while arrivals and requests[arrivals[0]].arrive <= step:
            if requests[arrivals[0]].arrive_seconds > time.monotonic() - begin:
                break
            i = arrivals.pop(0)
            prompt = {"prompt_token_ids": requests[i].prompt}
            engine.add_request(ids[i], prompt, requests[i].params, priority=requests[i].priority)
            if requests[i].abort is not None and not is_stock:
                aborts.setdefault(step + requests[i].abort, []).append(ids[i])
        if step in aborts:
            engine.abort_request(aborts.pop(step))
        if actions.get(step) == "reset_prefix_cache":
            llm.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            # With n > 1 an output holds only those answers that grew.
            answers = finals[output.request_id][1] if output.request_id in finals else {}
            answers.update((answer.index, answer) for answer in output.outputs)
            finals[output.request_id] = output, answers
            abort_at = requests[ids.index(output.request_id)].abort_at
            longest = max(len(answer.token_ids) for answer in answers.values())
            if abort_at is not None and longest >= abort_at and not (is_stock or output.finished):
                aborts.setdefault(step + 1, []).append(output.request_id)
            now = time.monotonic() - begin
            times[output.request_id][1] = times[output.request_id][1] or now
            if output.finished:
                times[output.request_id][2] = now
                done += 1
                emit(event="progress", name=name, done=done, of=len(requests))
        step += 1
    return [finals.get(i) for i in ids], [times[i] for i in ids], step


def _drain(llm) -> None:
    """Rows of ended requests may still be in the pipeline."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(100):
        if not core.scheduler.has_requests() and not getattr(core, "batch_queue", None):
            return
        core.step_fn()
    raise RuntimeError("the pipeline does not run empty")


def _flush(llm, context: Context) -> None:
    """One more request, so that the workers hear that the ones before it ended."""
    from spexis.bench.scenario import greedy

    request = Request(prompt=context.prompt("flush", 0, 8), params=greedy(1))
    drive(llm, [request], {}, False, lambda **event: None, "flush")
    _drain(llm)


def set_drafter(worker, block: dict) -> None:
    """Runs in a worker: an oracle or synthetic drafter, as if the engine had started with it."""
    from spexis.config import DrafterConfig
    from spexis.drafters.base import load_drafter

    runner = worker.model_runner
    runner.spexis_drafter = load_drafter(DrafterConfig.from_dict(block), runner)


def trust_guesses(worker, argument: dict) -> None:
    """Runs in a worker: takes rule 1 away, so that wrong guesses count. Comparisons must notice."""
    worker.model_runner.last_stage.judge = lambda slots, start, tokens, is_prefill, samples: samples


PREPARE = {"drafter": set_drafter, "trust_guesses": trust_guesses}
PREPARE_SCHEDULER = {
    "oracle_lengths": oracle_lengths.install,
    "look_ahead_turns": lookahead_turns.install,
}


def count_slots(worker) -> int:
    """Runs in a worker: slots bound beyond the flushing request's own."""
    runner = worker.model_runner
    # V2's slots are vLLM's own indices of requests.
    bound = (
        runner.slot_table.slot_of
        if hasattr(runner, "slot_table")
        else runner.req_states.req_id_to_index
    )
    return max(0, len(bound) - 1)


def _predictor(lookahead) -> dict | None:
    """What came of a length predictor since the engine started; None where none spoke."""
    if lookahead is None or not lookahead.predictions.calibration.num_observed:
        return None
    calibration = lookahead.predictions.calibration
    return {
        "answers": calibration.num_observed,
        "off_by": [round(error, 4) for error in calibration.calibration_error().tolist()],
        "slopes": [round(slope, 3) for slope in calibration.theta[:, 1].tolist()],
    }


# -- JSON ------------------------------------------------------------------------------------------


def _request_from_row(row: dict) -> Request:
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, **row.get("params", {})})
    arrive = row.get("arrive_seconds", 0.0)
    return Request(prompt=row["prompt_token_ids"], params=params, arrive_seconds=arrive)


def _row(request: Request, final, is_stock: bool) -> dict:
    row = {
        "prompt_token_ids": request.prompt,
        "prompt_len": len(request.prompt),
        "aborted": request.abort is not None or request.abort_at is not None,
        "outputs": [],
        "num_cached_tokens": None,
        "prompt_logprobs": None,
    }
    if final is None:  # aborted before anything came
        return row
    output, answers = final
    row["num_cached_tokens"] = output.num_cached_tokens
    row["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    row["aborted"] = row["aborted"] and not output.finished
    row["outputs"] = [
        {
            "index": index,
            "token_ids": list(answer.token_ids),
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "logprobs": _logprobs(answer.logprobs),
        }
        for index, answer in sorted(answers.items())
    ]
    return row


def _logprobs(positions) -> list[dict[str, float]] | None:
    """[{token: logprob}] by position."""
    if positions is None:
        return None
    return [
        {str(token): entry.logprob for token, entry in (position or {}).items()}
        for position in positions
    ]
