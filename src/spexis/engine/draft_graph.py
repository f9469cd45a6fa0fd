# SPDX-License-Identifier: Apache-2.0
"""The drafter and the state advance as CUDA graphs, one per decode batch size.

    graphs = DraftGraphs(draft, recorder)     draft(num_rows): drafts and advances the state
    graphs.record(num_rows, prepare)          while vLLM captures its own graphs
    graphs.replay(num_rows)                   in place of draft(num_rows) on such a batch

Switched off by `draft_graphs: false`; tensor parallel stages draft eagerly, since there it has not
run on GPUs yet. A graph holds norm, bridge, attention layers, head, the choice of the token and the
advance of position, token and planned tokens (one kernel): some thirty launches for a drafter of
two layers, which cost the host some 3 ms a step otherwise (docs/performance.md).

Why a graph of its own, and not keys in the stage's: vLLM's full graph ends when its outputs are
in persistent buffers, and these are sent at once; with the drafter inside, the next stage would
wait for it, and that wait is on the path from first stage to verdict. Behind the stage's graph,
the drafter runs while the next stage works.

What makes a replay right is that everything a graph reads lies where it lay at capture:
- hidden states and residual: where vLLM's full graph of that size leaves its output
  (ModelCudaGraphManager.intermediate_tensors);
- positions of tokens, block tables, slot mappings, attention metadata: vLLM's own persistent
  input buffers, which its full graph reads too and which hold this step's data by then;
- rows (slot, start, token, end, prompt or not): RowBuffers, filled before the stage runs, with
  the dummy slot in padded rows, so that a graph larger than the batch touches nobody's state;
- the states of the rules and the drafter's final states: allocated once.
A batch is replayed only if vLLM ran it as a full decode graph of that very size; prompts and
mixed batches draft eagerly.

The graphs share vLLM's graph memory pool: they run after the stage's graph, whose outputs lie
outside of the pool, and leave nothing in it. They live in the graph manager that they were
captured beside, so the ones of vLLM's memory profiling end with it. Invariant: a graph is never
replayed with another manager than the one it was captured with.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Draft = Callable[[int], None]


class Recorder(Protocol):
    """Makes something that can be run again from work that ran once."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]: ...


class CudaGraphRecorder:
    """Records into a CUDA graph. Use it where vLLM captures (inside its graph_capture())."""

    def __init__(self, pool_context: Callable[[], AbstractContextManager]):
        """pool_context(): enters capture into the wanted memory pool, gives the pool."""
        self.pool_context = pool_context

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with (
            self.pool_context() as pool,
            torch.cuda.graph(graph, pool, stream=torch.cuda.current_stream()),
        ):
            work()
        return graph.replay


class DraftGraphs:
    def __init__(self, draft: Draft, recorder: Recorder):
        self.draft, self.recorder = draft, recorder
        self._replays: dict[int, Callable[[], None]] = {}

    def record(self, num_rows: int, prepare: Callable[[int], AbstractContextManager[None]]) -> None:
        """prepare(num_rows): context in which a dummy batch of that size can be drafted.

        Entered twice: attention back ends may set up their metadata in the run before capture.
        """
        with prepare(num_rows):
            self.draft(num_rows)
        with prepare(num_rows):
            self._replays[num_rows] = self.recorder.record(lambda: self.draft(num_rows))

    def __contains__(self, num_rows: int) -> bool:
        return num_rows in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def replay(self, num_rows: int) -> None:
        self._replays[num_rows]()


def decode_sizes(descriptors) -> list[int]:
    """Batch sizes of the full graphs of one token a row, largest first as vLLM captures.

    descriptors: vLLM's BatchExecutionDescriptors of full graphs.
    """
    return sorted({d.num_tokens for d in descriptors if is_decode(d)}, reverse=True)


def is_decode(descriptor) -> bool:
    """Whether a full graph of this descriptor runs one token a row, in one piece."""
    return (
        descriptor.uniform_token_count == 1
        and descriptor.num_tokens == descriptor.num_reqs
        and descriptor.num_ubatches == 1
    )
