# SPDX-License-Identifier: Apache-2.0
"""How likely a draft is right: the drafter's confidence, calibrated while it runs.

    estimator = AcceptanceEstimator()
    chance = estimator.probability("v1", confidence, position, accepted, drafts)     # [D]
    estimator.observe("v1", confidence, position, accepted, drafts, right)           # verdicts

A logistic model for each drafter version on

    1,  logit(confidence),  log(1 + position / 64) - log 2,  history

position is the number of tokens answered before; history the request's own share of right drafts,
shrunk towards the mean, as a difference of logits. Before any verdict the model is (0, 1, 0, 1):
the confidence as it is reported, shifted by the request's history. observe() takes one Newton step
on the new verdicts with the precision of all older ones, which fade. A drafter that reports no
confidence (None) is judged by history and position alone. A new version begins with the weights of
the last one and little trust in them.

Invariant: probabilities are within 1e-4 .. 1-1e-4 for any input; only drafts whose row ran on true
tokens are observed, since of the others nothing is known.
"""

from __future__ import annotations

import numpy as np

NUM_FEATURES = 4
START = np.array((0.0, 1.0, 0.0, 1.0))
# Standard deviations of START before any verdict. History's weight is nearly what theory says.
SPREAD = np.array((1.0, 0.5, 0.3, 0.3))
MEMORY = 20_000  # verdicts that count
PRIOR_DRAFTS = 20.0  # drafts of the mean that a request's own history is mixed with
HISTORY_MEMORY = 100.0  # drafts that a request's history reaches back
CALIBRATION_BINS = 10
EDGE = 1e-4


def remember(
    accepted: np.ndarray, drafts: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A request's history after one more verdict. accepted, drafts, right: [D]; returns both."""
    keep = 1.0 - 1.0 / HISTORY_MEMORY
    return accepted * keep + right, drafts * keep + 1.0


class AcceptanceEstimator:
    def __init__(self, prior_acceptance: float = 0.6):
        self._prior = prior_acceptance
        self._models: dict[tuple[str, bool], _Model] = {}

    def probability(
        self,
        version: str,
        confidence: np.ndarray | None,  # [D] as reported
        position: np.ndarray,  # [D] tokens answered before
        accepted: np.ndarray,  # [D] of the request, from remember()
        drafts: np.ndarray,  # [D]
    ) -> np.ndarray:
        """[D] probability that each draft is right."""
        model = self._model(version, confidence is not None)
        return model.probability(model.features(confidence, position, accepted, drafts))

    def observe(
        self,
        version: str,
        confidence: np.ndarray | None,
        position: np.ndarray,
        accepted: np.ndarray,
        drafts: np.ndarray,
        right: np.ndarray,  # [D] bool
    ) -> None:
        """Verdicts. The other arguments are those of probability() when the draft was made."""
        if len(right):
            self._model(version, confidence is not None).observe(
                confidence, position, accepted, drafts, np.asarray(right, float)
            )

    def acceptance(self, version: str) -> float:
        """Share of right drafts lately."""
        return max(
            (m for (v, _), m in self._models.items() if v == version),
            key=lambda m: m.num_observed,
            default=_Model(self._prior, True),
        ).mean

    def calibration_error(self, version: str) -> float:
        """Mean distance between predicted and real share, over tenths of predicted probability."""
        models = [m for (v, _), m in self._models.items() if v == version and m.num_observed]
        return max(models, key=lambda m: m.num_observed).calibration_error() if models else 0.0

    def _model(self, version: str, has_confidence: bool) -> _Model:
        key = (version, has_confidence)
        if key not in self._models:
            model = self._models[key] = _Model(self._prior, has_confidence)
            older = [m for (_, c), m in self._models.items() if c == has_confidence][:-1]
            if older:
                model.theta, model.mean = older[-1].theta.copy(), older[-1].mean
        return self._models[key]


class _Model:
    def __init__(self, prior_acceptance: float, has_confidence: bool):
        self.theta = START.copy()
        self.has_confidence = has_confidence
        self.mean = prior_acceptance
        self.num_observed = 0
        self._start_precision = np.diag(1 / SPREAD**2)
        self._precision = self._start_precision.copy()
        self._bins = np.zeros((3, CALIBRATION_BINS))  # count, sum predicted, sum right

    def features(self, confidence, position, accepted, drafts) -> np.ndarray:
        """[D, 4]"""
        position = np.asarray(position, float)
        base = _logit(self.mean)
        own = (accepted + PRIOR_DRAFTS * self.mean) / (np.asarray(drafts) + PRIOR_DRAFTS)
        x = np.empty((len(position), NUM_FEATURES))
        x[:, 0] = 1.0
        x[:, 1] = base if confidence is None else _logit(np.asarray(confidence, float))
        x[:, 2] = np.log1p(position / 64.0) - np.log(2.0)
        x[:, 3] = _logit(own) - base
        return x

    def probability(self, x: np.ndarray) -> np.ndarray:
        return np.clip(1.0 / (1.0 + np.exp(-(x @ self.theta))), EDGE, 1 - EDGE)

    def observe(self, confidence, position, accepted, drafts, right: np.ndarray) -> None:
        x = self.features(confidence, position, accepted, drafts)
        chance = self.probability(x)
        fade = 0.5 ** (len(right) / MEMORY)
        self._bins *= fade
        place = np.minimum((chance * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        for row, weights in enumerate((None, chance, right)):
            self._bins[row] += np.bincount(place, weights, minlength=CALIBRATION_BINS)
        curvature = (x * (chance * (1 - chance))[:, None]).T @ x
        # Old verdicts fade towards the start's precision, never below it.
        self._precision = fade * self._precision + (1 - fade) * self._start_precision + curvature
        step = np.linalg.solve(self._precision, x.T @ (right - chance))
        self.theta = np.clip(self.theta + np.clip(step, -0.5, 0.5), -8.0, 8.0)
        share = min(1.0, len(right) / max(min(self.num_observed + len(right), 2000), 1))
        self.mean += share * (float(right.mean()) - self.mean)
        self.mean = float(np.clip(self.mean, EDGE, 1 - EDGE))
        self.num_observed += len(right)

    def calibration_error(self) -> float:
        count, predicted, right = self._bins
        return float(np.abs(predicted - right).sum() / max(count.sum(), 1e-9))


def _logit(p):
    p = np.clip(p, EDGE, 1 - EDGE)
    return np.log(p / (1 - p))
