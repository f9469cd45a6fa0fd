# SPDX-License-Identifier: Apache-2.0
"""What the last stage returns to the scheduler: vLLM's output, and what is Spexis' own.

    SpexisOutput(req_ids=..., ..., held=held, ends=ends)     V1: built as vLLM's
    SpexisOutput.of(output, ends=..., held=...)              V2: vLLM's own, see v2_extras.py

Invariant: it is a ModelRunnerOutput with three fields more, so every reader of vLLM's sees what it
always saw; it travels pickled like the rest.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from vllm.v1.outputs import ModelRunnerOutput


@dataclasses.dataclass
class SpexisOutput(ModelRunnerOutput):
    held: frozenset[str] = frozenset()
    """Requests whose row did not run in this step (selector.py, v2_choice.py)."""
    ends: np.ndarray | None = None
    """[R, 5] float32 P(fewer than lengths.THRESHOLDS tokens remain), of each row's last token; None
    without a length predictor. It means nothing where the row returned no token."""

    offered: np.ndarray | None = None
    """[2, R] float: of each request the product of its unverified guesses' confidences, and their
    number, as the first stage's device saw them (v2_choice.py); None in a step with prompts."""

    @classmethod
    def of(cls, output: ModelRunnerOutput, **extras) -> SpexisOutput:
        """The same output with these; what it holds is shared."""
        fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
        return cls(**{**fields, **extras})
