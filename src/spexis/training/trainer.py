# SPDX-License-Identifier: Apache-2.0
"""Trains several exit drafters on one forward pass of the frozen target.

Each drafter sees the restarts its own earlier mistakes would cause: which draft was wrong is kept
per token from the last time that token was seen (first epoch: at random), and decides whether a row
sees the final state of one or of two positions back.

Invariant: drafters never share a parameter or a gradient; training one alone gives the same result.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spexis
from spexis.drafters.exit.config import ExitConfig
from spexis.drafters.exit.module import ExitDrafter
from spexis.training.batches import Batch, epoch_batches, make_batch
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.loop import TrainingLoop
from spexis.training.loss import draft_loss, teach
from spexis.training.simulate import serve_drafts, state_lags
from spexis.training.target import Target


@dataclasses.dataclass(slots=True)
class Candidate:
    """One drafter in training."""

    name: str
    drafter: ExitDrafter
    hard_weight: float
    wrong: torch.Tensor  # [tokens of the store] uint8: the last draft for this token was wrong
    loss: torch.Tensor | None = None  # sums since the last log
    right: torch.Tensor | None = None


class Trainer(TrainingLoop):
    """Exit drafters: their set-up, loss and evaluation. The loop itself is loop.py."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        store: TokenStore,
        vocab_ids: np.ndarray,  # [draft vocabulary] most frequent first
        train_rows: np.ndarray,
        holdout_rows: np.ndarray,
    ) -> None:
        out = Path(config.output_dir)
        super().__init__(
            config.train,
            config.seed,
            out,
            out / "drafters",
            target,
            store,
            train_rows,
            holdout_rows,
        )
        self.config = config
        self.acceptance: dict[str, float] = {}
        """Of each drafter, when last looked at."""
        self.vocab_ids = torch.from_numpy(vocab_ids.astype(np.int64)).to(self.device)
        # The target's head with the draft vocabulary first: its prefix is every drafter's head.
        vocab = target.head.shape[0]
        order = torch.ones(vocab, dtype=torch.bool, device=self.device)
        order[self.vocab_ids] = False
        self.order = torch.cat([self.vocab_ids, order.nonzero()[:, 0]])
        self.head = target.head.detach()[self.order].contiguous()
        self.candidates = self.make_candidates()
        self.start({c.name: c.drafter for c in self.candidates})

    # -- set-up -------------------------------------------------------------------------------

    def make_candidates(self) -> list[Candidate]:
        """All combinations of the grid, started from the target's own weights."""
        grid = self.config.drafter
        scales = self.residual_scale(grid.exit_layers)
        combos = itertools.product(
            grid.exit_layers, grid.num_drafter_layers, grid.final_state_feature, grid.hard_weight
        )
        generator = torch.Generator().manual_seed(self.config.seed)
        first_guess = torch.rand(len(self.store.tokens), generator=generator)
        first_guess = (first_guess < self.options.restart_rate).to(torch.uint8)
        candidates = []
        for exit_layer, layers, state, hard in combos:
            drafter = ExitDrafter(
                ExitConfig(
                    base_model=Path(self.target.folder).name,
                    base_model_hash=self.target.hash,
                    exit_layer=exit_layer,
                    num_stages=grid.num_stages,
                    num_drafter_layers=layers,
                    final_state_feature=state,
                    draft_vocab_size=len(self.vocab_ids),
                    tied_head=self.target.tied,
                    version=spexis.__version__,
                    **self.target.facts,
                )
            ).to(self.device)
            drafter.draft_vocab_ids.copy_(self.vocab_ids)
            drafter.init_from_target(self.target.model, scales[exit_layer])
            if not self.target.tied:
                drafter.lm_head.requires_grad_(False)
            name = f"{self.config.name}-exit{exit_layer}-k{layers}"
            name += "" if state else "-nostate"
            name += f"-hw{hard:g}" if len(grid.hard_weight) > 1 else ""
            wrong = first_guess.to(self.device, copy=True)
            candidates.append(Candidate(name, drafter, hard, wrong))
        return candidates

    def residual_scale(self, exit_layers: list[int]) -> dict[int, float]:
        """RMS of the residual stream at each exit, over a few sequences' answers."""
        batch = make_batch(self.store, self.train_rows[:8], self.device)
        states, _ = self.target.states(batch.ids, exit_layers)
        return {
            n: float(h.flatten(0, 1)[batch.rows].float().pow(2).mean().sqrt())
            for n, h in states.items()
        }

    # -- one step -----------------------------------------------------------------------------

    def backward(self, batch: Batch) -> None:
        """Forward of the target once, then forward, backward of each drafter."""
        o, grid = self.options, self.config.drafter
        states, final = self.target.states(batch.ids, grid.exit_layers)
        width, size = batch.ids.shape[1], len(self.vocab_ids)
        final_rows = final.flatten(0, 1)[batch.rows]
        places = batch.places.flatten()[batch.rows] + 1  # of the drafted tokens
        next_ids = batch.ids.flatten()[batch.rows + 1]
        teachers = [teach(part, self.head, size) for part in final_rows.split(o.loss_rows)]
        count = len(batch.rows)
        weight = torch.full((count,), 1.0 / count, device=self.device)
        q = torch.arange(width, device=self.device)[None]
        inside = q < batch.length[:, None]
        dropped = torch.rand(len(batch.length), 1, device=self.device) < o.drop_state
        for c in self.candidates:
            wrong = c.wrong[batch.places].bool() & inside & (q >= batch.prompt_len[:, None])
            lag = state_lags(wrong, batch.prompt_len).masked_fill(dropped, 0)
            with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
                out = c.drafter(states[c.drafter.config.exit_layer], final, lag)
            rows = out.flatten(0, 1)[batch.rows].to(self.head.dtype)
            total, drafts = rows.new_zeros((), dtype=torch.float32), []
            chunks = zip(rows.split(o.loss_rows), teachers, weight.split(o.loss_rows), strict=True)
            for part, teacher, w in chunks:
                loss, draft = draft_loss(part, self.head[:size], teacher, w, c.hard_weight)
                total = total + loss
                drafts.append(draft)
            total.backward()
            missed = self.vocab_ids[torch.cat(drafts)] != next_ids
            c.wrong[places] = missed.to(torch.uint8)
            right = count - missed.sum()
            c.loss = total.detach() * count + (0 if c.loss is None else c.loss)
            c.right = right + (0 if c.right is None else c.right)

    @torch.no_grad()
    def evaluate_holdout(self) -> dict[str, float]:
        """Acceptance by simulated serving on held-out prompts, for each drafter."""
        lengths = np.diff(self.store.offsets)
        kept = {c.name: [0, 0] for c in self.candidates}
        if not len(self.holdout_rows):
            return {}
        size = len(self.vocab_ids)
        for rows in epoch_batches(
            lengths, self.holdout_rows, self.options.tokens_per_batch, self.config.seed, 0
        ):
            batch = make_batch(self.store, rows, self.device)
            states, final = self.target.states(batch.ids, self.config.drafter.exit_layers)
            for c in self.candidates:
                with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
                    drafts = serve_drafts(
                        c.drafter,
                        self.head[:size],
                        states[c.drafter.config.exit_layer],
                        final,
                        batch.ids,
                        batch.prompt_len,
                        batch.length,
                        max_passes=12,
                    )
                kept[c.name][0] += int(drafts.accepted.sum())
                kept[c.name][1] += len(drafts.accepted)
        self.acceptance = {name: round(a / max(1, b), 4) for name, (a, b) in kept.items()}
        return self.acceptance

    # -- logs, checkpoints, folders ------------------------------------------------------------

    def log_values(self) -> tuple[dict[str, float], str]:
        """Loss and share of right drafts, by drafter."""
        values = {}
        for c in self.candidates:
            values[f"loss/{c.name}"] = round(float(c.loss) / self.rows_since_log, 4)
            values[f"right/{c.name}"] = round(float(c.right) / self.rows_since_log, 4)
            c.loss = c.right = None
        first = self.candidates[0].name
        return values, f"loss {values[f'loss/{first}']:.3f} right {values[f'right/{first}']:.3f}"

    def extra_state(self) -> dict[str, Any]:
        """Which drafts were wrong."""
        return {c.name: c.wrong for c in self.candidates}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """The same, back."""
        for c in self.candidates:
            c.wrong.copy_(state[c.name])

    def export(self, folder: Path) -> dict[str, Path]:
        """Write every drafter in the folder format, in bfloat16."""
        paths = {}
        for c in self.candidates:
            config = dataclasses.replace(c.drafter.config, acceptance=self.acceptance.get(c.name))
            config.save(folder / c.name, c.drafter.export(torch.bfloat16))
            paths[c.name] = folder / c.name
        return paths
