# SPDX-License-Identifier: Apache-2.0
"""Times of what travels between two devices: hidden states of a step, and an all-reduce.

    links("cuda", hidden_size=8192, rows=[1, 64, 128], num_devices=2)
    {"p2p": {"send": {"64": 3.1e-05, ...}, "all_reduce": {...}, "tp_all_reduce": {...}},
     "no_p2p": {...}, "host": {"describe": 2.1e-04}}

"send" is the one-way time of the two tensors [rows, hidden] that a vLLM stage hands on (hidden
states and residual), "all_reduce" that of one [rows, hidden], both by torch.distributed: NCCL on
CUDA, with and without NCCL_P2P_DISABLE=1, Gloo on CPU. "tp_all_reduce" is the same one as vLLM
runs it in a tensor-parallel group: by its own kernels where devices see each other's memory
(without peer access they are off, as disable_custom_all_reduce does), on CUDA from within a CUDA
graph; on a CPU through shared memory if vLLM's build for it can ("tp_by"; AVX2's cannot). Where
that fails it is null and "tp_note" says why.
"describe" is the time of the message by which vLLM describes a step's tensors, host to host, which
`fixed_transfer` does without; it needs two processes but no device, and fails in the same way.
On a CPU each rank has cores of its own, as a worker has.
Invariant: no guess where there is only one device: nothing but "host" then.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spexis.bench import engines, machine

_WARM_UP = 5
_PER_GRAPH = 32  # all-reduces, one behind the other as in a step; one launch for all of them


def links(
    device: str, *, hidden_size: int, rows: Sequence[int], num_devices: int, repeats: int = 50
) -> dict:
    """Seconds by kind of link, operation and rows; of "host" alone with one CUDA device."""
    order = {"device": device, "hidden_size": hidden_size, "rows": list(rows), "repeats": repeats}
    if device == "cpu":  # as vLLM's workers: on any core, with a thread for each, ranks only wait
        order["cores"] = machine.stock_cpu_binding(2).split("|")
    host = {"host": _of_vllm({**order, "what": "host"}, {}, "describe", "note")}
    if device == "cpu":
        return {"gloo": _link(order, p2p=True), **host}
    if num_devices < 2:
        return host
    return {"p2p": _link(order, p2p=True), "no_p2p": _link(order, p2p=False), **host}


def _link(order: dict[str, Any], p2p: bool) -> dict[str, Any]:
    extra = {} if p2p else {"NCCL_P2P_DISABLE": "1"}
    found = _measure({**order, "what": "torch"}, extra)
    by_vllm = {**order, "what": "vllm", "custom": p2p}
    return found | _of_vllm(by_vllm, extra, "tp_all_reduce", "tp_note")


def _of_vllm(order: dict[str, Any], extra: dict[str, str], key: str, note: str) -> dict[str, Any]:
    """In processes of their own: what fails in vLLM must not cost the rest."""
    try:
        return _measure(order, extra)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return {key: None, note: f"failed: {why}"}


def _measure(order: dict[str, Any], extra: dict[str, str]) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "NCCL_P2P_DISABLE"}
    source = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
    env |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "spexis.bench.links",
                    str(rank),
                    f"{folder}/store",
                    json.dumps(order),
                ],
                env={**env, **extra, **_threads(order, rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
            for rank in range(2)
        ]
        engines._groups.update(rank.pid for rank in ranks)
        try:
            out, err = ranks[0].communicate(timeout=300)
            if ranks[0].returncode:
                raise RuntimeError(f"link times failed: {err[-2000:]}")
            return json.loads(out.splitlines()[-1])
        finally:
            for rank in ranks:
                engines._kill_group(rank)


def _threads(order: dict[str, Any], rank: int) -> dict[str, str]:
    """Environment of a rank that has cores of its own."""
    return {"OMP_NUM_THREADS": str(len(_cores(order, rank)))} if "cores" in order else {}


def _cores(order: dict[str, Any], rank: int) -> list[int]:
    return [int(core) for core in order["cores"][rank].split(",")]


# -- inside the two processes ----------------------------------------------------------------------


def _main(rank: int, store: str, order: dict) -> None:
    if "cores" in order:
        os.sched_setaffinity(0, _cores(order, rank))
    import torch

    on_cuda = order["device"] == "cuda" and order["what"] != "host"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    measure = {"torch": _by_torch, "vllm": _by_vllm, "host": _by_host}[order["what"]]
    found = measure(rank, store, order, device)
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # communicators that graphs have captured can hang on their way out


def _by_torch(rank: int, store: str, order: dict, device) -> dict[str, dict[str, float]]:
    import torch
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    dtype = torch.bfloat16 if on_cuda else torch.float32
    found: dict[str, dict[str, float]] = {"send": {}, "all_reduce": {}}
    for rows in order["rows"]:
        x = torch.zeros(2, rows, order["hidden_size"], dtype=dtype, device=device)

        def there_and_back(x=x):
            for source in (0, 1):
                if rank == source:
                    dist.send(x, 1 - rank)
                else:
                    dist.recv(x, 1 - rank)

        def all_reduce(x=x[0]):
            dist.all_reduce(x)

        for name, call, share in (("send", there_and_back, 2), ("all_reduce", all_reduce, 1)):
            seconds = _seconds(call, order["repeats"], torch.cuda.synchronize if on_cuda else None)
            found[name][str(rows)] = seconds / share
    dist.barrier()
    dist.destroy_process_group()
    return found


def _by_vllm(rank: int, store: str, order: dict, device) -> dict[str, Any]:
    """The all-reduce of a tensor-parallel group of two, through vLLM's own entry point."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state, tensor_model_parallel_all_reduce
    from vllm.platforms import current_platform

    on_cuda = device.type == "cuda"
    # Without its kernels the CPU's group falls back to Gloo, which takes ten times as long.
    current_platform.import_kernels()
    # Both ranks need the same name for the CPU's shared memory; vLLM's worker sets it likewise.
    os.environ["VLLM_DIST_IDENT"] = f"links-{Path(store).parent.name}"
    found: dict[str, float] = {}
    dtype = torch.bfloat16 if on_cuda else torch.float32
    with set_current_vllm_config(VllmConfig()):
        parallel_state.set_custom_all_reduce(order["custom"])
        parallel_state.init_distributed_environment(
            world_size=2,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{store}",
            backend="nccl" if on_cuda else "gloo",
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        for rows in order["rows"]:
            x = torch.zeros(rows, order["hidden_size"], dtype=dtype, device=device)
            if on_cuda:
                found[str(rows)] = _in_graph(tensor_model_parallel_all_reduce, x, order["repeats"])
            else:
                call = functools.partial(tensor_model_parallel_all_reduce, x)
                found[str(rows)] = _seconds(call, order["repeats"], None)
        torch.distributed.barrier()
        if on_cuda:
            return {"tp_all_reduce": found}
        # Only through shared memory can vLLM hand on dictionaries of tensors on a CPU.
        shared = parallel_state.get_tp_group().device_communicator.supports_tensor_dict
    return {"tp_all_reduce": found, "tp_by": "shared memory" if shared else "gloo"}


def _by_host(rank: int, store: str, order: dict, device) -> dict[str, float]:
    """The description of hidden states, residual and rows, by the group call that vLLM sends it."""
    import torch
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = parallel_state.init_model_parallel_group(
        [[0, 1]], 0, "gloo", group_name="links", use_device_communicator=False
    )
    rows = max(order["rows"])
    step = {name: torch.zeros(rows, order["hidden_size"]) for name in ("hidden_states", "residual")}
    step["spexis_rows"] = torch.zeros(2, rows, dtype=torch.int32)
    description, _ = parallel_state._split_tensor_dict(step)

    def there_and_back():
        for source in (0, 1):
            if rank == source:
                group.send_object(description, dst=1 - rank)
            else:
                group.recv_object(src=1 - rank)

    seconds = _seconds(there_and_back, order["repeats"], None) / 2
    dist.barrier()
    return {"describe": seconds}


def _in_graph(all_reduce, x, repeats: int) -> float:
    """Seconds of one, as part of a CUDA graph of several in a row. x: [rows, hidden]"""
    import torch
    from vllm.distributed.parallel_state import graph_capture

    def chain(y):
        for _ in range(_PER_GRAPH):
            y = all_reduce(y)
        return y

    graph = torch.cuda.CUDAGraph()
    with graph_capture(x.device) as context:
        chain(x)  # what is allocated or looked up at first use must not be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=context.stream):
            chain(x)
    return _seconds(graph.replay, repeats, torch.cuda.synchronize) / _PER_GRAPH


def _seconds(call, repeats: int, synchronize) -> float:
    for _ in range(_WARM_UP):
        call()
    if synchronize:
        synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    if synchronize:
        synchronize()
    return (time.perf_counter() - begin) / repeats


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
