# SPDX-License-Identifier: Apache-2.0
"""Chains of drafts without verdict, the choice among them, and its replay."""

import json
from random import Random

import numpy as np
import pytest

from spexis.core.chains import DraftChooser
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
