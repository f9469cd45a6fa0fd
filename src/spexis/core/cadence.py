# SPDX-License-Identifier: Apache-2.0
"""When a request's next row may run: at every step, or at stock pipelining's pace.

    cadence = Cadence(steps=2)                      # a plain row waits for the verdict of the last
    eligible = cadence.next_step("a", step=7, plain=True)      # 9, or later by less than 2
    eligible = cadence.next_step("a", step=9, plain=False)     # 0: it may run at every step

A plain request has one row in the pipeline, so its rows come every `steps` steps, at one phase
(step modulo `steps`). Stages are busy only where the phases hold about equally many requests, so a
request that becomes plain takes the emptiest phase, and one whose phase holds at least two more
than another moves there. Either costs it less than `steps` steps, once. That is what makes a
change from speculation to plain pipelining safe at any moment: without it all requests, which ran
in the same step until then, would go on in the same step, and the stages would take turns.

Invariant: a plain request's eligible step is at least `steps` after its row, and less than twice
that; phases are counted for plain requests only. Deterministic.
"""


class Cadence:
    def __init__(self, steps: int):
        self.steps = steps
        self.load = [0] * steps  # plain requests at each phase
        self._phase: dict[str, int] = {}

    def next_step(self, req_id: str, step: int, plain: bool) -> int:
        """The request has a row in `step`: the first step that its next row may run in.

        0 without `plain`, as vLLM has it for a request that never waits.
        """
        self.forget(req_id)
        if not plain:
            return 0
        # Without this request, the emptiest phase; of equal ones the one that comes first, which
        # is its own. So one that moves leaves a phase that held at least two more than the other.
        delay = min(range(self.steps), key=lambda later: self.load[(step + later) % self.steps])
        phase = (step + delay) % self.steps
        self._phase[req_id] = phase
        self.load[phase] += 1
        return step + self.steps + delay

    def forget(self, req_id: str) -> None:
        """The request ended, was preempted, or speculates again."""
        phase = self._phase.pop(req_id, None)
        if phase is not None:
            self.load[phase] -= 1
