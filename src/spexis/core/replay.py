# SPDX-License-Identifier: Apache-2.0
"""Computes every decision of an iteration log again, from its own lines.

    python -m spexis.core.replay steps.jsonl       # and steps.jsonl.selection, where there is one

    differences = replay(lines)            # [] when each decision follows from what was logged

Memory look-ahead writes a journal (engine/lookahead.py): answers that ended and what a length
predictor had said of them, outlooks, what was admitted, held and preempted. Mode control writes
what it saw of each step. The first stage writes which drafts it ran (engine/selector.py). All are
deterministic, so the same objects, fed with the log, must decide the same.

Invariant: nothing but the log is read; a decision is never taken over, always computed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from spexis.core.chains import DraftChooser
from spexis.core.chooser import Chooser
from spexis.core.counts import CountChooser
from spexis.core.endings import EndCalibration
from spexis.core.lengths import LengthModel
from spexis.core.live_mode import LiveMode
from spexis.core.memory import MemoryLookahead, Outlook, Running
from spexis.core.outcomes import OutcomeChooser
from spexis.core.predictions import Told, learn


def replay(lines: Iterable[dict[str, Any]]) -> list[str]:
    """What was decided otherwise than the policies decide now, a line each."""
    lines = list(lines)
    journal = [entry for line in lines for entry in line.get("lookahead", ())]
    selection = _chosen(lines)
    counts = bool(selection) and selection[0]["setup"].get("kind") == "counts"
    chosen = replay_selection(selection, CountChooser if counts else OutcomeChooser)
    return replay_memory(journal) + replay_mode(lines) + chosen


def _chosen(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The scheduler's journal of selection."""
    return [entry for line in lines for entry in line.get("selection", ())]


def replay_memory(journal: Iterable[dict[str, Any]], lengths: LengthModel | None = None) -> list:
    """lengths: what the engine began with; default: as it begins when a server starts."""
    differences: list[str] = []
    memory: MemoryLookahead | None = None
    outlook: Outlook | None = None
    running: Running | None = None
    calibration = EndCalibration()
    for number, entry in enumerate(journal):
        if "setup" in entry:
            setup = entry["setup"]
            memory = MemoryLookahead(
                0, setup["num_stages"], lengths or LengthModel(), setup["block_size"]
            )
        elif "ended" in entry:
            memory.lengths.observe(entry["ended"])
            learn(calibration, entry["ended"], entry.get("learnt", {}))
        elif "outlook" in entry:
            running = _running(entry, calibration)
            memory.capacity = entry["capacity"]
            outlook = memory.project(running, entry["acceptance"])
            upper = np.array(entry["outlook"])
            if upper.shape != outlook.upper.shape or not np.allclose(outlook.upper, upper, 1e-6):
                differences.append(f"entry {number}: another outlook, peak {outlook.peak:.0f}")
        elif "admit" in entry:
            waiting = [np.array(values) for values in entry["waiting"]]
            count = memory.admit(outlook, *waiting, entry["num_running"])
            if count != entry["admit"]:
                differences.append(f"entry {number}: admits {count}, not {entry['admit']}")
        elif "evict" in entry:
            pace = entry["pace"]
            relief = memory.relieve(
                outlook,
                running,
                np.array(entry["wants"]),
                float(entry["short_tokens"]),
                pace["tokens_per_second"],
                pace["prefill_seconds_per_token"],
                pace["step_seconds"],
            )
            found = (relief.hold.tolist(), relief.evict.tolist())
            if found != (entry["hold"], entry["evict"]):
                differences.append(f"entry {number}: holds {found[0]}, preempts {found[1]}")
    return differences


def replay_mode(lines: Iterable[dict[str, Any]]) -> list[str]:
    differences: list[str] = []
    control: LiveMode | None = None
    for line in lines:
        seen = line.get("live_mode")
        if not seen:
            continue
        control = control or LiveMode(settle=seen["settle"])
        mode = control.observe(
            seen["seconds"], seen["tokens"], seen["running"], seen["prefill_tokens"]
        )
        if mode != line["mode"]:
            differences.append(f"step {line['step']}: mode {mode}, not {line['mode']}")
    return differences


def replay_selection(
    journal: Iterable[dict[str, Any]], kind: type[Chooser] = DraftChooser
) -> list[str]:
    """The first stage's file, or what the scheduler chose."""
    chooser: Chooser | None = None
    differences: list[str] = []
    for number, entry in enumerate(journal):
        if "setup" in entry:
            chooser = kind.from_setup(entry["setup"])
        elif difference := chooser.replay(entry):
            differences.append(f"entry {number} of {kind.__name__}: {difference}")
    return differences


def _running(entry: dict[str, Any], calibration: EndCalibration) -> Running:
    kv_tokens, generated, max_tokens, protected = map(np.array, entry["running"])
    ends = ends_at = None
    if "told" in entry:
        told = Told.read(entry["told"])
        ends, ends_at = calibration.calibrated(told.said), told.at
    return Running(
        kv_tokens,
        generated,
        max_tokens,
        protected=protected.astype(bool),
        ends=ends,
        ends_at=ends_at,
    )


def main(argv: Sequence[str] | None = None) -> int:
    (path,) = sys.argv[1:] if argv is None else argv
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    differences = replay(lines)
    stage = []
    if os.path.exists(f"{path}.selection"):
        with open(f"{path}.selection", encoding="utf-8") as file:
            stage = [json.loads(line) for line in file]
        differences += replay_selection(stage)
    print(*differences[:20], sep="\n", end="\n" if differences else "")
    decisions = sum(len(line.get("lookahead", ())) + ("live_mode" in line) for line in lines)
    decisions += sum("choose" in entry for entry in [*stage, *_chosen(lines)])
    result = {"name": "replay", "ok": not differences and decisions > 0, "decisions": decisions}
    print(json.dumps({**result, "different": len(differences)}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
