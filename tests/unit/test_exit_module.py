# SPDX-License-Identifier: Apache-2.0
"""The exit drafter's module, loss and simulated serving, on tiny random weights."""

import dataclasses

import pytest
import torch
from torch import nn

from spexis.drafters.exit.config import ExitConfig, expected_shapes
from spexis.drafters.exit.module import LAG_1, LAG_2, NO_STATE, ExitDrafter, load_drafter
from spexis.training.loss import draft_loss, teach
from spexis.training.simulate import answer_rows, serve_drafts, state_lags

VOCAB, SIZE, HIDDEN = 64, 24, 32


def exit_config(**changes) -> ExitConfig:
    fields = {
        "base_model": "tiny",
        "base_model_hash": "0" * 64,
        "exit_layer": 2,
        "num_stages": 2,
        "num_hidden_layers": 4,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_drafter_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "qkv_bias": False,
        "qk_norm": False,
        "final_state_feature": True,
        "draft_vocab_size": SIZE,
        "tied_head": True,
        "version": "test",
    }
    return ExitConfig(**(fields | changes))


def random_drafter(**changes) -> ExitDrafter:
    torch.manual_seed(0)
    drafter = ExitDrafter(exit_config(**changes))
    for p in drafter.parameters():
        nn.init.normal_(p, std=0.3)
    return drafter


FAMILIES = [{}, {"qkv_bias": True}, {"qk_norm": True}, {"final_state_feature": False}]


@pytest.mark.parametrize("changes", [*FAMILIES, {"tied_head": False}])
def test_names_and_shapes_follow_the_folder_format(changes):
    drafter = random_drafter(**changes)
    shapes = {name: tuple(t.shape) for name, t in drafter.export().items()}
    assert shapes == expected_shapes(drafter.config)


@pytest.mark.parametrize("changes", FAMILIES)
def test_a_later_token_changes_no_earlier_draft(changes):
    drafter = random_drafter(**changes)
    h, final = torch.randn(2, 10, HIDDEN), torch.randn(2, 10, HIDDEN)
    lag = torch.randint(0, 3, (2, 10))
    before = drafter(h, final, lag)
    h2, final2, lag2 = h.clone(), final.clone(), lag.clone()
    h2[:, 6:] += 1.0
    final2[:, 6:] += 1.0
    lag2[:, 6:] = (lag2[:, 6:] + 1) % 3
    after = drafter(h2, final2, lag2)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_final_states_come_from_one_or_two_positions_back():
    drafter = random_drafter(num_drafter_layers=0)
    h, final = torch.randn(1, 6, HIDDEN), torch.randn(1, 6, HIDDEN)
    for value, back in ((LAG_1, 1), (LAG_2, 2)):
        lag = torch.full((1, 6), value)
        changed = final.clone()
        changed[:, 3] += 1.0
        moved = (drafter(h, final, lag) != drafter(h, changed, lag)).any(-1)[0]
        assert moved.nonzero().flatten().tolist() == [3 + back]
    none = torch.full((1, 6), NO_STATE)
    torch.testing.assert_close(drafter(h, final, none), drafter(h))


def test_loss_and_gradient_equal_autograd():
    torch.manual_seed(0)
    head, final = torch.randn(VOCAB, HIDDEN), torch.randn(30, HIDDEN)
    out = torch.randn(30, HIDDEN, requires_grad=True)
    weight = torch.rand(30)
    for hard_weight in (0.0, 0.4, 1.0):
        teacher = teach(final, head, SIZE)
        loss, draft = draft_loss(out, head[:SIZE], teacher, weight, hard_weight)
        (grad,) = torch.autograd.grad(loss, out)
        p = (final @ head.T).softmax(-1)
        log_q = (out @ head[:SIZE].T).log_softmax(-1)
        top = p.argmax(-1)
        inside = (top < SIZE).float()
        hard = -log_q.gather(-1, top.clamp_max(SIZE - 1)[:, None])[:, 0] * inside
        soft = -(p[:, :SIZE] * log_q).sum(-1)
        expected = ((1 - hard_weight) * soft + hard_weight * hard) @ weight
        (expected_grad,) = torch.autograd.grad(expected, out)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(draft, log_q.argmax(-1))


def test_simulated_serving_equals_serving_token_by_token():
    drafter = random_drafter().eval()
    drafter.draft_vocab_ids.copy_(torch.randperm(VOCAB)[:SIZE])
    head = torch.randn(VOCAB, HIDDEN)[drafter.draft_vocab_ids.long()]
    h, final = torch.randn(3, 20, HIDDEN), torch.randn(3, 20, HIDDEN)
    prompt_len, length = torch.tensor([3, 5, 1]), torch.tensor([20, 15, 9])
    # Make about half of the drafts right: write them into the sequence as it unfolds.
    ids = torch.randint(0, VOCAB, (3, 20))
    wrong = torch.zeros(3, 20, dtype=torch.bool)
    rows = answer_rows(prompt_len, length, 20)
    for q in range(19):
        lag = state_lags(wrong, prompt_len)
        best = (drafter(h, final, lag)[:, q] @ head.T).argmax(-1)
        draft = drafter.draft_vocab_ids[best].long()
        keep = torch.rand(3) < 0.5
        ids[:, q + 1] = torch.where(keep & rows[:, q], draft, ids[:, q + 1])
        wrong[:, q + 1] = (draft != ids[:, q + 1]) & rows[:, q]
    result = serve_drafts(drafter, head, h, final, ids, prompt_len, length)
    assert result.settled
    assert torch.equal(result.accepted, ~wrong[:, 1:][rows[:, :-1]])
    assert 0.2 < result.accepted.float().mean() < 0.9
    assert torch.equal(result.sequence, rows.nonzero()[:, 0])
    probabilities = (drafter(h, final, state_lags(wrong, prompt_len)) @ head.T).softmax(-1)
    torch.testing.assert_close(result.confidence, probabilities.amax(-1)[rows])
    # The same tokens in another order, named by the caller.
    order = torch.randperm(SIZE)
    names = drafter.draft_vocab_ids[order]
    again = serve_drafts(drafter, head[order], h, final, ids, prompt_len, length, vocab=names)
    assert torch.equal(again.accepted, result.accepted)


def test_lags_respect_where_final_states_begin():
    wrong = torch.zeros(1, 8, dtype=torch.bool)
    wrong[0, [3, 6]] = True
    # prompt of 3: final states exist from position 2 on
    assert state_lags(wrong, torch.tensor([3])).tolist() == [
        [NO_STATE, NO_STATE, NO_STATE, LAG_1, LAG_2, LAG_2, LAG_1, LAG_2]
    ]


def test_folder_round_trip_and_refusals(tmp_path):
    drafter = random_drafter()
    saved = drafter.config.save(tmp_path, drafter.export(torch.float32))
    assert ExitConfig.load(tmp_path) == saved
    again = load_drafter(str(tmp_path))
    h = torch.randn(1, 5, HIDDEN)
    torch.testing.assert_close(again(h), drafter(h))

    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="weights_sha256") as refusal:
        load_drafter(str(tmp_path))
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        ExitConfig.load(tmp_path / "nowhere")
    wider = dataclasses.replace(saved, num_drafter_layers=3)
    with pytest.raises(ValueError, match=r"layers\.2"):
        wider.save(tmp_path / "other", drafter.export())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exit_layer": 4}, "exit_layer"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"format": "other"}, "format"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        exit_config(**changes)
