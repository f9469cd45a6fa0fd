# SPDX-License-Identifier: Apache-2.0
"""What benchmarks ask of workers, on stand-in runners."""

from types import SimpleNamespace

import pytest
import torch

from spexis.bench.worker_extension import BenchWorker
from spexis.config import DrafterConfig
from spexis.drafters.synthetic import SyntheticDrafter

ROWS = 20_000


def worker(**runner) -> BenchWorker:
    found = BenchWorker()
    config = SimpleNamespace(
        get_vocab_size=lambda: 1000, get_hidden_size=lambda: 4, dtype=torch.float32
    )
    found.model_runner = SimpleNamespace(device=torch.device("cpu"), model_config=config, **runner)
    return found


@pytest.fixture
def sp() -> BenchWorker:
    found = worker(pp=SimpleNamespace(is_first_rank=True))
    config = DrafterConfig(method="synthetic", acceptance=0.5)
    found.model_runner.spexis_drafter = SyntheticDrafter(config, found.model_runner)
    return found


def share(drafter) -> float:
    """Of guesses that the last stage makes true."""
    positions = torch.arange(ROWS)
    guesses = drafter.propose(SimpleNamespace(draft_positions=positions, tokens=positions))
    return (drafter.overrule(positions, positions) == guesses.tokens).float().mean().item()


def test_acceptance_changes_without_another_engine(sp):
    drafter = sp.model_runner.spexis_drafter
    assert share(drafter) == pytest.approx(0.5, abs=0.02)
    assert sp.bench_set_acceptance(0.9) is True
    assert share(drafter) == pytest.approx(0.9, abs=0.02)
    assert drafter.version == "synthetic-0.9"


@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_sharp_drafts_are_right_as_often_as_they_say(sharpness):
    config = DrafterConfig(method="synthetic", acceptance=0.5, sharpness=sharpness)
    drafter = SyntheticDrafter(config, SimpleNamespace(**vars(worker().model_runner)))
    drafter.set_acceptance(0.7)
    positions, tokens = torch.arange(ROWS), torch.arange(ROWS) * 7 % 1000
    guesses = drafter.propose(SimpleNamespace(draft_positions=positions, tokens=tokens))
    right = (drafter.overrule(positions.int(), tokens.int()) == guesses.tokens).float()
    assert right.mean().item() == pytest.approx(0.7, abs=0.02)
    bins = (guesses.confidence * 5).long().clamp(max=4)
    spread = guesses.confidence.std().item()
    assert spread == pytest.approx((0.21 / (1 + sharpness)) ** 0.5, abs=0.02)
    for place in range(5):
        inside = bins == place
        if inside.sum() > 500:
            said, came = guesses.confidence[inside].mean(), right[inside].mean()
            assert came.item() == pytest.approx(said.item(), abs=0.05)
    drafter.set_acceptance(1.0)
    assert (
        drafter.propose(SimpleNamespace(draft_positions=positions, tokens=tokens))
        .confidence.eq(1)
        .all()
    )


def test_stages_without_a_drafter_say_so(sp):
    assert worker().bench_set_acceptance(0.9) is False
    assert worker(spexis_drafter=None).bench_set_acceptance(0.9) is False
    assert worker().bench_drafter_seconds(4, 2) is None
    assert sp.bench_drafter_seconds(4, 2) > 0
    sp.model_runner.pp.is_first_rank = False
    assert sp.bench_drafter_seconds(4, 2) is None


def test_head_runs_on_the_asked_rows():
    shapes = []

    def compute_logits(hidden):
        shapes.append(tuple(hidden.shape))
        return hidden

    model = SimpleNamespace(compute_logits=compute_logits)
    assert worker(get_model=lambda: model).bench_head_seconds(7, 5) > 0
    assert set(shapes) == {(7, 4)} and len(shapes) == 3 + 5  # warm-up and repeats


def test_host_time_counts_steps_that_ran_something():
    found = worker(
        execute_model=lambda scheduler_output, *args: sum(range(20_000)),
        sample_tokens=lambda grammar: "sampled",
    )
    found.bench_watch_host()
    runner = found.model_runner
    runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=3))
    runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=0))
    assert runner.sample_tokens(None) == "sampled"
    steps, seconds = found.bench_take_host()
    assert steps == 1 and seconds > 0
    assert found.bench_take_host() == [0, 0.0]
