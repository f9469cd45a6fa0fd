# SPDX-License-Identifier: Apache-2.0
"""From the cells that a GPU preset measured to its table, result and plot. No engine, no device.

A cell: {"engine": "sp2", "round": 0, "rows": 64, "p": 0.785 (None: stock), "rate": tokens/s, ...}
or with "skipped" in place of "rate". Step times: {engine: {batch: {"stages": N, "full": seconds of
the slowest stage, "bare": the same without drafter and head}}}, from the stage curve.

    summary = summarise("gpu2", cells, steps)        fields by batch and p
    verdict("gpu2", "l70", summary)                  {"sp_over_pp 64 0.785": [1.52, 1.50, True]}

Invariant: a ratio compares cells of the same round; medians are over rounds; what was not
measured is absent, never zero.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spexis.bench.gpu_kinds import EXTRA, KINDS, NO_P2P, TENSOR, WANTED, Kind
from spexis.core.stage_curve import law_limit

Cell = Mapping[str, Any]
ByBatch = dict[str, dict[str, float]]


def rates(cells: Iterable[Cell], engine: str) -> dict[tuple[int, float | None], dict[int, float]]:
    """(rows, p) -> {round: tokens/s}."""
    found: dict[tuple[int, float | None], dict[int, float]] = {}
    for cell in cells:
        if cell["engine"] == engine and "rate" in cell:
            found.setdefault((cell["rows"], cell["p"]), {})[cell["round"]] = cell["rate"]
    return found


def ratios(cells: Sequence[Cell], above: str, below: str) -> ByBatch:
    """Median over rounds of rate/rate, by batch and by the acceptance of `above`."""
    over, under = rates(cells, above), rates(cells, below)
    found: ByBatch = {}
    for (rows, p), by_round in sorted(over.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        base = under.get((rows, None), {})
        pairs = [rate / base[number] for number, rate in by_round.items() if number in base]
        if pairs:
            found.setdefault(str(rows), {})[str(p)] = round(statistics.median(pairs), 4)
    return found


def limit(cell: Cell, step: Mapping[str, Any], curve: str) -> float:
    """The law's tokens/s for a cell, at the acceptance that was counted in it."""
    acceptance = cell.get("acceptance", cell["p"])
    return law_limit(cell["rows"], acceptance, [step[curve]] * step["stages"])


def shares(cells: Sequence[Cell], engine: str, steps: Mapping[str, Any], curve: str) -> ByBatch:
    """Median of rate over the law's limit, by batch and p."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in sorted(cells, key=lambda c: (c["rows"], c["p"] or 0)):
        step = steps.get(engine, {}).get(str(cell["rows"]))
        if cell["engine"] == engine and "rate" in cell and step:
            by_p = found.setdefault(str(cell["rows"]), {})
            by_p.setdefault(str(cell["p"]), []).append(cell["rate"] / limit(cell, step, curve))
    return {
        rows: {p: round(statistics.median(values), 4) for p, values in by_p.items()}
        for rows, by_p in found.items()
    }


def limits(kind: Kind, acceptance: Sequence[float], steps: Mapping[str, Any]) -> ByBatch:
    """The law's limit in tokens/s by batch and asked acceptance, drafter and head included."""
    return {
        rows: {
            str(p): round(law_limit(int(rows), p, [step["full"]] * step["stages"]), 1)
            for p in acceptance
        }
        for rows, step in steps.get(kind.name, {}).items()
    }


def summarise(preset: str, cells: Sequence[Cell], steps: Mapping[str, Any]) -> dict[str, Any]:
    """The result's fields. gpu2: by batch and p; gpu4, which has two kinds of SP: by kind first."""
    tensor = TENSOR[preset]
    by_kind = {
        kind.name: {
            "sp_over_pp": ratios(cells, kind.name, kind.against),
            "sp_over_tp_no_p2p": ratios(cells, kind.name + NO_P2P, tensor + NO_P2P),
            "sp_over_tp": ratios(cells, kind.name, tensor),
            "law_share": shares(cells, kind.name, steps, "full"),
            "law_share_bare": shares(cells, kind.name, steps, "bare"),
            "sp_over_pp_no_p2p": ratios(cells, kind.name + NO_P2P, kind.against + NO_P2P),
        }
        for kind in KINDS[preset]
        if kind.is_sp
    }
    for fields in by_kind.values():
        fields["single_stream_speedup"] = fields["sp_over_pp"].get("1", {})
    if len(by_kind) == 1:
        off = {
            rows: by_p["None"]
            for kind in EXTRA[preset]
            if not kind.is_sp
            for rows, by_p in ratios(cells, kind.name, kind.against).items()
        }
        others = {
            f"{kind.name}_over_pp": found
            for kind in EXTRA[preset]
            if kind.is_sp and (found := ratios(cells, kind.name, kind.against))
        }
        return {**next(iter(by_kind.values())), "off_over_pp": off, **others}
    fields = {
        field: {kind: values[field] for kind, values in by_kind.items()}
        for field in next(iter(by_kind.values()))
    }
    for suffix in ("", NO_P2P):
        fields[f"best_sp_over_best_stock{suffix}"] = _best(preset, cells, suffix)
    return fields


def _best(preset: str, cells: Sequence[Cell], suffix: str) -> dict[str, float]:
    """By batch: the fastest SP kind at its own acceptance over the fastest stock kind."""
    best: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for kind in KINDS[preset]:
        for (rows, p), by_round in rates(cells, kind.name + suffix).items():
            if kind.is_sp and p not in kind.acceptance:
                continue
            rate = statistics.median(by_round.values())
            best[kind.is_sp][rows] = max(rate, best[kind.is_sp].get(rows, 0.0))
    return {
        str(rows): round(best[True][rows] / best[False][rows], 4)
        for rows in sorted(best[True])
        if rows in best[False]
    }


def verdict(preset: str, dims: str, summary: Mapping[str, Any]) -> dict[str, list]:
    """Wanted figures that were measured: [measured, wanted, whether it holds]."""
    found = {}
    for field, batch, p, wanted in WANTED.get((preset, dims), ()):
        value = summary.get(field, {}).get(batch)
        if isinstance(value, dict):
            value = value.get(p)
        if value is not None:
            name = " ".join(filter(None, (field, batch, p)))
            found[name] = [value, wanted, value >= wanted]
    return found


# -- for people ------------------------------------------------------------------------------------


def table(preset: str, kinds: Sequence[Kind], cells: Sequence[Cell], summary: Mapping) -> str:
    """Medians of tokens/s by batch, a column per engine and acceptance; then the ratios."""
    columns: list[tuple[str, str, float | None]] = []
    for kind in kinds:
        for p in sorted({p for _, p in rates(cells, kind.name)}, key=lambda p: p or 0):
            title = kind.name if p is None else f"{kind.name} p={p}"
            columns.append((title, kind.name, p))
    batches = sorted({cell["rows"] for cell in cells})
    body = []
    for rows in batches:
        line = [str(rows)]
        for _, engine, p in columns:
            by_round = rates(cells, engine).get((rows, p))
            line.append(f"{statistics.median(by_round.values()):.0f}" if by_round else "-")
        body.append(line)
    text = [
        "decode tokens/s, medians over rounds",
        *_aligned([["batch", *_titles(columns)], *body]),
    ]
    for field, values in summary.items():
        if values:
            text += ["", f"{field}:", *(f"  {line}" for line in _lines(values))]
    return "\n".join(text)


def _titles(columns: Sequence[tuple[str, str, float | None]]) -> list[str]:
    return [title for title, _, _ in columns]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]


def _lines(values: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in values.items():
        if not isinstance(value, dict):
            lines.append(f"{key}: {value:.3f}")
        elif value and all(isinstance(v, dict) for v in value.values()):
            lines += [f"{key} {line}" for line in _lines(value)]
        elif value:
            lines.append(f"{key}: " + "  ".join(f"p={p} {v:.3f}" for p, v in value.items()))
    return lines


def plot(
    title: str, kinds: Sequence[Kind], cells: Sequence[Cell], steps: Mapping[str, Any], path: str
) -> None:
    """Against the batch: throughput, SP over stock, and the share of the law's limit if known."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "spexis"  # the same picture gives the same file
    from matplotlib import pyplot as plt

    share = {kind.name: shares(cells, kind.name, steps, "full") for kind in kinds}
    panels = 3 if any(share.values()) else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.5 * panels, 4.5), layout="constrained")
    for kind in kinds:
        found = rates(cells, kind.name)
        style = "o-" if kind.is_sp else "o--"
        for p in sorted({p for _, p in found}, key=lambda p: p or 0):
            points = {
                rows: statistics.median(r.values()) for (rows, q), r in found.items() if q == p
            }
            label = kind.name if p is None else f"{kind.name} p={p}"
            (line,) = axes[0].plot(*_points(points), style, ms=3, label=label)
            of_p = {
                int(rows): by_p[str(p)] for rows, by_p in share[kind.name].items() if str(p) in by_p
            }
            if of_p:
                axes[2].plot(*_points(of_p), style, ms=3, color=line.get_color(), label=label)
    for label, values in _against_stock(kinds, cells):
        axes[1].plot(*_points(values), "o-", ms=3, label=label)
    names = ("decode tokens/s", "SP over stock", "share of the law's limit")
    for axis, name in zip(axes, names, strict=False):
        axis.set(xlabel="batch", ylabel=name, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    axes[0].set_title(title)
    for axis in axes[1:]:
        axis.axhline(1.0, color="#888888", lw=0.8)
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)
    plt.close(figure)


def _points(values: Mapping[int, float]) -> tuple[Sequence[int], Sequence[float]]:
    """Batches and values, in order."""
    return tuple(zip(*sorted(values.items()), strict=True))


def _against_stock(
    kinds: Sequence[Kind], cells: Sequence[Cell]
) -> Iterator[tuple[str, dict[int, float]]]:
    """(label, {batch: ratio}) of every kind of SP over stock with the same links."""
    for kind in kinds:
        if not kind.is_sp:
            continue
        for stock in (k.name for k in kinds if k.drafter is None and k.p2p == kind.p2p):
            found = ratios(cells, kind.name, stock)
            for p in sorted({p for by_p in found.values() for p in by_p}):
                values = {int(rows): by_p[p] for rows, by_p in found.items() if p in by_p}
                yield f"{kind.name.removesuffix(NO_P2P)} p={p} over {stock}", values


def main(argv: Sequence[str] | None = None) -> int:
    """Table and picture of a result file that a run has written."""
    parser = argparse.ArgumentParser(prog="python -m spexis.bench.gpu_report")
    parser.add_argument("file", help="JSON of `spexis bench --preset gpu2 | gpu4`")
    path = Path(parser.parse_args(argv).file)
    record = json.loads(path.read_text())
    preset, dims = record["settings"]["preset"], record["settings"]["model"]["name"]
    cells, steps = record["cells"], record["step_seconds"]
    names = {cell["engine"] for cell in cells}
    known = (*KINDS[preset], *EXTRA[preset])
    kinds = [k for base in known for k in (base, base.without_p2p()) if k.name in names]
    print(table(preset, kinds, cells, summarise(preset, cells, steps)))
    picture = str(path.with_suffix(".svg"))
    plot(f"{preset}, {dims} dimensions, random weights", kinds, cells, steps, picture)
    print(picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
