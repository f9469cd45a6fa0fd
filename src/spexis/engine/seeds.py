# SPDX-License-Identifier: Apache-2.0
"""Seeded requests draw once for every token of their text, whatever else was sampled meanwhile.

Two things are sampled and do not become text: discarded rows, and tokens in flight when the prefix
cache is reset (vLLM drops those and samples their positions again). Stock vLLM has neither with one
stage, so their draws are given back. Invariant: a generator's state is that after as many draws as
its request has tokens. Lives on the last stage of the V1 runner; V2 keys noise by position.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class SeededDraws:
    def __init__(self, max_in_flight: int):
        """max_in_flight: rows of one request that the pipeline can hold."""
        self.max_in_flight = max_in_flight
        self._before: dict[str, deque[torch.Tensor]] = {}  # states before the newest draws

    @contextmanager
    def drawing(
        self,
        req_ids: Sequence[str],
        generators: dict[int, torch.Generator],  # by row, seeded requests only
        good: torch.Tensor,  # [R] bool
    ) -> Iterator[None]:
        """Around the sampler: rows that are not good leave their generator as it was."""
        states = {row: generator.get_state() for row, generator in generators.items()}
        yield
        if not states:
            return
        is_good = good.tolist()
        for row, state in states.items():
            if is_good[row]:
                kept = self._before.setdefault(req_ids[row], deque(maxlen=self.max_in_flight))
                kept.append(state)
            else:
                generators[row].set_state(state)

    def take_back(self, req_id: str, generator: torch.Generator | None, num_dropped: int) -> None:
        """The request resumes without its num_dropped newest tokens."""
        kept = self._before.get(req_id)
        if generator is None or not kept or num_dropped < 1:
            return
        state = [kept.pop() for _ in range(num_dropped)][-1]
        generator.set_state(state)

    def forget(self, req_id: str) -> None:
        self._before.pop(req_id, None)
