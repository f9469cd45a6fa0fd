# SPDX-License-Identifier: Apache-2.0
"""When steps begin and end in a pipeline of FIFO stages.

    clock = PipelineClock(cost)
    begin = clock.next_begin(step)                # verdict of step - N at hand, first stage free
    end = clock.run(step, rows, prefill, kv)      # its verdict is back at the first stage

Stage s runs step j when it has finished step j-1 and step j has come over the link. The first stage
also waits for the verdict of step j-N. So steps of different sizes meet as they do in a real
pipeline: a small step between large ones waits for them. The host's work lies behind a verdict, or,
where it works ahead of the devices, beside the step before.

Invariant: begin and end never go back in time; an empty step takes none.
"""

from __future__ import annotations

from spexis.core.cost_model import CostModel


class PipelineClock:
    def __init__(self, cost: CostModel):
        self.cost, n = cost, cost.num_stages
        self._free = [0.0] * n  # when each stage is free
        self._verdict = [0.0] * n  # by step % N: when the newest verdict there is back
        self._prepared = 0.0  # when a host that works ahead has the next step ready

    def next_begin(self, step: int) -> float:
        return max(self._free[0], self._verdict[step % self.cost.num_stages], self._prepared)

    def wait_until(self, seconds: float) -> None:
        """Nothing to do before this time."""
        self._free[0] = max(self._free[0], seconds)

    def run(
        self,
        step: int,
        rows: int,
        prefill_tokens: int,
        kv_tokens: float,
        begin: float | None = None,
    ) -> float:
        """begin: what next_begin() said, if it was asked. Returns when the verdict is back."""
        at = begin = self.next_begin(step) if begin is None else begin
        empty = rows + prefill_tokens == 0
        link = 0.0 if empty else self.cost.link(rows + prefill_tokens)
        for s, stage in enumerate(self.cost.stages):
            at = max(at + (link if s else 0.0), self._free[s])
            at += 0.0 if empty else stage.seconds(rows, prefill_tokens, kv_tokens)
            self._free[s] = at
        host = 0.0 if empty else self.cost.host(rows)
        if self.cost.host_overlaps:
            # It prepares the next step while this one runs, one step after the other.
            self._prepared, host = begin + host, 0.0
        back = at + host
        self._verdict[step % self.cost.num_stages] = back
        return back
