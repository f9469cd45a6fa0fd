# SPDX-License-Identifier: Apache-2.0
"""The file that `spexis profile` writes, read and checked: the one schema of measured times.

    file = ProfileFile.load("profile.json")
    file.stage_profile()             # for plan and simulate; p2p=False: without peer access
    file.model, file.device_memory   # presets.Model, bytes of a device (None on a CPU)

The keys are in docs/profile.md. Required are format, layers, points and head_seconds; a question
for another key that is missing is refused where it is asked. The placement and the GPU presets
read the same file through StageCurve.from_profile (stage_curve.py), which asks for these alone.

Invariant: what cannot be used is a ProfileError of one line that names the key and says what to
do. No torch, no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spexis.core.cost_model import CostModel
from spexis.core.presets import Model, vllm_all_reduce
from spexis.core.stage_profile import BLOCK_SIZE, ProfileError, StagePoints, StageProfile

FORMAT = "spexis-profile-1"
LAYER_SIZES = ("hidden_size", "intermediate_size", "vocab_size")  # what a layer's time hangs on
SIZES = (*LAYER_SIZES, "num_hidden_layers")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ProfileFile:
    path: str
    """Named in errors."""
    block: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | Path) -> ProfileFile:
        try:
            block = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(f"profile {path} cannot be read: {error}") from error
        return cls.of(block, Path(path).name)

    @classmethod
    def of(cls, block: Any, path: str = "profile") -> ProfileFile:
        """The file's content, checked as far as every reader needs it."""
        if not isinstance(block, Mapping):
            raise ProfileError(f"{path} is {type(block).__name__}: allowed is a JSON object")
        if block.get("format") != FORMAT:
            raise ProfileError(
                f"{path} has format {block.get('format')!r}, not {FORMAT!r}: write one with "
                "`spexis profile`"
            )
        file = cls(path, block)
        file._whole("layers")
        points = block.get("points")
        if not isinstance(points, list):
            raise ProfileError(f"{path}.points is missing: write the file with `spexis profile`")
        if not points:
            raise ProfileError(f"{path} has no points: measure again with a larger KV cache")
        for i, point in enumerate(points):
            at = f"{path}.points[{i}]"
            if not isinstance(point, Mapping):
                raise ProfileError(f"{at} is {point!r}: allowed is a JSON object")
            for key in ("rows", "context", "seconds"):
                _number(point.get(key), f"{at}.{key}")
        file.by_rows("head_seconds", required=True)
        file._check_optional()
        return file

    def _check_optional(self) -> None:
        """Types of what may be missing or null, so that no reader meets anything else."""
        for key in ("model", "hardware", "engine", "host_seconds", "link_seconds"):
            _object(self.block.get(key), f"{self.path}.{key}")
        hardware, engine = self.block.get("hardware") or {}, self.block.get("engine") or {}
        gpus = hardware.get("gpus") or []
        if not isinstance(gpus, list) or not all(isinstance(gpu, Mapping) for gpu in gpus):
            raise ProfileError(f"{self.path}.hardware.gpus: allowed is a list of JSON objects")
        sizes = engine.get("cudagraph_capture_sizes") or []
        sizes = sizes if isinstance(sizes, list) else [sizes]
        for value in (*sizes, engine.get("kv_tokens") or 1):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ProfileError(
                    f"{self.path}.engine has {value!r} among its graph sizes or as kv_tokens: "
                    "allowed are whole numbers above 0"
                )
        chunks = self.block.get("chunks") or []
        if not isinstance(chunks, list) or not all(isinstance(chunk, Mapping) for chunk in chunks):
            raise ProfileError(f"{self.path}.chunks: allowed is a list of JSON objects")
        for i, chunk in enumerate(chunks):
            for key in ("tokens", "seconds"):
                _number(chunk.get(key), f"{self.path}.chunks[{i}].{key}")
        for rows, times in (self.block.get("host_seconds") or {}).items():
            at = f"{self.path}.host_seconds.{rows}"
            _object(times, at)
            _number((times or {}).get("scheduler"), f"{at}.scheduler")
        for key, link in (self.block.get("link_seconds") or {}).items():
            _object(link, f"{self.path}.link_seconds.{key}")

    def by_rows(self, key: str, required: bool = False) -> tuple[tuple[int, float], ...]:
        """((rows, seconds), ...) by rows of a key like head_seconds; () where it is null."""
        return _by_rows(self.block.get(key), f"{self.path}.{key}", required)

    # -- what was measured on ----------------------------------------------------------------------

    @property
    def model(self) -> Model:
        block = self.block.get("model")
        if not isinstance(block, Mapping):
            raise ProfileError(f"{self.path}.model is missing: the dimensions of the model")
        try:
            return Model.from_config(str(block.get("name", "")), block)
        except ValueError as error:
            raise ProfileError(f"{self.path}.model: no dense decoder's config: {error}") from error

    def check_model(self, config: Any, keys: Sequence[str] = SIZES) -> None:
        """Refuse the file for a model of other sizes; config: as transformers reads config.json.

        A size that either of them does not state is not compared.
        """
        for key in keys:
            there, here = (self.block.get("model") or {}).get(key), getattr(config, key, None)
            if there is not None and here is not None and there != here:
                raise ProfileError(
                    f"{self.path} is of another model ({key} is {there} there and {here} here): "
                    "measure this one with `spexis profile`"
                )

    @property
    def device_memory(self) -> float | None:
        """Bytes of one device; None where the file names none (a CPU)."""
        sizes = [str(gpu.get("memory.total", "")).split() for gpu in self._gpus()]
        whole = [s for s in sizes if len(s) == 2 and s[0].isdecimal() and s[1] == "MiB"]
        found = [float(s[0]) * MIB for s in whole]
        return min(found) if found else None

    # -- as the cost model wants it ----------------------------------------------------------------

    def stage_profile(self, p2p: bool = True) -> StageProfile:
        """The pipeline of such stages that holds the whole model.

        p2p: with peer access between the devices, or by "no_p2p" of link_seconds. A CPU has one
        kind of link.
        """
        block, layers = self.block, self._whole("layers")
        model, engine = block.get("model") or {}, block.get("engine") or {}
        total = model.get("num_hidden_layers")
        if not isinstance(total, int) or total < 1:
            raise ProfileError(f"{self.path}.model.num_hidden_layers is {total!r}: not a number")
        stages, rest = divmod(total, layers)
        send, reduce, by = self._links(p2p)
        tensor = self._whole("tensor_parallel_size", 1)
        points = tuple(
            sorted((p["rows"], float(p["context"]), p["seconds"]) for p in block["points"])
        )
        chunks = sorted((c["tokens"], c["seconds"]) for c in block.get("chunks") or [])
        host = {
            rows: times["scheduler"] for rows, times in (block.get("host_seconds") or {}).items()
        }
        kv_tokens = engine.get("kv_tokens")
        return StageProfile(
            hardware=self._hardware(),
            model=str(model.get("name", "")),
            source=f"{block.get('date', 'no date')}: {block.get('command', self.path)}",
            layers_per_stage=(layers,) * stages + ((rest,) if rest else ()),
            measured_layers=layers,
            tensor_parallel=tensor,
            stages=(
                StagePoints(
                    points=points,
                    graph_sizes=tuple(sorted(engine.get("cudagraph_capture_sizes") or ())),
                    prefill_points=tuple(chunks),
                ),
            ),
            head=self.by_rows("head_seconds"),
            drafter=self.by_rows("drafter_seconds"),
            hidden_link=send,
            # A stage of several devices was measured with its all-reduces in it.
            all_reduce=reduce if tensor == 1 else (),
            all_reduce_by=by,
            host=_by_rows(host, f"{self.path}.host_seconds"),
            host_overlaps=bool(engine.get("async_scheduling")),
            kv_blocks=kv_tokens // BLOCK_SIZE if kv_tokens else None,
        )

    def cost_model(self, num_stages: int, tensor_parallel_size: int = 1) -> CostModel:
        """Step times of so many stages; ProfileError where this profile cannot say."""
        profile = self.stage_profile()
        if (profile.num_stages, profile.tensor_parallel) != (num_stages, tensor_parallel_size):
            split = profile.split(num_stages, tensor_parallel_size)
            if split is None:
                raise ProfileError(
                    f"{self.path} has no times for {num_stages} stages of {tensor_parallel_size} "
                    "ranks; profile one such stage (spexis profile)"
                )
            profile = split
        return CostModel.from_profile(profile)

    def _links(self, p2p: bool) -> tuple[tuple, tuple, str]:
        """(send, all-reduce, whose all-reduce)"""
        links = self.block.get("link_seconds") or {}
        link = links.get("gloo") or links.get("p2p" if p2p else "no_p2p") or {}
        at = f"{self.path}.link_seconds"
        send = _by_rows(link.get("send"), f"{at}.send")
        by_vllm = _by_rows(link.get("tp_all_reduce"), f"{at}.tp_all_reduce")
        if by_vllm:
            return send, by_vllm, "vllm"
        by_torch = _by_rows(link.get("all_reduce"), f"{at}.all_reduce")
        if p2p and by_torch and self._has_peer_access(links):
            assumed = vllm_all_reduce(self._devices()[0], self.model.hidden, by_torch)
            if assumed:
                return send, assumed, "preset"
        return send, by_torch, "torch" if by_torch else ""

    def _has_peer_access(self, links: Mapping[str, Any]) -> bool:
        """NCCL is much faster with it at the most rows, where links are what counts."""
        near, far = (
            _by_rows((links.get(key) or {}).get("all_reduce"), f"{self.path}.link_seconds.{key}")
            for key in ("p2p", "no_p2p")
        )
        return bool(near and far and self._devices()) and near[-1][1] < 0.5 * far[-1][1]

    def _devices(self) -> list[str]:
        return [gpu.get("name", "GPU") for gpu in self._gpus()]

    def _gpus(self) -> list[Mapping[str, Any]]:
        return (self.block.get("hardware") or {}).get("gpus") or []

    def _hardware(self) -> str:
        return ", ".join(self._devices()) or str((self.block.get("hardware") or {}).get("cpu", ""))

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self.block.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProfileError(f"{self.path}.{key} is {value!r}: allowed is a whole number above 0")
        return value


def _by_rows(value: Any, path: str, required: bool = False) -> tuple[tuple[int, float], ...]:
    if not value and not required:
        return ()
    if not isinstance(value, Mapping) or not value:
        raise ProfileError(f"{path} is {value!r}: allowed is an object of seconds by rows")
    for rows, seconds in value.items():
        if not str(rows).isdecimal():
            raise ProfileError(f"{path} has a key {rows!r}: allowed are numbers of rows")
        _number(seconds, f"{path}.{rows}")
    return tuple(sorted((int(rows), seconds) for rows, seconds in value.items()))


def _object(value: Any, path: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ProfileError(f"{path} is {value!r}: allowed is a JSON object")


def _number(value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ProfileError(f"{path} is {value!r}: allowed is a number, 0 or more")
