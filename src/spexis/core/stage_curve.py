# SPDX-License-Identifier: Apache-2.0
"""The measured stage curve T(B): what one pipeline stage needs for a decode step of B rows.

    curve = StageCurve.from_profile(json.load(open("profile.json")))    # profile_file.py
    curve.seconds(64)                          # the profile's stage, without the output head
    curve.costs(64, drafter_seconds=2e-4)      # seconds of a layer, of the first and last extras
    law_limit(64, 0.785, [0.0201, 0.0206])     # tokens/s of the law with these stage times

Between measured points the curve is linear; below the first one it is flat, because reading the
weights takes what it takes. Invariant: never extrapolated upwards - a figure nobody measured is
an error. File format: docs/profile.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spexis.core.law import tokens_per_step
from spexis.core.placement import StageCosts
from spexis.core.profile_file import ProfileFile


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCurve:
    layers: int
    """Layers of the measured stage."""
    context: int
    """Tokens of context of every row."""
    points: tuple[tuple[int, float], ...]
    """(rows, seconds) of a step without the output head, by rows."""
    head: tuple[tuple[int, float], ...]
    """(rows, seconds) of the output head with its argmax, by rows."""
    drafter: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of an exit drafter, by rows; empty where none was measured."""

    @classmethod
    def from_profile(cls, profile: Mapping[str, Any], context: int | None = None) -> StageCurve:
        """The curve at the measured context length nearest to `context` (null: the shortest)."""
        file = ProfileFile.of(profile)
        lengths = sorted({point["context"] for point in profile["points"]})
        wanted = lengths[0] if context is None else context
        nearest = min(lengths, key=lambda length: abs(length - wanted))
        points = [(p["rows"], p["seconds"]) for p in profile["points"] if p["context"] == nearest]
        return cls(
            layers=profile["layers"],
            context=nearest,
            points=tuple(sorted(points)),
            head=file.by_rows("head_seconds"),
            drafter=file.by_rows("drafter_seconds"),
        )

    @property
    def max_rows(self) -> int:
        return self.points[-1][0]

    def seconds(self, rows: float) -> float:
        """A step of the measured stage with this many rows, without the head."""
        return interpolate(self.points, rows)

    def head_seconds(self, rows: float) -> float:
        return interpolate(self.head, rows)

    def drafter_seconds(self, rows: float) -> float:
        """0 where no drafter was measured."""
        return interpolate(self.drafter, rows) if self.drafter else 0.0

    def costs(self, rows: float, drafter_seconds: float = 0.0) -> StageCosts:
        """What a layer, the first stage's drafter and the last stage's head take at `rows`."""
        return StageCosts(
            layer=self.seconds(rows) / self.layers,
            first=drafter_seconds,
            last=self.head_seconds(rows),
        )


def interpolate(points: Sequence[tuple[int, float]], rows: float) -> float:
    """Value at `rows` of a curve given by points in order of rows."""
    if rows > points[-1][0]:
        raise ValueError(f"{rows} rows were not measured; the most is {points[-1][0]}")
    if rows <= points[0][0]:
        return points[0][1]
    for (below, low), (above, high) in itertools.pairwise(points):
        if rows <= above:
            return low + (high - low) * (rows - below) / (above - below)
    raise AssertionError("unreachable: rows is within the points")


def law_limit(rows: int, acceptance: float, stage_seconds: Sequence[float]) -> float:
    """Tokens/s of `rows` requests when the slowest stage sets the pace: B r(p, N) / max T."""
    return rows * tokens_per_step(acceptance, len(stage_seconds)) / max(stage_seconds)
