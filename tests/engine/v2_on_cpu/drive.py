# SPDX-License-Identifier: Apache-2.0
"""One engine run of the V2 tests, in a process of its own (the environment must precede it).

    python drive.py model FOLDER                      a tiny random-weight Llama with a tokenizer
    python drive.py run FOLDER OUT.json [--stages N] [--spexis JSON] [--blocks B] [--abort]

`run` pushes a fixed mix of requests through an engine in this process and writes each one's
tokens, and what the scheduler counted. A small --blocks makes the scheduler preempt requests,
--abort aborts two requests while their rows are in flight.
"""

import argparse
import json
import os
import sys

BYTES = 256
EOS = BYTES
VOCAB = 264
ABORTED = ("abort_early", "abort_late")


def make_model(folder: str) -> None:
    """Random weights, spread wide so that the text wanders; one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"] + [f"<unused{i}>" for i in range(VOCAB - BYTES - 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>"
    ).save_pretrained(folder)


def prompt(index: int, length: int) -> list[int]:
    return [(31 * index + 7 * j + j * j // 3) % BYTES for j in range(length)]


def requests() -> dict[str, tuple[list[int], dict, int]]:
    """name -> prompt, sampling parameters, engine step at which it arrives."""
    from vllm.sampling_params import StructuredOutputsParams

    long = prompt(3, 70)  # more than one chunk of 48
    greedy = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    drawn = {**greedy, "temperature": 0.9}
    yes_or_no = StructuredOutputsParams(choice=["yes, of course", "no, never at all"])
    return {
        "short": (prompt(0, 3), greedy, 0),
        "one_block": (prompt(1, 32), greedy, 0),
        "block_edge": (prompt(2, 61), {**greedy, "max_tokens": 34}, 0),
        "chunked": (long, greedy, 0),
        "abort_early": (prompt(4, 12), {**greedy, "max_tokens": 60}, 0),
        "penalties": (
            prompt(5, 14),
            {
                **greedy,
                "repetition_penalty": 1.3,
                "frequency_penalty": 0.4,
                "presence_penalty": 0.3,
            },
            2,
        ),
        "bias": (prompt(6, 9), {**greedy, "logit_bias": {i: 2.5 for i in range(0, 250, 3)}}, 2),
        "logprobs": (prompt(7, 21), {**greedy, "logprobs": 3}, 4),
        "bad_words": (prompt(8, 11), {**greedy, "bad_words": ["a", "zq"]}, 4),
        "stop_ids": (
            prompt(9, 8),
            {**greedy, "stop_token_ids": list(range(0, 250, 4)), "min_tokens": 7},
            6,
        ),
        "one_token": (prompt(10, 33), {**greedy, "max_tokens": 1}, 6),
        "two_tokens": (prompt(11, 5), {**greedy, "max_tokens": 2}, 8),
        "abort_late": (prompt(12, 40), {**greedy, "max_tokens": 60}, 8),
        "prefix": (long[:64] + prompt(13, 9), greedy, 60),  # once "chunked" has cached blocks
        "structured": (
            prompt(14, 10),
            {"temperature": 0, "max_tokens": 30, "structured_outputs": yes_or_no},
            10,
        ),
        "seed": (prompt(15, 13), {**drawn, "seed": 7}, 12),
        # Not top_k or top_p: the interpreter (3.9) cannot run vLLM's kernel for them.
        "seed_min_p": (prompt(16, 6), {**drawn, "seed": 8, "min_p": 0.05}, 12),
        "seed_penalty": (prompt(17, 18), {**drawn, "seed": 9, "repetition_penalty": 1.2}, 14),
        "two_answers": (prompt(18, 7), {**drawn, "seed": 10, "n": 2}, 14),
    }


def run(args: argparse.Namespace) -> dict:
    from vllm import LLM, SamplingParams

    if args.spexis:
        from spexis.plugin import register

        register()
    llm = LLM(
        args.model,
        pipeline_parallel_size=args.stages,
        distributed_executor_backend="mp" if args.stages > 1 else None,
        additional_config={"spexis": json.loads(args.spexis)} if args.spexis else {},
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=args.blocks,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    waiting = sorted(requests().items(), key=lambda item: item[1][2])
    texts: dict[str, dict[int, dict]] = {}  # by request and index of the answer
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
        step += 1
        if args.abort:
            abort(engine, texts, aborted)
    counters = getattr(scheduler, "counters", None)
    pool = scheduler.kv_cache_manager.block_pool
    result = {
        "texts": texts,
        "aborted": sorted(aborted),
        "counters": counters.snapshot() if counters else {},
        "blocks_leaked": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "runner_v2": engine.vllm_config.use_v2_model_runner,
    }
    engine.engine_core.shutdown()
    return result


def answer(output, num_cached: int | None) -> dict:
    logprobs = [
        sorted((token, round(entry.logprob, 4)) for token, entry in position.items())
        for position in output.logprobs or []
    ]
    return {"token_ids": list(output.token_ids), "logprobs": logprobs, "cached": num_cached}


def abort(engine, texts: dict, aborted: set[str]) -> None:
    """Aborts each of ABORTED once it has a few tokens; its next rows are in flight then."""
    for name, enough in zip(ABORTED, (4, 9)):
        tokens = texts.get(name, {}).get(0, {"token_ids": ()})["token_ids"]
        if name not in aborted and len(tokens) >= enough:
            engine.abort_request([name])
            aborted.add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["model", "run"])
    parser.add_argument("model")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--spexis", default=None)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--abort", action="store_true")
    args = parser.parse_args()
    if args.what == "model":
        make_model(args.model)
        return
    result = run(args)
    with open(args.out, "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own teardown can wait for a worker that is already gone


if __name__ == "__main__":
    main()
