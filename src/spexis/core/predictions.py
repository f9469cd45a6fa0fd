# SPDX-License-Identifier: Apache-2.0
"""What a length predictor said of the requests that are being served, and what came of it.

    predictions = Predictions()
    predictions.note("a", 17, rounded(ends)[0])          # said when 17 tokens were answered
    told = predictions.of(["a", "b"])                    # Told, None where nobody was spoken of
    Running(..., ends=predictions.calibrated(told), ends_at=told.at)
    predictions.ended("a", length=40, limit=400)         # learns from it (endings.py)
    predictions.forget("b")                              # aborted: says nothing

The newest prediction of a request stands until the next one; what has been answered since is
`ends_at`'s business (lengths.py). A request may be preempted and come back meanwhile: what was said
of its answer stays true.

Invariant: what of() and ended() return, written as JSON and read back, gives the same calibration
and the same probabilities (replay.py), because predictions are rounded before anything uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spexis.core.endings import EndCalibration
from spexis.core.lengths import THRESHOLDS

DIGITS = 4  # EDGE is 1e-4: nothing finer is made use of
LEARN_EVERY = 4  # tokens of an answer; its neighbours say nearly the same (endings.NEIGHBOURS)


class Told(NamedTuple):
    """The newest predictions of some requests."""

    said: np.ndarray
    """[R, 5] P(fewer than THRESHOLDS tokens remain) as reported, NaN where nothing was said."""
    at: np.ndarray
    """[R] tokens answered when it was said; 0 where nothing was."""

    def described(self) -> dict[str, list]:
        """For the journal; Told.read() is its inverse."""
        said = [None if np.isnan(row).all() else row.tolist() for row in self.said]
        return {"said": said, "at": self.at.tolist()}

    @classmethod
    def read(cls, entry: dict[str, list]) -> Told:
        silent = [float("nan")] * len(THRESHOLDS)
        return cls(
            np.array([silent if row is None else row for row in entry["said"]]),
            np.array(entry["at"], np.int64),
        )


class _Request:
    __slots__ = ("at", "learn_at", "learn_said", "said")

    def __init__(self):
        self.at: int = 0
        self.said: np.ndarray | None = None  # [5]
        self.learn_at: list[int] = []
        self.learn_said: list[list[float]] = []


def rounded(ends: np.ndarray) -> np.ndarray:
    """[R, 5] float64, as note() wants its rows."""
    return np.round(np.asarray(ends, np.float64), DIGITS)


class Predictions:
    def __init__(self):
        self.calibration = EndCalibration()
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        """Requests that something was said of."""
        return len(self._requests)

    def note(
        self,
        req_id: str,
        answered: int,  # tokens of the answer, up to and with the one it was predicted from
        said: np.ndarray,  # [5] a row of rounded()
    ) -> None:
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = _Request()
        request.at, request.said = answered, said
        if answered % LEARN_EVERY == 0:
            request.learn_at.append(answered)
            request.learn_said.append(said.tolist())

    def of(self, req_ids: Sequence[str]) -> Told | None:
        """The newest of each request, in this order; None where there is none of any."""
        if not self._requests:
            return None
        said = np.full((len(req_ids), len(THRESHOLDS)), np.nan)
        at = np.zeros(len(req_ids), np.int64)
        for i, req_id in enumerate(req_ids):
            request = self._requests.get(req_id)
            if request is not None:
                said[i], at[i] = request.said, request.at
        return None if np.isnan(said).all() else Told(said, at)

    def calibrated(self, told: Told) -> np.ndarray:
        """[R, 5] for Running.ends."""
        return self.calibration.calibrated(told.said)

    def ended(self, req_id: str, length: int, limit: int) -> dict[str, Any]:
        """The answer ended by itself or by its limit. Returns what was learnt from, for learn()."""
        request = self._requests.pop(req_id, None)
        if request is None or not request.learn_at:
            return {}
        learnt = {"limit": limit, "at": request.learn_at, "said": request.learn_said}
        learn(self.calibration, length, learnt)
        return learnt

    def forget(self, req_id: str) -> None:
        """It left in another way."""
        self._requests.pop(req_id, None)


def learn(calibration: EndCalibration, length: int, learnt: dict[str, Any]) -> None:
    """What Predictions.ended() does, from what it returned; {} teaches nothing."""
    if learnt:
        calibration.observe(
            np.array(learnt["at"]), np.array(learnt["said"]), length, learnt["limit"]
        )
