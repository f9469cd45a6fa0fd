# SPDX-License-Identifier: Apache-2.0
"""Which way to split a model over GPUs: TP, PP, SP, SP-alpha, their mixes, and replicas; ranked.

    options = plan(HARDWARE["h100"], MODELS["llama-70b"], gpus=8, batch=64)
    options[0].label, options[0].tokens_per_second, options[0].reason

    options = plan_measured(file.stage_profile(), file.model, file.device_memory, gpus=2, batch=64)

Every split gpus = replicas x stages x tensor ranks that the model's heads and the memory allow is
priced with its profile (presets.py, or measured: profile_file.py and StageProfile.split): step
times from the cost model, tokens a step from the law, for SP-alpha at the best share of held
drafts. Figures are of decoding at a constant batch.

Invariant: sorted by tokens per second; what does not fit in memory is not listed; SP without a
known acceptance at its exit depth is not listed either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spexis.core.cost_model import CostModel, Curve
from spexis.core.presets import (
    BYTES,
    DRAFTER_LAYERS,
    STACKS,
    Hardware,
    Model,
    Stack,
    estimate_profile,
)
from spexis.core.selection import BINS, ConfidenceHistogram, operating_points
from spexis.core.stage_profile import StageProfile

MEMORY_SHARE = 0.9  # vLLM's gpu_memory_utilization
RESERVED = 3e9  # activations, graphs, communication buffers: bytes a GPU
SHARPNESS = 1.5  # of the drafter's confidences, see simulator/drafts.py


@dataclass(frozen=True, slots=True)
class Option:
    mode: str
    """tp, pp, sp or sp-alpha; tp also for one GPU a replica."""
    replicas: int
    stages: int
    tensor: int
    batch: int
    """Requests running at once, all replicas; less than asked where memory does not hold them."""
    tokens_per_second: float
    seconds_per_token: float
    """Of one request (TPOT)."""
    prefill_seconds: float
    """Of one prompt of the asked length, alone."""
    kv_tokens: int | None
    """That fit, all replicas; None: memory was not looked at."""
    weight_bytes: int
    """Of the fullest GPU, drafter included."""
    reason: str

    @property
    def label(self) -> str:
        parts = [f"{self.replicas}x" if self.replicas > 1 else ""]
        parts.append(self.mode.upper().replace("ALPHA", "alpha"))
        if self.stages > 1:
            parts.append(f" {self.stages} stages")
        if self.tensor > 1:
            parts.append(f" TP{self.tensor}" if self.stages > 1 else f"{self.tensor}")
        return "".join(parts)


def plan(
    hardware: Hardware,
    model: Model,
    gpus: int,
    batch: int,
    context: int = 1000,
    prompt: int = 512,
    acceptance: float | None = None,
    stack: Stack = STACKS["vllm-0.32"],
    replicas: Sequence[int] | None = None,
) -> list[Option]:
    """From presets. context: mean tokens of a running request. acceptance: overrides the model's
    own figures."""

    def profile(stages: int, tensor: int, drafter: bool) -> StageProfile:
        return estimate_profile(hardware, model, tensor, stages, stack, drafter)

    wanted = Wanted(gpus, batch, context, prompt, acceptance, replicas)
    return _ranked(profile, model, hardware.memory, wanted)


def plan_measured(
    measured: StageProfile,
    model: Model,
    memory: float | None,
    gpus: int,
    batch: int,
    context: int = 1000,
    prompt: int = 512,
    acceptance: float | None = None,
    replicas: Sequence[int] | None = None,
) -> list[Option]:
    """From a measured stage: every split that it can say something about (StageProfile.split).

    memory: bytes of a device; None: everything fits, as on a CPU whose memory is not divided.
    """

    def profile(stages: int, tensor: int, drafter: bool) -> StageProfile | None:
        return measured.split(stages, tensor)

    return _ranked(
        profile, model, memory, Wanted(gpus, batch, context, prompt, acceptance, replicas)
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked: see plan()."""

    gpus: int
    batch: int
    context: int
    prompt: int
    acceptance: float | None
    replicas: Sequence[int] | None


def _ranked(
    profile_of: Callable[[int, int, bool], StageProfile | None],
    model: Model,
    memory: float | None,
    wanted: Wanted,
) -> list[Option]:
    """profile_of(stages, tensor ranks, with a drafter): None where it is not known."""
    options = []
    for stages in range(1, wanted.gpus + 1):
        for tensor in range(1, wanted.gpus // stages + 1):
            copies, rest = divmod(wanted.gpus, stages * tensor)
            if rest or not _splits(model, stages, tensor) or copies > wanted.batch:
                continue
            if wanted.replicas is not None and copies not in wanted.replicas:
                continue
            share = -(-wanted.batch // copies)
            for mode in ("tp",) if stages == 1 else ("pp", "sp"):
                accepted = wanted.acceptance
                if accepted is None:
                    accepted = model.acceptance(1 / stages)
                if mode == "sp" and accepted is None:
                    continue
                weights, kv_tokens = _memory(memory, model, stages, tensor, mode == "sp")
                fits = share
                if kv_tokens is not None:
                    fits = min(share, kv_tokens // max(wanted.context, 1))
                profile = profile_of(stages, tensor, mode == "sp") if fits else None
                if profile is None:
                    continue
                found = price(profile, mode, fits, wanted.context, wanted.prompt, accepted)
                options += [_scaled(o, copies, kv_tokens, weights, share) for o in found]
    return sorted(options, key=lambda o: -o.tokens_per_second)


def price(
    profile: StageProfile,
    mode: str,
    batch: int,
    context: float,
    prompt: int,
    acceptance: float | None,
) -> list[Option]:
    """The options of one replica with this profile. mode "sp" gives SP and SP-alpha."""
    cost = CostModel.from_profile(profile, drafter=mode == "sp")
    stages, tensor = profile.num_stages, profile.tensor_parallel
    prefill = sum(s.seconds(0, prompt) for s in cost.stages)
    prefill += (stages - 1) * cost.link(prompt) + cost.host(batch)

    def option(mode: str, tokens: float, seconds: float, per_token: float, reason: str) -> Option:
        rate = tokens / seconds
        return Option(mode, 1, stages, tensor, batch, rate, per_token, prefill, 0, 0, reason)

    reduce = _all_reduce_seconds(profile, batch)
    ranks = f", {1e3 * reduce:.1f} ms of it all-reduces" if reduce else ""
    if mode == "tp":
        seconds = cost.step_seconds(batch, 0, batch * context)
        text = f"a step of {batch} rows takes {1e3 * seconds:.1f} ms{ranks}"
        return [option("tp", batch, seconds, seconds, text)]
    table = cost.step_table(batch, context)
    if mode == "pp":
        rows = -(-batch // stages)
        seconds = cost.step_seconds(rows, 0, rows * context)
        text = f"{stages} micro-batches of {rows} rows, {1e3 * seconds:.1f} ms each"
        return [option("pp", batch / stages, seconds, stages * seconds, text)]
    points = operating_points(batch, stages, table, beta_histogram(acceptance))
    full = points[0]
    best = max(points, key=lambda p: p.rate)
    text = (
        f"a step of {batch} rows takes {1e3 * full.seconds:.1f} ms{ranks} and returns "
        f"{full.tokens / batch:.2f} tokens a request (p = {acceptance:.3f})"
    )
    found = [option("sp", full.tokens, full.seconds, full.seconds * batch / full.tokens, text)]
    if best.dropped > 0:
        text = (
            f"{best.dropped:.0%} of the drafts held back: {best.rows:.0f} rows, "
            f"{1e3 * best.seconds:.1f} ms, {best.tokens / batch:.2f} tokens a request"
        )
        per_token = best.seconds * batch / best.tokens
        found.append(option("sp-alpha", best.tokens, best.seconds, per_token, text))
    return found


def beta_histogram(acceptance: float, sharpness: float = SHARPNESS) -> ConfidenceHistogram:
    """Confidences of a drafter right with this probability, calibrated."""
    histogram = ConfidenceHistogram()
    p = min(max(acceptance, 0.01), 0.99)
    a, b = sharpness * p, sharpness * (1 - p)
    # Fine midpoints of the density, summed into the bins.
    x = (np.arange(BINS * 64) + 0.5) / (BINS * 64)
    density = x ** (a - 1) * (1 - x) ** (b - 1)
    density /= density.sum()
    # The midpoint rule misses part of the poles at 0 and 1: put it where the mean says.
    lack = p - float(density @ x)
    density[-1 if lack > 0 else 0] += abs(lack) / ((1 - p) if lack > 0 else p)
    histogram.weight = density.reshape(BINS, 64).sum(axis=1)
    mean = (density * x).reshape(BINS, 64).sum(axis=1) / histogram.weight
    histogram.centres = mean
    return histogram


def _splits(model: Model, stages: int, tensor: int) -> bool:
    heads = model.heads % tensor == 0
    kv = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return heads and kv and stages <= model.layers


def _memory(
    memory: float | None, model: Model, stages: int, tensor: int, drafter: bool
) -> tuple[int, int | None]:
    """(bytes of weights on the fullest GPU, KV tokens of a replica or None: not looked at)."""
    layers = -(-model.layers // stages)
    weights = layers * model.layer_params + (2 if stages == 1 else 1) * model.head_params
    total = BYTES * weights / tensor + (model.drafter_bytes / tensor if drafter else 0)
    per_token = model.kv_bytes * layers / model.layers / min(tensor, model.kv_heads)
    if drafter:  # the drafter's attention layers have keys and values too
        per_token *= (layers + DRAFTER_LAYERS) / layers
    if memory is None:
        return int(total), None
    room = memory * MEMORY_SHARE - RESERVED - total
    return int(total), max(int(room / per_token), 0)


def _all_reduce_seconds(profile: StageProfile, rows: int) -> float:
    """Of one stage's step."""
    if not profile.all_reduce or profile.tensor_parallel == 1:
        return 0.0
    return 2 * max(profile.layers_per_stage) * Curve(profile.all_reduce)(rows)


def _scaled(option: Option, copies: int, kv_tokens: int | None, weights: int, asked: int) -> Option:
    short = f"; memory holds {option.batch} of {asked} requests" if option.batch < asked else ""
    return replace(
        option,
        replicas=copies,
        batch=option.batch * copies,
        tokens_per_second=option.tokens_per_second * copies,
        kv_tokens=None if kv_tokens is None else kv_tokens * copies,
        weight_bytes=weights,
        reason=option.reason + short,
    )
