# SPDX-License-Identifier: Apache-2.0
"""How many rows run: as many as pay by what the newest candidates were worth."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from spexis import checks
from spexis.config import ConfigError
from spexis.core.counts import CountChooser
from spexis.core.replay import replay
from spexis.engine import row_counter
from spexis.engine.outputs import SpexisOutput
from spexis.simulator.tables import chooser_row


def setup(steep: float = 0.0, **more):
    points = [{"rows": r, "context": 0, "seconds": 0.01 + steep * r} for r in (1, 16, 64)]
    profile = {
        "format": "spexis-profile-1",
        "model": {"num_hidden_layers": 4},
        "layers": 2,
        "points": points,
        "head_seconds": {"1": 0.0},
    }
    return {"profile": profile, "num_stages": 2, "tensor_parallel_size": 1, "max_rows": 64, **more}


def fed(chooser, joint, steps=30, right=None):
    """Steps in which all candidates ran; right: the share of guesses that were."""
    joint = np.array(joint)
    unverified = (joint < 1).astype(int)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chance = joint if right is None else np.where(unverified > 0, right, 1.0)
        good = rng.random(len(joint)) < chance
        all_of_them = np.ones(len(joint), bool)
        chooser.came(joint, unverified, all_of_them, all_of_them, good)
        chooser.observe(0.02, int(good.sum()), len(joint), len(joint), 0.0, 0)
    return chooser


def test_all_run_before_anything_came_back_and_where_rows_are_free():
    chooser = CountChooser.from_setup(setup(steep=0.01))
    assert chooser.choose(7, 0.0).tolist() == [7]
    free = fed(CountChooser.from_setup(setup()), [1.0, 0.1, 0.2, 0.9])
    assert free.choose(40, 0.0).tolist() == [40]


def test_dear_rows_that_are_unlikely_do_not_run():
    chooser = fed(CountChooser.from_setup(setup(steep=0.002)), [1.0] * 8 + [0.05] * 8)
    (count,) = chooser.choose(32, 0.0).tolist()
    assert 12 <= count <= 20  # half of them are verified
    assert chooser.choose(1, 0.0).tolist() == [1]


def test_confidences_are_calibrated_by_what_came():
    """A drafter that is sure of everything and right in one of five."""
    chooser = fed(CountChooser.from_setup(setup(steep=0.002)), [1.0] * 8 + [0.95] * 24, 200, 0.2)
    (count,) = chooser.choose(32, 0.0).tolist()
    assert count < 20
    believed = fed(CountChooser.from_setup(setup(steep=0.002)), [1.0] * 8 + [0.95] * 24, 200)
    assert believed.choose(32, 0.0).tolist() == [32]


@pytest.mark.parametrize(("stages", "acceptance"), [(2, 0.65), (2, 0.8), (4, 0.65)])
def test_simulated_on_the_measured_curve(stages, acceptance):
    """Nearly as good as where the first stage sees everything, and better than outcomes alone."""
    row = chooser_row(stages, 192, acceptance, steps=400)
    assert row["device"] > row["stage"] - 0.03 and row["device"] > row["scheduler"] + 0.05


def test_each_draft_counts_once_whether_it_ran_or_not():
    chooser = CountChooser.from_setup(setup(steep=0.002))
    joint, one = np.array([0.9, 0.9, 0.2, 0.2]), np.ones(4, int)
    ran = np.array([True, True, False, False])
    for step in range(50):  # the two that are unlikely are held all the time
        chooser.came(joint, one, ran if step else ran | True, ran, ran)
        chooser.observe(0.02, 2, 2, 4, 0.0, 0)
    # 100 of .9, two of .2, and the 20 that it began with.
    assert chooser.selection.histogram.mean > 0.8
    assert chooser.selection.histogram.weight.sum() == pytest.approx(120, abs=6)


# -- in the scheduler ------------------------------------------------------------------------------


def scheduler(tmp_path, requests):
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps(setup(steep=0.002)["profile"]))
    config = SimpleNamespace(profile=str(profile), iteration_log="log")
    return SimpleNamespace(
        spexis_config=config,
        num_stages=2,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        max_num_running_reqs=64,
        requests=requests,
    )


def request(structured=False):
    return SimpleNamespace(use_structured_output=structured, num_computed_tokens=50)


def step(names, total=None, new=()):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=total or len(names),
        scheduled_new_reqs=list(new),
    )


def test_the_scheduler_counts_and_the_log_says_why(tmp_path):
    names = [f"r{i}" for i in range(16)]
    counter = row_counter.RowCounter(scheduler(tmp_path, {n: request() for n in names}))
    rows = dict.fromkeys(names, True)
    assert counter.scheduled(rows, step(names)) is None  # nothing is known: all run
    offered = np.array([[1.0] * 8 + [0.05] * 8, [0] * 8 + [1] * 8])
    for number in range(30):
        held = frozenset(names[12:])
        output = SpexisOutput(names, {}, [], held=held, offered=offered)
        outcomes = {n: i < 8 for i, n in enumerate(names) if n not in held}
        del outcomes["r3"]  # ended meanwhile
        counter.came(outcomes, number, output)
        counter.observe(0.03, 8, rows, 16, 0, 12, True)
    count = counter.scheduled(rows, step(names))
    assert 6 <= count <= 10
    counter.came({}, 31, SpexisOutput(names, {}, []))  # a step with prompts says nothing
    # What was decided follows from the journal alone.
    lines = [{"selection": json.loads(json.dumps(counter.chooser.take_journal()))}]
    assert replay(lines) == []
    entry = next(e for e in reversed(lines[0]["selection"]) if "choose" in e)
    assert entry["run"] == [count]
    entry["run"] = [count + 1]
    assert len(replay(lines)) == 1


@pytest.mark.parametrize("case", ["one row", "a prompt", "a new request", "a grammar"])
def test_steps_that_run_whole(tmp_path, case):
    names = ["a", "b", "c"]
    requests = {n: request(structured=case == "a grammar" and n == "b") for n in names}
    counter = row_counter.RowCounter(scheduler(tmp_path, requests))
    counter.chooser.choose = lambda *args: np.array([1])
    rows = dict.fromkeys(names[: 1 if case == "one row" else 3], True)
    output = step(list(rows), total=5 if case == "a prompt" else None)
    output.scheduled_new_reqs = [1] if case == "a new request" else []
    assert counter.scheduled(rows, output) is None
    if case != "one row":
        assert counter.scheduled({"a": True, "c": False}, step(["a", "c"])) == 1


@pytest.mark.parametrize(
    ("ranks", "method", "words"),
    [(2, "exit", "not tested with tensor parallelism"), (1, "oracle", "hides from the oracle")],
)
def test_what_a_device_cannot_choose_is_refused(ranks, method, words):
    spexis = SimpleNamespace(
        mode="sp-alpha", selection="stage", drafter=SimpleNamespace(method=method)
    )
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    config = SimpleNamespace(use_v2_model_runner=True, parallel_config=parallel)
    with pytest.raises(ConfigError, match=words):
        checks._check_selection(config, spexis)
