# SPDX-License-Identifier: Apache-2.0
"""One engine run of the V2 tests, in a process of its own (the environment must precede it).

    python drive.py MODEL OUT.json [--stages N] [--spexis JSON] [--blocks B] [--abort]
                                  [--tensor T] [--greedy] [--no-grammar]
                                  [--gpu [--graphs | --default-modes]]

Pushes a fixed mix of requests through an engine in this process and writes each one's tokens,
and what the scheduler counted. A small --blocks makes the scheduler preempt requests, --abort
aborts two requests while their rows are in flight, --greedy leaves out what is drawn. --gpu is
for tests/gpu: a back end that takes float32, with --graphs full CUDA graphs of decode batches, with
--default-modes vLLM's own choice (torch.compile, full and piecewise graphs).
"""

import argparse
import json
import os
import sys

BYTES = 256  # prompts use these token ids only; the model's vocabulary is larger
DRAWN = {"seed", "seed_min_p", "seed_penalty", "two_answers", "seed_top"}
ABORTED = {"abort_early": 3, "abort_late": 6}  # name -> tokens after which it is aborted


def prompt(index: int, length: int) -> list[int]:
    return [(31 * index + 7 * j + j * j // 3) % BYTES for j in range(length)]


def requests(gpu: bool) -> dict[str, tuple[list[int], dict, int]]:
    """name -> prompt, sampling parameters, engine step at which it arrives.

    gpu: also what the interpreter (3.9) cannot run (vLLM's kernel for top_k and top_p), or takes
    long for.
    """
    from vllm.sampling_params import StructuredOutputsParams

    long = prompt(3, 70)  # more than one chunk of 48
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    drawn = {**greedy, "temperature": 0.9}
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    yes_or_no = StructuredOutputsParams(choice=["yes, of course", "no, never at all"])
    more = {
        "seed_top": (prompt(19, 12), {**drawn, "seed": 11, "top_k": 20, "top_p": 0.9}, 6),
        "stop_text": (prompt(20, 15), {**greedy, "max_tokens": 40, "stop": ["e", "t", "0"]}, 4),
        "prompt_logprobs": (prompt(21, 60), {**greedy, "prompt_logprobs": 2}, 10),
    }
    return {
        "short": (prompt(0, 3), greedy, 0),
        "one_block": (prompt(1, 32), greedy, 0),
        "block_edge": (prompt(2, 57), {**greedy, "max_tokens": 20}, 0),
        "chunked": (long, greedy, 0),
        "abort_early": (prompt(4, 12), {**greedy, "max_tokens": 40}, 0),
        "penalties": (prompt(5, 14), {**greedy, **penalties}, 2),
        "bias": (prompt(6, 9), {**greedy, "logit_bias": dict.fromkeys(range(1, 250, 3), 2.5)}, 2),
        "logprobs": (prompt(7, 21), {**greedy, "logprobs": 3}, 4),
        "bad_words": (prompt(8, 11), {**greedy, "bad_words": ["a", "zq"]}, 4),
        "stop_ids": (
            prompt(9, 8),
            {**greedy, "stop_token_ids": list(range(1, 380, 3)), "min_tokens": 5},
            6,
        ),
        "one_token": (prompt(10, 33), {**greedy, "max_tokens": 1}, 6),
        "two_tokens": (prompt(11, 5), {**greedy, "max_tokens": 2}, 8),
        "abort_late": (prompt(12, 40), {**greedy, "max_tokens": 40}, 8),
        "structured": (
            prompt(13, 10),
            {"temperature": 0, "max_tokens": 20, "structured_outputs": yes_or_no},
            10,
        ),
        "seed": (prompt(14, 13), {**drawn, "seed": 7}, 12),
        "seed_min_p": (prompt(15, 6), {**drawn, "seed": 8, "min_p": 0.05}, 12),
        "seed_penalty": (prompt(16, 18), {**drawn, "seed": 9, "repetition_penalty": 1.2}, 14),
        "two_answers": (prompt(17, 7), {**drawn, "seed": 10, "n": 2}, 14),
        "prefix": (long[:64] + prompt(18, 9), greedy, 40),  # once "chunked" has cached blocks
        **(more if gpu else {}),
    }


def run(args: argparse.Namespace) -> dict:
    from vllm import LLM, SamplingParams

    if args.spexis:
        from spexis.plugin import register

        register()
    llm = LLM(
        args.model,
        pipeline_parallel_size=args.stages,
        tensor_parallel_size=args.tensor,
        distributed_executor_backend="mp" if args.stages * args.tensor > 1 else None,
        additional_config={"spexis": json.loads(args.spexis)} if args.spexis else {},
        enforce_eager=not (args.graphs or args.default_modes),
        dtype="float32",
        block_size=32,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=args.blocks,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        **(gpu_options(args) if args.gpu else {}),
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    left_out = (DRAWN if args.greedy else set()) | ({"structured"} if args.no_grammar else set())
    wanted = {k: v for k, v in requests(args.gpu).items() if k not in left_out}
    waiting = sorted(wanted.items(), key=lambda item: item[1][2])
    texts: dict[str, dict[int, dict]] = {}  # by request and index of the answer
    prompt_logprobs: dict[str, list[float]] = {}
    aborted: set[str] = set()
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1][2] <= step or not engine.has_unfinished_requests()):
            name, (token_ids, params, _) = waiting.pop(0)
            engine.add_request(name, {"prompt_token_ids": token_ids}, SamplingParams(**params))
        for output in engine.step():
            answers = texts.setdefault(output.request_id, {})
            for part in output.outputs:  # n > 1: only the answers that grew
                answers[part.index] = answer(part, output.num_cached_tokens)
            if output.prompt_logprobs:
                prompt_logprobs[output.request_id] = own_logprobs(output)
        step += 1
        if args.abort:
            abort(engine, texts, aborted)
    counters = getattr(scheduler, "counters", None)
    pool = scheduler.kv_cache_manager.block_pool
    result = {
        "texts": texts,
        "prompt_logprobs": prompt_logprobs,
        "aborted": sorted(aborted),
        "counters": counters.snapshot() if counters else {},
        "blocks_leaked": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "runner_v2": engine.vllm_config.use_v2_model_runner,
    }
    engine.engine_core.shutdown()
    return result


def gpu_options(args: argparse.Namespace) -> dict:
    options = {
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": 0.15,
        # vLLM's own measurement fails where another engine starts on the device.
        "kv_cache_memory_bytes": 1 << 28,
    }
    if args.default_modes:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    elif args.graphs:
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        }
    return options


def answer(output, num_cached: int | None) -> dict:
    logprobs = [
        sorted((token, round(entry.logprob, 4)) for token, entry in position.items())
        for position in output.logprobs or []
    ]
    return {"token_ids": list(output.token_ids), "logprobs": logprobs, "cached": num_cached}


def own_logprobs(output) -> list[float]:
    """Of each of the prompt's tokens but the first."""
    tokens = output.prompt_token_ids[1:]
    return [p[t].logprob for t, p in zip(tokens, output.prompt_logprobs[1:], strict=True)]


def abort(engine, texts: dict, aborted: set[str]) -> None:
    """Aborts each of ABORTED once it has a few tokens; its next rows are in flight then."""
    for name, enough in ABORTED.items():
        tokens = texts.get(name, {}).get(0, {"token_ids": ()})["token_ids"]
        if name not in aborted and len(tokens) >= enough:
            engine.abort_request([name])
            aborted.add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--spexis", default=None)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--abort", action="store_true")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--no-grammar", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--default-modes", action="store_true")
    args = parser.parse_args()
    result = run(args)
    with open(args.out, "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own teardown can wait for a worker that is already gone


if __name__ == "__main__":
    main()
