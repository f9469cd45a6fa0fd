# SPDX-License-Identifier: Apache-2.0
"""What else a step's output holds, on its way from a CUDA device to the scheduler (V2).

    output = super().sample_tokens(...)                              # vLLM's, being copied already
    AsyncExtras(output, ends, rows, self.main_stream, self.output_copy_stream)

Invariant: as vLLM's own output: the copies are enqueued behind what computes them, and only
get_output(), which another thread calls, waits for them.
"""

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

from spexis.engine.outputs import SpexisOutput
from spexis.engine.v2_choice import HELD


class AsyncExtras(AsyncModelRunnerOutput):
    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        ends: torch.Tensor | None,  # [R, 5] float32, of a length predictor
        rows: torch.Tensor | None,  # [4, R] int32, what the first stage chose from (v2_choice.py)
        main_stream: torch.cuda.Stream,  # that computes both
        copy_stream: torch.cuda.Stream,
    ):
        self.output = output
        # They must live until they are copied, on another stream than their own.
        self.on_device = ends, rows
        self.copied = torch.cuda.Event(blocking=True)
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            self.ends, self.rows = (t if t is None else async_copy_to_np(t) for t in self.on_device)
            self.copied.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        self.copied.synchronize()
        if self.rows is None:
            return SpexisOutput.of(output, ends=self.ends)
        at, _, joint, unverified = self.rows
        held = frozenset(r for r, p in zip(output.req_ids, at, strict=True) if p == HELD)
        offered = np.stack([np.ascontiguousarray(joint).view(np.float32), unverified])
        return SpexisOutput.of(output, ends=self.ends, held=held, offered=offered)
