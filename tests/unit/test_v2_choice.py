# SPDX-License-Identifier: Apache-2.0
"""The device's choice of rows: what it knows of chains, who is held, what stages make of it."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the V2 runner needs Triton (requirements/dev.lock)")

from spexis.engine import v2_choice
from spexis.engine.v2_choice import HELD, Chains, Choice, RowChoiceMixin, first_rows
from spexis.engine.v2_extras import AsyncExtras
from spexis.engine.verdict import NO_TOKEN, FirstStage

CPU = torch.device("cpu")


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_worth_is_the_product_over_unverified_guesses(num_stages):
    """Random histories of three slots against a plain account of them: rows run or are held,
    verdicts come N steps later, wrong guesses restart a slot, a slot goes to another request."""
    rng, steps = Random(num_stages), 60
    rules = FirstStage(3, num_stages, CPU)
    chains = Chains(3, rules.num_remembered, CPU)
    guessed: list[dict[int, float]] = [{}, {}, {}]  # by slot: position -> confidence
    known, generation = [9, 4, 0], [0, 0, 0]
    flying = []  # (step, slots, positions of the verdicts' tokens, generations)

    def start(slots, ends):
        chains.begun(tensor(slots), tensor(ends), torch.ones(len(slots), dtype=torch.bool))
        for slot, end in zip(slots, ends, strict=True):
            known[slot], guessed[slot] = end - 1, {}
        advance(slots, ends)

    def advance(slots, ends):
        confidence = [rng.random() for _ in slots]
        rules.propose(tensor(slots), tensor(ends), tensor(ends), torch.ones(len(slots)) > 0)
        chains.guessed(tensor(slots), tensor(ends), torch.tensor(confidence))
        for slot, end, sure in zip(slots, ends, confidence, strict=True):
            guessed[slot][end] = sure
        flying.append((step, slots, ends, [generation[s] for s in slots]))

    step = 0
    start([0, 1, 2], [10, 5, 1])
    compared = 0
    for step in range(1, steps):
        for _, slots, positions, generations in [f for f in flying if f[0] == step - num_stages]:
            alive = [generation[s] == g for s, g in zip(slots, generations, strict=True)]
            # A row counts if it ran the true token: what the rules plan is the position itself.
            tokens = []
            for slot, position, lives in zip(slots, positions, alive, strict=True):
                good = lives and position == known[slot] + 1
                right = good and rng.random() < 0.7
                tokens.append((position if right else 999) if good else NO_TOKEN)
                if good:
                    known[slot] = position
                    if not right:
                        guessed[slot] = {}
            verdict = tensor(slots), tensor(positions), tensor(tokens), tensor(alive, torch.bool)
            rules.apply_verdict(*verdict)
            chains.verdict(*verdict)
        if step == 30:
            generation[1] += 1
            start([1], [7])
            continue
        slots = tensor([0, 1, 2])
        position = rules.position[slots]
        joint, unverified = chains.worth(slots, position)
        for slot in range(3):
            open_guesses = [
                sure
                for at, sure in guessed[slot].items()
                if known[slot] < at <= int(position[slot])
            ]
            assert unverified[slot] == len(open_guesses)
            assert float(joint[slot]) == pytest.approx(np.prod(open_guesses), rel=1e-5)
            compared += len(open_guesses) > 0
        run = [slot for slot in range(3) if rng.random() < 0.7]
        if run:
            advance(run, [int(position[slot]) + 1 for slot in run])
    assert compared > steps


def test_the_best_run_and_verified_ones_before_them():
    chains = Chains(6, 4, CPU)
    chains.ran[:6] = tensor([5, 3, 4, 5, 5, 5])
    joint = torch.tensor([1.0, 1.0, 1.0, 0.3, 0.9, 0.6])
    unverified = tensor([0, 0, 0, 1, 1, 2])
    slots = torch.arange(6)
    for count, running in ((1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 4]), (6, range(6))):
        held = chains.hold(slots, joint, unverified, count, step=6)
        assert (~held).nonzero().flatten().tolist() == list(running)
    # Whoever waits longest is next, so nobody waits for ever.
    waited = [0] * 6
    for step in range(6, 40):
        held = chains.hold(slots, torch.ones(6), torch.zeros(6, dtype=torch.int64), 2, step)
        chains.ran[slots[~held]] = step
        waited = [w + 1 if h else 0 for w, h in zip(waited, held.tolist(), strict=True)]
        assert max(waited) <= 5


def choose(held) -> Choice:
    held = tensor(held, torch.bool)
    slots = torch.arange(len(held)) + 10
    ids = [f"r{i}" for i in range(len(held))]
    return Choice.of(ids, slots.numpy(), slots, held, int((~held).sum()))


def test_every_request_finds_its_row():
    choice = choose([True, False, False, True, False])
    assert choice.chosen.tolist() == [1, 2, 4]
    assert choice.place[choice.chosen].tolist() == [0, 1, 2]
    assert choose([False] * 4).chosen.tolist() == [0, 1, 2, 3]


def test_what_travels_tells_the_held_ones():
    stage = RowChoiceMixin()
    stage.device, stage.choice = CPU, choose([True, False, False])
    stage.offered = torch.tensor([0.2, 1.0, 0.7]), tensor([1, 0, 1])
    rows = torch.tensor([[7, 8], [70, 80]], dtype=torch.int32)
    sent = stage.rows_to_send(None, rows)
    assert sent[0].tolist() == [HELD, 7, 8] and sent[1, 1:].tolist() == [70, 80]
    assert sent[2].view(torch.float32).tolist() == pytest.approx([0.2, 1.0, 0.7])
    assert sent[3].tolist() == [1, 0, 1]
    assert stage.positions_of_all(tensor([8, 9])).tolist() == [0, 8, 9]
    # A step that runs whole has as many lines, and says what there was unless it holds prompts.
    stage.choice, stage.chains = None, Chains(3, 4, CPU)
    stage.chains.verified[:3] = tensor([6, 7, 0])
    stage.chains.guessed(tensor([0]), tensor([7]), torch.tensor([0.5]))
    batch = SimpleNamespace(has_prefill=False, idx_mapping=tensor([0, 1]))
    sent = stage.rows_to_send(batch, rows)
    assert torch.equal(sent[:2], rows) and sent[3].tolist() == [1, 1]
    assert sent[2].view(torch.float32).tolist() == [0.5, 1.0]
    batch.has_prefill = True
    assert stage.rows_to_send(batch, rows).shape == (4, 2)


def test_the_scheduler_hears_who_was_held(monkeypatch):
    from vllm.v1.outputs import ModelRunnerOutput

    class Event:
        def __init__(self, blocking):
            pass

        record = synchronize = lambda self, *args: None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("spexis.engine.v2_extras.stream", lambda to, back: torch.inference_mode())
    rows = torch.zeros(4, 2, dtype=torch.int32)
    rows[0] = tensor([5, HELD], torch.int32)
    rows[2], rows[3] = torch.tensor([1.0, 0.25]).view(torch.int32), tensor([0, 1], torch.int32)
    output = ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}, [[3], []])
    copy_stream = SimpleNamespace(wait_stream=lambda stream: None)
    inner = SimpleNamespace(get_output=lambda: output)
    got = AsyncExtras(inner, None, rows, None, copy_stream).get_output()
    assert got.held == {"b"} and got.sampled_token_ids == [[3], []] and got.ends is None
    assert got.offered.tolist() == [[1.0, 0.25], [0.0, 1.0]]


class TestWhichStepsChoose:
    """All stages must agree, so only what they share decides."""

    def stage(self, **step):
        stage = RowChoiceMixin()
        stage.req_states = SimpleNamespace(
            prefill_len=SimpleNamespace(np=np.array([4, 6])), req_id_to_index={"a": 0, "b": 1}
        )
        values = {
            "spexis_run": 1,
            "scheduled_new_reqs": [],
            "scheduled_cached_reqs": SimpleNamespace(
                req_ids=["a", "b"], num_computed_tokens=step.pop("computed", [4, 9])
            ),
            "num_scheduled_tokens": {"a": 1, "b": 1},
            "total_num_scheduled_tokens": 2,
        }
        return stage, SimpleNamespace(**{**values, **step})

    def test_decode_steps_do(self):
        stage, step = self.stage()
        run = stage.begin_choice(step)
        assert run.num_scheduled_tokens == {"a": 1} and run.total_num_scheduled_tokens == 1
        assert stage.asked == ["a", "b"] and len(step.num_scheduled_tokens) == 2

    @pytest.mark.parametrize(
        "step", [{"spexis_run": None}, {"scheduled_new_reqs": [1]}, {"computed": [4, 5]}]
    )
    def test_others_run_whole(self, step):
        stage, output = self.stage(**step)
        assert stage.begin_choice(output) is output and stage.asked is None

    def test_vllm_sees_the_first_of_them(self):
        _, step = self.stage()
        assert first_rows(step, 2).num_scheduled_tokens == {"a": 1, "b": 1}
        assert v2_choice.CHOICE_LINES == 4
