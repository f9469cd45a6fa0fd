# SPDX-License-Identifier: Apache-2.0
"""The length predictor's probabilities on their way from a CUDA device to the scheduler (V2).

    output = super().sample_tokens(...)                              # vLLM's, being copied already
    AsyncEnds(output, ends, self.main_stream, self.output_copy_stream)

Invariant: as vLLM's own output: the copy is enqueued behind what computes it, and only
get_output(), which another thread calls, waits for it.
"""

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream

from spexis.engine.outputs import SpexisOutput


class AsyncEnds(AsyncModelRunnerOutput):
    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        ends: torch.Tensor,  # [R, 5] float32
        main_stream: torch.cuda.Stream,  # that computes `ends`
        copy_stream: torch.cuda.Stream,
    ):
        self.output = output
        self.device_ends = ends  # must live until it is copied, on another stream than its own
        self.copied = torch.cuda.Event(blocking=True)
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            self.ends = async_copy_to_np(ends)
            self.copied.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        self.copied.synchronize()
        return SpexisOutput.of(output, self.ends)
