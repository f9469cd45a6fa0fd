# SPDX-License-Identifier: Apache-2.0
"""What `make exact` would run on the demo model, without an engine."""

import pytest

from spexis.bench import exact
from spexis.bench.scenarios import SCENARIOS


class Planned(exact.Exact):
    """Notes engines and work instead of running them."""

    def reference(self, spec, work):
        self.stock = [item.name for item in work]
        output = {"token_ids": [1, 2], "logprobs": [{1: -0.1, 2: -0.3}, {1: -0.2, 2: -0.5}]}
        row = {"prompt_token_ids": [3], "outputs": [output]}
        return {item.name: {"rows": [row]} for item in work}

    def compare(self, spec, work, stock, source=lambda name: name):
        self.planned.append((spec, work, [source(item.name) for item in work]))


@pytest.fixture
def planned(monkeypatch, tmp_path) -> Planned:
    monkeypatch.setattr("spexis.bench.prompts.chat_token_ids", lambda model, texts: [[3]])
    monkeypatch.setattr("spexis.demo_model.demo_model_dir", lambda: "demo")
    monkeypatch.setattr(exact, "shipped_drafter", lambda model: {"method": "exit"})
    monkeypatch.setattr(exact, "write_oracle_file", lambda path, results: str(path))
    plan = Planned(exact._arguments(["--data", str(tmp_path / "none")]), tmp_path)
    plan.planned = []
    plan.prompts()
    plan.bar.close()
    return plan


def test_every_drafter_runs_at_every_number_of_stages(planned):
    assert [spec.stages for spec, _, _ in planned.planned] == [2, 3, 4]
    for spec, work, _ in planned.planned:
        assert spec.drafter == {"method": "exit"}
        drafters = [item.prepare["drafter"]["acceptance"] for item in work if item.prepare]
        assert drafters == list(exact.ACCEPTANCES)


def test_everything_has_a_stock_result_to_be_compared_with(planned):
    assert set(planned.stock) == {"prompts", *SCENARIOS}
    for _, _, sources in planned.planned:
        assert set(sources) <= set(planned.stock)


def test_scenarios_run_with_the_trained_drafter_and_with_the_oracle(planned):
    names = [item.name for item in planned.planned[0][1]]
    for scenario in SCENARIOS:
        # A second time the cache holds more, so what counts cached tokens runs once.
        again = not SCENARIOS[scenario].same_cached_tokens
        assert scenario in names and (f"{scenario} oracle" in names) is again
