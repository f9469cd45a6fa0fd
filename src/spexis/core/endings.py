# SPDX-License-Identifier: Apache-2.0
"""A length predictor's probabilities, calibrated while it runs.

    calibration = EndCalibration()
    ends = calibration.calibrated(said)                  # [R, 5] -> [R, 5], for Running.ends
    calibration.observe(answered, said, length, limit)   # a request ended: what was said of it

`said` is P(fewer than m tokens remain) for m = 4, 8, 16, 32, 64 (lengths.THRESHOLDS), as the
predictor reports it, NaN where it said nothing. For each m on its own a logistic model on
(1, logit(said)), begun at (0, 1): the report as it is. observe() takes one Newton step with the
precision of everything older, which fades, as core/acceptance.py does.

What an answer that was cut by its limit would still have given is unknown. A token is counted for
m only where m more tokens fitted below the limit, however the answer ended: were only those of cut
answers left out, all that is left near the limit would be answers that ended. Short answers end
first, so the first few requests make ends seem likelier than they are; that fades.

Invariant: calibrated() keeps NaN as NaN, rises with m, and is within EDGE .. 1-EDGE otherwise;
neither method raises for NaN.
"""

from __future__ import annotations

import numpy as np

from spexis.core.lengths import EDGE, THRESHOLDS

SPREAD = np.array((1.0, 0.3))  # standard deviations of (0, 1) before anything was observed
MEMORY = 100_000  # tokens that count
# Tokens of one answer end together: so many neighbours tell as much as one independent token.
NEIGHBOURS = 8.0
SLOPES = (0.2, 5.0)
CALIBRATION_BINS = 10


class EndCalibration:
    def __init__(self):
        count = len(THRESHOLDS)
        self.theta = np.tile((0.0, 1.0), (count, 1))  # [5, 2]
        self.num_observed = 0  # requests
        self._start = np.diag(1 / SPREAD**2)  # [2, 2]
        self._precision = np.tile(self._start, (count, 1, 1))
        self._bins = np.zeros((count, 3, CALIBRATION_BINS))  # count, sum calibrated, sum ended

    def calibrated(self, said: np.ndarray) -> np.ndarray:
        """[R, 5] as reported -> [R, 5]."""
        x = _logit(np.asarray(said, float))
        ends = _sigmoid(self.theta[:, 0] + self.theta[:, 1] * x)
        return np.where(np.isnan(x), np.nan, np.fmax.accumulate(ends, axis=1))

    def observe(
        self,
        answered: np.ndarray,  # [D] tokens of the answer given when each prediction was made
        said: np.ndarray,  # [D, 5] as reported then
        length: int,  # tokens of the whole answer
        limit: int,  # that the answer could not exceed
    ) -> None:
        """A request ended by itself or by its limit; not for aborts, which say nothing."""
        answered, said = np.asarray(answered), np.asarray(said, float)
        if not len(answered):
            return
        within = np.array(THRESHOLDS)
        known = (answered[:, None] + within <= limit) & ~np.isnan(said)  # [D, 5]
        ended = (length - answered[:, None] < within).astype(float)
        logit = np.where(known, _logit(said), 0.0)
        chance = _sigmoid(self.theta[:, 0] + self.theta[:, 1] * logit)
        fade = 0.5 ** (len(answered) / MEMORY)
        self._count(fade, known, chance, ended)
        weight = known / NEIGHBOURS
        x = np.stack((np.ones_like(logit), logit), axis=-1)  # [D, 5, 2]
        curvature = np.einsum("dm,dmi,dmj->mij", weight * chance * (1 - chance), x, x)
        self._precision = fade * self._precision + (1 - fade) * self._start + curvature
        gradient = np.einsum("dm,dmi->mi", weight * (ended - chance), x)
        step = np.linalg.solve(self._precision, gradient[..., None])[..., 0]
        self.theta += np.clip(step, -0.5, 0.5)
        self.theta[:, 0] = np.clip(self.theta[:, 0], -8.0, 8.0)
        self.theta[:, 1] = np.clip(self.theta[:, 1], *SLOPES)
        self.num_observed += 1

    def _count(self, fade: float, known, chance, ended) -> None:
        """Bins of what was predicted before it was learnt from. All [D, 5]."""
        self._bins *= fade
        place = np.minimum((chance * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        for i in range(len(THRESHOLDS)):
            for row, weights in enumerate((known, known * chance, known * ended)):
                self._bins[i, row] += np.bincount(place[:, i], weights[:, i], CALIBRATION_BINS)

    def calibration_error(self) -> np.ndarray:
        """[5] mean distance of predicted and real share, over tenths of predicted probability."""
        count, predicted, ended = self._bins.transpose(1, 0, 2)
        return np.abs(predicted - ended).sum(axis=1) / np.maximum(count.sum(axis=1), 1e-9)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.clip(1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0))), EDGE, 1 - EDGE)


def _logit(p: np.ndarray) -> np.ndarray:
    """NaN stays NaN."""
    p = np.clip(p, EDGE, 1 - EDGE)
    return np.log(p / (1 - p))
