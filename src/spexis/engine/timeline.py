# SPDX-License-Identifier: Apache-2.0
"""Optional record of what each stage did when, for the demo's picture and for traces.

One JSONL file per stage (PATH.stage0, PATH.stage1, ...): {"step", "part", "begin", "end",
"cpu", "rows"} with times from the machine-wide monotonic clock in seconds ("cpu" is the
thread's own time, which other load on the machine does not lengthen), and from the last stage
{"step", "good"}: the rows whose token counted. Off (and free) unless `timeline_log` is set.
"""

import contextlib
import json
import time
from pathlib import Path

STOCK_TIMELINE_ENV = "SPEXIS_STOCK_TIMELINE"  # file prefix; read by StockCPUWorker alone


class Timeline:
    def __init__(self, path: str | None, stage: int):
        # Open as long as the stage lives.
        self._file = Path(f"{path}.stage{stage}").open("w", buffering=1) if path else None  # noqa: SIM115

    @classmethod
    def open(cls, path: str | None, stage: int) -> "Timeline":
        return cls(path, stage)

    def busy(self, step: int, rows, part: str = "forward"):
        """Context manager around work of the stage."""
        if self._file is None:
            return contextlib.nullcontext()
        return self._record(step, rows, part)

    @contextlib.contextmanager
    def _record(self, step: int, rows, part: str):
        begin, cpu = time.monotonic(), time.thread_time()
        yield
        event = {
            "step": step,
            "part": part,
            "begin": begin,
            "end": time.monotonic(),
            "cpu": time.thread_time() - cpu,
            "rows": list(rows.req_ids),
        }
        self._file.write(json.dumps(event) + "\n")

    def note_verdict(self, step: int, verdict, rows) -> None:
        """verdict: [R] token or NO_TOKEN."""
        if self._file is not None:
            good = [r for r, t in zip(rows.req_ids, verdict.tolist(), strict=True) if t >= 0]
            self._file.write(json.dumps({"step": step, "good": good}) + "\n")
