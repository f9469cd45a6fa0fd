# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM on one GPU and Spexis on two with the same prompts, each with its two best logits.

    python model_checks.py tiny|demo OUT.json [--quantization fp8] [--dtype bfloat16]

Writes what find_ties() of bench/rounding.py found, and Spexis' acceptance. "tiny" is a random
model that any change to the context changes, "demo" the demo model with its shipped drafter.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from spexis.bench.engines import EngineSpec, Work, run_engine
from spexis.bench.exact import tiny_rows
from spexis.bench.rounding import find_ties, with_logits

ROWS, TOKENS = 32, 64


def tiny(folder: Path) -> tuple[str, dict, list[dict]]:
    from spexis.bench.tiny import tiny_drafter, tiny_model

    model = tiny_model("llama", folder / "model")
    drafter = {"method": "exit", "model": tiny_drafter(model, folder / "drafter")}
    return model, drafter, tiny_rows(ROWS, TOKENS)


def demo() -> tuple[str, dict, list[dict]]:
    from spexis.bench.prompts import BUILT_IN, chat_token_ids
    from spexis.demo_model import demo_model_dir

    model = demo_model_dir()
    rows = [
        {"prompt_token_ids": ids, "params": {"max_tokens": TOKENS}}
        for ids in chat_token_ids(model, list(BUILT_IN[:ROWS]))
    ]
    return model, {"method": "exit"}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["tiny", "demo"])
    parser.add_argument("out")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    options = {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "logprobs_mode": "raw_logits",
        "attention_backend": "TRITON_ATTN",  # takes float32
        "gpu_memory_utilization": 0.15,
        "kv_cache_memory_bytes": 1 << 30,  # so that other tests may start beside this one
        "max_num_seqs": ROWS,
    }
    with tempfile.TemporaryDirectory() as folder:
        model, drafter, rows = tiny(Path(folder)) if args.model == "tiny" else demo()
        work = [Work(name="prompts", rows=with_logits(rows))]
        found = []
        for stages, block in ((1, None), (2, drafter)):
            spec = EngineSpec(model=model, stages=stages, drafter=block, options=options)
            run = run_engine(spec, work)
            if run.error:
                sys.exit(run.error)
            found.append(run["prompts"])
    stock, ours = found
    result = {
        **dataclasses.asdict(find_ties(stock, ours)),
        "counters": ours["counters"],
        "seconds": [stock["seconds"], ours["seconds"]],
    }
    Path(args.out).write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
