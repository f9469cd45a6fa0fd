# SPDX-License-Identifier: Apache-2.0
"""SpexisScheduler with a length predictor's words, over the simulated pipeline.

Answers end at a token of their own, long before the limit that the scheduler knows. The simulated
workers return probabilities with each step as the runners do (SpexisOutput): right, uncertain or
wrong ones for the rows that count, noise for the others. Whatever they say, the text must stay
right, and the journal must say the same again when it is computed from its own lines.
"""

import numpy as np
import pytest
from test_scheduler import RealScheduler, make_config, run  # noqa: F401

from spexis.bench.pipeline import Target
from spexis.bench.recompute import Recomputed
from spexis.core.lengths import THRESHOLDS
from spexis.core.predictions import Predictions
from spexis.engine.outputs import SpexisOutput

pytestmark = pytest.mark.engine  # no engine starts, but vLLM is imported
M = np.array(THRESHOLDS)
LIMIT = 60  # tokens that every request states


class WithLengths(RealScheduler):
    """Histories whose answers are about 20 tokens long, with memory for a few of them."""

    predictor = "none"
    recomputed = steps = 0  # tokens, and the pipeline's steps, of all histories together

    def resize(self) -> None:
        self.num_blocks, self.num_requests = 60, 20
        self.target = Target(self.target.seed, 20, 0.7)
        self.length: dict[str, int] = {}
        self.noise = np.random.default_rng(self.target.seed)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.chances["flush"] = self.opt_out = 0.0
        self.arrive = 1.0
        self.watch = Recomputed.on(self.real)
        if self.real.lookahead is not None:
            self.real.lookahead.predictions = self.heard = Heard(self)

    def params(self, prompt):
        from vllm import SamplingParams

        stop, text = self.random.randrange(self.target.vocab_size), list(prompt)
        while len(text) < len(prompt) + LIMIT:
            text.append(self.target.next(text))
            if text[-1] == stop:
                break
        self.length[str(self.num_arrived)] = len(text) - len(prompt)
        return SamplingParams(
            temperature=0, max_tokens=LIMIT, stop_token_ids=[stop], ignore_eos=True
        )

    def _arrive(self) -> None:
        super()._arrive()
        self.prompt_len = getattr(self, "prompt_len", {})
        req_id = str(self.num_arrived - 1)
        self.prompt_len[req_id] = self.real.requests[req_id].num_prompt_tokens

    def truth(self, req_id: str, answered: int) -> np.ndarray:
        """[5] whether fewer than M tokens remain."""
        return self.length[req_id] - answered < M

    def with_predictions(self, step, result):
        if self.predictor == "none":
            return result
        ends = self.noise.random((len(step.rows), len(M)), dtype=np.float32)
        for i, (row, start) in enumerate(zip(step.rows, step.start.tolist(), strict=True)):
            # As a worker counts: by the position that the token about to be sampled will take.
            answered = start + row.num_scheduled - self.prompt_len[row.req_id]
            if step.outputs[i] >= 0:
                ends[i] = self.say(self.truth(row.req_id, answered))
        return SpexisOutput.of(result, ends=ends)

    def say(self, truth: np.ndarray) -> np.ndarray:
        if self.predictor == "uncertain":
            logit = np.where(truth, 1.5, -1.5) + self.noise.normal(0, 1.5, len(M))
            return np.maximum.accumulate(1 / (1 + np.exp(-logit)))
        return np.where(truth ^ (self.predictor == "wrong"), 1 - 1e-6, 1e-6)

    def done(self):
        type(self).recomputed += self.watch.tokens
        type(self).steps += self.real.num_steps
        if self.real.lookahead is not None:
            assert len(self.heard) == 0, "predictions of requests that left"
        return super().done()


class Heard(Predictions):
    """Checks that what reaches the scheduler is of the answer as the scheduler counts it."""

    def __init__(self, scheduler: WithLengths):
        super().__init__()
        self.scheduler, self.num_heard = scheduler, 0

    def note(self, req_id, answered, said):
        self.num_heard += 1
        if self.scheduler.predictor == "oracle":
            assert ((said > 0.5) == self.scheduler.truth(req_id, answered)).all()
        super().note(req_id, answered, said)


def histories(make_config, predictor, seeds, num_stages=2, more=1, **block):  # noqa: F811
    kind = type("Kind", (WithLengths,), {"predictor": predictor, "recomputed": 0, "steps": 0})
    totals = run(make_config, num_stages, more, seeds, tight=True, kind=kind, **block)
    return totals | {"recomputed": kind.recomputed, "steps": kind.steps}


@pytest.mark.parametrize(
    ("predictor", "hold"), [("oracle", 0.3), ("uncertain", 0.0), ("wrong", 0.0)]
)
def test_predictions_change_no_token(make_config, predictor, hold):  # noqa: F811
    """run() checks each token, that no block is left, and the replay of every decision.

    hold: share of rows that the first stage leaves out (mode "sp-alpha").
    """
    totals = histories(make_config, predictor, range(6), lookahead=True, hold=hold)
    assert totals["waits"] > 20 and totals["replayed"] > 200
    assert totals["discarded"] > 100 and totals["preemptions"] > 0
