# SPDX-License-Identifier: Apache-2.0
"""A head that ranks share gives the guess and the confidence of the whole one."""

import pytest
import torch

from spexis.drafters.exit.head import best_of_share, over_shares

ROWS, VOCAB = 50, 97


def shared(logits: torch.Tensor, ids: torch.Tensor, shares: list[torch.Tensor]):
    """What the ranks find that have these columns of the head."""
    found = [best_of_share(logits[:, share], ids[share]) for share in shares]
    return over_shares(torch.stack(found, dim=1))


@pytest.fixture
def head():
    torch.manual_seed(0)
    ids = torch.randperm(200_000)[:VOCAB]  # draft vocabularies are in no order
    return 3 * torch.randn(ROWS, VOCAB), ids


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_shares_find_what_the_whole_finds(head, num_shares):
    logits, ids = head
    shares = [torch.arange(rank, VOCAB, num_shares) for rank in range(num_shares)]
    tokens, confidence = shared(logits, ids, shares)
    assert torch.equal(tokens, ids[logits.argmax(-1)])
    torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))
    assert confidence.dtype == torch.float32
    # Were the first share's best taken, most guesses would be others.
    if num_shares > 1:
        alone = shared(logits, ids, shares[:1])
        assert (alone.tokens != tokens).float().mean() > 0.25


@pytest.mark.parametrize("empty", [0, 1])
def test_a_share_may_be_empty(head, empty):
    """Frequent tokens have low numbers, and the embedding is cut by number."""
    logits, ids = head
    shares = [torch.arange(VOCAB), torch.arange(VOCAB)]
    shares[empty] = torch.arange(0)
    tokens, confidence = shared(logits, ids, shares)
    assert torch.equal(tokens, ids[logits.argmax(-1)])
    torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))


def test_the_first_of_equals_is_taken_and_half_precision_is_summed_in_float32():
    logits = torch.zeros(2, 4, dtype=torch.bfloat16)
    ids = torch.tensor([7, 5, 3, 1])
    tokens, confidence = shared(logits, ids, [torch.tensor([2, 3]), torch.tensor([0, 1])])
    assert tokens.tolist() == [3, 3]
    assert confidence.tolist() == pytest.approx([0.25, 0.25])
