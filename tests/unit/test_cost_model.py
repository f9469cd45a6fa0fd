# SPDX-License-Identifier: Apache-2.0
"""The cost model keeps the measured curve's steps, learns from measured steps, and never breaks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spexis.core.cost_model import CostModel, Curve, StageCost
from spexis.core.stage_profile import StagePoints, StageProfile

POINTS = ((1, 0, 0.0188), (64, 0, 0.0201), (128, 0, 0.0231), (256, 0, 0.0352))
POWERS = tuple(2**i for i in range(9))


def stage(**changes) -> StageCost:
    return StageCost(StagePoints(**{"points": POINTS, **changes}))


def profile(**changes) -> StageProfile:
    values = {
        "hardware": "h",
        "model": "m",
        "layers_per_stage": (40, 40),
        "stages": (StagePoints(points=POINTS),),
    }
    return StageProfile(**{**values, **changes})


def test_measured_points_are_met_and_joined_by_lines():
    cost = stage()
    for rows, _, seconds in POINTS:
        assert cost.seconds(rows) == pytest.approx(seconds)
    assert cost.seconds(96) == pytest.approx((0.0201 + 0.0231) / 2)
    assert cost.seconds(512) == pytest.approx(0.0352 + 2 * (0.0352 - 0.0231))


def test_graph_sizes_are_steps_and_stay_steps_after_learning():
    cost = stage(graph_sizes=POWERS)
    assert cost.seconds(65) == cost.seconds(128) == pytest.approx(0.0231)
    assert cost.seconds(129) == pytest.approx(0.0352)
    for _ in range(200):
        cost.observe(128, 0, 0, 0.0231 * 1.2)
        cost.observe(256, 0, 0, 0.0352 * 1.2)
    assert cost.seconds(65) == cost.seconds(128)
    assert cost.seconds(129) / cost.seconds(128) == pytest.approx(0.0352 / 0.0231, rel=0.01)


def test_context_slope_comes_from_points_of_two_lengths():
    points = tuple((r, kv, s + 2e-8 * r * kv) for r, _, s in POINTS for kv in (0, 4096))
    cost = stage(points=points)
    assert cost.kv_seconds == pytest.approx(2e-8)
    assert cost.seconds(64, 0, 64 * 1000) == pytest.approx(0.0201 + 2e-8 * 64_000)


def test_prompt_chunks_follow_the_curve_or_their_own_points():
    slope = (0.0352 - 0.0231) / 128
    assert stage().seconds(0, 2048) == pytest.approx(0.0352 + slope * (2048 - 256))
    cost = stage(prefill_points=((1, 0.0188), (2048, 0.2)))
    assert cost.seconds(0, 2048) == pytest.approx(0.2)
    assert cost.seconds(64, 2048) == pytest.approx(0.0201 + 0.2 - 0.0188)
    # Below the smallest one that was measured: between it and a single row.
    cost = stage(prefill_points=((101, 0.0288), (2048, 0.2)))
    assert cost.seconds(0, 51) == pytest.approx((0.0188 + 0.0288) / 2)
    assert cost.seconds(64, 51) == pytest.approx(0.0201 + 0.005)


def test_learning_recovers_another_machine():
    rng = np.random.default_rng(0)
    cost = stage(graph_sizes=POWERS, kv_seconds_per_token=2e-8)
    truth = stage(graph_sizes=POWERS, kv_seconds_per_token=4e-8)

    def real(rows, kv):
        return 0.002 + 1.1 * truth.seconds(rows, 0, kv)

    for _ in range(600):
        rows, length = int(rng.integers(1, 257)), int(rng.integers(10, 4000))
        kv = rows * length
        cost.observe(rows, 0, kv, real(rows, kv) * rng.normal(1, 0.02))
    for rows, kv in ((1, 500), (64, 64_000), (200, 400_000)):
        assert cost.seconds(rows, 0, kv) == pytest.approx(real(rows, kv), rel=0.03)


def test_one_pause_of_the_host_moves_little():
    cost = stage()
    for _ in range(100):
        cost.observe(64, 0, 0, 0.0201)
    cost.observe(64, 0, 0, 1.0)
    assert cost.seconds(64) == pytest.approx(0.0201, rel=0.03)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300),
            st.integers(0, 3000),
            st.integers(0, 10**6),
            st.floats(-1, 10) | st.just(float("nan")),
        ),
        max_size=30,
    )
)
def test_any_observations_leave_it_positive_and_rising(observed):
    cost = stage(graph_sizes=POWERS, kv_seconds_per_token=3e-8)
    for rows, prefill, kv, seconds in observed:
        cost.observe(rows, prefill, kv, seconds)
    table = cost.table(256)
    assert np.isfinite(table).all() and (table > 0).all() and (np.diff(table) >= 0).all()
    assert cost.seconds(8, 0, 2000) > cost.seconds(8, 0, 1000)
    assert cost.seconds(8, 100, 1000) >= cost.seconds(8, 0, 1000)


def test_pace_is_the_slowest_stage_or_the_circle():
    model = CostModel.from_profile(profile(head=((1, 0.001),)))
    assert model.step_seconds(64) == pytest.approx(0.0211)  # the last stage, with the head
    model = CostModel.from_profile(profile(host=((1, 0.005),), hidden_link=((1, 0.001),)))
    assert model.step_seconds(64) == pytest.approx(0.0201 + 0.006 / 2)
    ahead = CostModel.from_profile(profile(host=((1, 0.005), (64, 0.030)), host_overlaps=True))
    assert ahead.step_seconds(1) == pytest.approx(0.0188)  # beside the stages
    assert ahead.step_seconds(64) == pytest.approx(0.030)  # a host that is slower than they are
    assert ahead.step_table(64)[[1, 64]] == pytest.approx([0.0188, 0.030])


def test_head_and_drafter_follow_their_own_rows():
    head = ((1, 0.0005), (64, 0.0006), (256, 0.0008))
    last = CostModel.from_profile(profile(head=head)).stages[1]
    assert last.seconds(64) == pytest.approx(0.0201 + 0.0006)
    # A prompt's tokens go through the layers; the head sees the rows that sample.
    layers = stage().seconds(64, 2048) - 0.0201
    assert last.seconds(64, 2048) == pytest.approx(0.0201 + 0.0006 + layers)


def test_drafter_and_all_reduce_are_added_where_they_run():
    p = profile(drafter=((1, 0.002),), all_reduce=((1, 1e-5), (101, 3e-5)), tensor_parallel=2)
    first, last = CostModel.from_profile(p).stages
    assert last.seconds(1) == pytest.approx(0.0188 + 80 * 1e-5)
    assert first.seconds(1) - last.seconds(1) == pytest.approx(0.002)
    plain = CostModel.from_profile(p, drafter=False).stages[0]
    assert plain.seconds(1) == pytest.approx(last.seconds(1))


def test_curve_of_one_point_and_of_none():
    assert Curve([])(5) == 0
    assert Curve([(4, 0.5)])(100) == 0.5
