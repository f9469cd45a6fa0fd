# SPDX-License-Identifier: Apache-2.0
"""The decode rows of all running requests: what verdict.py does for tokens, done for counts.

    rows = Rows(num_stages=4, drafts=DraftSource(0.8))
    rows.add(step, request_id, prompt_tokens, output_tokens)
    tokens, finished = rows.begin_step(step)      # verdicts of step - N
    rows.feed(step, run)                          # run: which requests run a row in this step

A row that ran in step j has its verdict at the start of step j+N. It is *valid* when its input was
the true token. The draft made from a valid row may be wrong: then what the request runs until j+N
is wasted, and it restarts with the true token at j+N. A request that holds its draft back keeps the
rows it has in flight; when the last of them returned its next token is known.

Invariant: arrays are dense, index 0..size-1; a request's index changes only in remove(). Every
begin_step() is followed by one feed(), unless nobody is there. Only `reported` values reach
policies; whether a draft is right stays in here until its verdict.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spexis.simulator.drafts import DraftSource


class Rows:
    def __init__(self, num_stages: int, drafts: DraftSource, capacity: int = 64):
        self.num_stages, self.drafts, self.size = num_stages, drafts, 0
        # One array a type: a request is moved in three strokes. What is below are views of them.
        self._counts = np.zeros((7, capacity), np.int64)
        self._flags = np.zeros((2 + 3 * num_stages, capacity), bool)
        self._shares = np.ones((2 * num_stages, capacity), np.float32)
        self._name_views()
        self.num_rows = self.num_wasted = self.num_drafts = self.num_accepted = 0
        # With a calibration: hooks (serving.py).
        self.calibrate: Callable[[np.ndarray], np.ndarray] | None = None
        self.judged: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def _name_views(self) -> None:
        n = self.num_stages
        (
            self.request,
            self.prompt,
            self.held,  # prompt, and answer as far as it returned
            self.end,  # prompt and the whole answer
            self.blocks,  # KV blocks held
            self.admitted,  # number in the order of admission
            self.last_fed,  # step of the newest row
        ) = self._counts
        self.broken = self._flags[0]  # behind a wrong draft, verdict pending
        self.restarted = self._flags[1]  # the verdict gave the next input
        # By step % N, of the rows in flight:
        self.valid, self.wrong, self.right = self._flags[2:].reshape(3, n, -1)
        """wrong: valid, and its draft is wrong. right: kept with a calibration only."""
        self.confidence, self.reported = self._shares.reshape(2, n, -1)
        """Of the draft that each row made: calibrated, and as the drafter said."""

    @property
    def committed(self) -> np.ndarray:
        """[capacity] tokens of the answer that returned."""
        return self.held - self.prompt

    def add(
        self,
        step: int,
        request: int,
        prompt: int,
        need: int,
        committed: int = 0,
        blocks: int = 0,
        admitted: int = 0,
    ) -> None:
        """A request whose prompt's last chunk runs in this step: it samples and drafts at once."""
        if self.size == len(self.request):
            self._grow()
        i, slot = self.size, step % self.num_stages
        self.size += 1
        self.request[i], self.prompt[i], self.end[i] = request, prompt, prompt + need
        self.held[i], self.last_fed[i] = prompt + committed, step
        self.blocks[i], self.admitted[i] = blocks, admitted
        self.restarted[i] = False
        self.confidence[:, i], self.valid[:, i], self.wrong[:, i] = 1.0, False, False
        reported, right = self.drafts.take(1)
        confidence = reported if self.calibrate is None else self.calibrate(reported)
        self.confidence[slot, i], self.right[slot, i] = confidence[0], right[0]
        self.reported[slot, i] = reported[0]
        self.valid[slot, i] = True
        self.broken[i] = self.wrong[slot, i] = not right[0]

    def begin_step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Verdicts of the step N before. Returns ([size] bool token returned, indices finished)."""
        b, slot = self.size, step % self.num_stages
        token = self.valid[slot, :b].copy()
        held = self.held[:b]
        held += token
        if self.calibrate is not None:
            # (request index, reported confidence, right) of the drafts whose truth is now known
            where = np.flatnonzero(token)
            self.judged = (where, self.reported[slot, where], self.right[slot, where])
        self.valid[slot, :b] = False
        self.confidence[slot, :b] = 1.0
        # Those whose draft of N steps ago was wrong go on from the truth.
        back = self.wrong[slot, :b]
        # putmask is several times as fast as an index of booleans at these sizes.
        for other, confidence in enumerate(self.confidence):
            if other != slot:
                np.putmask(confidence[:b], back, 1.0)
        self.broken[:b] ^= back
        self.restarted[:b] |= back
        return token, (held >= self.end[:b]).nonzero()[0]

    def known(self, step: int) -> np.ndarray:
        """[size] bool: the next input is the true token, not a draft."""
        b = self.size
        return self.restarted[:b] | (self.last_fed[:b] + self.num_stages <= step)

    def joint(self) -> np.ndarray:
        """[size] product of the confidences of all drafts that have no verdict yet."""
        if self.num_stages == 1:
            return np.ones(self.size, np.float32)
        if self.num_stages == 2:
            return self.confidence[0, : self.size] * self.confidence[1, : self.size]
        return np.multiply.reduce(self.confidence[:, : self.size], axis=0)

    def feed(self, step: int, run: np.ndarray | None = None) -> int:
        """run: [size] bool, or None for every request. Returns the number of rows."""
        b, slot = self.size, step % self.num_stages
        confidence, right = self.drafts.take(b)
        if self.calibrate is not None:
            self.reported[slot, :b], self.right[slot, :b] = confidence, right
            confidence = self.calibrate(confidence)
        count = b if run is None else int(np.count_nonzero(run))
        valid = self.valid[slot, :b]
        if count == b:
            np.logical_not(self.broken[:b], out=valid)
            self.confidence[slot, :b] = confidence
            self.last_fed[:b] = step
            self.restarted[:b] = False
        else:
            np.greater(run, self.broken[:b], out=valid)  # run and not broken
            np.copyto(self.confidence[slot, :b], confidence, where=run)
            np.putmask(self.last_fed[:b], run, step)
            restarted = self.restarted[:b]
            np.greater(restarted, run, out=restarted)  # and did not run
        wrong = np.greater(valid, right, out=self.wrong[slot, :b])
        self.broken[:b] |= wrong
        useful = int(np.count_nonzero(valid))
        self.num_rows += count
        self.num_wasted += count - useful
        self.num_drafts += useful
        self.num_accepted += useful - int(np.count_nonzero(wrong))
        return count

    def in_flight(self) -> bool:
        return bool(self.valid[:, : self.size].any())

    def remove(self, indices: np.ndarray) -> None:
        """Ends these requests, drops what they have in flight; the last ones take their place."""
        for i in sorted(indices.tolist(), reverse=True):
            last = self.size - 1
            if i != last:
                for array in (self._counts, self._flags, self._shares):
                    array[:, i] = array[:, last]
            self.size = last

    def _grow(self) -> None:
        for name in ("_counts", "_flags", "_shares"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros_like(array)), axis=-1))
        self._name_views()
