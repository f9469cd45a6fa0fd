# SPDX-License-Identifier: Apache-2.0
"""The first stage chooses which drafts run (mode "sp-alpha", selection "stage"); V1 runner.

    selector = DraftSelector.build(runner)           # None in other modes
    held = selector.choose(rows, start, full)        # [R] bool on the host; None: all rows run
    selector.drafted(rows, positions, confidence)
    selector.verdicts(plan, tokens, alive, wrong)

The choice is made where the confidences are, one step before anybody else could know them, so no
stage and no scheduler waits for it. A held row travels through the pipeline as a row of no tokens:
the stages that follow learn from the first which rows those are (HELD_KEY), the scheduler from the
last (outputs.py), and takes their counts back as it does a discarded row's.

Ranks of one stage must choose alike, but measure other times: the first one's choice is sent round.

Invariant: prompt rows and rows whose input is verified always run, and at least one row does.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from spexis.config import SpexisConfig
from spexis.core.chains import DraftChooser
from spexis.core.profile_file import ProfileFile
from spexis.engine.verdict import NO_TOKEN

JOURNAL_SUFFIX = ".selection"  # behind the iteration log's name
HELD_KEY = "spexis_held"  # [R] bool, travels with the hidden states


class DraftSelector:
    @classmethod
    def build(cls, runner) -> DraftSelector | None:
        config: SpexisConfig = runner.spexis_config
        wanted = runner.stage_selects and runner.pp.is_first_rank
        return cls(config, runner) if wanted else None

    def __init__(self, config: SpexisConfig, runner):
        tp = get_tp_group()
        self.tp = tp if tp.world_size > 1 else None
        profile = ProfileFile.load(config.profile)
        setup = {
            "profile": dict(profile.block),
            "num_stages": runner.num_stages,
            "tensor_parallel_size": tp.world_size,
            "max_rows": runner.max_num_reqs,
            "num_slots": runner.num_slots + 1,
            "version": runner.spexis_drafter.version,
        }
        self.table = runner.slot_table
        self.chooser = DraftChooser.from_setup(setup)
        self._last_begin: float | None = None
        self._tokens = 0  # verdicts with a token since the last choice
        self._journal = None
        if config.iteration_log is not None and tp.rank_in_group == 0:
            # Open as long as the stage lives.
            path = Path(f"{config.iteration_log}{JOURNAL_SUFFIX}")
            path.parent.mkdir(parents=True, exist_ok=True)  # the scheduler's log comes later
            self._journal = path.open("w", buffering=1)
            self._journal.write(json.dumps({"setup": setup}) + "\n")
            self.chooser.journal = []

    def bind(self, slot: int) -> None:
        self.chooser.bind(slot)

    def choose(self, rows, start: torch.Tensor, full: bool) -> np.ndarray | None:
        """[R] bool: rows held back. start: [R] position of each row's first token; full: every
        stage has a step to run (Chooser.learn)."""
        now, last = time.monotonic(), self._last_begin
        decode = np.flatnonzero(~rows.is_prefill.numpy())
        if not len(decode):
            self.no_choice()
            return None
        self._last_begin = now
        positions = start.numpy()[decode]
        run = self.chooser.choose(
            rows.slots_np[decode],
            positions,
            positions + 1,
            now - last if last is not None else 0.0,
            self._tokens,
            int(rows.num_scheduled_np.sum()) - len(decode),
            full,
        )
        self._tokens = 0
        held = np.zeros(len(rows.req_ids), bool)
        held[decode[~run]] = True
        if self.tp is not None:
            sent = torch.from_numpy(held.astype(np.uint8))
            held = self.tp.broadcast(sent, src=0).numpy().astype(bool)
        self._write()
        return held if held.any() else None

    def no_choice(self) -> None:
        """A step without decode rows, or nothing to do: what comes next says nothing of a step."""
        self._last_begin = None

    def drafted(self, rows, positions: torch.Tensor, confidence: torch.Tensor) -> None:
        """Guesses of the rows that sample. positions, confidence: [R], of the guesses."""
        at = np.flatnonzero(rows.samples.numpy())
        slots, positions = rows.slots_np[at], positions.numpy()[at]
        answered = positions - self.table.prefill_len[slots]
        self.chooser.drafted(slots, positions, answered, confidence.numpy()[at].astype(float))

    def verdicts(self, plan, tokens, alive, wrong) -> None:
        """tokens, alive, wrong: [R] of the plan's step."""
        valid = np.flatnonzero((alive & (tokens != NO_TOKEN)).numpy())
        self._tokens += len(valid)
        positions = plan.positions.numpy()[valid]
        self.chooser.verdicts(plan.slots_np[valid], positions, ~wrong.numpy()[valid])

    def _write(self) -> None:
        if self._journal is not None:
            for entry in self.chooser.take_journal():
                self._journal.write(json.dumps(entry) + "\n")
