# SPDX-License-Identifier: Apache-2.0
"""What gpu_timeline reads from a trace: made-up kernels with known times."""

import gzip
import json

import pytest

from spexis.bench import gpu_timeline


def kernel(name: str, start: float, duration: float, stream: int, category: str = "kernel"):
    args = {"stream": stream}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


def write_trace(path, wait: float) -> None:
    """Six steps of 1000 us: 2 x 300 us of model, 10 us apart, a send and a waiting verdict."""
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "args": {}}]
    for step in range(6):
        begin = 1000.0 * step
        events += [
            kernel("gemm", begin, 300, 7),
            kernel("gemm", begin + 310, 300, 7),
            kernel("ncclDevKernel_SendRecv(x)", begin + 610, 20, 30),
            kernel("ncclDevKernel_Broadcast_RING_LL(x)", begin + 1000 - wait, wait, 22),
            kernel("Memcpy DtoH", begin + 700, 3, 14, "gpu_memcpy"),
        ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)


def test_medians_of_a_step(tmp_path):
    write_trace(tmp_path / "rank-0.json.gz", wait=350)
    spans = gpu_timeline.read_spans(tmp_path / "rank-0.json.gz")
    # The pause of 10 us inside a graph is joined, and the copy to the host is nobody's work.
    assert sum(span.kind == "model" for span in spans) == 6
    found = gpu_timeline.summary(spans)
    assert found == {
        "steps": 3,
        "step": 1.0,
        "model": 0.61,
        "idle": 0.39,
        "hidden_states": 0.02,
        "verdict": 0.35,
    }


def test_picture_and_last_line(tmp_path, capsys):
    for rank, wait in enumerate((350, 5)):
        write_trace(tmp_path / f"rank-{rank}.json.gz", wait)
    picture = tmp_path / "timeline.svg"
    assert gpu_timeline.main([str(tmp_path), "--output", str(picture)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [rank["verdict"] for rank in line["ms"]] == [0.35, 0.005]
    assert picture.read_text().lstrip().startswith("<?xml")


def test_a_trace_without_kernels_is_refused(tmp_path):
    with gzip.open(tmp_path / "rank-0.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 0}]}, file)
    with pytest.raises(ValueError, match="has no kernels"):
        gpu_timeline.read_spans(tmp_path / "rank-0.json.gz")


def test_an_empty_folder_is_refused(tmp_path, capsys):
    assert gpu_timeline.main([str(tmp_path)]) == 1
    assert "holds no rank-" in capsys.readouterr().err
