# SPDX-License-Identifier: Apache-2.0
"""Where layers and cores go: the split of layers over stages, and of CPU cores over workers.

    layer_partition(30, 18, 2) -> [18, 12]        cpu_binding([0, 1], 3) -> "0|1|0"

Invariant: pure functions; every layer is on exactly one stage and the first stage ends at the
drafter's exit layer, because that is the layer whose output the drafter was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence


def layer_partition(num_layers: int, exit_layer: int, num_stages: int) -> list[int]:
    """Layers per stage: the first ends at `exit_layer`, the rest is spread evenly.

    Left-over layers go to the stages right after the first: the last one also runs the norm and
    the output head.
    """
    rest, stages = num_layers - exit_layer, num_stages - 1
    if stages < 1 or exit_layer < 1 or rest < stages:
        raise ValueError(
            f"cannot split {num_layers} layers over {num_stages} stages with the first ending at "
            f"layer {exit_layer}"
        )
    each, extra = divmod(rest, stages)
    return [exit_layer] + [each + (stage < extra) for stage in range(stages)]


def cpu_binding(cores: Sequence[int], num_workers: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND for `num_workers` ranks: an even share of `cores` each.

    Cores that do not divide evenly stay with the engine process. With fewer cores than ranks the
    ranks take turns: three on two cores give "0|1|0".
    """
    if not cores or num_workers < 1:
        raise ValueError(f"cannot bind {num_workers} workers to cores {list(cores)}")
    share = max(1, len(cores) // num_workers)
    groups = []
    for rank in range(num_workers):
        start = rank * share
        mine = [cores[(start + i) % len(cores)] for i in range(share)]
        groups.append(",".join(str(core) for core in mine))
    return "|".join(groups)
