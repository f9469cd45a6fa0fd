# SPDX-License-Identifier: Apache-2.0
"""Checks of one first stage that runs alone (spexis.bench.stage), in a process of their own.

    python tests/gpu/stage_checks.py OUT.json [--dtype float32] [--attention TRITON_ATTN] [--states]
                                              [--default-modes] [--quantization fp8]

On a GPU with vLLM's full decode graphs and the drafter's (--default-modes: and torch.compile and
piecewise graphs, as users run it); on a CPU in Triton's interpreter, where
a graph is the captured code run again (tests/engine/test_stage_alone.py), so that the checks
themselves are known to work. Writes what was compared; a difference is an AssertionError.
"""

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from spexis.bench import dims
from spexis.bench.stage import Stage
from spexis.bench.stage_step import drafting, random_drafter
from spexis.bench.tiny import steep_profile
from spexis.engine.transfer import ROWS
from spexis.engine.v2_choice import HELD, Chains
from spexis.engine.verdict import NO_TOKEN, FirstStage

CPU = torch.device("cpu")
MAX_ROWS, CONTEXT, STEPS = 8, 24, 40
GRAPH_SIZES = [1, 2, 4, 8]
LAYERS = 2  # of the stage


def start(folder: Path, args: argparse.Namespace, states: bool) -> tuple[Stage, str]:
    model = dims.write_model("tiny", folder / "model", 2 * LAYERS)
    dtype = getattr(torch, args.dtype)
    drafter = random_drafter(
        model, folder / "drafter", num_layers=2, draft_vocab_size=300, states=states, dtype=dtype
    )
    if torch.cuda.is_available():
        modes = {} if args.default_modes else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        more = {
            "compilation_config": {**modes, "cudagraph_capture_sizes": GRAPH_SIZES},
            "gpu_memory_utilization": 0.2,
            "quantization": args.quantization,
        }
        if args.attention:
            more["attention_backend"] = args.attention
    else:
        more = {"enforce_eager": True, "block_size": 32}
    spexis = {"drafter": {"method": "exit", "model": drafter}, "draft_graphs": True}
    if args.choose:
        profile = steep_profile(folder / "steep.json", num_layers=2 * LAYERS)
        spexis |= {"mode": "sp-alpha", "selection": "stage", "profile": profile}
    sizes = {"max_rows": MAX_ROWS, "context": CONTEXT, "steps": STEPS}
    # 256 so that a prompt of every row fits into one step.
    stage = Stage.start(
        model,
        spexis=spexis,
        **sizes,
        dtype=args.dtype,
        load_format="dummy",
        max_num_batched_tokens=256,
        **more,
    )
    return stage, drafter


def check_capture(stage: Stage) -> dict:
    """On the CPU: the way through vLLM's capture, with a recorder that only runs the work.

    It must leave every request's state as it was.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from spexis.engine import v2_drafter

    class Again:
        def __init__(self, pool_context):
            pass

        def record(self, work):
            work()
            return work

    runner, manager = stage.runner, stage.runner.cudagraph_manager
    full = CUDAGraphMode.FULL
    descriptors = [BatchExecutionDescriptor(full, n, n, uniform_token_count=1) for n in GRAPH_SIZES]
    mixed = BatchExecutionDescriptor(full, 16, MAX_ROWS)
    manager._capture_descs = {full: [mixed, *reversed(descriptors)]}
    stage.begin(3)
    first = runner.first_stage
    before = [t[: runner.num_slots].clone() for t in (first.position, first.token, first.planned)]
    with (
        patch.object(v2_drafter, "CudaGraphRecorder", Again),
        patch.object(v2_drafter, "graph_capture", lambda device: nullcontext()),
        patch.object(torch.accelerator, "get_memory_info", lambda: (0, 0)),
        torch.inference_mode(),
    ):
        runner.model_state.capture_inner_cudagraphs(
            runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config
        )
    for mine, theirs in zip((first.position, first.token, first.planned), before, strict=True):
        assert torch.equal(mine[: runner.num_slots], theirs)
    manager._capture_descs = {}
    graphs = manager.spexis_draft_graphs
    return {"captured": [n for n in range(1, 100) if n in graphs]}


def emulate_graphs(stage: Stage) -> None:
    """On the CPU: what a graph would hold runs instead, from the buffers that a graph would read.

    The stage's output is put where vLLM's graph leaves it, padded as vLLM pads. Attention's
    metadata is this step's, since the CPU's back end has no persistent one.
    """
    from vllm.forward_context import set_forward_context

    runner, manager = stage.runner, stage.runner.cudagraph_manager

    class Emulated(dict):
        def replay(self, size: int) -> None:
            state, output = runner.execute_model_state, runner.stage_output
            batch = state.input_batch
            for name, tensor in output.tensors.items():
                manager.intermediate_tensors[name][: len(tensor)] = tensor
            with set_forward_context(
                state.attn_metadata,
                runner.vllm_config,
                num_tokens=batch.num_tokens_after_padding,
                slot_mapping=state.slot_mappings_by_layer,
            ):
                runner._draft_decode_rows(size)

    def graph_size() -> int | None:
        batch = runner.execute_model_state.input_batch
        emulated = isinstance(getattr(manager, "spexis_draft_graphs", None), Emulated)
        return batch.num_reqs if emulated and batch.num_tokens == batch.num_reqs else None

    manager.spexis_draft_graphs = Emulated()
    runner._graph_size = graph_size


def slots_of(stage: Stage) -> torch.Tensor:
    index = stage.runner.req_states.req_id_to_index
    return torch.tensor([index[req_id] for req_id in stage.runner.execute_order])


def note_order(stage: Stage) -> None:
    """Rows of a step are in vLLM's order; keeps the latest one's request names."""
    make_plan = stage.handler.make_plan

    def noting(batch, *args):
        stage.runner.execute_order = list(batch.req_ids)
        make_plan(batch, *args)

    stage.handler.make_plan = noting


def check_rules(stage: Stage, num_rows: int, steps: int, eager: bool) -> dict:
    """What each step ran is what the rules in verdict.py say, given the drafter's guesses."""
    runner, plans = stage.runner, []
    rule = FirstStage(runner.num_slots, 2, CPU)
    num_wrong = num_compared = 0
    with drafting(stage, eager):
        stage.begin(num_rows)
        for step in range(steps):
            slots = slots_of(stage)
            ran = stage.handed_on[ROWS].cpu().long()
            if step > 0:
                if len(plans) == 2:
                    num_wrong += int(rule.apply_verdict(*plans.pop(0)).sum())
                wanted = torch.stack([rule.position[slots], rule.token[slots]])
                assert torch.equal(ran, wanted), (step, ran, wanted)
                num_compared += num_rows
            guesses = runner.first_stage.token[slots.to(runner.device)].cpu()
            yes = torch.ones(num_rows, dtype=torch.bool)
            rule.propose(slots, ran[0] + 1, guesses, yes)
            truth = stage.verdicts_of_latest_step(num_rows).cpu()
            plans.append((slots, ran[0] + 1, truth, yes))
            stage.step()
    assert num_wrong > 0
    return {"rows": num_compared, "restarts": num_wrong}


def rows_run(stage: Stage, num_rows: int, steps: int, eager: bool) -> list[torch.Tensor]:
    """What each step of a fixed history handed on: positions and tokens."""
    found = []
    with drafting(stage, eager):
        stage.begin(num_rows)
        for _ in range(steps):
            found.append(stage.handed_on[ROWS].clone())
            stage.step()
    found[0][1] = 0  # a prompt row's token is whatever its slot held before
    return [rows.cpu() for rows in found]


def check_graphs(stage: Stage, num_rows: int, steps: int) -> dict:
    """The drafter's graphs draft what the eager drafter drafts."""
    eager, captured = (rows_run(stage, num_rows, steps, eager) for eager in (True, False))
    for step, (mine, theirs) in enumerate(zip(captured, eager, strict=True)):
        assert torch.equal(mine, theirs), (step, mine, theirs)
    assert len({rows[1].sum().item() for rows in eager}) > steps // 4  # guesses do vary
    return {"rows": num_rows * steps}


def check_head(
    stage: Stage, drafter_folder: str, steps: int, tolerance: float, eager: bool
) -> dict:
    """Every guess is the best one by the drafter's definition (drafters/exit/module.py)."""
    from spexis.drafters.exit.module import load_drafter

    reference = load_drafter(drafter_folder)
    head = reference.lm_head.weight
    torch.manual_seed(1)
    prompts = [torch.randint(1, 300, (3 + 4 * i,)).tolist() for i in range(4)]
    streams: dict[str, torch.Tensor] = {}  # request -> [position + 1, H] as the drafter saw them
    num_compared, worst, different = 0, 0.0, set()
    with drafting(stage, eager), torch.inference_mode():
        stage.begin(len(prompts), prompts)
        for _ in range(steps):
            order, slots = stage.runner.execute_order, slots_of(stage)
            sent = {name: tensor.cpu() for name, tensor in stage.handed_on.items()}
            hidden = sent["hidden_states"].float() + sent["residual"].float()
            guesses = stage.runner.first_stage.token[slots.to(stage.device)].cpu()
            confidence = stage.runner.first_stage.confidence[slots.to(stage.device)].cpu()
            first = 0
            for row, req_id in enumerate(order):
                start = int(sent[ROWS][0, row])
                count = len(prompts[stage.req_ids.index(req_id)]) if req_id not in streams else 1
                before = streams.get(req_id, hidden[:0])[:start]
                streams[req_id] = torch.cat([before, hidden[first : first + count]])
                first += count
                logits = head @ reference(streams[req_id].unsqueeze(0))[0, -1]
                behind = float(logits.max() - logits[guesses[row]])
                worst = max(worst, behind)
                assert behind <= tolerance, (req_id, start, behind)
                sure = float(logits.softmax(-1).max())
                assert abs(sure - float(confidence[row])) <= tolerance, (req_id, start, sure)
                num_compared += 1
                different.add(int(guesses[row]))
            stage.step()
    return {"rows": num_compared, "worst": worst, "different": len(different)}


def check_choice(stage: Stage, num_rows: int, steps: int, eager: bool) -> dict:
    """The device runs the rows that are worth most, by the rules and by what it guessed before.

    How many, changes from step to step; whoever is held runs its row later.
    """
    runner, plans = stage.runner, []
    rule = FirstStage(runner.num_slots, 2, CPU)
    known = Chains(runner.num_slots, rule.num_remembered, CPU)
    counts, num_held, close = [], 0, 0
    with drafting(stage, eager):
        stage.begin(num_rows)
        for step in range(steps):
            slots, yes = slots_of(stage), torch.ones(num_rows, dtype=torch.bool)
            ran = stage.handed_on[ROWS].cpu()
            running = (ran[0] != HELD).nonzero().flatten()
            at = ran[0].long()
            if step == 0:
                known.begun(slots, at + 1, yes)
            else:
                if len(plans) == 2:
                    due = plans.pop(0)
                    rule.apply_verdict(*due)
                    known.verdict(*due)
                joint, unverified = known.worth(slots, rule.position[slots])
                offered = ran[2].view(torch.float32)
                assert torch.equal(unverified, ran[3].long()), (step, unverified, ran[3])
                assert torch.allclose(joint, offered, atol=1e-5), (step, joint, offered)
                held = known.hold(slots, offered, unverified, counts[-1], runner.step)
                wanted = (~held).nonzero().flatten()
                assert torch.equal(running, wanted), (step, running, wanted)
                rows = torch.stack([rule.position[slots], rule.token[slots]])[:, running]
                assert torch.equal(ran[:2, running].long(), rows), (step, ran, rows)
                num_held += num_rows - len(running)
                close += int(((unverified > 0) & ~held).sum())
            run = slots[running]
            known.ran[run] = runner.step
            guesses = runner.first_stage.token[run.to(runner.device)].cpu()
            confidence = runner.first_stage.confidence[run.to(runner.device)].cpu()
            rule.propose(run, at[running] + 1, guesses, yes[running])
            known.guessed(run, at[running] + 1, confidence)
            truth = stage.verdicts_of_latest_step(num_rows).cpu()
            truth = torch.where(ran[0] == HELD, NO_TOKEN, truth)
            plans.append((slots, torch.where(ran[0] == HELD, 0, at + 1), truth, yes))
            counts.append(1 + (3 * step) % (num_rows - 1))
            stage.step(counts[-1])
    assert num_held > steps and close > 0
    return {"held": num_held, "guesses that ran": close}


def check_no_sync(stage: Stage, num_rows: int, steps: int, choose: bool = False) -> dict:
    """No call from requests' first step on waits for the device: torch raises where one does."""
    for _ in range(2):  # twice, since a request that ends clears and frees, too
        stage.begin(num_rows)
        stage.step()
    stage.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stage.begin(num_rows)
        for step in range(steps):
            stage.step(1 + step % (num_rows - 1) if choose else None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"steps": steps}


def memory(stage: Stage) -> dict:
    runner, worker = stage.runner, stage.worker
    drafter = runner.spexis_drafter
    tensors = [*drafter.parameters(), drafter.bridge, *getattr(drafter, "state_projections", ())]
    found = {
        "drafter": dict(runner.drafter_bytes),
        "parameters": sum(t.numel() * t.element_size() for t in tensors),
        "model": runner.model_memory_usage,
        "kv_layers": len(runner.compilation_config.static_forward_context),
    }
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        found["used"] = worker.init_snapshot.free_memory - free
        found["requested"] = int(worker.requested_memory)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", help="vLLM's attention back end")
    parser.add_argument("--states", action="store_true", help="drafter with final states")
    parser.add_argument("--default-modes", action="store_true", help="vLLM's own choice")
    parser.add_argument("--choose", action="store_true", help="the device chooses rows")
    parser.add_argument("--quantization", help="vLLM's; on a GPU")
    args = parser.parse_args()
    on_gpu, exact = torch.cuda.is_available(), args.dtype == "float32"
    tolerance = 2e-3 if exact else 0.3
    with tempfile.TemporaryDirectory() as folder:
        stage, drafter = start(Path(folder), args, args.states)
        note_order(stage)
        steps = 24 if on_gpu else 6
        if not on_gpu:
            shape = MAX_ROWS, stage.runner.model.config.hidden_size
            names = ("hidden_states", "residual")
            output = {name: torch.zeros(shape) for name in names}
            stage.runner.cudagraph_manager.intermediate_tensors = output
            capture = check_capture(stage)
            emulate_graphs(stage)
        if args.choose:
            result = {
                f"choice{way}": check_choice(stage, 6, steps, bool(way)) for way in ("", " eager")
            }
            if on_gpu:
                result["no sync"] = [check_no_sync(stage, n, 16, choose=True) for n in (8, 3)]
            Path(args.out).write_text(json.dumps(result))
            return
        result = {"rules eager": check_rules(stage, 5, steps, eager=True)}
        if not args.states:
            result["head eager"] = check_head(stage, drafter, steps, tolerance, eager=True)
        sizes = GRAPH_SIZES if on_gpu else GRAPH_SIZES[-1:]
        # A padded batch's head has more rows than an eager one's, and may round differently.
        sizes = [*sizes, 3] if exact else sizes
        result["graphs"] = [check_graphs(stage, n, steps) for n in sizes]
        result["rules"] = check_rules(stage, 5, steps, eager=False)
        if not args.states:
            result["head"] = check_head(stage, drafter, steps, tolerance, eager=False)
        if not on_gpu:
            result.update(capture)
        else:
            graphs = stage.runner.cudagraph_manager.spexis_draft_graphs
            result["captured"] = [n for n in range(1, 100) if n in graphs]
            result["no sync"] = [check_no_sync(stage, n, 16) for n in (8, 3)]
        result["memory"] = memory(stage)
        Path(args.out).write_text(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
