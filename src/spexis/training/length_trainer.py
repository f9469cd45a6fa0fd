# SPDX-License-Identifier: Apache-2.0
"""Trains length predictors, one for each exit layer, on the lower layers of the frozen target.

Plain binary cross-entropy, no reweighting, so that probabilities mean what they say; the decision
of each head is chosen afterwards, on one half of the held-out prompts, and measured on the other.

Invariant: a predictor sees only what the first stage knows when it serves the row: the state at the
exit and how many tokens were answered.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch

import spexis
from spexis.core.lengths import THRESHOLDS
from spexis.lengths.config import NEVER, LengthConfig
from spexis.lengths.module import LengthPredictor, length_loss
from spexis.training.batches import Batch, epoch_batches
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.length_data import Limits, labels, predict, shares
from spexis.training.length_scores import Scores, choose_decisions
from spexis.training.loop import TrainingLoop
from spexis.training.target import Target


def halves(store: TokenStore, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Held-out rows (to choose decisions on, to measure on), split by prompt."""
    prompts = np.unique(store.prompt_index[rows])
    first = np.isin(store.prompt_index[rows], prompts[::2])
    return rows[first], rows[~first]


class LengthTrainer(TrainingLoop):
    """Length predictors: their set-up, loss and evaluation. The loop itself is loop.py."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        store: TokenStore,
        train_rows: np.ndarray,
        holdout_rows: np.ndarray,
    ) -> None:
        out = Path(config.output_dir)
        super().__init__(
            config.length,
            config.seed,
            out / "length",
            out / "predictors",
            target,
            store,
            train_rows,
            holdout_rows,
        )
        self.config, self.limits = config, Limits.of(config)
        self.choose_rows, self.measure_rows = halves(store, holdout_rows)
        if not len(self.choose_rows) or not len(self.measure_rows):
            raise ValueError(
                "no held-out answers to choose decisions on: raise data.holdout or add prompts"
            )
        torch.manual_seed(config.seed)
        self.predictors = self.make_predictors()
        self.scores: dict[str, Scores] = {}
        self.decisions = {name: [NEVER] * len(THRESHOLDS) for name in self.predictors}
        self.losses = {name: torch.zeros((), device=self.device) for name in self.predictors}
        self.known = torch.zeros((), device=self.device)  # tokens times heads since the last log
        # Every token weighs the same, in whatever batch it stands: losses are sums over a batch,
        # brought near one by the mean number of answer rows.
        batches = epoch_batches(
            np.diff(store.offsets), train_rows, config.length.tokens_per_batch, config.seed, 0
        )
        answers = (np.diff(store.offsets) - store.prompt_lens)[train_rows]
        self.mean_rows = max(1.0, float(answers.sum()) / max(1, len(batches)))
        self.start(dict(self.predictors))

    def make_predictors(self) -> dict[str, LengthPredictor]:
        """One for each exit layer, begun at the shares of the training answers."""
        start = torch.from_numpy(shares(self.store, self.train_rows, self.limits))
        predictors = {}
        for exit_layer in self.config.length.exit_layers:
            predictor = LengthPredictor(
                LengthConfig(
                    base_model=Path(self.target.folder).name,
                    base_model_hash=self.target.hash,
                    exit_layer=exit_layer,
                    num_hidden_layers=self.target.facts["num_hidden_layers"],
                    hidden_size=self.target.facts["hidden_size"],
                    rms_norm_eps=self.target.facts["rms_norm_eps"],
                    width=self.config.length.width,
                    max_answered=self.limits.max_tokens,
                    thresholds=list(THRESHOLDS),
                    decisions=[NEVER] * len(THRESHOLDS),
                    min_precision=self.config.length.min_precision,
                    version=spexis.__version__,
                )
            )
            predictor.start_at(start)
            predictors[f"{self.config.name}-length{exit_layer}"] = predictor.to(self.device)
        return predictors

    def backward(self, batch: Batch) -> None:
        """Forward of the target's lower layers once, then each predictor."""
        states, _ = self.target.states(batch.ids, self.config.length.exit_layers)
        facts = labels(batch, self.limits)
        for name, predictor in self.predictors.items():
            h = states[predictor.config.exit_layer].flatten(0, 1)[batch.rows]
            loss = length_loss(predictor.log_alive(h, facts.answered), facts.ended, facts.known)
            (loss / (self.mean_rows * len(THRESHOLDS))).backward()
            self.losses[name] += loss.detach()
        self.known += facts.known.sum()

    def log_values(self) -> tuple[dict[str, float], str]:
        """Mean cross-entropy of a head, by predictor."""
        values, known = {}, max(1.0, float(self.known))
        for name, total in self.losses.items():
            values[f"loss/{name}"] = round(float(total) / known, 5)
            total.zero_()
        self.known.zero_()
        return values, f"loss {next(iter(values.values())):.4f}"

    def evaluate_holdout(self) -> dict[str, float]:
        """Choose decisions on one half, measure precision, recall, calibration on the other."""
        found = predict(
            self.target,
            self.predictors,
            self.store,
            self.holdout_rows,
            self.limits,
            self.options.tokens_per_batch,
        )
        values: dict[str, float] = {}
        for name, predictions in found.items():
            chosen = predictions.of(self.choose_rows)
            decisions = choose_decisions(chosen, self.config.length.min_precision)
            scores = Scores.of(predictions.of(self.measure_rows), decisions)
            self.decisions[name], self.scores[name] = decisions, scores
            for kind in ("precision", "recall", "calibration_error"):
                for m, value in getattr(scores, kind).items():
                    if value is not None:
                        values[f"{kind}{m}/{name}"] = value
        return values

    def export(self, folder: Path) -> dict[str, Path]:
        """Write every predictor in the folder format, in float32: they are small."""
        paths = {}
        for name, predictor in self.predictors.items():
            config = dataclasses.replace(predictor.config, decisions=self.decisions[name])
            config.save(folder / name, predictor.state_dict())
            paths[name] = folder / name
        return paths
