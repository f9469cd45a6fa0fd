# SPDX-License-Identifier: Apache-2.0
"""Look-ahead switched in a running engine leaves nothing of itself behind, and comes back."""

from types import SimpleNamespace

import pytest

from spexis.bench.lookahead_switch import switch_predictor, switch_scheduler


def test_a_scheduler_loses_its_look_ahead_and_gets_the_same_one_back():
    resets = []
    lookahead = SimpleNamespace(seconds=3.0)
    scheduler = SimpleNamespace(
        lookahead=lookahead, reset_prefix_cache=lambda: resets.append(1) or True
    )
    for on in (True, False, False, True):
        switch_scheduler(scheduler, on)
        assert scheduler.lookahead is (lookahead if on else None)
    assert len(resets) == 4


def test_not_while_requests_hold_blocks():
    scheduler = SimpleNamespace(lookahead=object(), reset_prefix_cache=lambda: False)
    with pytest.raises(RuntimeError, match="idle engine"):
        switch_scheduler(scheduler, False)


@pytest.mark.parametrize("predictor", [None, "the second stage's"])
def test_a_worker_loses_its_predictor_and_gets_it_back(predictor):
    worker = SimpleNamespace(model_runner=SimpleNamespace(length_predictor=predictor))
    for on in (False, False, True, True):
        switch_predictor(worker, on)
        assert worker.model_runner.length_predictor == (predictor if on else None)
