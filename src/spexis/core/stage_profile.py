# SPDX-License-Identifier: Apache-2.0
"""The times from which every decision is priced: of each pipeline stage, and of what lies between.

    profile = ProfileFile.load("profile.json").stage_profile()     # measured (profile_file.py)
    profile = estimate_profile(HARDWARE["h100"], MODELS["llama-70b"], tensor=4, stages=2)
    profile.split(stages=1, tensor=2)             # the same model on two devices, without stages

Times in seconds, sizes in bytes, rows of one decode token each. Curves are ((rows, seconds), ...).

split() assumes that a stage's layers take their time by what a device reads: L/2 layers on one
device read the same bytes as L layers halved over two, so both take the same time. That leaves out
what narrower matrices lose. Added to it are two all-reduces a layer, one behind attention and one
behind the MLP. Head and drafter are divided by the ranks.

Invariant: split() of the measured shape is the measurement itself; no torch, no vLLM, no numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spexis.config import ConfigError

BLOCK_SIZE = 16  # tokens of a KV block, vLLM's default
Rows = tuple[tuple[float, float], ...]


class ProfileError(ConfigError):
    """A profile that cannot be used; the message is one line and names the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePoints:
    """Measured times of one stage's layers."""

    points: tuple[tuple[int, float, float], ...]
    """(rows, KV tokens a row, seconds), by rows; without head, drafter and links."""
    graph_sizes: tuple[int, ...] = ()
    """Captured CUDA graph sizes, ascending: fewer rows are padded up to one. Empty: no padding."""
    prefill_points: Rows = ()
    """(query tokens, seconds) of a prompt chunk alone, above 1 token. Empty: the decode curve is
    continued with the slope of its last segment."""
    kv_seconds_per_token: float | None = None
    """Seconds one KV token adds to a step; None: from points of different context lengths."""

    def scaled(self, factor: float) -> StagePoints:
        """All times by a factor."""
        slope = self.kv_seconds_per_token
        return replace(
            self,
            points=tuple((rows, kv, seconds * factor) for rows, kv, seconds in self.points),
            prefill_points=scaled(self.prefill_points, factor),
            kv_seconds_per_token=None if slope is None else slope * factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    hardware: str
    model: str
    layers_per_stage: tuple[int, ...]
    """First stage to last."""
    stages: tuple[StagePoints, ...]
    """One a stage, or one that holds for all of them."""
    source: str = ""
    """How and when it was measured."""
    tensor_parallel: int = 1
    """Ranks that share one stage."""
    measured_layers: int | None = None
    """Layers in `stages` where one entry holds for stages of other lengths too; None: of its
    own stage."""
    head: Rows = ()
    """Output head and sampling on the last stage, a step."""
    drafter: Rows = ()
    """Drafter on the first stage, a step."""
    hidden_link: Rows = ()
    """The hidden states' way to the next stage."""
    all_reduce: Rows = ()
    """One all-reduce over two ranks, where the points hold none."""
    all_reduce_by: str = ""
    """"vllm": as vLLM runs it; "torch": by torch.distributed (NCCL, Gloo); "preset": vLLM's own by
    presets.py, for want of a measurement; "": none."""
    host: Rows = ()
    """The scheduler's work a step."""
    host_overlaps: bool = False
    """The host works ahead of the devices (async scheduling), so it only limits the pace; else it
    lies on the way from a verdict to the first stage's next step."""
    kv_blocks: int | None = None
    """Of one stage's rank."""
    block_size: int = BLOCK_SIZE

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    def of_stage(self, stage: int) -> StagePoints:
        """Times of this stage's layers, all of its ranks working."""
        if len(self.stages) > 1:
            return self.stages[stage]
        if self.measured_layers in (None, self.layers_per_stage[stage]):
            return self.stages[0]
        return self.stages[0].scaled(self.layers_per_stage[stage] / self.measured_layers)

    def split(self, stages: int, tensor: int) -> StageProfile | None:
        """The same model and machine with other stages and ranks; None where this profile cannot
        say: all-reduces were not measured, or its points hold those of another number of ranks.
        """
        if self.measured_layers is None or stages > self.num_layers:
            return None
        if tensor != self.tensor_parallel and self.tensor_parallel > 1:
            return None
        if tensor > self.tensor_parallel and not self.all_reduce:
            return None
        share = self.tensor_parallel / tensor
        # A ring of n ranks sends 2(n-1)/n of the bytes, two ranks once.
        ring = 2 * (tensor - 1) / tensor
        each, extra = divmod(self.num_layers, stages)
        return replace(
            self,
            layers_per_stage=tuple(each + (s < extra) for s in range(stages)),
            tensor_parallel=tensor,
            stages=(self.stages[0].scaled(share),),
            head=scaled(self.head, share),
            drafter=scaled(self.drafter, share),
            all_reduce=scaled(self.all_reduce, ring) if tensor > 1 else self.all_reduce,
            kv_blocks=None,
        )


def scaled(points: Rows, factor: float) -> Rows:
    return tuple((rows, seconds * factor) for rows, seconds in points)
