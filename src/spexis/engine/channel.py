# SPDX-License-Identifier: Apache-2.0
"""Carries verdicts from the last stage back to the first, in step order.

A verdict is [R] int64 tokens (see verdict.py) and, where the drafter asks for them, the
last stage's final states [R, hidden]. Sends never block; the oldest are reaped once more are
outstanding than the pipeline can hold. Used by the V1 runner, whose groups are Gloo; the V2
runner's verdicts ride on vLLM's PPHandler instead.
"""

from collections import deque

import torch
import torch.distributed as dist

_TOKENS, _STATES = 7001, 7002  # message tags, so that nothing else on the group can match


class VerdictChannel:
    def __init__(self, pp_group, state_size: int = 0, state_dtype=torch.float32):
        """state_size: hidden size of the states sent along, 0 for none."""
        self.group = pp_group.device_group
        self.first, self.last = pp_group.ranks[0], pp_group.ranks[-1]
        self.max_outstanding = 2 * pp_group.world_size + 4
        self.state_size, self.state_dtype = state_size, state_dtype
        self._sends: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()

    def send(self, tokens: torch.Tensor, states: torch.Tensor | None) -> None:
        """tokens: [R] int64; states: [R, state_size], required iff state_size > 0."""
        messages = [(tokens, _TOKENS)]
        if self.state_size:
            messages.append((states.to(self.state_dtype).contiguous(), _STATES))
        # The tensors are kept with the handles: Gloo reads them in the background.
        self._sends.append(
            [(dist.isend(t, dst=self.first, group=self.group, tag=tag), t) for t, tag in messages]
        )
        while len(self._sends) > self.max_outstanding:
            for work, _ in self._sends.popleft():
                work.wait()

    def receive(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blocks until the next step's verdict is here: tokens [R], states [R, H] or None."""
        tokens = torch.empty(num_rows, dtype=torch.int64)
        dist.recv(tokens, src=self.last, group=self.group, tag=_TOKENS)
        states = None
        if self.state_size:
            states = torch.empty(num_rows, self.state_size, dtype=self.state_dtype)
            dist.recv(states, src=self.last, group=self.group, tag=_STATES)
        return tokens, states
