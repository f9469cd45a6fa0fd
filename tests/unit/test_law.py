# SPDX-License-Identifier: Apache-2.0
"""The throughput law, and where layers and cores go."""

import pytest

from spexis.core import law
from spexis.core.placement import (
    StageCosts,
    balanced_partition,
    cpu_binding,
    layer_partition,
)

ACCEPTANCE = (0.0, 0.3, 0.5, 0.8, 1.0)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("p", ACCEPTANCE)
def test_the_two_forms_of_the_law_are_one(p, stages):
    assert law.rows_per_token(p, stages) == pytest.approx(1 + (1 - p) * (stages - 1))
    assert law.tokens_per_step(p, stages) == pytest.approx(1 / (stages - (stages - 1) * p))
    assert law.acceptance_for(law.tokens_per_step(p, stages), stages) == pytest.approx(p)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_ends_of_the_law(stages):
    assert law.speedup(0.0, stages) == pytest.approx(1)  # always wrong: plain PP's pace
    assert law.speedup(1.0, stages) == pytest.approx(stages)  # always right: every stage full


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("p", ACCEPTANCE)
def test_law_against_a_direct_count(p, stages):
    """Play the pipeline: a row a step, the truth of a row's token known N steps later."""
    import random

    draw, rows, tokens, wrong_until = random.Random(0), 0, 0, 0
    for step in range(40_000):
        rows += 1
        if step < wrong_until:
            continue  # behind a wrong guess: runs, returns nothing
        tokens += 1
        if draw.random() >= p:  # this row's token was guessed wrong for the next row
            wrong_until = step + stages
    assert rows / tokens == pytest.approx(law.rows_per_token(p, stages), rel=0.02)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("p", ACCEPTANCE)
def test_selective_law_lies_between_sp_and_plain_pp(p, stages):
    assert law.selective(p, 0.0, stages) == pytest.approx((law.tokens_per_step(p, stages), 1.0))
    assert law.selective(p, 1.0, stages) == pytest.approx((1 / stages, 1 / stages))
    tokens, rows = law.selective(p, 0.3, stages)
    assert 1 / stages <= tokens <= rows + 1e-12 <= 1 + 2e-12


@pytest.mark.parametrize("bad", [(-0.1, 2), (1.1, 2), (0.5, 0)])
def test_law_refuses_nonsense(bad):
    with pytest.raises(ValueError):
        law.rows_per_token(*bad)


@pytest.mark.parametrize(
    ("layers", "exit_layer", "stages", "split"),
    [
        (30, 18, 2, [18, 12]),
        (30, 18, 3, [18, 6, 6]),
        (30, 17, 3, [17, 7, 6]),  # the left-over layer is not on the last stage, it has the head
        (30, 15, 4, [15, 5, 5, 5]),
        (4, 2, 3, [2, 1, 1]),
    ],
)
def test_layer_partition(layers, exit_layer, stages, split):
    assert layer_partition(layers, exit_layer, stages) == split
    assert sum(split) == layers


@pytest.mark.parametrize("bad", [(30, 30, 2), (30, 29, 3), (30, 0, 2), (30, 18, 1)])
def test_layer_partition_refuses_the_impossible(bad):
    with pytest.raises(ValueError, match="cannot split"):
        layer_partition(*bad)


def splits(num_layers, num_stages):
    """Every split of the layers over the stages, at least one each."""
    if num_stages == 1:
        return [[num_layers]]
    return [
        [first, *rest]
        for first in range(1, num_layers - num_stages + 2)
        for rest in splits(num_layers - first, num_stages - 1)
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0.0, 0.7, 3.2])
@pytest.mark.parametrize("last", [0.0, 1.3, 6.0])
def test_no_split_beats_the_balanced_one(stages, first, last):
    costs = StageCosts(layer=0.5, first=first, last=last)
    found = balanced_partition(12, stages, costs)
    assert sum(found) == 12 and min(found) >= 1
    best = min(max(costs.of_split(split)) for split in splits(12, stages))
    assert max(costs.of_split(found)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("stages", "costs", "first_layers", "split"),
    [
        (2, StageCosts(layer=1.0), None, [40, 40]),
        (3, StageCosts(layer=1.0), None, [27, 27, 26]),  # not the last: it has the head
        (2, StageCosts(layer=0.5, last=1.0), None, [41, 39]),
        (2, StageCosts(layer=0.5, first=1.0), None, [39, 41]),
        (3, StageCosts(layer=1.0, last=4.0), 20, [20, 32, 28]),  # an exit drafter's stage stays
    ],
)
def test_balanced_partition(stages, costs, first_layers, split):
    assert balanced_partition(80, stages, costs, first_layers) == split


@pytest.mark.parametrize("bad", [(1, 2, None), (4, 3, 3), (4, 1, 2), (4, 0, None)])
def test_balanced_partition_refuses_the_impossible(bad):
    layers, stages, first = bad
    with pytest.raises(ValueError, match="cannot split"):
        balanced_partition(layers, stages, StageCosts(layer=1.0), first)
    with pytest.raises(ValueError, match="positive"):
        balanced_partition(4, 2, StageCosts(layer=0.0))


@pytest.mark.parametrize(
    ("cores", "workers", "binding"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1], 3, "0|1|0"),
        ([0, 1], 4, "0|1|0|1"),
        ([3], 2, "3|3"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([0, 2, 4, 6, 8], 2, "0,2|4,6"),  # the fifth core is left to the engine process
    ],
)
def test_cpu_binding(cores, workers, binding):
    assert cpu_binding(cores, workers) == binding
