# SPDX-License-Identifier: Apache-2.0
"""What a stage's step costs with Spexis, against the bare stage step, on one GPU.

    python -m spexis.bench.stage_step                        # 40 layers of Llama-70B, H200
    python -m spexis.bench.stage_step --model tiny --batches 1 4 --steps 3 --rounds 2

One process, one load of random weights: the first of two stages (spexis.bench.stage), with an
exit drafter of random weights. Per batch size, alternating in rounds, medians over rounds:

    graph    the stage's CUDA graph alone, replayed back to back
    stock    the bare stage step: vLLM's own first stage, no guesses, no verdicts
    eager    Spexis: verdict, rows, forward, drafter, advance; drafter launched from the host
    spexis   the same with the drafter as a CUDA graph
    draft    the drafter's graph alone

As many steps are in flight as the engine allows, timed from the first launch to the end of the
last, so a host that is slower than the device shows; `host` is the time of launching a step while
the device is idle. The transfer between stages is not in it. Target at batch 64: spexis at most
1.04 x stock. Prints a table; the last line is one JSON object. --trace FOLDER also writes traces of
a few steps of the last batch size, and counts the device's kernels in a step.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from spexis.bench import dims
from spexis.bench.stage import NUM_STAGES, Stage

TARGET, TARGET_BATCH = 1.04, 64
WARM_UP_STEPS = 4
HOST_STEPS = 2  # few, so that launching them cannot wait for the device


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    on_gpu = torch.cuda.is_available()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spexis-stage-step-") as folder:
        stage = start(args, Path(folder), on_gpu)
        print(f"stage ready after {time.monotonic() - begin:.0f} s", file=sys.stderr)
        rows = [measure(stage, batch, args) for batch in args.batches]
        traced = trace(stage, args.batches[-1], Path(args.trace)) if args.trace else None
    result = {
        "bench": "stage_step",
        "model": Path(args.model).name,
        "layers": stage.runner.model.config.num_hidden_layers // NUM_STAGES,
        "context": args.context,
        "drafter": {
            "layers": args.drafter_layers,
            "draft_vocab_size": stage.runner.spexis_drafter.draft_vocab_size,
            "states": not args.no_states,
        },
        "drafter_bytes": stage.runner.drafter_bytes,
        "draft_graphs": len(getattr(stage.runner.cudagraph_manager, "spexis_draft_graphs", ())),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "vllm": _vllm_version(),
        "steps": args.steps,
        "rounds": args.rounds,
        "ms": rows,
        "kernels": traced,
        "target": TARGET,
        "met": target_met(rows),
    }
    print(table(rows))
    line = json.dumps(result)
    if args.output:
        Path(args.output).write_text(line + "\n")
    print(line)
    return 0


def start(args: argparse.Namespace, folder: Path, on_gpu: bool):
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    sizes = dims.sizes(args.model)
    layers = args.layers or max(1, sizes["num_hidden_layers"] // NUM_STAGES)
    model = dims.write_model(args.model, folder / "model", NUM_STAGES * layers)
    drafter = random_drafter(
        model,
        folder / "drafter",
        num_layers=args.drafter_layers,
        draft_vocab_size=min(args.draft_vocab, sizes["vocab_size"]),
        states=not args.no_states,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted(set(args.batches)),
    }
    return Stage.start(
        model,
        spexis={"drafter": {"method": "exit", "model": drafter}, "draft_graphs": on_gpu},
        max_rows=max(args.batches),
        context=args.context,
        steps=WARM_UP_STEPS + max(args.steps, 5) + HOST_STEPS,
        load_format="dummy",
        max_num_batched_tokens=2048,
        **(
            {"dtype": "bfloat16", "compilation_config": graphs, "gpu_memory_utilization": 0.94}
            if on_gpu
            else {"dtype": "float32", "enforce_eager": True, "block_size": 32}
        ),
    )


def random_drafter(
    model_dir: str,
    folder: Path,
    *,
    num_layers: int,
    draft_vocab_size: int,
    states: bool,
    dtype: torch.dtype,
) -> str:
    """An exit drafter for the middle of the model, with random weights."""
    from transformers import AutoConfig

    from spexis.drafters.exit.config import ExitConfig, base_facts, expected_shapes

    hf_config = AutoConfig.from_pretrained(model_dir)
    config = ExitConfig(
        base_model="random",
        base_model_hash="random",
        exit_layer=hf_config.num_hidden_layers // 2,
        num_stages=2,
        num_drafter_layers=num_layers,
        final_state_feature=states,
        draft_vocab_size=draft_vocab_size,
        tied_head=False,
        version="random",
        **base_facts(hf_config),
    )
    torch.manual_seed(0)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if name == "draft_vocab_ids":
            tensors[name] = torch.arange(draft_vocab_size, dtype=torch.int32)
        elif "norm" in name:
            tensors[name] = torch.ones(shape, dtype=dtype)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype).normal_(0, 0.02)
    config.save(folder, tensors)
    return str(folder)


# ------------------------------------------------------------------- measurement
def measure(stage, batch: int, args: argparse.Namespace) -> dict:
    """Medians in ms of one batch size; None where there are no CUDA graphs."""
    times: dict[str, list[float]] = {}
    hosts: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in ("stock", "eager", "spexis"):
            step, host = time_steps(stage, name, batch, args.steps)
            times.setdefault(name, []).append(step)
            hosts.setdefault(name, []).append(host)
        for name, replay in graph_replays(stage).items():
            times.setdefault(name, []).append(time_calls(stage, replay, args.steps))
    medians = {name: round(statistics.median(found), 4) for name, found in times.items()}
    return {
        "batch": batch,
        **{name: medians.get(name) for name in ("graph", "stock", "eager", "spexis", "draft")},
        "ratio": round(medians["spexis"] / medians["stock"], 4),
        "ratio_eager": round(medians["eager"] / medians["stock"], 4),
        "host": {name: round(statistics.median(found), 4) for name, found in hosts.items()},
        "spread": {name: [min(found), max(found)] for name, found in times.items()},
    }


def time_steps(stage, name: str, batch: int, steps: int) -> tuple[float, float]:
    """ms a step, and ms to launch one, in one of the three ways."""
    use(stage, name)
    with drafting(stage, eager=name == "eager"):
        stage.begin(batch)
        for _ in range(WARM_UP_STEPS):
            stage.step()
        step = time_calls(stage, stage.paced_step, steps)
        begin = time.perf_counter()
        for _ in range(HOST_STEPS):
            stage.step()
        return step, round(1000 * (time.perf_counter() - begin) / HOST_STEPS, 4)


def time_calls(stage, call: Callable[[], None], times: int) -> float:
    stage.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    stage.synchronize()
    return round(1000 * (time.perf_counter() - begin) / times, 4)


@contextmanager
def drafting(stage, eager: bool):
    """Puts the drafter's graphs aside."""
    manager = stage.runner.cudagraph_manager
    graphs = getattr(manager, "spexis_draft_graphs", None)
    if eager and graphs is not None:
        del manager.spexis_draft_graphs
    try:
        yield
    finally:
        if graphs is not None:
            manager.spexis_draft_graphs = graphs


def graph_replays(stage) -> dict[str, Callable[[], None]]:
    """The graphs that the latest Spexis step ran, by name; none without a GPU."""
    runner, size = stage.runner, stage.runner._graph_size()
    if size is None:
        return {}
    manager, desc = runner.cudagraph_manager, runner.batch_desc
    return {
        "graph": lambda: manager.run_fullgraph(desc),
        "draft": lambda: manager.spexis_draft_graphs.replay(size),
    }


def trace(stage, batch: int, folder: Path, steps: int = 5) -> dict[str, float]:
    """Writes a Chrome trace of each way; returns kernels and copies on the device a step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    counts = {}
    for name in ("stock", "eager", "spexis"):
        use(stage, name)
        with drafting(stage, eager=name == "eager"):
            stage.begin(batch)
            for _ in range(WARM_UP_STEPS):
                stage.step()
            stage.synchronize()
            with profile(activities=activities) as profiler:
                for _ in range(steps):
                    stage.step()
                stage.synchronize()
        profiler.export_chrome_trace(str(folder / f"{name}-{batch}.json"))
        on_device = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
        counts[name] = len(on_device) / steps
    return counts


def use(stage, name: str) -> None:
    if name == "stock":
        stage.use_stock()
    else:
        stage.use_spexis()


def target_met(rows: list[dict]) -> bool | None:
    """At the target's batch size; None where it was not measured."""
    found = [row["ratio"] <= TARGET for row in rows if row["batch"] == TARGET_BATCH]
    return found[0] if found else None


def table(rows: list[dict]) -> str:
    names = ["batch", "graph", "stock", "eager", "spexis", "draft", "ratio", "ratio_eager"]
    lines = ["".join(f"{name:>12}" for name in names)]
    for row in rows:
        cells = ("-" if row[name] is None else f"{row[name]:.6g}" for name in names)
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="l70", help=f"{', '.join(dims.DIMS)}, or a folder with a config.json"
    )
    parser.add_argument("--layers", type=int, help="layers of the stage (default: by the model)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=50, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafter-layers", type=int, default=2)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--no-states", action="store_true", help="drafter without final states")
    parser.add_argument("--trace", metavar="FOLDER", help="write traces of a few steps there")
    parser.add_argument("--output", help="also write the JSON line there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
