# SPDX-License-Identifier: Apache-2.0
"""Times of what travels between two devices: hidden states of a step, and an all-reduce.

    links("cuda", hidden_size=8192, rows=[1, 64, 128], num_devices=2)
    {"p2p": {"send": {"64": 3.1e-05, ...}, "all_reduce": {...}}, "no_p2p": {...}}

"send" is the one-way time of the two tensors [rows, hidden] that a vLLM stage hands on (hidden
states and residual), "all_reduce" that of one [rows, hidden]. Both by torch.distributed: NCCL on
CUDA, with and without NCCL_P2P_DISABLE=1, Gloo on CPU. vLLM's own all-reduce kernels, which it
uses where devices see each other's memory, are faster at few rows. Invariant: None, not a guess,
where there is only one device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from spexis.bench import engines

_WARM_UP = 5


def links(
    device: str, *, hidden_size: int, rows: Sequence[int], num_devices: int, repeats: int = 50
) -> dict | None:
    """Seconds by kind of link, operation and rows; None with one CUDA device."""
    if device == "cpu":
        return {"gloo": _measure(device, hidden_size, rows, repeats, {})}
    if num_devices < 2:
        return None
    return {
        "p2p": _measure(device, hidden_size, rows, repeats, {}),
        "no_p2p": _measure(device, hidden_size, rows, repeats, {"NCCL_P2P_DISABLE": "1"}),
    }


def _measure(
    device: str, hidden_size: int, rows: Sequence[int], repeats: int, extra: dict[str, str]
) -> dict:
    order = {"device": device, "hidden_size": hidden_size, "rows": list(rows), "repeats": repeats}
    env = {name: value for name, value in os.environ.items() if name != "NCCL_P2P_DISABLE"}
    source = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
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
                env={**env, **extra},
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


# -- inside the two processes ----------------------------------------------------------------------


def _main(rank: int, store: str, order: dict) -> None:
    import torch
    import torch.distributed as dist

    on_cuda = order["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
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
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


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
