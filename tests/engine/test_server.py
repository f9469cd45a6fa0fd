# SPDX-License-Identifier: Apache-2.0
"""The soak in short: `spexis serve` at PP=2 under clients that come, stop and go, then a kill.

One server does everything: 72 requests against few blocks, one request that needs all of them,
then a worker is killed (-9) under load. `make soak` is the long form, with every kind of kill.
"""

import pytest

from spexis.bench import soak
from spexis.bench.serving import Answer, Server

WANT = {"token_ids": [5, 6, 7], "text": "abc", "finish_reason": "stop", "stop_reason": 7}


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> tuple[soak.Soak, soak.Kill]:
    model = soak.prepare("tiny", tmp_path_factory.mktemp("served"))
    requests = soak.crowd(model.vocab_size)
    requests += soak.make_requests(60, 0, model.vocab_size, model.decoder())
    requests.append(soak.full_request(model.vocab_size))
    wanted = soak.reference(model.path, requests, timeout=300)
    with Server(soak.server_arguments(model.path, model.drafter)) as server:
        server.wait_ready(300)
        found = soak.run_soak(server, requests, wanted, timeout=120, clients=32)
        kill = soak.kill_under_load(server, "last worker", model.vocab_size)
        print(server.tail(100))  # shown when a test fails
    return found, kill


@pytest.mark.engine
def test_every_answer_is_stock_vllms(findings):
    found, _ = findings
    assert found.wrong == []


@pytest.mark.engine
def test_clients_left_and_requests_were_preempted(findings):
    found, _ = findings
    assert found.left > 3
    assert found.preemptions > 0
    assert 0.2 < found.acceptance < 0.8


@pytest.mark.engine
def test_no_block_is_lost_and_counters_agree(findings):
    found, _ = findings
    assert found.blocks_leaked == 0
    assert found.disagreements == []


@pytest.mark.engine
def test_a_killed_worker_is_an_error_soon_and_leaves_nothing(findings):
    _, kill = findings
    assert kill.errors == kill.clients
    assert kill.error_seconds < soak.ERROR_WITHIN
    assert kill.left == []


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (Answer([5, 6, 7], "abc", "stop", 7), True),
        (Answer([5, 6], "ab", left=True), True),
        (Answer(left=True), True),
        (Answer([5, 7], "ac", left=True), False),
        (Answer([5, 6, 7, 8], left=True), False),
        (Answer([5, 6], "ab", "stop", 7), False),
        (Answer([5, 6, 7], "abd", "stop", 7), False),
        (Answer([5, 6, 7], "abc", "length", None), False),
        (Answer([5, 6, 7], "abc", "stop", 7, error="HTTP 500"), False),
        (Answer([5, 6]), False),
    ],
)
def test_what_counts_as_wrong(answer, right):
    assert (soak.difference(answer, WANT) is None) == right
