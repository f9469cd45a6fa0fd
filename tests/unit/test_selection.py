# SPDX-License-Identifier: Apache-2.0
"""Selection: the price decides, steps of the curve are seen, and it never loses to no selection."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spexis.core.cost_model import CostModel
from spexis.core.law import tokens_per_step
from spexis.core.presets import MEASURED
from spexis.core.selection import ConfidenceHistogram, Selection, operating_points
from spexis.core.stage_profile import StagePoints, StageProfile
from spexis.simulator import fixed_batch
from spexis.simulator.drafts import DraftSource
from spexis.simulator.tables import OutcomeRule, selection_row


def cost(points, graph_sizes=(), kv=0.0) -> CostModel:
    return CostModel.from_profile(
        StageProfile(
            hardware="h",
            model="m",
            layers_per_stage=(1, 1),
            stages=(StagePoints(points=points, graph_sizes=graph_sizes, kv_seconds_per_token=kv),),
        )
    )


FLAT = ((1, 0, 0.01), (256, 0, 0.01))
STEEP = ((1, 0, 0.0001), (256, 0, 0.0256))  # every row costs 0.1 ms and nothing else does


def running(model: CostModel, tokens=50, rows=64, requests=64, seconds=None) -> Selection:
    """A policy that has seen steady steps."""
    policy = Selection(model, 256)
    for _ in range(50):
        policy.observe(seconds or model.step_seconds(rows), tokens, rows, requests)
    return policy


def test_everything_runs_before_anything_was_measured():
    assert Selection(cost(STEEP), 256).select(np.array([0.1, 1.0])).all()


def test_flat_curve_holds_nothing_back():
    joint = np.linspace(0.001, 1, 64)
    assert running(cost(FLAT)).select(joint).all()


def test_steep_curve_runs_only_what_is_worth_its_row():
    """Where only rows cost, a row is worth it iff q*kappa > price of a row in tokens."""
    policy = running(cost(STEEP), tokens=48)
    joint = np.concatenate((np.ones(32), np.full(16, 0.95), np.full(16, 0.05)))
    run = policy.select(joint)
    assert run[:32].all() and not run[48:].any()


def test_long_context_costs_more():
    model = cost(FLAT, kv=1e-7)
    policy = running(model)
    joint, kv = np.full(64, 0.5), np.full(64, 100.0)
    kv[7] = 50_000  # 5 ms of reading, half a step
    run = policy.select(joint, kv)
    assert not run[7] and run.sum() == 63


def test_a_bonus_brings_a_row_in():
    model = cost(STEEP)
    joint = np.concatenate((np.ones(32), np.full(32, 0.05)))
    assert not running(model, tokens=48).select(joint)[40]
    bonus = np.zeros(64)
    bonus[40] = 20.0
    run = running(model, tokens=48).select(joint, bonus=bonus)
    assert run[40] and not run[41]


def test_beside_a_prompt_chunk_rows_have_the_chunks_price():
    model = cost(((1, 0, 0.0188), (64, 0, 0.0201), (128, 0, 0.0231), (256, 0, 0.0352)))
    policy = running(model, tokens=50, seconds=0.0201)
    joint = np.concatenate((np.ones(32), np.full(32, 0.2)))
    assert policy.select(joint).all()  # 0.02 ms a row
    run = policy.select(joint, prefill_tokens=2000)  # 0.09 ms a row
    assert run[:32].all() and not run[32:].any()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_simulated_scheduler_learns_how_often_drafts_are_right(stages, lag):
    """Outcomes reach OutcomeChooser under the steps in which their rows ran, also one step late."""
    model = CostModel.from_profile(MEASURED[f"h200-llama-70b-pp{stages}"])
    rule = OutcomeRule(CostModel.from_profile(MEASURED[f"h200-llama-70b-pp{stages}"]), 48, lag)
    fixed_batch.run(model, 48, DraftSource(0.8), rule, 500, 0, on_step=rule.on_step)
    assert rule.chooser.mean == pytest.approx(0.8, abs=0.03)
    in_flight = [len(request.flying) for request in rule.chooser.requests.values()]
    assert max(in_flight) <= stages + lag and min(in_flight) > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.sampled_from([FLAT, STEEP]),
    st.booleans(),
    st.integers(0, 64),
)
def test_something_always_runs_and_the_order_is_kept(joint, points, graphs, tokens):
    model = cost(points, tuple(2**i for i in range(9)) if graphs else ())
    joint = np.array(joint)
    run = running(model, tokens=tokens).select(joint)
    assert run.any()
    if not run.all():
        assert joint[run].min() >= joint[~run].max()


def test_operating_points_reach_from_sp_to_plain_pp():
    histogram = ConfidenceHistogram(0.7)
    histogram.observe(np.random.default_rng(0).beta(1.4, 0.6, 20_000))
    table = cost(FLAT).step_table(64)
    points = operating_points(64, 2, table, histogram)
    assert points[0].dropped == 0 and points[0].rows == pytest.approx(64)
    assert points[0].tokens == pytest.approx(64 * tokens_per_step(histogram.mean, 2), rel=0.01)
    assert points[-1].tokens == points[-1].rows == pytest.approx(32)
    rows = [p.rows for p in points]
    assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize(
    ("stages", "graphs", "batch", "p", "least"),
    [
        (2, False, 64, 0.8, 0.99),
        (2, False, 256, 0.55, 1.10),
        (4, False, 192, 0.65, 1.10),
        (2, True, 128, 0.65, 0.99),
        (2, True, 192, 0.8, 1.10),  # the step at 128 must be seen
        (2, True, 256, 0.8, 0.99),  # and must not be taken for an end in itself
        (4, True, 256, 0.65, 1.20),
    ],
)
def test_gain_on_the_measured_curve(stages, graphs, batch, p, least):
    row = selection_row(stages, graphs, batch, p, steps=800)
    assert row["over_none"] >= least
    assert row["over_drop"] >= 0.99
