# SPDX-License-Identifier: Apache-2.0
"""A simulated server whose look-ahead asks a length predictor.

    serving = PredictedServing(cost, drafts, Settings(policy="sp"), sharpness=2.5)
    serving.run(trace).summary()
    PredictedServing(..., sharpness=math.inf)          # an oracle: right about every threshold

What is said of a request comes from the trace, spoilt: for each threshold m a number that is
normal around `sharpness` where fewer than m tokens remain, and around 0 where not. Sharpness 2.5
finds half of the rare case with .6 % false alarms. Noise is drawn for 8 tokens of an answer at a
time. It is reported as a probability at even odds, thus badly off, and calibrated from answers that
ended, as the engine does (core/endings.py).

Invariant: the trace's lengths reach the policy in this form only.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from spexis.core.endings import EndCalibration
from spexis.core.lengths import THRESHOLDS
from spexis.core.memory import Outlook, Running
from spexis.core.predictions import LEARN_EVERY
from spexis.simulator.serving import Serving
from spexis.simulator.trace import Trace

NOISES, NOISE_TOKENS = 8191, 8  # rows of noise, a prime number of them; tokens that share one


class PredictedServing(Serving):
    def __init__(self, *args, sharpness: float, seed: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.sharpness = sharpness
        self.calibration = EndCalibration()
        self.noise = np.random.default_rng(seed).normal(size=(NOISES, len(THRESHOLDS)))

    def said(
        self,
        requests: np.ndarray,  # [R]
        answered: np.ndarray,  # [R]
    ) -> np.ndarray:
        """[R, 5] as the predictor reports it."""
        within = (self.trace.output[requests] - answered)[:, None] < THRESHOLDS
        if math.isinf(self.sharpness):
            return within.astype(float)
        noise = self.noise[(requests * 131 + answered // NOISE_TOKENS) % NOISES]
        logit = self.sharpness * (self.sharpness * (within - 0.5) + noise)
        return np.maximum.accumulate(1.0 / (1.0 + np.exp(-logit)), axis=1)

    def _finish(self, finished: np.ndarray, now: float) -> None:
        if not math.isinf(self.sharpness):
            for i in finished.tolist():
                request = int(self.rows.request[i])
                length = int(self.trace.output[request])
                at = np.arange(0, length, LEARN_EVERY)
                said = self.said(np.full(len(at), request), at)
                self.calibration.observe(at, said, length, int(self.limit[request]))
        super()._finish(finished, now)

    def _running(self, order: np.ndarray) -> Running:
        plain = super()._running(order)
        ends = self.calibration.calibrated(self.said(self.rows.request[order], plain.generated))
        return dataclasses.replace(plain, ends=ends)

    def _project(self, running: Running | None = None) -> Outlook:
        """Of a request whose prompt runs nothing is said yet."""
        if running is None:
            running = self._running(np.arange(self.rows.size))
        if not self.prompts:
            return self.memory.project(running, self._acceptance())
        requests = np.array([prompt.request for prompt in self.prompts])
        held = np.array([prompt.tokens for prompt in self.prompts])
        silent = np.full((len(requests), len(THRESHOLDS)), np.nan)
        return self.memory.project(
            Running(
                np.concatenate((running.kv_tokens, held)),
                np.concatenate((running.generated, self.generated[requests])),
                np.concatenate((running.max_tokens, self.limit[requests])),
                ends=np.concatenate((running.ends, silent)),
            ),
            self._acceptance(),
        )


def quality(serving: PredictedServing, trace: Trace, most: int = 200) -> np.ndarray:
    """[5, 2] precision and recall of the calibrated predictions at one half, first answers."""
    true, said = [], []
    for request in range(min(most, len(trace))):
        at = np.arange(0, int(trace.output[request]), LEARN_EVERY)
        true.append((trace.output[request] - at)[:, None] < THRESHOLDS)
        said.append(serving.calibration.calibrated(serving.said(np.full(len(at), request), at)))
    true, yes = np.concatenate(true), np.concatenate(said) > 0.5
    hits = (true & yes).sum(axis=0)
    return np.stack((hits / np.maximum(yes.sum(axis=0), 1), hits / true.sum(axis=0)), axis=1)
