# SPDX-License-Identifier: Apache-2.0
"""Decisions of a length predictor, and how good they are: precision, recall, calibration.

    decisions = choose_decisions(chosen, min_precision=0.75)    # [5], on one set of answers
    scores = Scores.of(others, decisions)                       # measured on another

Precision: of the tokens where a head said "fewer than m remain", the share where that was so.
Recall: of the tokens where it was so, the share where the head said it. Tokens whose truth is not
known (length_data.py) count for neither.

Invariant: what cannot be measured (no token, no positive) is None, never a number.
"""

import dataclasses

import numpy as np

from spexis.core.lengths import THRESHOLDS
from spexis.lengths.config import NEVER
from spexis.training.length_data import Predictions

BINS = 10  # of predicted probability, for the calibration error
ByThreshold = dict[str, float | None]  # keys "4" .. "64", as in the JSON line


def choose_decisions(found: Predictions, min_precision: float) -> list[float]:
    """The lowest probability for each head at which precision is reached: the most recall.

    NEVER for a head that reaches it nowhere.
    """
    decisions = []
    for k in range(len(THRESHOLDS)):
        known = found.known[:, k]
        p, right = found.ends[known, k].astype(np.float64), found.ended[known, k]
        order = np.argsort(-p, kind="stable")
        p, hits = p[order], np.cumsum(right[order])
        whole = np.append(p[1:] != p[:-1], True) if len(p) else np.zeros(0, bool)  # no tie is split
        enough = whole & (hits >= min_precision * np.arange(1, len(p) + 1)) & (hits > 0)
        if not enough.any():
            decisions.append(NEVER)
            continue
        last = int(np.flatnonzero(enough)[-1])
        # Halfway to the next token, so that rounding on another device changes nothing.
        below = p[last + 1] if last + 1 < len(p) else 0.0
        decisions.append(float((p[last] + below) / 2))
    return decisions


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """By threshold, rounded for print; None where it cannot be said."""

    precision: ByThreshold
    recall: ByThreshold
    calibration_error: ByThreshold  # mean distance of probability and share, over tenths of it
    share: ByThreshold  # of tokens where fewer remained, for comparison
    tokens: dict[str, int]  # whose truth is known

    @classmethod
    def of(cls, found: Predictions, decisions: list[float]) -> "Scores":
        """Measure the heads with these decision thresholds."""
        columns: dict[str, dict] = {f.name: {} for f in dataclasses.fields(cls)}
        for k, m in enumerate(THRESHOLDS):
            known = found.known[:, k]
            p, true = found.ends[known, k].astype(np.float64), found.ended[known, k]
            yes = p >= decisions[k]
            values = {
                "precision": _share(int((yes & true).sum()), int(yes.sum())),
                "recall": _share(int((yes & true).sum()), int(true.sum())),
                "calibration_error": _calibration_error(p, true),
                "share": _share(int(true.sum()), len(true)),
                "tokens": len(true),
            }
            for name, value in values.items():
                columns[name][str(m)] = value
        return cls(**columns)

    def good(self, precision: float, recall: float) -> bool:
        """At every threshold at least these."""
        pairs = zip(self.precision.values(), self.recall.values(), strict=True)
        return all(
            p is not None and r is not None and p >= precision and r >= recall for p, r in pairs
        )

    def fields(self) -> dict[str, dict]:
        """For a JSON line."""
        return dataclasses.asdict(self)


def table(columns: dict[str, Scores]) -> str:
    """Precision / recall in percent by remaining tokens, one column for each set of answers."""
    width = max(13, *(len(name) for name in columns))
    lines = ["remaining | " + " | ".join(f"{name:>{width}}" for name in columns)]
    for m in map(str, THRESHOLDS):
        cells = (
            f"{_percent(s.precision[m])} / {_percent(s.recall[m])}".rjust(width)
            for s in columns.values()
        )
        lines.append(f"{'< ' + m:>9} | " + " | ".join(cells))
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _calibration_error(p: np.ndarray, true: np.ndarray) -> float | None:
    if not len(p):
        return None
    place = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(place, p - true, BINS)
    return round(float(np.abs(gap).sum() / len(p)), 4)
