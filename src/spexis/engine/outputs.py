# SPDX-License-Identifier: Apache-2.0
"""What the last stage returns to the scheduler: vLLM's output, and the length predictor's with it.

    EndsOutput(req_ids=..., ..., ends=ends)      V1: built as vLLM's own
    AsyncEnds(output, ends, main_stream, ...)    V2 (v2_ends.py): vLLM's own, with ends once copied

Invariant: it is a ModelRunnerOutput with one field more, so every reader of vLLM's sees what it
always saw; it travels pickled like the rest.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from vllm.v1.outputs import ModelRunnerOutput


@dataclasses.dataclass
class EndsOutput(ModelRunnerOutput):
    ends: np.ndarray | None = None
    """[R, 5] float32 P(fewer than lengths.THRESHOLDS tokens remain), of each row's last token; None
    without a predictor. It means nothing where the row returned no token."""

    @classmethod
    def of(cls, output: ModelRunnerOutput, ends: np.ndarray) -> EndsOutput:
        """The same output with `ends`; what it holds is shared."""
        fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(ModelRunnerOutput)}
        return cls(**fields, ends=ends)
