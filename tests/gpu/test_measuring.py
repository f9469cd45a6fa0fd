# SPDX-License-Identifier: Apache-2.0
"""The measuring tools on real devices: figures are there and are consistent with each other.

    python -m pytest tests/gpu            # skipped, with a message, where there is no CUDA device

Invariant: nothing here compares a time with a fixed number; machines differ.
"""

import json

import pytest

from spexis.bench import gpu, machine, profile
from spexis.core.law import rows_per_token
from spexis.core.stage_curve import StageCurve

pytestmark = pytest.mark.gpu


def test_profile_of_a_few_layers(tmp_path):
    output = tmp_path / "profile.json"
    argv = ["l8", "--layers", "2", "--batches", "1", "16", "--contexts", "128", "--device", "cuda"]
    assert profile.main([*argv, "--capture-sizes", "1", "16", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    curve = StageCurve.from_profile(written)
    assert curve.seconds(1) > 0 and curve.head_seconds(1) > 0
    assert written["engine"]["runner"] == "V2" and written["engine"]["async_scheduling"]
    assert written["host_seconds"]["16"]["worker"] > 0
    links = dict(written["link_seconds"])
    assert links.pop("host")["describe"] > 0
    assert set(links) == (set() if machine.num_gpus() < 2 else {"p2p", "no_p2p"})
    for link in links.values():
        assert link["tp_all_reduce"], link["tp_note"]
        assert all(seconds > 0 for seconds in link["tp_all_reduce"].values())


@pytest.mark.skipif(machine.num_gpus() < 2, reason="gpu: needs two devices")
def test_gpu2_preset_counts_what_the_law_says(tmp_path):
    output = tmp_path / "gpu2.json"
    argv = ["--preset", "gpu2", "--dims", "tiny", "--device", "cuda", "--p2p", "on"]
    argv += ["--batches", "16", "--p", "0.3", "0.8", "--no-profile", "--engines", "sp2"]
    gpu.main([*argv, "--output", str(output), "--capture-sizes", "16"])
    record = json.loads(output.read_text())
    assert record["complete"], record["failures"]
    found = {cell["p"]: cell for cell in record["cells"] if cell["engine"] == "sp2"}
    for p, cell in found.items():
        assert cell["acceptance"] == pytest.approx(p, abs=0.06)  # 4 sigma of 1000 drafts
        assert cell["rows_per_token"] == pytest.approx(rows_per_token(p, 2), abs=0.1)
    assert found[0.8]["rate"] > found[0.3]["rate"]
