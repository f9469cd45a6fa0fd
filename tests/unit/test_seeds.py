# SPDX-License-Identifier: Apache-2.0
"""Seeded requests draw once per token: discarded rows and dropped tokens give their draws back."""

import pytest
import torch

from spexis.engine.seeds import SeededDraws


def draw(draws: SeededDraws, generator: torch.Generator, good: bool) -> int:
    with draws.drawing(["a"], {0: generator}, torch.tensor([good])):
        return int(torch.randint(0, 1 << 31, (1,), generator=generator))


def plain(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(0, 1 << 31, (1,), generator=generator)) for _ in range(count)]


def test_discarded_rows_leave_no_trace():
    draws, generator = SeededDraws(4), torch.Generator().manual_seed(7)
    pattern = [True, False, False, True, True, False, True]
    kept = [value for good in pattern if (value := draw(draws, generator, good)) and good]
    assert kept == plain(7, 4)


@pytest.mark.parametrize("dropped", [0, 1, 2, 4])
def test_dropped_tokens_are_drawn_again(dropped):
    draws, generator = SeededDraws(4), torch.Generator().manual_seed(7)
    values = [draw(draws, generator, True) for _ in range(6)]
    draws.take_back("a", generator, dropped)
    values = values[: 6 - dropped] + [draw(draws, generator, True) for _ in range(3)]
    assert values == plain(7, 9 - dropped)


def test_two_resets_in_a_row():
    draws, generator = SeededDraws(4), torch.Generator().manual_seed(7)
    values = [draw(draws, generator, True) for _ in range(6)]
    draws.take_back("a", generator, 2)
    draws.take_back("a", generator, 1)
    assert [*values[:3], draw(draws, generator, True)] == plain(7, 4)


def test_requests_without_a_seed_and_ended_ones():
    draws, generator = SeededDraws(4), torch.Generator().manual_seed(7)
    with draws.drawing(["a"], {}, torch.tensor([True])):
        pass
    draws.take_back("a", None, 1)
    draw(draws, generator, True)
    draws.forget("a")
    draws.take_back("a", generator, 1)  # nothing is known of it any more
    assert draw(draws, generator, True) == plain(7, 2)[1]
