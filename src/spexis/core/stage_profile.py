# SPDX-License-Identifier: Apache-2.0
"""The times from which every decision is priced, as one JSON file.

load() also takes what `spexis profile` writes (one stage, docs/profile.md), from_measurement().

    profile = StageProfile.load("h200-llama70b.json")
    profile.save("copy.json")

Schema "spexis-profile/1" (times in seconds, sizes in bytes; * = required):

    schema*             "spexis-profile/1"
    hardware*, model*   free text; source: how and when it was measured
    layers_per_stage*   layers of each pipeline stage, first to last
    tensor_parallel     ranks that share one stage (default 1)
    stages*             one entry a stage, or one entry that holds for all of them:
        points*         [rows, kv_tokens_per_row, seconds] of one decode step of the stage's layers,
                        without head, drafter and links
        graph_sizes     captured CUDA graph sizes: a decode step of fewer rows is padded up to one.
                        Absent: nothing is padded
        prefill_points  [query_tokens, seconds] of a prompt chunk alone; absent: the decode curve is
                        continued with the slope of its last segment
        kv_seconds_per_token   where all points have one context length
    head_seconds        output head and sampling on the last stage, a step
    drafter_seconds     drafter on the first stage, a step
    hidden_link         [rows, seconds] of the hidden states' way to the next stage
    all_reduce          [rows, seconds] of one all-reduce within a stage, where `points` hold none
    host_seconds        host work a step that no stage hides: it lies on the way from a verdict to
                        the first stage's next step
    kv_blocks, block_size, kv_bytes_per_token      the KV cache of one stage's rank

Invariant: `StageProfile.from_dict(p.to_dict()) == p`; what is not understood is a ProfileError of
one line. No torch, no vLLM, no numpy: also the tool that writes the file can import this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spexis.config import ConfigError

SCHEMA = "spexis-profile/1"
MEASURED_FORMAT = "spexis-profile-1"  # of `spexis profile`


class ProfileError(ConfigError):
    """A profile that cannot be used; the message is one line and names the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePoints:
    """Measured times of one stage's layers."""

    points: tuple[tuple[int, float, float], ...]
    """(rows, KV tokens a row, seconds), by rows."""
    graph_sizes: tuple[int, ...] = ()
    """Captured sizes, ascending."""
    prefill_points: tuple[tuple[int, float], ...] = ()
    """(query tokens, seconds), by tokens."""
    kv_seconds_per_token: float | None = None
    """Seconds one KV token adds to a step; None: from points of different context lengths."""

    @classmethod
    def from_dict(cls, block: Any, path: str) -> StagePoints:
        block = _known(block, cls, path)
        points = _rows(block.get("points"), 3, f"{path}.points", required=True)
        sizes = block.get("graph_sizes", ())
        if not isinstance(sizes, list | tuple) or any(
            not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in sizes
        ):
            raise ProfileError(
                f"{path}.graph_sizes is {sizes!r}: allowed are whole numbers above 0"
            )
        return cls(
            points=tuple(sorted((int(r), float(k), float(s)) for r, k, s in points)),
            graph_sizes=tuple(sorted(set(sizes))),
            prefill_points=tuple(
                sorted(
                    (int(q), float(s))
                    for q, s in _rows(block.get("prefill_points"), 2, f"{path}.prefill_points")
                )
            ),
            kv_seconds_per_token=_number_or_none(
                block.get("kv_seconds_per_token"), f"{path}.kv_seconds_per_token"
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    hardware: str
    model: str
    layers_per_stage: tuple[int, ...]
    stages: tuple[StagePoints, ...]
    source: str = ""
    tensor_parallel: int = 1
    head_seconds: float = 0.0
    drafter_seconds: float = 0.0
    hidden_link: tuple[tuple[float, float], ...] = ()
    all_reduce: tuple[tuple[float, float], ...] = ()
    host_seconds: float = 0.0
    kv_blocks: int | None = None
    block_size: int = 16
    kv_bytes_per_token: int | None = None

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @classmethod
    def from_dict(cls, block: Any, path: str = "profile") -> StageProfile:
        if not isinstance(block, Mapping):
            raise ProfileError(f"{path} is {type(block).__name__}: allowed is a JSON object")
        if block.get("format") == MEASURED_FORMAT:
            block = from_measurement(block)
        if block.get("schema") != SCHEMA:
            raise ProfileError(f'{path}.schema is {block.get("schema")!r}: allowed is "{SCHEMA}"')
        block = _known({k: v for k, v in block.items() if k != "schema"}, cls, path)
        for key in ("hardware", "model", "layers_per_stage", "stages"):
            if not block.get(key):
                raise ProfileError(f"{path}.{key} is missing")
        layers = tuple(_whole(n, f"{path}.layers_per_stage") for n in block["layers_per_stage"])
        stages = tuple(
            StagePoints.from_dict(stage, f"{path}.stages[{i}]")
            for i, stage in enumerate(block["stages"])
        )
        if len(stages) not in (1, len(layers)):
            raise ProfileError(
                f"{path}.stages has {len(stages)} entries for {len(layers)} stages: "
                "allowed are one for each, or one for all"
            )
        values: dict[str, Any] = {"layers_per_stage": layers, "stages": stages}
        for key in ("hardware", "model", "source"):
            values[key] = str(block.get(key, ""))
        for key in ("head_seconds", "drafter_seconds", "host_seconds"):
            values[key] = _number_or_none(block.get(key, 0.0), f"{path}.{key}") or 0.0
        for key in ("hidden_link", "all_reduce"):
            rows = _rows(block.get(key), 2, f"{path}.{key}")
            values[key] = tuple(sorted((float(r), float(s)) for r, s in rows))
        for key, default in (("tensor_parallel", 1), ("block_size", 16)):
            values[key] = _whole(block.get(key, default), f"{path}.{key}")
        for key in ("kv_blocks", "kv_bytes_per_token"):
            value = block.get(key)
            values[key] = None if value is None else _whole(value, f"{path}.{key}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, in the order of the fields."""
        return {"schema": SCHEMA, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def load(cls, path: str | Path) -> StageProfile:
        try:
            block = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(f"profile {path} cannot be read: {error}") from error
        return cls.from_dict(block, Path(path).name)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def from_measurement(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The block of a StageProfile from the file that `spexis profile` writes (docs/profile.md).

    One stage was measured: all stages have its times, as many stages as the model's layers fill.
    Head, drafter and host time are those at the most rows; links without peer access only if no
    others were measured.
    """
    layers, total = measured["layers"], measured["model"]["num_hidden_layers"]
    stages = [layers] * (total // layers) + ([total % layers] if total % layers else [])
    links = measured["link_seconds"] or {}
    link = links.get("p2p") or links.get("gloo") or links.get("no_p2p") or {}
    head, host = measured["head_seconds"], measured["host_seconds"] or {}
    drafter = measured.get("drafter_seconds") or {}
    hardware = measured["hardware"]
    return {
        "schema": SCHEMA,
        "hardware": ", ".join(gpu["name"] for gpu in hardware["gpus"]) or hardware["cpu"],
        "model": measured["model"]["name"],
        "source": f"{measured['date']}: {measured['command']}",
        "layers_per_stage": stages,
        "tensor_parallel": measured["tensor_parallel_size"],
        "stages": [
            {
                "points": [[p["rows"], p["context"], p["seconds"]] for p in measured["points"]],
                "graph_sizes": measured["engine"]["cudagraph_capture_sizes"],
            }
        ],
        "head_seconds": head[max(head, key=int)] if head else 0.0,
        "drafter_seconds": drafter[max(drafter, key=int)] if drafter else 0.0,
        "host_seconds": host[max(host, key=int)]["scheduler"] if host else 0.0,
        "hidden_link": [[int(rows), s] for rows, s in link.get("send", {}).items()],
    }


# -- checks of one value each ----------------------------------------------------------------------


def _known(block: Any, cls: type, path: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping):
        raise ProfileError(f"{path} is {block!r}: allowed is a JSON object")
    names = [f.name for f in fields(cls)]
    for key in block:
        if key not in names:
            raise ProfileError(f"{path}.{key} is not known: allowed are {', '.join(names)}")
    return block


def _rows(value: Any, width: int, path: str, required: bool = False) -> Sequence[Sequence[float]]:
    if value is None and not required:
        return ()
    good = isinstance(value, list | tuple) and (value or not required)
    if not good or any(
        not isinstance(row, list | tuple)
        or len(row) != width
        or any(isinstance(x, bool) or not isinstance(x, int | float) or x < 0 for x in row)
        for row in value
    ):
        raise ProfileError(f"{path} is not a list of {width} numbers each, 0 or more")
    return value


def _number_or_none(value: Any, path: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ProfileError(f"{path} is {value!r}: allowed is a number, 0 or more")
    return float(value)


def _whole(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"{path} is {value!r}: allowed is a whole number above 0")
    return value
