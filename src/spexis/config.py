# SPDX-License-Identifier: Apache-2.0
"""The `spexis` block of vLLM's `--additional-config`: strict, frozen, free of torch and vLLM.

    vllm serve MODEL --pipeline-parallel-size 2 \
        --additional-config '{"spexis": {"drafter": {"method": "exit"}}}'

Invariant: `SpexisConfig.from_dict(cfg.to_dict()) == cfg`, and `to_dict()` is plain JSON with a
stable order, because vLLM hashes `additional_config` into its compile-cache key. Whatever is not
understood is an error of one line that names the key, the value and what is allowed: a mistyped
option that is silently ignored would make a measurement wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CONFIG_KEY = "spexis"
MODES = ("sp", "sp-alpha", "pp", "auto")
SELECTIONS = ("stage", "scheduler")

# Keys of the drafter block, by method. Keys of other methods are refused rather than ignored.
DRAFTER_KEYS: dict[str, tuple[str, ...]] = {
    "exit": ("model", "draft_vocab_size"),
    "oracle": ("reference", "acceptance", "seed"),
    "synthetic": ("acceptance", "seed", "sharpness"),
    "none": (),
}


class ConfigError(ValueError):
    """A setting that Spexis refuses; the message is one line and says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Where the first stage's guesses come from."""

    method: str = "exit"
    """"exit": trained exit head; "oracle": a reference run; "synthetic": lossy; "none": off."""
    model: str | None = None
    """exit: drafter folder or shipped name; null takes the shipped one made for the model."""
    draft_vocab_size: int | None = None
    """exit: draft only among the model's most frequent tokens; null takes the folder's size."""
    reference: str | None = None
    """oracle: jsonl file of {"prompt_token_ids": [...], "token_ids": [...]} rows."""
    acceptance: float = 1.0
    """oracle, synthetic: probability that a draft is right, 0 to 1."""
    seed: int = 0
    """oracle, synthetic: seed of the choice which drafts are right."""
    sharpness: float | None = None
    """synthetic: drafts differ in how likely they are right and say so; small numbers: a lot (the
    `sharpness` of simulator/drafts.py); null: all alike."""

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own: everything but "synthetic"."""
        return self.method != "synthetic"

    @property
    def speculates(self) -> bool:
        """False for "none": every request runs at stock cadence."""
        return self.method != "none"

    @classmethod
    def from_dict(cls, block: Any, path: str = "spexis.drafter") -> DrafterConfig:
        block = _mapping(block, path)
        method = block.get("method", "exit")
        if not isinstance(method, str) or method not in DRAFTER_KEYS:
            raise ConfigError(_bad_choice(f"{path}.method", method, tuple(DRAFTER_KEYS)))
        allowed = ("method", *DRAFTER_KEYS[method])
        _known_keys(block, allowed, path, f' for method "{method}"')
        values = {key: _DRAFTER_FIELDS[key](block[key], f"{path}.{key}") for key in block}
        if method == "oracle" and not values.get("reference"):
            raise ConfigError(
                f'{path}.reference is missing: method "oracle" needs the jsonl file of a reference '
                "run, one {prompt_token_ids, token_ids} object a line"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        keys = ("method", *DRAFTER_KEYS[self.method])
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Which layers run on which stage. VLLM_PP_LAYER_PARTITION, where set, wins."""

    layers: tuple[int, ...] | None = None
    """Layers per stage, first stage first."""
    profile: str | None = None
    """File of `spexis profile`: the split with the fastest slowest stage by its times."""
    rows: int | None = None
    """profile: rows of a step to balance at; null takes the most that were measured."""
    drafter_seconds: float = 0.0
    """profile: what the drafter adds to a step of the first stage, in seconds."""

    @classmethod
    def from_dict(cls, block: Any, path: str = "spexis.placement") -> PlacementConfig | None:
        if block is None:
            return None
        block = _mapping(block, path)
        _known_keys(block, tuple(_PLACEMENT_FIELDS), path)
        values = {key: _PLACEMENT_FIELDS[key](block[key], f"{path}.{key}") for key in block}
        if (values.get("layers") is None) == (values.get("profile") is None):
            raise ConfigError(f"{path} is {dict(block)!r}: allowed is one of layers and profile")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": None if self.layers is None else list(self.layers),
            "profile": self.profile,
            "rows": self.rows,
            "drafter_seconds": self.drafter_seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SpexisConfig:
    """Everything a user can set; `{}` is a complete, sensible configuration."""

    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """The guesses of the first stage."""
    placement: PlacementConfig | None = None
    """Layers per stage; null leaves the split to the exit drafter, else to vLLM (even)."""
    mode: str = "sp"
    """"sp": every guess runs; "sp-alpha": those that pay; "pp": none; "auto": sp or pp, whichever
    was measured faster."""
    profile: str | None = None
    """sp-alpha: file of `spexis profile` for this model, from which a row's price is known."""
    selection: str | None = None
    """sp-alpha: "stage": the first stage chooses, by confidence (V1 runner); "scheduler": one step
    ahead by outcomes; null takes "stage" where it is possible."""
    lookahead: bool = False
    """Admit, hold and preempt by projected KV memory instead of by what fits now."""
    length_predictor: str | bool | None = None
    """lookahead: folder or shipped name; null takes a shipped one that fits, false none."""
    steps_in_flight: int | None = None
    """Steps handed to the pipeline at once, N to 2N for N stages; null leaves it to vLLM."""
    iteration_log: str | None = None
    """Write one JSON line per scheduler step to this file."""
    timeline_log: str | None = None
    """Write the begin and end of each step on each stage to files with this prefix."""
    fixed_transfer: bool = True
    """V2 runner: stages send tensors whose shapes both ends know, without describing them."""
    draft_graphs: bool = True
    """CUDA: the drafter runs as a CUDA graph on decode batches that vLLM runs as one."""

    @classmethod
    def from_dict(cls, block: Any, path: str = CONFIG_KEY) -> SpexisConfig:
        block = _mapping(block, path)
        _known_keys(block, tuple(_FIELDS), path)
        config = cls(**{key: _FIELDS[key](block[key], f"{path}.{key}") for key in block})
        if config.mode != "sp-alpha":
            for key in ("profile", "selection"):
                if getattr(config, key) is not None:
                    given = f"{path}.{key} is {getattr(config, key)!r}"
                    raise ConfigError(
                        f'{given} with mode "{config.mode}": allowed is null; it is for "sp-alpha"'
                    )
        elif config.profile is None:
            raise ConfigError(
                f'{path}.profile is missing: mode "sp-alpha" needs the file that `spexis profile '
                "MODEL` writes on this hardware"
            )
        if isinstance(config.length_predictor, str) and not config.lookahead:
            raise ConfigError(
                f"{path}.length_predictor is {config.length_predictor!r}, but only look-ahead asks "
                f"it: allowed are null and false unless {path}.lookahead is true"
            )
        return config

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> SpexisConfig | None:
        """The block of a VllmConfig (or EngineArgs), or None when Spexis was not asked for."""
        additional = getattr(vllm_config, "additional_config", None)
        if not isinstance(additional, dict) or CONFIG_KEY not in additional:
            return None
        return cls.from_dict(additional[CONFIG_KEY])

    def to_dict(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter.to_dict(),
            "placement": None if self.placement is None else self.placement.to_dict(),
            "mode": self.mode,
            "profile": self.profile,
            "selection": self.selection,
            "lookahead": self.lookahead,
            "length_predictor": self.length_predictor,
            "steps_in_flight": self.steps_in_flight,
            "iteration_log": self.iteration_log,
            "timeline_log": self.timeline_log,
            "fixed_transfer": self.fixed_transfer,
            "draft_graphs": self.draft_graphs,
        }


# -- checks of one value each: (value, path) -> value ---------------------------------------------


def _text_or_null(value: Any, path: str) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{path} is {value!r}: allowed are a non-empty string or null")


def _text_null_or_false(value: Any, path: str) -> str | bool | None:
    if value is None or value is False or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{path} is {value!r}: allowed are a non-empty string, null or false")


def _whole_or_null(value: Any, path: str) -> int | None:
    # bool is an int in Python; `true` as a number of steps is a mistake.
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ConfigError(f"{path} is {value!r}: allowed are a whole number above 0 or null")


def _whole(value: Any, path: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigError(f"{path} is {value!r}: allowed is a whole number, 0 or more")


def _yes_or_no(value: Any, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{path} is {value!r}: allowed are true and false")


def _share(value: Any, path: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ConfigError(f"{path} is {value!r}: allowed is a number from 0 to 1")


def _positive_or_null(value: Any, path: str) -> float | None:
    if value is None or (_seconds(value, path) > 0):
        return value
    raise ConfigError(f"{path} is {value!r}: allowed are a number above 0 or null")


def _layers_or_null(value: Any, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and value:
        return tuple(_whole_above_zero(item, path) for item in value)
    raise ConfigError(f"{path} is {value!r}: allowed are a list of layer counts or null")


def _whole_above_zero(value: Any, path: str) -> int:
    if _whole_or_null(value, path) is None:
        raise ConfigError(f"{path} holds {value!r}: allowed are whole numbers above 0")
    return value


def _seconds(value: Any, path: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise ConfigError(f"{path} is {value!r}: allowed is a number of seconds, 0 or more")


def _mode(value: Any, path: str) -> str:
    if isinstance(value, str) and value in MODES:
        return value
    raise ConfigError(_bad_choice(path, value, MODES))


def _selection(value: Any, path: str) -> str | None:
    if value is None or (isinstance(value, str) and value in SELECTIONS):
        return value
    raise ConfigError(_bad_choice(path, value, (*SELECTIONS, "null")))


def _method(value: Any, path: str) -> str:
    return value  # checked first, because it decides which keys are allowed


_Check = Callable[[Any, str], Any]

_DRAFTER_FIELDS: dict[str, _Check] = {
    "method": _method,
    "model": _text_or_null,
    "draft_vocab_size": _whole_or_null,
    "reference": _text_or_null,
    "acceptance": _share,
    "seed": _whole,
    "sharpness": _positive_or_null,
}

_PLACEMENT_FIELDS: dict[str, _Check] = {
    "layers": _layers_or_null,
    "profile": _text_or_null,
    "rows": _whole_or_null,
    "drafter_seconds": _seconds,
}

_FIELDS: dict[str, _Check] = {
    "drafter": DrafterConfig.from_dict,
    "placement": PlacementConfig.from_dict,
    "mode": _mode,
    "profile": _text_or_null,
    "selection": _selection,
    "lookahead": _yes_or_no,
    "length_predictor": _text_null_or_false,
    "steps_in_flight": _whole_or_null,
    "iteration_log": _text_or_null,
    "timeline_log": _text_or_null,
    "fixed_transfer": _yes_or_no,
    "draft_graphs": _yes_or_no,
}


def _mapping(block: Any, path: str) -> Mapping[str, Any]:
    if isinstance(block, Mapping):
        return block
    raise ConfigError(f"{path} is {block!r}: allowed is a JSON object, {{}} for the defaults")


def _known_keys(
    block: Mapping[str, Any], allowed: tuple[str, ...], path: str, of: str = ""
) -> None:
    for key in block:
        if key not in allowed:
            known = ", ".join(allowed)
            hint = _did_you_mean(key, allowed)
            raise ConfigError(
                f"{path}.{key} = {block[key]!r} is not an option{of}{hint}: allowed are {known}"
            )


def _bad_choice(path: str, value: Any, allowed: tuple[str, ...]) -> str:
    return f"{path} is {value!r}{_did_you_mean(value, allowed)}: allowed are {', '.join(allowed)}"


def _did_you_mean(word: Any, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(word), allowed, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
