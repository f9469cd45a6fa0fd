# SPDX-License-Identifier: Apache-2.0
"""What the two ways to select drafts share: what steps cost, and a journal of every decision.

    DraftChooser (chains.py)        on the first stage, where the drafts' confidences are
    OutcomeChooser (outcomes.py)    in the scheduler, one step ahead, from outcomes alone

Each calls learn() once a step and selection.select() with how likely each row is good. With a
journal every input and decision is kept, so that each can be computed again (replay.py).

Invariant: numpy in, numpy out, nothing random; a row whose input is verified always runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from spexis.core.profile_file import ProfileFile
from spexis.core.selection import Selection

SURE = 0.9999
PAUSE = 5.0  # times the predicted step: nobody asked for anything meanwhile
# Steps without prompts, looked at together: where they take twice as long as predicted, or half,
# the profile was made elsewhere, and its curve is kept but scaled.
USUAL, OFF = 15, 2.0


class Chooser:
    def __init__(self, selection: Selection, num_stages: int):
        self.selection, self.cost, self.num_stages = selection, selection.cost, num_stages
        self.journal: list[dict[str, Any]] | None = None
        self._ratios: deque[float] = deque(maxlen=USUAL)
        """Measured / predicted of the newest steps without prompts."""

    @classmethod
    def from_setup(cls, setup: Mapping[str, Any]) -> Self:
        """setup: what a journal begins with; `profile` is the content of a profile's file."""
        cost = ProfileFile.of(setup["profile"]).cost_model(
            setup["num_stages"], setup["tensor_parallel_size"]
        )
        return cls._of(Selection(cost, setup["max_rows"]), setup)

    @classmethod
    def _of(cls, selection: Selection, setup: Mapping[str, Any]) -> Self:
        return cls(selection, setup["num_stages"])

    def select(
        self,
        joint: np.ndarray,  # [R] probability that each row is good
        kv_tokens: np.ndarray,  # [R]
        prefill_tokens: int,
        bonus: np.ndarray | None = None,  # [R] tokens that a good row is worth on top
    ) -> np.ndarray:
        """[R] bool: rows that run."""
        return self.selection.select(joint, kv_tokens, prefill_tokens, bonus) | (joint >= SURE)

    def learn(
        self,
        seconds: float,
        tokens: int,
        rows: int,
        requests: int,
        kv_tokens: float,
        prefill_tokens: int,
        confidences: np.ndarray | None,  # [D] calibrated, of drafts judged lately
        full: bool = True,
    ) -> None:
        """A step took so long: rows of so many requests ran over kv_tokens, and tokens came.

        full: each stage had a step to run. Otherwise, as with one request that does not speculate,
        most of the time nothing ran, and the step's cost is not known.
        """
        if seconds <= 0:
            return
        predicted = self.cost.step_seconds(rows, prefill_tokens, kv_tokens)
        if full and not prefill_tokens:
            self._ratios.append(seconds / predicted)
        if len(self._ratios) == USUAL:
            usual = float(np.median(self._ratios))
            if not 1 / OFF < usual < OFF:
                self.cost.scale(usual)
                self.selection.refresh()
                self._ratios.clear()
                predicted = self.cost.step_seconds(rows, prefill_tokens, kv_tokens)
        if seconds >= PAUSE * predicted:
            return
        for stage in self.cost.stages if full else ():
            # The step's time is one number: each stage is off by as much as the whole is.
            part = stage.seconds(rows, prefill_tokens, kv_tokens) / predicted
            stage.observe(rows, prefill_tokens, kv_tokens, seconds * part)
        self.selection.observe(seconds, tokens, rows, requests, confidences, prefill_tokens)

    def note(self, what: str, *inputs: Any) -> None:
        if self.journal is not None:
            values = [v.tolist() if isinstance(v, np.ndarray) else v for v in inputs]
            self.journal.append({what: values})

    def decided(self, run: np.ndarray) -> np.ndarray:
        """Beside the inputs that note() kept last."""
        if self.journal is not None:
            self.journal[-1]["run"] = run.tolist()
        return run

    def take_journal(self) -> list[dict[str, Any]]:
        if self.journal is None:
            return []
        journal, self.journal = self.journal, []
        return journal

    def replay(self, entry: dict[str, Any]) -> str | None:
        """Does a journal's entry again; what came out otherwise, or None."""
        (what, values), *rest = entry.items()
        found = getattr(self, what)(*map(_again, values))
        if rest and found.tolist() != entry["run"]:
            return f"runs {np.flatnonzero(found)}, not {np.flatnonzero(entry['run'])}"
        return None


class SchedulerChooser(Chooser):
    """One that is told of every step that came back, as the scheduler is."""

    def __init__(self, selection: Selection, num_stages: int):
        super().__init__(selection, num_stages)
        self._confidences: list[float] = []
        """Of single drafts, calibrated, since the last observe()."""

    def observe(
        self,
        seconds: float,
        tokens: int,
        rows: int,
        requests: int,
        kv_tokens: float,
        prefill_tokens: int,
        full: bool = True,
    ) -> None:
        """The step of the newest outcomes; seconds: since those before it; full: as of learn()."""
        self.note("observe", seconds, tokens, rows, requests, kv_tokens, prefill_tokens, full)
        confidences, self._confidences = np.array(self._confidences), []
        self.learn(seconds, tokens, rows, requests, kv_tokens, prefill_tokens, confidences, full)


def _again(value: Any) -> Any:
    if not isinstance(value, list) or (value and isinstance(value[0], str)):
        return value  # numbers, and lists of request ids
    # An empty list says nothing of its type, and all empty arrays are alike.
    return np.array(value, None if value else np.int64)
