# SPDX-License-Identifier: Apache-2.0
"""How many rows a step runs, where a device says which (SP-alpha on the V2 runner).

    chooser = CountChooser(Selection(cost, max_rows=256), num_stages=2)
    each step:
        (n,) = chooser.choose(requests, kv_tokens)          # steps without prompts
        chooser.came(joint, unverified, fresh, ran, good)   # of a step that came back, all requests
        chooser.observe(seconds, tokens, rows, requests, kv_tokens, prefill_tokens)

A CUDA graph has its size before the step's drafts exist, so the host says how many rows run, and
the device, which has the confidences, takes the best. The host knows what the candidates of the
newest step that came back were worth: their confidences travel with it. A step's candidates are
much like those of N steps before, so it asks Selection as if they were these.

Confidences are calibrated by the rows that ran behind one unverified draft: those say of single
drafts whether they were right.

Invariant: as in chooser.py; 1 <= n <= requests, and n = requests before anything came back.
"""

from __future__ import annotations

import numpy as np

from spexis.core.acceptance import AcceptanceEstimator
from spexis.core.chooser import SchedulerChooser
from spexis.core.selection import Selection

VERSION = ""  # one drafter's drafts as long as an engine lives


class CountChooser(SchedulerChooser):
    def __init__(self, selection: Selection, num_stages: int):
        super().__init__(selection, num_stages)
        self.estimator = AcceptanceEstimator()
        self._joint = np.ones(0)  # of the newest candidates, calibrated, falling

    def forget(self, req_id: str) -> None:
        """Nothing is kept by request."""

    def came(
        self,
        joint: np.ndarray,  # [R] product of the confidences of each candidate's unverified drafts
        unverified: np.ndarray,  # [R] how many those are
        fresh: np.ndarray,  # [R] bool: its newest draft was made in the step before
        ran: np.ndarray,  # [R] bool
        good: np.ndarray,  # [R] bool: it ran and gave a token
    ) -> None:
        self.note("came", joint, unverified, fresh, ran, good)
        joint, unverified = np.asarray(joint, float), np.asarray(unverified)
        fresh, ran, good = (np.asarray(flags, bool) for flags in (fresh, ran, good))
        count = np.maximum(unverified, 1)
        single = self._calibrated(joint ** (1.0 / count))
        chance = np.where(unverified > 0, single**count, 1.0)
        self._joint = -np.sort(-chance)
        # Each draft counts once, also of those that are held: else they would look better than
        # they are, or worse, by what is done with them.
        self._confidences += single[fresh & (unverified > 0)].tolist()
        judged = ran & (unverified == 1)
        nothing = np.zeros(int(judged.sum()))
        self.estimator.observe(VERSION, joint[judged], nothing, nothing, nothing, good[judged])

    def _calibrated(self, confidence: np.ndarray) -> np.ndarray:
        nothing = np.zeros(len(confidence))
        return self.estimator.probability(VERSION, confidence, nothing, nothing, nothing)

    def choose(self, requests: int, kv_tokens: float) -> np.ndarray:
        """[1] rows that run; kv_tokens: of all candidates together."""
        self.note("choose", requests, kv_tokens)
        if not len(self._joint):
            return self.decided(np.array([requests]))
        # As many candidates as there are now, worth what the newest known were.
        at = (np.arange(requests) + 0.5) * (len(self._joint) / requests)
        joint = self._joint[at.astype(np.int64)]
        share = np.full(requests, kv_tokens / requests)
        # Unlike where rows are named, those whose input is verified may have to wait: the device
        # takes first who waited longest, so that each runs in its turn, as in plain PP.
        run = self.selection.select(joint, share)
        return self.decided(np.array([max(int(run.sum()), 1)]))
