# SPDX-License-Identifier: Apache-2.0
"""Which drafts run: by chains of drafts without verdict, by outcomes, and the replay of both."""

import json
from random import Random

import numpy as np
import pytest

from spexis.core.chains import DraftChooser
from spexis.core.outcomes import OutcomeChooser
from spexis.core.profile_file import FORMAT
from spexis.core.replay import replay_selection

ROWS = (1, 4, 8, 16)


def setup(num_stages=2, steep=1.0, layers=4):
    """A stage whose time is 10 ms and `steep` ms a row more."""
    points = [
        {"rows": r, "context": 128, "seconds": (10 + steep * r) / 1e3, "spread": 0.0} for r in ROWS
    ]
    profile = {
        "format": FORMAT,
        "device": "cpu",
        "hardware": {"cpu": "none"},
        "model": {"name": "m", "num_hidden_layers": layers * num_stages},
        "layers": layers,
        "points": points,
        "head_seconds": {"1": 0.0},
    }
    return {
        "profile": profile,
        "num_stages": num_stages,
        "tensor_parallel_size": 1,
        "max_rows": 16,
        "num_slots": 20,
        "version": "v",
    }


class Stream:
    """Requests whose drafts are right with their own chance, through a pipeline of N stages.

    Which draft is right is known when it is made; its verdict comes N steps later.
    """

    def __init__(self, chooser, chances, seed=0):
        self.chooser, self.chances, self.random = chooser, chances, Random(seed)
        n = len(chances)
        self.position = np.full(n, 5)  # of the next row
        self.chain: list[list[bool]] = [[] for _ in chances]  # drafts without verdict
        self.flying: list[list[tuple[int, int, bool, bool]]] = []  # steps: (slot, position, ...)
        self.ran, self.joint_of_ran, self.tokens = 0, [], 0
        self.good_of_ran: list[bool] = []

    def step(self):
        c, n = self.chooser, len(self.chances)
        tokens = 0
        if len(self.flying) == c.num_stages:
            done = self.flying.pop(0)
            good = [(s, p, right) for s, p, right, valid in done if valid]
            tokens = len(good)
            if good:
                slots, positions, right = (np.array(x) for x in zip(*good, strict=True))
                c.verdicts(slots, positions, right.astype(bool))
            for slot, position, right in good:
                if not right:  # the truth takes the guess's place
                    self.position[slot] = position
                    self.chain[slot] = []
                elif self.chain[slot]:
                    self.chain[slot].pop(0)
        slots = np.arange(n)
        joint = c.joint(slots, self.position)
        run = c.choose(slots, self.position, self.position, 0.01 + 0.001 * self.ran, tokens)
        assert run.any() and run[joint >= 0.9999].all()
        rows = []
        for slot in np.flatnonzero(run):
            valid = all(self.chain[slot])
            self.joint_of_ran.append(joint[slot])
            self.good_of_ran.append(valid)
            right = self.random.random() < self.chances[slot]
            self.position[slot] += 1
            self.chain[slot].append(right)
            rows.append((slot, self.position[slot], right, valid))
        self.ran = len(rows)
        self.tokens += tokens
        self.flying.append(rows)
        at = np.flatnonzero(run)
        # The drafter does not know how good it is; each request's history tells.
        reported = np.full(len(at), 0.6)
        c.drafted(at, self.position[at], self.position[at] - 5, reported)


def test_joint_is_the_product_of_drafts_without_verdict():
    chooser = DraftChooser.from_setup(setup(num_stages=3))
    slots = np.array([3, 4])
    assert chooser.joint(slots, np.array([9, 9])).tolist() == [1, 1]
    for position, confidence in ((10, 0.5), (11, 0.8)):
        at = np.full(2, position)
        chooser.drafted(slots, at, at - 9, np.full(2, confidence))
    first, second = (chooser.chance[3, p % chooser.num_remembered] for p in (10, 11))
    assert first == pytest.approx(0.5, abs=0.02) and second == pytest.approx(0.8, abs=0.02)
    assert chooser.joint(slots, np.array([11, 10])).tolist() == [first * second, first]
    chooser.verdicts(np.array([3]), np.array([10]), np.array([True]))
    assert chooser.joint(slots, np.array([11, 11])).tolist() == [second, first * second]
    # Wrong: the true token runs at that position.
    chooser.verdicts(np.array([4]), np.array([10]), np.array([False]))
    assert chooser.joint(slots, np.array([11, 10])).tolist() == [second, 1.0]
    chooser.bind(3)
    assert chooser.joint(slots[:1], np.array([11])).tolist() == [1.0]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_joint_tells_how_often_rows_are_good(num_stages):
    chooser = DraftChooser.from_setup(setup(num_stages, steep=0.0))
    stream = Stream(chooser, [0.4, 0.7, 0.9] * 4)
    for _ in range(400):
        stream.step()
    joint, good = np.array(stream.joint_of_ran), np.array(stream.good_of_ran)
    assert good[joint >= 0.9999].all()
    for low, high in ((0.0, 0.3), (0.3, 0.6), (0.6, 0.9999)):
        some = (joint >= low) & (joint < high)
        assert joint[some].mean() == pytest.approx(good[some].mean(), abs=0.06)


def test_flat_times_run_all_and_steep_ones_the_better_drafts():
    shares = {}
    for steep in (0.0, 1.0):
        chooser = DraftChooser.from_setup(setup(steep=steep))
        stream = Stream(chooser, [0.2] * 6 + [0.9] * 6)
        chooser.journal = []
        for _ in range(300):
            stream.step()
        runs = np.array([entry["run"] for entry in chooser.journal if "choose" in entry][100:])
        shares[steep] = runs[:, :6].mean(), runs[:, 6:].mean()
    assert shares[0.0] == (1.0, 1.0)
    poor, rich = shares[1.0]
    assert poor < 0.8 and rich > poor + 0.15


def test_every_choice_follows_from_the_journal():
    begin = setup(steep=1.0)
    chooser = DraftChooser.from_setup(begin)
    chooser.journal = [{"setup": begin}]
    stream = Stream(chooser, [0.2] * 6 + [0.9] * 6)
    for number in range(200):
        stream.step()
        if number % 50 == 49:
            chooser.bind(number % 12)
    journal = json.loads(json.dumps(chooser.journal))
    chosen = [i for i, entry in enumerate(journal) if "choose" in entry]
    assert len(chosen) == 200 and not all(all(journal[i]["run"]) for i in chosen)
    assert replay_selection(journal) == []
    journal[chosen[150]]["run"][0] ^= True
    assert len(replay_selection(journal)) == 1


class Outcomes:
    """As Stream, seen by a scheduler that is `ahead` steps ahead of the newest outcome."""

    def __init__(self, chooser, chances, ahead, seed=0):
        self.chooser, self.chances, self.random = chooser, chances, Random(seed)
        self.ids = [str(i) for i in range(len(chances))]
        self.ahead, self.step_number = ahead, 0
        self.next_good = [0] * len(chances)  # first step whose row is good, if its draft was wrong
        self.right = [True] * len(chances)  # the draft of the newest good row
        self.flying: list[tuple[int, dict[str, bool]]] = []
        self.joint: list[float] = []
        self.good: list[bool] = []

    def step(self):
        c = self.chooser
        if len(self.flying) == self.ahead:
            ran, done = self.flying.pop(0)
            c.came(list(done), list(done.values()), ran)
            c.observe(
                0.01 + 0.001 * len(done), sum(done.values()), len(done), len(self.ids), 0.0, 0
            )
        self.step_number = step = self.step_number + 1
        joint = c.good_rows(self.ids, step)
        run = c.choose(self.ids, step, np.zeros(len(self.ids)))
        rows = {}
        for i in np.flatnonzero(run):
            good = self.right[i] or step >= self.next_good[i]
            self.joint.append(joint[i])
            self.good.append(good)
            if good:
                self.right[i] = self.random.random() < self.chances[i]
                self.next_good[i] = step + c.num_stages
            rows[self.ids[i]] = good
        c.ran(list(rows), step)
        self.flying.append((step, rows))
        return run


@pytest.mark.parametrize(("num_stages", "ahead"), [(2, 2), (2, 3), (4, 4), (4, 5)])
def test_outcomes_tell_how_often_rows_are_good(num_stages, ahead):
    chooser = OutcomeChooser.from_setup(setup(num_stages, steep=0.0))
    stream = Outcomes(chooser, [0.4, 0.7, 0.9] * 4, ahead)
    for _ in range(600):
        assert stream.step().all()
    joint, good = np.array(stream.joint), np.array(stream.good)
    assert good[joint >= 0.9999].all()
    tenths = np.minimum((joint * 10).astype(int), 9)
    off = [abs(joint[tenths == t].mean() - good[tenths == t].mean()) for t in set(tenths.tolist())]
    shares = [(tenths == t).mean() for t in set(tenths.tolist())]
    assert np.dot(off, shares) < 0.06
    # Not merely the mean: what is known makes a difference.
    assert good[joint > np.median(joint)].mean() > good[joint <= np.median(joint)].mean() + 0.1


def test_after_a_held_row_the_next_is_good():
    chooser = OutcomeChooser.from_setup(setup())
    assert chooser.good_rows(["a"], 1)[0] == 1.0
    chooser.ran(["a"], 1)
    assert chooser.good_rows(["a"], 2)[0] == pytest.approx(0.6)  # it would run a draft
    assert chooser.good_rows(["a"], 3)[0] == 1.0  # the verdict of step 1 is in
    chooser.came(["a"], [True], 1)
    chooser.ran(["a"], 2)
    # Right and right again, or wrong: then the truth runs in step 3.
    assert chooser.good_rows(["a"], 3)[0] == pytest.approx(0.6 * 0.6 + 0.4)
    chooser.came(["a"], [False], 2)
    p = chooser.acceptance(chooser.requests["a"])
    assert p < 0.6 and chooser.good_rows(["a"], 3)[0] == 1.0
    chooser.forget("a")
    assert chooser.good_rows(["a"], 3)[0] == 1.0


def test_choices_by_outcomes_hold_the_poorer_requests_and_follow_from_the_journal():
    begin = setup(steep=1.0)
    chooser = OutcomeChooser.from_setup(begin)
    chooser.journal = [{"setup": begin}]
    stream = Outcomes(chooser, [0.1] * 6 + [0.9] * 6, 2)
    runs = np.array([stream.step() for _ in range(400)])[100:]
    poor, rich = runs[:, :6].mean(), runs[:, 6:].mean()
    assert poor < 0.9 and rich > poor + 0.05
    chooser.forget("3")
    journal = json.loads(json.dumps(chooser.journal))
    assert replay_selection(journal, OutcomeChooser) == []
    chosen = [i for i, entry in enumerate(journal) if "choose" in entry]
    journal[chosen[300]]["run"][0] ^= True
    assert len(replay_selection(journal, OutcomeChooser)) == 1


def test_a_bonus_brings_rows_in():
    chooser = OutcomeChooser.from_setup(setup(steep=1.0))
    chooser.journal = [{"setup": setup(steep=1.0)}]
    stream = Outcomes(chooser, [0.3] * 12, 2)
    for _ in range(200):
        stream.step()
    ids, kv_tokens = [str(i) for i in range(12)], np.full(12, 50)
    without = chooser.choose(ids, 201, kv_tokens)
    held = np.flatnonzero(~without)
    assert len(held) > 1
    bonus = np.zeros(12)
    bonus[held[0]] = 10.0
    found = chooser.choose(ids, 201, kv_tokens, 0, bonus)
    assert found[held[0]] and not found[held[1:]].all()
    assert replay_selection(json.loads(json.dumps(chooser.journal)), OutcomeChooser) == []


def test_a_pipeline_that_is_not_full_says_nothing_of_what_a_step_costs():
    """One request that does not speculate: a step comes back every N steps' time. What a token is
    worth is learnt all the same."""
    chooser = OutcomeChooser.from_setup(setup())
    chooser.journal = []
    known = chooser.cost.step_seconds(8, 0, 0.0)
    for _ in range(200):
        chooser.observe(4 * known, 6, 8, 8, 0.0, 0, False)
    assert chooser.cost.step_seconds(8, 0, 0.0) == known
    assert chooser.selection.rate == pytest.approx(6 / (4 * known))
    assert replay_selection([{"setup": setup()}, *chooser.take_journal()], OutcomeChooser) == []
    for _ in range(200):
        chooser.observe(4 * known, 6, 8, 8, 0.0, 0)
    assert chooser.cost.step_seconds(8, 0, 0.0) == pytest.approx(4 * known, rel=0.1)


def test_a_pause_says_nothing_but_steps_that_are_always_long_are_learnt():
    """A profile made on other hardware: its curve is kept but scaled."""
    chooser = OutcomeChooser.from_setup(setup())
    known = chooser.cost.step_seconds(8, 0, 0.0)
    slow = lambda times: chooser.observe(times * known, 6, 8, 8, 0.0, 0)  # noqa: E731
    for _ in range(10):
        slow(20), slow(1), slow(1)
    assert chooser.cost.step_seconds(8, 0, 0.0) == pytest.approx(known, rel=0.01)
    rate = chooser.selection.rate
    for _ in range(200):
        slow(100)
    assert chooser.cost.step_seconds(8, 0, 0.0) == pytest.approx(100 * known, rel=0.2)
    assert chooser.selection.table[8] == pytest.approx(100 * known, rel=0.2)
    assert chooser.selection.rate < rate / 5
