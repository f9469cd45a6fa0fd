# SPDX-License-Identifier: Apache-2.0
"""`spexis bench --preset load`: what it asks servers and client for, and its summaries."""

import gzip
import itertools
import json
import os
import signal
import time

import pytest

from spexis.bench import load
from spexis.config import ConfigError


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv.gz"
    rows = [(0.5 * i, 100 + i, 10 + i) for i in range(50)] + [(30.0, 9000, 10)]
    text = "arrival_s,input_tokens,output_tokens\n"
    text += "".join(f"{at},{prompt},{answer}\n" for at, prompt, answer in rows)
    file.write_bytes(gzip.compress(text.encode()))
    return str(file)


def test_trace_keeps_lengths_and_gaps_and_sets_the_rate(trace):
    lines = load.trace_lines(trace, 40, rate=4.0, scale=0.5, longest=2048)
    assert len(lines) == 40
    assert lines[0]["timestamp"] == 0 and lines[-1]["timestamp"] == pytest.approx(40 / 4)
    times = [line["timestamp"] for line in lines]
    gaps = {round(b - a, 3) for a, b in itertools.pairwise(times)}
    assert len(gaps) <= 2  # even, as in the trace, but for rounding
    assert [lines[7]["input_length"], lines[7]["output_length"]] == [round(107 / 2), 8]
    hashes = [h for line in lines for h in line["hash_ids"]]
    assert len(hashes) == len(set(hashes))
    for line in lines:
        assert len(line["hash_ids"]) == -(-line["input_length"] // load.HASHES)


def test_trace_leaves_out_what_does_not_fit(trace):
    assert len(load.trace_lines(trace, 100, rate=1, scale=1, longest=2048)) == 50
    with pytest.raises(ConfigError, match="no two requests"):
        load.trace_lines(trace, 100, rate=1, scale=1, longest=50)


def row(engine, streams, rate, number=0):
    return {"engine": engine, "concurrency": streams, "round": number, "output_throughput": rate}


def test_share_of_the_better_one():
    rows = [
        *(row("pp", 4, r, i) for i, r in enumerate((10.0, 12.0, 11.0))),
        *(row("sp", 4, r, i) for i, r in enumerate((15.0, 14.0, 16.0))),
        *(row("auto", 4, r, i) for i, r in enumerate((14.0, 15.0, 14.5))),
        row("pp", 64, 50.0),
        row("sp", 64, 40.0),
        row("auto", 64, 52.0),
    ]
    assert load.worst_shares(rows) == {"4": round(14.5 / 15, 4), "64": 1.04}
    assert load.worst_shares([r for r in rows if r["engine"] != "sp"]) == {}


def options(tmp_path, monkeypatch, *argv):
    demo = tmp_path / "demo"
    demo.mkdir(exist_ok=True)
    (demo / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("spexis.demo_model.demo_model_dir", lambda: str(demo))
    args = load._parser().parse_args(["--device", "cpu", *argv])
    made = load.Load(args, tmp_path, [load.Point("concurrency", 2)])
    made.bar.close()
    return made


def test_servers_differ_in_what_is_compared_only(tmp_path, monkeypatch):
    made = options(tmp_path, monkeypatch, "--kv-blocks", "64")
    pp, tp, auto = (made.arguments(name) for name in ("pp", "tp", "auto"))
    assert pp[0] == str(tmp_path / "demo")
    assert pp[pp.index("--pipeline-parallel-size") + 1] == "2"
    assert tp[tp.index("--tensor-parallel-size") + 1] == "2"
    assert "--spexis" not in pp and "--worker-cls" in pp and "--worker-cls" not in auto
    block = json.loads(auto[auto.index("--spexis") + 1])
    assert block == {"drafter": {"method": "exit"}, "mode": "auto"}
    # Two stock workers on one NUMA node must be told their cores; the plugin tells its own.
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    binds = ["VLLM_CPU_OMP_THREADS_BIND" in made.environment(n) for n in ("pp", "tp", "auto")]
    assert binds == [True, True, False]
    for found in (pp, tp, auto):
        assert found[found.index("--num-gpu-blocks-override") + 1] == "64"


def test_selection_is_told_what_steps_take(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = options(tmp_path, monkeypatch, "--step-times", "p.json")
    found = made.arguments("alpha-look")
    assert json.loads(found[found.index("--spexis") + 1]) == {
        "drafter": {"method": "exit"},
        "mode": "sp-alpha",
        "selection": "scheduler",
        "lookahead": True,
        "profile": str(tmp_path / "p.json"),
    }


def test_without_peer_access_no_way_around_is_left(tmp_path, monkeypatch):
    made = options(tmp_path, monkeypatch, "--no-p2p")
    assert made.environment("sp")["NCCL_P2P_DISABLE"] == "1"
    for name in ("pp", "tp", "sp"):
        assert "--disable-custom-all-reduce" in made.arguments(name)


def test_a_model_by_its_dimensions_has_random_weights_and_a_tokenizer(tmp_path, monkeypatch):
    made = options(tmp_path, monkeypatch, "--model", "tiny", "--acceptance", "0.7")
    found = made.arguments("sp")
    assert (tmp_path / "tiny-8" / "tokenizer.json").is_file()
    assert found[0] == str(tmp_path / "tiny-8") and "dummy" in found
    block = json.loads(found[found.index("--spexis") + 1])
    assert block == {"drafter": {"method": "synthetic", "acceptance": 0.7}}


def test_loads_are_needed():
    with pytest.raises(ConfigError, match="--concurrency"):
        load.main([])
    with pytest.raises(ConfigError, match="--trace"):
        load.main(["--rates", "1"])
    with pytest.raises(ConfigError, match="--step-times"):
        load.main(["--engines", "pp", "alpha", "--concurrency", "1"])


def test_a_run_that_is_ended_keeps_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(load.Load, "_model", lambda self: "demo")
    kept = signal.getsignal(signal.SIGTERM)

    def measure_one_and_end(self):
        self.rows.append(row("pp", 1, 10.0))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(load.Load, "run", measure_one_and_end)
    output = tmp_path / "load.json"
    try:
        with pytest.raises(SystemExit) as end:
            load.main(["--concurrency", "1", "--output", str(output)])
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert end.value.code == 128 + signal.SIGTERM
    result = json.loads(output.read_text())
    assert result["throughput"] == {"pp": {"1": 10.0}} and not result["ok"]
