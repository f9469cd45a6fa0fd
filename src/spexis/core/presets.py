# SPDX-License-Identifier: Apache-2.0
"""Hardware and models for the planner where nothing was measured: stated assumptions, no more.

    profile = estimate_profile(HARDWARE["h100"], MODELS["llama-70b"], tensor=4, stages=2)
    profile = MEASURED["h200-llama-70b-pp2"]          # measured, bare stage

What a stage of given layers takes is taken from one measurement (80-layer Llama-70B dimensions on
two H200s, 40 layers a stage, CUDA graphs at powers of two): 76 % of the data-sheet's bandwidth at
one row, and from there a shape that depends on x = rows * bandwidth / FLOPs only, the share of the
weight-reading time that the arithmetic would take. An all-reduce of b bytes over n ranks takes
latency + b * per_byte * 2(n-1)/n. Everything is seconds, bytes, FLOP/s; bfloat16.

Invariant: every figure here says where it is from. A profile measured on the machine (`spexis
profile`) beats all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spexis.core.cost_model import Curve
from spexis.core.stage_profile import Rows, StagePoints, StageProfile

BYTES = 2  # bfloat16
BANDWIDTH_SHARE = (
    0.7585  # reached by the measured stage at one row (18.8 ms for 68.4 GB at 4.8 TB/s)
)
# Seconds of a step over those at one row, by x: 1, 64, 128, 256 rows on an H200.
SHAPE = Curve([(0.0, 1.0), (0.311, 1.069), (0.621, 1.229), (1.243, 1.872)])
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
MOST = 1 << 24  # no size of a model is larger
DRAFTER_LAYERS = 2  # attention layers without MLP, in the exit drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    name: str
    memory: float
    bandwidth: float
    """Bytes a second, data sheet."""
    flops: float
    """Dense bfloat16, data sheet."""
    all_reduce_latency: float
    all_reduce_per_byte: float
    """At two ranks; times 2(n-1)/n over n."""
    hop_latency: float
    hop_per_byte: float
    source: str
    """Where the link figures are from."""


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of a config.json; default: for a key that lacks or is null."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MOST:
        raise ValueError(f"{key} is {value!r}: allowed is a whole number above 0")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    accepted: tuple[tuple[float, float], ...] = ()
    """(exit depth as a share of the layers, drafts right): published averages over Spec-Bench."""

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> Model:
        """From the keys of a Hugging Face config.json; a ValueError names the one that is wrong."""
        heads = _whole(config, "num_attention_heads")
        hidden = _whole(config, "hidden_size")
        return cls(
            name=name,
            layers=_whole(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_whole(config, "intermediate_size"),
            heads=heads,
            kv_heads=_whole(config, "num_key_value_heads", heads),
            head_dim=_whole(config, "head_dim", max(1, hidden // heads)),
            vocab=_whole(config, "vocab_size"),
        )

    @property
    def attention_params(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def layer_params(self) -> int:
        return self.attention_params + 3 * self.hidden * self.intermediate

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + 2 * self.head_params

    @property
    def bytes(self) -> int:
        return BYTES * self.params

    @property
    def drafter_bytes(self) -> int:
        params = self.hidden**2 + DRAFTER_LAYERS * self.attention_params + self.head_params
        return BYTES * params

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers."""
        return BYTES * 2 * self.layers * self.kv_heads * self.head_dim

    def acceptance(self, depth: float) -> float | None:
        """Of an exit after that share of the layers; None outside of what was published."""
        known = self.accepted
        if not known or not known[0][0] - 1e-9 <= depth <= known[-1][0] + 1e-9:
            return None
        return float(np.interp(depth, [d for d, _ in known], [p for _, p in known]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Seconds a step takes longer than its stage: host, launches, the way of the verdict."""

    name: str
    tensor: float
    pipeline: float
    speculative: float
    source: str


STACKS = {
    "vllm-0.32": Stack(
        name="vllm-0.32",
        tensor=0.0003,
        pipeline=0.0001,
        speculative=0.0002,
        source="two H200s, Llama-70B dimensions (docs/performance.md): PP2 19.2 ms at 32 rows, SP "
        "20.2 and 23.8 ms at 64 and 128 rows; TP2's is in its all-reduce",
    ),
    "published": Stack(
        name="published",
        tensor=0.0063,
        pipeline=0.0055,
        speculative=0.0055,
        source="what the published rows of H100 leave beside weights and all-reduces: 5.9 and "
        "6.4 ms (TP, both models), 5.3 ms (SP, Llama-70B)",
    ),
}

HARDWARE = {
    "h200": Hardware(
        name="h200",
        memory=141e9,
        bandwidth=4.8e12,
        flops=989e12,
        all_reduce_latency=13e-6,
        all_reduce_per_byte=7e-12,
        hop_latency=30e-6,
        hop_per_byte=1 / 200e9,
        source="TP2 measured at 64 and 128 rows (2730 and 4653 tokens/s) against the bare stage",
    ),
    "h200-no-p2p": Hardware(
        name="h200-no-p2p",
        memory=141e9,
        bandwidth=4.8e12,
        flops=989e12,
        all_reduce_latency=47e-6,
        all_reduce_per_byte=35e-12,
        hop_latency=60e-6,
        hop_per_byte=1 / 20e9,
        source="the same with NCCL_P2P_DISABLE=1 (1919 and 3058 tokens/s)",
    ),
    "h100": Hardware(
        name="h100",
        memory=80e9,
        bandwidth=3.35e12,
        flops=989e12,
        all_reduce_latency=15e-6,
        all_reduce_per_byte=7e-12,
        hop_latency=30e-6,
        hop_per_byte=1 / 200e9,
        source="assumed as measured on H200 with NVLink",
    ),
    "a100": Hardware(
        name="a100",
        memory=80e9,
        bandwidth=2.039e12,
        flops=312e12,
        all_reduce_latency=10e-6,
        all_reduce_per_byte=150e-12,
        hop_latency=60e-6,
        hop_per_byte=1 / 20e9,
        source="implied by the two published TP rows (966 and 2058 tokens/s; within 10 %): "
        "about 7 GB/s, far below NVLink, as if peers could not reach each other",
    ),
    "a100-nvlink": Hardware(
        name="a100-nvlink",
        memory=80e9,
        bandwidth=2.039e12,
        flops=312e12,
        all_reduce_latency=20e-6,
        all_reduce_per_byte=12e-12,
        hop_latency=30e-6,
        hop_per_byte=1 / 150e9,
        source="assumed: H200's links at the data sheet's ratio (300 to 450 GB/s a direction)",
    ),
    "rtx-pro-6000": Hardware(
        name="rtx-pro-6000",
        memory=96e9,
        bandwidth=1.792e12,
        flops=503e12,
        all_reduce_latency=20e-6,
        all_reduce_per_byte=100e-12,
        hop_latency=60e-6,
        hop_per_byte=1 / 25e9,
        source="implied by the published TP row (1236 tokens/s): PCIe 5 without peer access",
    ),
}

LINKS_MEASURED = {"NVIDIA H200": "h200"}  # devices whose links are not assumed here

MODELS = {
    "llama-70b": Model(
        name="llama-70b",
        layers=80,
        hidden=8192,
        intermediate=28672,
        heads=64,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        accepted=((0.25, 0.634), (0.5, 0.785)),
    ),
    "llama-8b": Model(
        name="llama-8b",
        layers=32,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        accepted=((0.25, 0.596), (0.5, 0.759)),
    ),
    "qwen3-32b": Model(
        name="qwen3-32b",
        layers=64,
        hidden=5120,
        intermediate=25600,
        heads=64,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        accepted=((0.5, 0.596),),
    ),
}


def estimate_profile(
    hardware: Hardware,
    model: Model,
    tensor: int = 1,
    stages: int = 1,
    stack: Stack = STACKS["vllm-0.32"],
    speculative: bool = True,
) -> StageProfile:
    """The profile that such a machine would have. speculative: with drafter and SP's overhead."""
    layers = tuple(model.layers // stages + (s < model.layers % stages) for s in range(stages))
    effective = hardware.bandwidth * BANDWIDTH_SHARE

    def stage(count: int) -> StagePoints:
        alone = BYTES * count * model.layer_params / tensor / effective
        ridge = hardware.bandwidth / hardware.flops
        # Each row reads its context's keys and values.
        kv = BYTES * 2 * count * model.kv_heads * model.head_dim / min(tensor, model.kv_heads)
        return StagePoints(
            points=tuple((r, 0.0, alone * SHAPE(r * ridge)) for r in ROWS),
            kv_seconds_per_token=kv / effective,
        )

    ring = 2 * (tensor - 1) / tensor
    row = BYTES * model.hidden
    reduce = tuple(
        (float(r), hardware.all_reduce_latency + ring * r * row * hardware.all_reduce_per_byte)
        for r in ROWS
    )
    hop = tuple(
        (float(r), hardware.hop_latency + r * 2 * row * hardware.hop_per_byte) for r in ROWS
    )
    if stages == 1:
        host = stack.tensor
    else:  # N steps share the circle that this lies on
        host = stages * (stack.speculative if speculative else stack.pipeline)
    return StageProfile(
        hardware=hardware.name,
        model=model.name,
        source=f"estimated from presets; links: {hardware.source}; host: {stack.source}",
        tensor_parallel=tensor,
        layers_per_stage=layers,
        stages=tuple(stage(count) for count in layers),
        head=((1, BYTES * model.head_params / tensor / effective),),
        drafter=((1, model.drafter_bytes / tensor / effective),),
        hidden_link=hop,
        all_reduce=reduce if tensor > 1 else (),
        host=((1, host),),
    )


def vllm_all_reduce(device: str, hidden: int, by_nccl: Rows) -> Rows:
    """What vLLM's own all-reduce takes over two such devices with peer access, by rows.

    For profiles that hold NCCL's only, launched from the host; () where nothing is known of the
    device. by_nccl: measured; vLLM leaves to it what it does faster.
    """
    hardware = HARDWARE.get(LINKS_MEASURED.get(device, ""))
    if hardware is None:
        return ()

    def seconds(rows: float) -> float:
        return hardware.all_reduce_latency + rows * BYTES * hidden * hardware.all_reduce_per_byte

    return tuple((rows, min(nccl, seconds(rows))) for rows, nccl in by_nccl)


def _measured_h200(stages: int) -> StageProfile:
    points = ((1, 0.0188), (64, 0.0201), (128, 0.0231), (256, 0.0352))
    scale = 2 / stages
    scaled = "" if stages == 2 else f"; times of 40 layers scaled to {80 // stages}"
    return StageProfile(
        hardware="h200",
        model="llama-70b",
        source="measured 2026-11-29, random weights, one stage of 40 layers, short contexts, no "
        "head, drafter, links or host in it; graphs captured at powers of two" + scaled,
        layers_per_stage=(80 // stages,) * stages,
        stages=(
            StagePoints(
                points=tuple((r, 0.0, s * scale) for r, s in points),
                graph_sizes=tuple(2**i for i in range(9)),
                kv_seconds_per_token=0.0,
            ),
        ),
    )


MEASURED = {f"h200-llama-70b-pp{n}": _measured_h200(n) for n in (2, 4)}
