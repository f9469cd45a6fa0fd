# SPDX-License-Identifier: Apache-2.0
"""Which length predictor an engine runs: from the setting and the served model to a folder.

    resolve("my/folder", model, first_layers=15)    # that one, or a ConfigError of one line
    resolve(None, model, first_layers=15)           # a shipped one that fits, or (None, why not)

Invariant: a predictor runs only on the weights and behind the layer that it was trained for. One
that was asked for is refused otherwise; one that was not is left out. Where the model's weights are
not on this machine yet, one that was asked for is compared by sizes here and by weights in the
workers, and none is taken unasked.
"""

from __future__ import annotations

from pathlib import Path

from spexis.config import ConfigError
from spexis.drafters import ServedModel, weights_fingerprint
from spexis.lengths import shipped
from spexis.lengths.config import LengthConfig

KEY = "spexis.length_predictor"


def resolve(asked: str | None, model: ServedModel, first_layers: int) -> tuple[Path | None, str]:
    """(folder, what to log): the folder is None where none fits and none was asked for.

    first_layers: layers on the first stage.
    """
    if asked is None:
        return _shipped_for(model, first_layers)
    folder = shipped().get(asked) or Path(asked).expanduser()
    try:
        config = LengthConfig.load(folder)
        config.load_tensors(folder)
    except (OSError, ValueError, TypeError) as err:
        names = ", ".join(shipped()) or "none"
        raise ConfigError(
            f"{KEY}: {err}; give a predictor's folder, the name of a shipped one ({names}), null, "
            "or false for none"
        ) from None
    if reason := mismatch(config, model, first_layers):
        raise ConfigError(f"{KEY}: {folder} does not fit {model.name}: {reason}")
    return folder.resolve(), f"length predictor {folder}"


def _shipped_for(model: ServedModel, first_layers: int) -> tuple[Path | None, str]:
    reasons = []
    for name, folder in shipped().items():
        config = LengthConfig.load(folder)
        reason = mismatch(config, model, first_layers)
        if reason is None and weights_fingerprint(model) is None:
            reason = f"the weights of {model.name} are not on this machine yet"
        if reason is None:
            return folder.resolve(), f"length predictor {name}"
        reasons.append(f"{name}: {reason}")
    return None, f"no length predictor ({'; '.join(reasons) or 'none ships'})"


def mismatch(config: LengthConfig, model: ServedModel, first_layers: int) -> str | None:
    """Why the predictor does not fit, or None."""
    for key in ("num_hidden_layers", "hidden_size"):
        theirs, ours = getattr(config, key), model.sizes.get(key)
        if ours is not None and theirs != ours:
            return f"made for {config.base_model}, {key} is {theirs} there and {ours} here"
    ours = weights_fingerprint(model)
    if ours is not None and ours != config.base_model_hash:
        return f"made for {config.base_model}, whose weights are others; `spexis train length`"
    if first_layers != config.exit_layer:
        return (
            f"it reads layer {config.exit_layer}, but the first stage ends after layer "
            f"{first_layers}; train one with length.exit_layers=[{first_layers}]"
        )
    return None
