# SPDX-License-Identifier: Apache-2.0
"""Memory look-ahead: the outlook against Monte Carlo, admission, and who waits or is evicted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spexis.core.law import tokens_per_step
from spexis.core.lengths import Growth, LengthModel
from spexis.core.memory import (
    HORIZONS,
    MODEL_ERROR,
    QUANTILE,
    WITH_ENDS,
    MemoryLookahead,
    Running,
)


def arrays(kv, generated, limit=10**6) -> Running:
    kv = np.asarray(kv)
    return Running(kv, np.asarray(generated), np.full(len(kv), limit))


def taught(lengths) -> LengthModel:
    model = LengthModel()
    for n in lengths:
        model.observe(int(n))
    return model


@pytest.mark.parametrize(("p", "stages"), [(0.8, 2), (0.6, 2), (0.8, 4)])
def test_growth_is_the_laws_and_has_the_right_spread(p, stages):
    growth = Growth.of(p, stages, 64)
    rng = np.random.default_rng(0)
    tokens = np.zeros(20_000)
    left = np.full(20_000, 64)
    alive = np.ones(20_000, bool)
    while alive.any():
        cost = np.where(rng.random(20_000) < p, 1, stages)
        alive &= left >= cost
        tokens += alive
        left = left - cost * alive
    assert growth.mean[64] == pytest.approx(tokens.mean(), rel=0.005)
    assert growth.variance[64] == pytest.approx(tokens.var(), rel=0.05)
    assert growth.mean[64] == pytest.approx(64 * tokens_per_step(p, stages), rel=0.05)


def test_finishing_probability_is_the_share_of_ended_answers():
    lengths = np.random.default_rng(0).geometric(1 / 80, 8000)
    model = taught(lengths)
    alive = model.alive(np.array([0, 50]), np.array([10**6, 10**6]), np.array([20.0]))[:, 0]
    assert alive[0] == pytest.approx((lengths > 20).mean(), abs=0.03)
    assert alive[1] == pytest.approx((lengths > 70).sum() / (lengths > 50).sum(), abs=0.04)
    assert model.expected_remaining(np.array([0]), np.array([10**6]))[0] == pytest.approx(80, 0.1)


def test_an_answers_own_limit_is_a_hard_end():
    model = LengthModel()
    alive = model.alive(np.array([90]), np.array([100]), np.array([5.0, 10.0]))[0]
    assert alive[0] > 0.5 and alive[1] == 0
    assert model.expected_remaining(np.array([90]), np.array([100]))[0] <= 10


def test_upper_quantile_covers_what_happens():
    """Of many futures of the same requests about 5 % hold more than the outlook, at any horizon."""
    rng = np.random.default_rng(1)
    lengths = rng.geometric(1 / 150, 20_000)
    memory = MemoryLookahead(10**9, 2, taught(lengths[:8000]))
    generated = rng.integers(1, 150, 60)
    kv = generated + rng.integers(50, 600, 60)
    outlook = memory.project(arrays(kv, generated), 0.75)
    for k in (8, 64, 256):
        column = int(np.flatnonzero(k == HORIZONS)[0])
        growth, runs = Growth.of(0.75, 2, 256), 3000
        # Geometric answers: what remains has the same distribution whatever was generated.
        remaining = rng.geometric(1 / 150, (runs, 60))
        spread = np.sqrt(growth.variance[k])
        grown = np.maximum(rng.normal(growth.mean[k], spread, (runs, 60)), 0)
        held = np.where(remaining > grown, kv + memory.overhead + grown, 0).sum(axis=1)
        assert (held > outlook.upper[column]).mean() < 0.12
        assert held.mean() == pytest.approx(outlook.mean[column], rel=0.03)


def test_admission_stops_at_the_first_that_does_not_fit():
    memory = MemoryLookahead(10_000, 2, taught([100] * 500))
    outlook = memory.project(arrays([2000, 2000], [10, 10]), 0.8)
    prompts = np.array([1000, 1000, 50_000, 10])
    count = memory.admit(outlook, prompts, np.zeros(4, int), np.full(4, 10**6), 2)
    assert count == 2


def test_requests_about_to_end_make_room():
    memory = MemoryLookahead(10_000, 2, taught([100] * 2000))
    prompt = np.array([4000])
    arguments = (prompt, np.zeros(1, int), np.array([10**6]), 8)
    fresh = memory.project(arrays([1000] * 8, [1] * 8), 0.8)
    assert memory.admit(fresh, *arguments) == 0
    # Blocks of the moment count too: who is about to end has not ended.
    ending = memory.project(arrays([700] * 8, [98] * 8), 0.8)
    assert memory.admit(ending, *arguments) == 1


def test_alone_the_first_is_admitted_if_it_can_run_at_all():
    memory = MemoryLookahead(1000, 2)
    none = memory.project(arrays([], []), 0.8)
    zero, limit = np.zeros(1, int), np.array([10**6])
    assert memory.admit(none, np.array([950]), zero, limit, 0) == 1
    assert memory.admit(none, np.array([1000]), zero, limit, 0) == 0
    assert memory.admit(none, np.zeros(0, int), zero[:0], limit[:0], 0) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 800)), min_size=1, max_size=20),
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(2000, 40_000),
)
def test_more_running_never_admits_more(running, prompts, capacity):
    memory = MemoryLookahead(capacity, 2)
    kv, generated = (np.array(x) for x in zip(*running, strict=True))
    count = len(prompts)
    arguments = (np.array(prompts), np.zeros(count, int), np.full(count, 10**6))
    fewer = memory.project(arrays(kv[:-1], generated[:-1]), 0.7)
    more = memory.project(arrays(kv, generated), 0.7)
    assert memory.admit(more, *arguments, len(kv)) <= memory.admit(fewer, *arguments, len(kv) - 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 800)), max_size=20),
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.floats(0.9, 1.6),
)
def test_what_surely_fits_is_admitted(running, prompts, room):
    """The bound never promises more than the outlook, at capacities on both sides of it."""
    kv, generated = np.array(running, np.int64).reshape(-1, 2).T
    everyone = np.concatenate((kv, prompts))
    memory = MemoryLookahead(int(room * (everyone.sum() + 300 * len(everyone))), 2)
    count = len(prompts)
    outlook = memory.project(arrays(kv, generated), 0.7)
    new = (np.array(prompts), np.zeros(count, int), np.full(count, 10**6), len(kv))
    if memory.surely_fits(everyone, 0.7):
        assert memory.admit(outlook, *new) == count
    assert not MemoryLookahead(int(everyone.sum()), 2).surely_fits(everyone, 0.7)
    assert MemoryLookahead(10**7, 2).surely_fits(everyone, 0.7)


def relieve(memory, running, short, wants=None, recompute=1e-4):
    outlook = memory.project(running, 0.8)
    wants = np.ones(len(running.kv_tokens), bool) if wants is None else wants
    return memory.relieve(outlook, running, wants, short, 2000.0, recompute, 0.02)


def test_when_others_are_about_to_end_the_rest_waits():
    memory = MemoryLookahead(8000, 2, taught([100] * 2000))
    running = arrays([1000] * 8, [99, 99, 99, 99, 20, 20, 20, 20])
    relief = relieve(memory, running, 16.0, wants=np.arange(8) >= 4)
    assert len(relief.hold) and not len(relief.evict)
    assert set(relief.hold.tolist()) <= {4, 5, 6, 7}


def test_when_nobody_ends_soon_one_is_evicted():
    memory = MemoryLookahead(8000, 2, taught([2000] * 2000))
    relief = relieve(memory, arrays([1000] * 8, [50] * 8), 128.0, recompute=1e-6)
    assert len(relief.evict) and not len(relief.hold)


def test_work_already_done_counts():
    """Of two the same size, the victim is the one whose prompt the prefix cache gives back."""
    memory = MemoryLookahead(3000, 2, taught([2000] * 2000))
    running = Running(
        np.array([1000, 1000, 1000]),
        np.array([50, 50, 50]),
        np.full(3, 10**6),
        cached=np.array([0, 900, 0]),
    )
    relief = relieve(memory, running, 64.0, recompute=1e-6)
    assert relief.evict.tolist() == [1]


def test_who_is_nearly_done_is_not_the_victim():
    memory = MemoryLookahead(2500, 2, taught([400] * 2000))
    relief = relieve(memory, arrays([1000, 500, 500], [10, 399, 20]), 64.0, recompute=1e-6)
    assert relief.evict.tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 800)), min_size=1, max_size=20),
    st.floats(0, 5000),
)
def test_the_oldest_always_goes_on(running, short):
    kv, generated = (np.array(x) for x in zip(*running, strict=True))
    relief = relieve(MemoryLookahead(20_000, 2), arrays(kv, generated), short)
    assert 0 not in relief.hold and 0 not in relief.evict
    assert not (len(relief.hold) and len(relief.evict))
    assert len(set(relief.evict.tolist())) == len(relief.evict)


def test_bonus_goes_to_large_requests_that_end_soon():
    memory = MemoryLookahead(10**5, 2, taught([100] * 2000))
    bonus = memory.finish_bonus(arrays([3000, 1000, 1000], [95, 95, 5]), pace=0.8)
    assert bonus[0] > bonus[1] > bonus[2] and bonus[2] < 0.1


# -- with a length predictor ----------------------------------------------------------------------

SOON, LATER = (0.0, 0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0, 0.0)  # 8 to 15 tokens; 64 or more


def with_ends(kv, generated, ends, **more) -> Running:
    plain = arrays(kv, generated)
    return Running(plain.kv_tokens, plain.generated, plain.max_tokens, ends=np.array(ends), **more)


def test_known_ends_are_looked_at_closely_and_leave_the_models_own_error():
    memory = MemoryLookahead(10**6, 2)
    outlook = memory.project(with_ends([900] * 50, [100] * 50, [SOON] * 25 + [LATER] * 25), 0.8)
    assert set(HORIZONS) <= set(outlook.horizons) == set(WITH_ENDS)
    at = {int(k): i for i, k in enumerate(outlook.horizons)}
    held = 900 + memory.overhead
    assert outlook.mean[at[4]] == pytest.approx(50 * (held + outlook.more[at[4]]), rel=1e-3)
    assert outlook.mean[at[32]] == pytest.approx(25 * (held + outlook.more[at[32]]), rel=1e-3)
    margin = outlook.upper - outlook.mean
    for k in (4, 32):
        error = QUANTILE * MODEL_ERROR * outlook.mean[at[k]]
        assert error < margin[at[k]] < 1.3 * error  # growth, and that nothing is taken for certain
    without = memory.project(arrays([900] * 50, [100] * 50), 0.8)
    assert (without.horizons == HORIZONS).all()


def test_who_is_known_to_end_soon_makes_room_and_is_not_evicted():
    memory = MemoryLookahead(20_000, 2, taught([400] * 500))
    kv, generated = [900] * 20, [100] * 20
    ends = [LATER] + [SOON] * 10 + [LATER] * 9
    running = with_ends(kv, generated, ends)
    waiting = np.full(8, 600), np.zeros(8, int), np.full(8, 10**6)
    knowing = memory.admit(memory.project(running, 0.8), *waiting, 20)
    silent = memory.admit(memory.project(arrays(kv, generated), 0.8), *waiting, 20)
    assert silent < knowing
    outlook = memory.project(running, 0.8)
    slow = 1e-6  # recomputing is cheap: somebody is evicted
    relief = memory.relieve(outlook, running, np.ones(20, bool), 1600.0, 100.0, slow, 0.02)
    assert len(relief.evict) and not set(relief.evict) & set(range(11))


def test_an_old_prediction_is_read_as_of_when_it_was_made():
    """Said 20 tokens ago that 8 to 15 remained: it was wrong, and tells nothing any more."""
    memory = MemoryLookahead(10**6, 2, taught([400] * 500))
    old = with_ends([900], [120], [SOON], ends_at=np.array([100]))
    fresh = with_ends([900], [120], [SOON])
    assert memory.project(old, 0.8).mean[-1] > 5 * memory.project(fresh, 0.8).mean[-1]
