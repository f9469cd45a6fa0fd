# SPDX-License-Identifier: Apache-2.0
"""Configuration and folder format of a length predictor.

A predictor is a folder of two files, ``config.json`` and ``model.safetensors``:

    config = LengthConfig.load(folder)          # reads and checks config.json
    config.check_base(model_dir, exit_layer)    # refuses a predictor made for another model or exit
    tensors = config.load_tensors(folder)       # reads and checks model.safetensors

Invariant: every refusal is a ValueError of one line that says what to do.
"""

import dataclasses
import os

import torch

from spexis import weights_folder
from spexis.core.lengths import THRESHOLDS
from spexis.drafters.exit.config import fingerprint

FORMAT = "spexis-length-1"
WHAT = "length predictor"
NEVER = 1.0  # as a decision threshold: above every probability the module gives


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """Everything that training and serving must agree on about one predictor."""

    base_model: str  # name of the target, for people
    base_model_hash: str  # fingerprint() of the target, for machines
    exit_layer: int  # layers of the target below the exit = layers of the first stage
    num_hidden_layers: int  # layers of the target
    hidden_size: int
    rms_norm_eps: float
    width: int  # of the hidden layer
    max_answered: int  # longest answer it was trained on; later tokens count as that many
    thresholds: list[int]  # one head each: P(fewer than so many tokens remain)
    decisions: list[float]  # a head says yes from this probability on (NEVER: at none)
    min_precision: float  # the decisions were chosen for at least that on held-out prompts
    version: str
    weights_sha256: str = ""
    format: str = FORMAT

    def __post_init__(self) -> None:
        if tuple(self.thresholds) != THRESHOLDS:
            raise ValueError(
                f"length thresholds {self.thresholds} are not {list(THRESHOLDS)}: retrain or update"
            )
        if len(self.decisions) != len(THRESHOLDS) or not all(0 < d <= 1 for d in self.decisions):
            raise ValueError(f"decisions {self.decisions} must be five numbers in 0..1")
        if not 0 < self.exit_layer < self.num_hidden_layers:
            raise ValueError(
                f"exit_layer {self.exit_layer} must lie in 1..{self.num_hidden_layers - 1}"
            )
        for name in ("hidden_size", "width", "max_answered"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is too small")

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "LengthConfig":
        """Read config.json of a predictor folder."""
        return weights_folder.read_config(cls, folder, WHAT)

    def save(self, folder: str | os.PathLike, tensors: dict[str, torch.Tensor]) -> "LengthConfig":
        """Write both files; returns the config with the weights' hash filled in."""
        return weights_folder.write(self, folder, tensors, expected_shapes(self), WHAT)

    def load_tensors(self, folder: str | os.PathLike) -> dict[str, torch.Tensor]:
        """Read model.safetensors, checking its hash, names and shapes."""
        return weights_folder.read_tensors(self, folder, expected_shapes(self), WHAT)

    def check_base(
        self,
        model_dir: str | os.PathLike,
        exit_layer: int | None = None,  # layers of the first stage; None: not to be checked
        served_name: str | None = None,
    ) -> None:
        """Refuse the predictor if it was trained for another model or another exit."""
        name = served_name or model_dir
        if fingerprint(model_dir) != self.base_model_hash:
            raise ValueError(
                f"this length predictor belongs to {self.base_model}, not to {name}: "
                "train one with `spexis train length`"
            )
        if exit_layer is not None and exit_layer != self.exit_layer:
            raise ValueError(
                f"this length predictor reads layer {self.exit_layer}, but the first stage ends "
                f"after layer {exit_layer}: train one with length.exit_layers=[{exit_layer}]"
            )


def expected_shapes(config: LengthConfig) -> weights_folder.Shapes:
    """Names and shapes of model.safetensors."""
    heads = len(THRESHOLDS)
    return {
        "norm.weight": (config.hidden_size,),
        "inner.weight": (config.width, config.hidden_size),
        "inner.bias": (config.width,),
        "answered.weight": (config.width, 1),
        "heads.weight": (heads, config.width),
        "heads.bias": (heads,),
    }
