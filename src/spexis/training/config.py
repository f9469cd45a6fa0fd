# SPDX-License-Identifier: Apache-2.0
"""The run file of `spexis train`: typed sections, strict keys, key=value overrides.

    config = RunConfig.load("run.yaml", ["train.max_seconds=600", "drafter.exit_layers=[15]"])

Invariant: a key that is not a field below is an error that names the allowed ones, and so is a
value of the wrong type; what a run used is dumped to OUTPUT/config.yaml.
"""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which prompts the model answers."""

    prompts: str = ""  # .jsonl or .json, optionally .gz; see training/data.py for the row shapes
    max_prompts: int | None = None  # the first so many after shuffling; null: all
    joined_prompts: int = 0  # extra prompts made by joining several: longer contexts
    max_len: int = 2048  # prompt and answer together; longer prompts are left out
    holdout: int = 400  # prompts kept out of training, for the accuracy printed while training


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """How the model answers them. Passes run in order until done or out of time."""

    # Each pass: temperature; opening: so many tokens at that temperature, then greedy (0: all of
    # the answer at that temperature); follow_up: second turns after the first pass's answers.
    passes: list[dict[str, Any]] = dataclasses.field(default_factory=lambda: [{"temperature": 0.0}])
    max_tokens: int = 512  # per answer
    shard_prompts: int = 2048  # answers per file; a file is the unit of resuming
    processes: int = 1  # engines side by side on one device
    max_num_seqs: int = 256  # per engine
    gpu_memory_utilization: float = 0.85  # of the device, all engines together
    enforce_eager: bool = False
    max_seconds: float | None = None  # no shard is begun after this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrafterGrid:
    """Drafters to train side by side on one forward pass of the target: all combinations."""

    exit_layers: list[int] = dataclasses.field(default_factory=lambda: [15])
    num_drafter_layers: list[int] = dataclasses.field(default_factory=lambda: [4])
    final_state_feature: list[bool] = dataclasses.field(default_factory=lambda: [True])
    hard_weight: list[float] = dataclasses.field(default_factory=lambda: [0.5])
    draft_vocab_size: int = 16384
    num_stages: int = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimisation. The schedule follows whichever limit is nearest to its end."""

    optimizer: str = "muon"  # muon for matrices with AdamW for the rest, or adamw for all
    lr: float = 0.003  # of muon's matrices, or of all with adamw
    adamw_lr: float = 0.001  # of the vectors beside muon
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # 0: off
    warmup_steps: int = 50
    final_lr: float = 0.02  # share of lr at the end of the cosine
    tokens_per_batch: int = 32768  # padded
    epochs: int = 1
    max_steps: int | None = None
    max_seconds: float | None = None  # wall clock, resumes included
    log_every: int = 20
    eval_every: int = 500
    checkpoint_every_seconds: float = 300.0
    device: str = "auto"
    tensorboard: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(OptimConfig):
    """How exit drafters are trained."""

    restart_rate: float = 0.35  # lag-1 rows in the first epoch; later ones replay own mistakes
    drop_state: float = 0.05  # sequences trained without the final-state feature
    loss_rows: int = 8192  # answer rows per chunk of the loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig(OptimConfig):
    """Length predictors of `spexis train length`, and how they are trained."""

    exit_layers: list[int] = dataclasses.field(default_factory=lambda: [15])  # one predictor each
    width: int = 128  # of the hidden layer
    min_precision: float = 0.75  # decisions: most recall with at least that, on held-out prompts
    optimizer: str = "adamw"
    lr: float = 0.001
    epochs: int = 3
    eval_every: int = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run."""

    model: str = ""  # folder or Hub name; "demo" is the packaged demo model
    name: str = "exit"  # prefix of the drafters' folder names
    output_dir: str = "runs/exit"
    seed: int = 0
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
    drafter: DrafterGrid = dataclasses.field(default_factory=DrafterGrid)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    length: LengthConfig = dataclasses.field(default_factory=LengthConfig)

    def __post_init__(self) -> None:
        if not self.model or not self.data.prompts:
            raise ValueError("the run file must set model and data.prompts")
        for name in ("train", "length"):
            kind = getattr(self, name).optimizer
            if kind not in ("muon", "adamw"):
                raise ValueError(f"{name}.optimizer {kind!r}: 'muon' or 'adamw'")
        if not 0 < self.length.min_precision < 1:
            raise ValueError(f"length.min_precision {self.length.min_precision}: between 0 and 1")
        for i, one in enumerate(self.generate.passes):
            allowed = {"temperature": float, "opening": int, "follow_up": bool, "seed": int}
            build_flat(allowed, one, f"generate.passes[{i}]")

    @classmethod
    def load(cls, path: str | None, overrides: list[str] | None = None) -> "RunConfig":
        """Defaults, then the YAML file, then key=value overrides."""
        import yaml

        tree: dict[str, Any] = {}
        if path is not None:
            if not Path(path).is_file():
                raise ValueError(f"no run file {path}")
            try:
                tree = yaml.safe_load(Path(path).read_text()) or {}
            except yaml.YAMLError as error:
                raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
            if not isinstance(tree, dict):
                raise ValueError(f"{path} must hold sections, not a {type(tree).__name__}")
        for item in overrides or []:
            key, sep, text = item.partition("=")
            if not sep:
                raise ValueError(f"override {item!r} is not key=value")
            node = tree
            *parents, leaf = key.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
                if not isinstance(node, dict):
                    raise ValueError(f"override {key}: {parent} is not a section")
            node[leaf] = yaml.safe_load(text)
        return build(cls, tree, "")

    def dump(self, path: Path) -> None:
        """Write the resolved configuration as YAML."""
        import yaml

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False))


def build(cls: type, tree: dict[str, Any], where: str) -> Any:
    """A config dataclass out of nested dicts; strict about names and types."""
    if not isinstance(tree, dict):
        raise ValueError(f"{where.rstrip('.')} is a section, not {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            raise ValueError(f"unknown key {where}{key}; allowed: {', '.join(hints)}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = build(hints[key], value, f"{where}{key}.")
        else:
            values[key] = check_type(value, hints[key], f"{where}{key}")
    return cls(**values)


def build_flat(allowed: dict[str, type], tree: Any, where: str) -> None:
    """Check a small dict against name -> type."""
    if not isinstance(tree, dict):
        raise ValueError(f"{where} must be a mapping, not {tree!r}")
    for key, value in tree.items():
        if key not in allowed:
            raise ValueError(f"unknown key {where}.{key}; allowed: {', '.join(allowed)}")
        check_type(value, allowed[key], f"{where}.{key}")


def check_type(value: Any, hint: Any, where: str) -> Any:
    """The value, if it fits the type hint; integers pass for floats."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (hint,) = (a for a in args if a is not type(None))
        return check_type(value, hint, where)
    if origin is list:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} must be a list with entries, not {value!r}")
        return [check_type(v, args[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a mapping, not {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} must be of type {hint.__name__}, not {value!r}")
    return value
