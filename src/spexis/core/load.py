# SPDX-License-Identifier: Apache-2.0
"""What a trace asks of a server: requests at once, context, prompt; the load a plan is made for.

    load = Load.of_trace(arrival, prompt, output, seconds=lambda load: ..., most=256)
    load.streams, load.context, load.prompt

By Little's law the requests at once are their rate times the seconds that each of them takes, and
those seconds depend on how many there are. They are counted up from one: the smallest number that
keeps up with the trace, or `most` where none does (a queue grows then, and the server is full).

Invariant: 1 <= streams <= most; pure numbers. That prompts take time from other requests' tokens
is not counted, nor that a trace has quiet and busy hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    """Requests that run at once."""
    context: int
    """Tokens of a running request, mean over time."""
    prompt: int
    """Tokens of a prompt, mean over requests."""

    @classmethod
    def of_trace(
        cls,
        arrival: np.ndarray,  # [R] seconds, rising
        prompt: np.ndarray,  # [R] tokens
        output: np.ndarray,  # [R] tokens
        seconds: Callable[[Load, float], float],
        most: int,
    ) -> Load:
        """seconds(load, tokens): what a request takes that answers `tokens`, at this load.

        most: requests that may run at once, vLLM's max_num_seqs.
        """
        output = np.maximum(np.asarray(output, float), 1.0)
        prompt = np.asarray(prompt, float)
        # A request is there as long as it answers; half of its answer is there on average.
        context = float((output * (prompt + output / 2)).sum() / output.sum())
        load = cls(1, max(round(context), 1), max(round(float(prompt.mean())), 1))
        most = min(most, len(output))
        span = float(arrival[-1] - arrival[0])
        if span <= 0:  # all at once
            return replace(load, streams=most)
        rate = (len(output) - 1) / span
        while load.streams < most:
            wanted = rate * seconds(load, float(output.mean()))
            if wanted <= load.streams:
                break
            load = replace(load, streams=min(max(math.ceil(wanted), load.streams + 1), most))
        return load
