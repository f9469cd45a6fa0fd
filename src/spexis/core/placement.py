# SPDX-License-Identifier: Apache-2.0
"""Where layers and cores go: the split of layers over stages, and of CPU cores over workers.

    layer_partition(30, 18, 2) -> [18, 12]        cpu_binding([0, 1], 3) -> "0|1|0"
    balanced_partition(80, 2, StageCosts(layer=0.5, last=1.0)) -> [41, 39]

An exit drafter fixes where the first stage ends, because that is the layer whose output it was
trained on; other drafters leave it free, and then measured times decide.
Invariant: pure functions; every layer is on exactly one stage, every stage has a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Times of a step in any one unit."""

    layer: float
    """Of one layer."""
    first: float = 0.0
    """What the first stage does besides its layers: the drafter."""
    last: float = 0.0
    """What the last stage does besides its layers: the output head and sampling."""

    def of_split(self, split: Sequence[int]) -> list[float]:
        """Time of each stage of a split."""
        times = [layers * self.layer for layers in split]
        times[0] += self.first
        times[-1] += self.last
        return times


def balanced_partition(
    num_layers: int, num_stages: int, costs: StageCosts, first_layers: int | None = None
) -> list[int]:
    """Layers per stage with the slowest stage as fast as it can be.

    first_layers: length of the first stage where the drafter fixes it. Layers are alike, so
    giving each next one to the stage that is least busy is optimal. Of stages equally busy the
    middle ones come first, the last one last: it holds the output head's memory.
    """
    free = num_stages - (first_layers is not None)
    if num_stages < 1 or free < 1 or num_layers - (first_layers or 0) < free:
        raise ValueError(f"cannot split {num_layers} layers over {num_stages} stages")
    if costs.layer <= 0 or costs.first < 0 or costs.last < 0:
        raise ValueError(f"times must be positive: {costs}")
    split = [1] * num_stages
    if first_layers is not None:
        split[0] = first_layers
    stages = range(num_stages - free, num_stages)
    while sum(split) < num_layers:
        times = costs.of_split(split)
        split[min(stages, key=lambda s: (times[s], s == num_stages - 1, s == 0, s))] += 1
    return split


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


def read_partition(text: str, num_layers: int) -> list[int] | None:
    """Layers per stage of "18,12"; None unless all are above 0 and add up to `num_layers`."""
    parts = [part.strip() for part in text.split(",")]
    counts = [int(part) if part.isdecimal() else 0 for part in parts]
    return counts if min(counts) > 0 and sum(counts) == num_layers else None


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
