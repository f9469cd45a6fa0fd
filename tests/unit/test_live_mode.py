# SPDX-License-Identifier: Apache-2.0
"""Live mode control: finds the faster mode, stays there, tries the other seldom."""

from random import Random

import pytest

from spexis.core.live_mode import LiveMode, Reason, load_class
from spexis.core.mode import Mode


def serve(control: LiveMode, rates: dict[Mode, float], running: int, steps: int, seed=0, noise=0.1):
    """(steps in each mode, tokens, seconds): steps of 20 ms, tokens by the mode's rate."""
    r, spent, total = Random(seed), dict.fromkeys(Mode, 0), 0.0
    for _ in range(steps):
        tokens = rates[control.mode] * running * 0.02 * r.gauss(1, noise)
        spent[control.mode] += 1
        total += tokens
        control.observe(0.02, tokens, running)
    return spent, total, 0.02 * steps


@pytest.mark.parametrize("better", [Mode.SP, Mode.PP])
@pytest.mark.parametrize("gain", [1.1, 1.6])
def test_finds_the_faster_mode_and_stays(better, gain):
    control = LiveMode()
    rates = {Mode.SP: 1.0, Mode.PP: 1.0, better: gain}
    serve(control, rates, 32, 1_000)
    spent, tokens, seconds = serve(control, rates, 32, 30_000)
    assert control.mode is better or spent[better] > 0.9 * 30_000
    assert tokens / seconds > 0.97 * gain * 32


def test_says_why_the_mode_changed():
    control, seen = LiveMode(), []
    assert control.reason is Reason.START
    rates = {Mode.SP: 1.0, Mode.PP: 0.5}
    for _ in range(600):
        changes = control.num_changes
        serve(control, rates, 8, 1)
        if control.num_changes > changes:
            seen.append((control.mode, control.reason))
    # Plain PP is tried as soon as SP was seen twice, and found to be slower.
    assert seen[:2] == [(Mode.PP, Reason.TRIAL), (Mode.SP, Reason.MEASURED)]


def test_a_trial_that_is_clearly_in_vain_ends_at_once():
    control = LiveMode()
    spent, *_ = serve(control, {Mode.SP: 1.25, Mode.PP: 1.0}, 4, 350)
    assert 0 < spent[Mode.PP] <= control.settle + control.glance
    assert (control.mode, control.reason) == (Mode.SP, Reason.MEASURED)
    # Speculation is given its time: what a few of its steps return is chance.
    control = LiveMode(Mode.PP)
    spent, *_ = serve(control, {Mode.SP: 0.7, Mode.PP: 1.0}, 4, 350)
    assert spent[Mode.SP] >= control.trial_looks * control.look_steps


def test_a_trial_that_is_slower_by_little_takes_its_looks():
    control = LiveMode()
    spent, *_ = serve(control, {Mode.SP: 1.0, Mode.PP: 0.96}, 4, 400, noise=0.01)
    assert spent[Mode.PP] >= control.trial_looks * control.look_steps


def test_trials_cost_a_hundredth():
    control = LiveMode()
    rates = {Mode.SP: 1.0, Mode.PP: 0.5}
    serve(control, rates, 8, 1_000)
    spent, tokens, seconds = serve(control, rates, 8, 60_000)
    assert 0 < spent[Mode.PP] < 0.03 * 60_000  # tried, seldom
    assert tokens / seconds > 0.985 * 8


def test_equal_modes_do_not_flap():
    control = LiveMode()
    serve(control, {Mode.SP: 1.0, Mode.PP: 1.0}, 16, 20_000, noise=0.2)
    looks = 20_000 / control.look_steps
    assert control.num_changes < 0.1 * looks


def test_follows_a_drafter_that_fails_and_one_that_recovers():
    control = LiveMode()
    good, bad = {Mode.SP: 1.4, Mode.PP: 1.0}, {Mode.SP: 0.8, Mode.PP: 1.0}
    serve(control, good, 16, 2_000)
    assert control.mode is Mode.SP
    serve(control, bad, 16, 4_000)
    assert control.mode is Mode.PP
    serve(control, good, 16, 6_000)
    assert control.mode is Mode.SP


def test_each_load_has_its_own_answer_and_is_remembered():
    control = LiveMode()
    few, many = {Mode.SP: 1.5, Mode.PP: 1.0}, {Mode.SP: 0.7, Mode.PP: 1.0}
    for _ in range(2):
        serve(control, few, 4, 2_000)
        serve(control, many, 128, 2_000)
    spent, *_ = serve(control, few, 4, 400)
    assert spent[Mode.SP] > 250  # one look in the other mode at most, then back
    assert set(control.rates(4)) == {Mode.SP, Mode.PP}
    assert control.rates(4)[Mode.SP] == pytest.approx(1.5 * 4, rel=0.1)
    assert load_class(4) != load_class(128)


def test_prompts_and_pauses_say_nothing():
    control = LiveMode()
    for _ in range(10_000):
        control.observe(5.0, 1, 16, prefill_tokens=512)
        control.observe(0.0, 1, 16)
        control.observe(0.02, 0, 0)
    assert control.num_changes == 0 and control.rates(16) == {}
