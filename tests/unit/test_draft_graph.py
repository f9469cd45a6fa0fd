# SPDX-License-Identifier: Apache-2.0
"""What a captured drafter may rely on, with a recorder that runs the work again.

A replay on a GPU reads the addresses of capture; here the captured closure is called again, so it
finds this step's rows only if it reads persistent buffers. Compared with the eager way, row by
row, on batches that are smaller than their graph.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from spexis.engine import kernels
from spexis.engine.draft_graph import DraftGraphs, decode_sizes
from spexis.engine.verdict import FirstStage

CPU = torch.device("cpu")
SLOTS, WIDTH, SIZES = 6, 4, (1, 2, 4, 6)


class Again:
    """Stands for a CUDA graph: the recorded work, run again."""

    def record(self, work):
        work()
        return work


class Side:
    """A first stage with a drafter that looks at everything a drafter may look at."""

    def __init__(self):
        self.first = FirstStage(SLOTS, 2, CPU)
        self.rows = kernels.RowBuffers.allocate(SLOTS, self.first.dummy_slot, CPU)
        self.hidden = torch.zeros(SLOTS, WIDTH, dtype=torch.int64)
        self.yes = torch.ones(SLOTS, dtype=torch.bool)
        self.prefill_len = torch.full((SLOTS,), 3, dtype=torch.int32)

    def draft(self, num_rows: int) -> None:
        rows = self.rows
        mixed = self.hidden[:num_rows].sum(1) + 7 * rows.start[:num_rows] + rows.tokens[:num_rows]
        guesses = mixed * 13 + rows.is_prefill[:num_rows].long()
        slots, ends = rows.slots[:num_rows], rows.ends[:num_rows]
        kernels.propose(self.first, slots, ends, guesses % 1009, self.yes[:num_rows])

    def begin(self, slots: torch.Tensor, num_padded: int, hidden: torch.Tensor) -> torch.Tensor:
        ends = (self.first.position[slots] + 1).to(torch.int32)
        arguments = slots, ends, self.prefill_len, self.rows, num_padded
        self.hidden[: len(slots)] = hidden
        return kernels.begin_rows(self.first, *arguments)[0]

    def state(self) -> list:
        first = self.first
        return [t[:SLOTS].tolist() for t in (first.position, first.token, first.planned)]


def test_replays_equal_eager_runs():
    eager, captured = Side(), Side()
    graphs = DraftGraphs(captured.draft, Again())
    prepared = []

    @contextmanager
    def dummy_batch(num_rows):
        prepared.append(num_rows)
        captured.rows.pad(captured.first.dummy_slot)
        yield

    for size in SIZES:
        graphs.record(size, dummy_batch)
    assert prepared == [size for size in SIZES for _ in range(2)]  # warm-up, capture
    assert captured.state() == Side().state()  # both touched nobody
    assert 4 in graphs and 3 not in graphs and len(graphs) == len(SIZES)

    torch.manual_seed(0)
    for _ in range(60):
        num_rows = int(torch.randint(1, SLOTS + 1, ()))
        slots = torch.randperm(SLOTS)[:num_rows]
        hidden = torch.randint(0, 50, (num_rows, WIDTH))
        size = min(s for s in SIZES if s >= num_rows)
        sent = eager.begin(slots, num_rows, hidden)
        eager.draft(num_rows)
        assert torch.equal(captured.begin(slots, size, hidden), sent)
        graphs.replay(size)
        assert captured.state() == eager.state()


def test_sizes_are_those_of_plain_decode_graphs():
    def descriptor(tokens, rows, uniform=1, ubatches=1):
        return SimpleNamespace(
            num_tokens=tokens, num_reqs=rows, uniform_token_count=uniform, num_ubatches=ubatches
        )

    found = [
        descriptor(1, 1),
        descriptor(8, 8),
        descriptor(8, 4, uniform=2),
        descriptor(16, 16, uniform=None),
        descriptor(32, 32, ubatches=2),
        descriptor(8, 8),
    ]
    assert decode_sizes(found) == [8, 1]


def test_unknown_sizes_are_not_replayed():
    with pytest.raises(KeyError):
        DraftGraphs(lambda rows: None, Again()).replay(3)
