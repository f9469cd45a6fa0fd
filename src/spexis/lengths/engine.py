# SPDX-License-Identifier: Apache-2.0
"""The length predictor inside vLLM: on the stage behind the first one.

    predictor = StagePredictor.load(runner)            # None where this stage runs none
    rows = predictor.read(hidden, residual, last, answered)       # before this stage's layers run
    ends = predictor.ends(rows)                        # [R, 5], whenever there is time

It reads what the first stage hands on, and that lies on the second stage at the start of its step:
nothing more has to be sent, nothing kept by request, and no row's hand-on waits for it. With tensor
parallelism every rank holds the whole state and computes the same.

Invariant: the numbers are those of lengths/module.py; nothing here waits for a device, and nothing
that a token depends on is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.utils import get_pp_indices

from spexis.drafters import served_by_vllm
from spexis.lengths.config import LengthConfig
from spexis.lengths.module import LengthPredictor, load_predictor
from spexis.lengths.resolve import mismatch


@dataclass(slots=True)
class ExitRows:
    """What the predictor reads of one step; R requests, H hidden size."""

    states: torch.Tensor  # [R, H] float32, the residual stream of each row's last token
    answered: torch.Tensor  # [R] tokens of the answer up to and with that token


class StagePredictor:
    @classmethod
    def load(cls, runner) -> StagePredictor | None:
        """For the second stage of an engine whose configuration names a predictor's folder.

        Raises ValueError, one line, if it was made for other weights: only here are they certain to
        be on this machine.
        """
        folder = runner.spexis_config.length_predictor
        if not isinstance(folder, str) or runner.pp.rank_in_group != 1:
            return None
        config, model = LengthConfig.load(folder), runner.model_config
        num_layers = model.get_total_num_hidden_layers()
        first_layers = get_pp_indices(num_layers, 0, runner.pp.world_size)[1]
        if reason := mismatch(config, served_by_vllm(model), first_layers):
            raise ValueError(f"length predictor {folder}: {reason}")
        return cls(load_predictor(folder).to(runner.device))

    def __init__(self, predictor: LengthPredictor):
        self.predictor = predictor.requires_grad_(False)

    def read(
        self,
        hidden_states: torch.Tensor,  # [T, H] as received, with residual: the stream
        residual: torch.Tensor,  # [T, H]
        last: torch.Tensor,  # [R] index of each row's last token
        answered: torch.Tensor,  # [R]
    ) -> ExitRows:
        """A copy, since the layers may work on what was received in place."""
        return ExitRows(hidden_states[last].float() + residual[last].float(), answered)

    def ends(self, rows: ExitRows) -> torch.Tensor:
        """[R, 5] float32 P(fewer than lengths.THRESHOLDS tokens remain)."""
        return self.predictor(rows.states, rows.answered)
