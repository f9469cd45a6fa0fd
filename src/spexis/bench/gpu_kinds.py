# SPDX-License-Identifier: Apache-2.0
"""Which engines the GPU presets compare, and what is wanted of them.

    KINDS["gpu2"]                     sp2, pp2, tp2
    engines_of("gpu2", "both", None)  with and without peer access between the devices

Invariant: within a preset all kinds use the same number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spexis.config import ConfigError

NO_P2P = "_no_p2p"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    name: str
    stages: int
    tensor: int
    drafter: str | None = None
    """Method: "synthetic" is SP, "none" Spexis with speculation off, None stock vLLM."""
    acceptance: tuple[float, ...] = ()
    """sp: acceptances to measure unless asked otherwise."""
    against: str | None = None
    """sp: the stock pipeline of the same shape."""
    p2p: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    """The rest of the spexis block."""

    @property
    def is_sp(self) -> bool:
        return self.drafter == "synthetic"

    @property
    def selects(self) -> bool:
        """It leaves out drafts, for which it must know what steps take."""
        return self.settings.get("mode") == "sp-alpha"

    def without_p2p(self) -> Kind:
        return replace(self, name=self.name + NO_P2P, p2p=False)


KINDS: dict[str, tuple[Kind, ...]] = {
    "gpu2": (
        Kind(
            name="sp2",
            stages=2,
            tensor=1,
            drafter="synthetic",
            acceptance=(0.596, 0.7, 0.785, 0.88),
            against="pp2",
        ),
        Kind(name="pp2", stages=2, tensor=1),
        Kind(name="tp2", stages=1, tensor=2),
    ),
    "gpu4": (
        Kind(
            name="sp4",
            stages=4,
            tensor=1,
            drafter="synthetic",
            acceptance=(0.634,),
            against="pp4",
        ),
        Kind(
            name="sp2tp2",
            stages=2,
            tensor=2,
            drafter="synthetic",
            acceptance=(0.785,),
            against="tp2pp2",
        ),
        Kind(name="pp4", stages=4, tensor=1),
        Kind(name="tp2pp2", stages=2, tensor=2),
        Kind(name="tp4", stages=1, tensor=4),
    ),
}
# Run only where --engines names them.
EXTRA: dict[str, tuple[Kind, ...]] = {
    "gpu2": (
        Kind(name="off2", stages=2, tensor=1, drafter="none", against="pp2"),
        *(
            Kind(
                name=name,
                stages=2,
                tensor=1,
                drafter="synthetic",
                acceptance=(0.596, 0.785),
                against="pp2",
                settings=settings,
            )
            for name, settings in (
                ("auto2", {"mode": "auto"}),  # needs --warm of some hundred tokens
                ("described2", {"fixed_transfer": False}),
                # Needs --step-times, and --warm too.
                ("alpha2", {"mode": "sp-alpha", "selection": "scheduler"}),
                ("device2", {"mode": "sp-alpha", "selection": "stage"}),
            )
        ),
    ),
    "gpu4": (),
}
TENSOR = {"gpu2": "tp2", "gpu4": "tp4"}  # the stock kind without stages
BATCHES = {"gpu2": (1, 16, 32, 64, 96, 128, 192, 256), "gpu4": (1, 32, 64, 128, 256)}

# (preset, dimensions): (field of the result, batch, acceptance or None, lowest wanted value).
WANTED: dict[tuple[str, str], tuple[tuple[str, str, str | None, float], ...]] = {
    ("gpu2", "l70"): (
        ("sp_over_pp", "64", "0.785", 1.50),
        ("sp_over_pp", "128", "0.785", 1.40),
        ("sp_over_tp_no_p2p", "64", "0.785", 1.20),
        ("sp_over_tp_no_p2p", "128", "0.785", 1.34),
        ("sp_over_tp", "64", "0.88", 1.00),
        ("sp_over_tp", "128", "0.88", 1.00),
        ("law_share", "64", "0.785", 0.95),
        ("law_share", "128", "0.785", 0.95),
        ("law_share_bare", "64", "0.785", 0.92),
        ("law_share_bare", "128", "0.785", 0.92),
        ("sp_over_pp", "1", "0.785", 1.60),
        *(("off_over_pp", str(batch), None, 0.98) for batch in BATCHES["gpu2"]),
    ),
    ("gpu4", "l70"): tuple(
        ("best_sp_over_best_stock_no_p2p", batch, None, 1.34) for batch in ("64", "128")
    ),
}


def engines_of(preset: str, p2p: str, names: Sequence[str] | None) -> list[Kind]:
    """Engines to start, in order. names: exactly these; else by p2p: "on", "off" or "both".

    "both" leaves the stock pipelines without peer access out: two hidden-state messages a step
    cost a pipeline little on any link.
    """
    kinds = KINDS[preset]
    known = (*kinds, *EXTRA[preset])
    every = {kind.name: kind for kind in (*known, *(k.without_p2p() for k in known))}
    if names:
        unknown = [name for name in names if name not in every]
        if unknown:
            raise ConfigError(f"--engines {unknown[0]}: allowed are {', '.join(every)}")
        return [every[name] for name in names]
    off = [kind.without_p2p() for kind in kinds]
    if p2p == "off":
        return off
    if p2p == "on":
        return list(kinds)
    return [*kinds, *(k for k in off if k.is_sp or k.stages == 1)]
