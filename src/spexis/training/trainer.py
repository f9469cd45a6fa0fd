# SPDX-License-Identifier: Apache-2.0
"""Trains several exit drafters on one forward pass of the frozen target.

Each drafter sees the restarts its own earlier mistakes would cause: which draft was wrong is kept
per token from the last time that token was seen (first epoch: at random), and decides whether a row
sees the final state of one or of two positions back.

Invariant: drafters never share a parameter or a gradient; training one alone gives the same result.
"""

import dataclasses
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import spexis
from spexis.drafters.exit.config import ExitConfig
from spexis.drafters.exit.module import ExitDrafter
from spexis.training.batches import Batch, epoch_batches, make_batch, prefetch
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.loss import draft_loss, teach
from spexis.training.optim import clip_each, make_optimizers
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


class Trainer:
    """The training loop, its checkpoints and its logs."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        store: TokenStore,
        vocab_ids: np.ndarray,  # [draft vocabulary] most frequent first
        train_rows: np.ndarray,
        holdout_rows: np.ndarray,
    ) -> None:
        self.config, self.target, self.store = config, target, store
        self.options, self.device = config.train, target.device
        self.train_rows, self.holdout_rows = train_rows, holdout_rows
        self.out = Path(config.output_dir)
        self.vocab_ids = torch.from_numpy(vocab_ids.astype(np.int64)).to(self.device)
        # The target's head with the draft vocabulary first: its prefix is every drafter's head.
        vocab = target.head.shape[0]
        order = torch.ones(vocab, dtype=torch.bool, device=self.device)
        order[self.vocab_ids] = False
        self.order = torch.cat([self.vocab_ids, order.nonzero()[:, 0]])
        self.head = target.head.detach()[self.order].contiguous()
        self.candidates = self.make_candidates()
        modules = [c.drafter for c in self.candidates]
        o = self.options
        self.optimizers = make_optimizers(modules, o.optimizer, o.lr, o.adamw_lr, o.weight_decay)
        self.base_lrs = [[g["lr"] for g in opt.param_groups] for opt in self.optimizers]
        self.step = self.epoch = self.batch_in_epoch = self.tokens_seen = self.answers_seen = 0
        self.seconds = 0.0
        self.rows_since_log, self.last_log = 0, 0.0
        self.board: Any = None

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

    def train_step(self, batch: Batch) -> None:
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
        if o.grad_clip:
            clip_each([c.drafter for c in self.candidates], o.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.batch_in_epoch += 1
        self.rows_since_log += count
        self.answers_seen += count
        self.tokens_seen += batch.ids.numel()

    def progress(self, total_batches: int) -> float:
        """How much of the run is done, by whichever limit is nearest to its end."""
        o = self.options
        shares = [self.step / max(1, total_batches)]
        if o.max_steps is not None:
            shares.append(self.step / o.max_steps)
        if o.max_seconds is not None:
            shares.append(self.seconds / o.max_seconds)
        return min(1.0, max(shares))

    def set_lr(self, done: float) -> float:
        """Linear warm-up, then a cosine down to final_lr."""
        o = self.options
        factor = o.final_lr + (1 - o.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
        factor *= min(1.0, (self.step + 1) / max(1, o.warmup_steps))
        for optimizer, lrs in zip(self.optimizers, self.base_lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * factor
        return factor

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> dict[str, float]:
        """Train to the end; returns the holdout acceptance of each drafter."""
        o = self.options
        lengths = np.diff(self.store.offsets)
        total = o.epochs * len(
            epoch_batches(lengths, self.train_rows, o.tokens_per_batch, self.config.seed, 0)
        )
        if o.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out / "tensorboard"))
        started, before = time.monotonic(), self.seconds
        saved = started
        bar = tqdm(total=1000, desc="train", unit="", mininterval=5, bar_format=BAR)
        while self.epoch < o.epochs and self.progress(total) < 1.0:
            batches = epoch_batches(
                lengths, self.train_rows, o.tokens_per_batch, self.config.seed, self.epoch
            )[self.batch_in_epoch :]
            for batch in prefetch(self.store, batches, self.device):
                done = self.progress(total)
                if done >= 1.0:
                    break
                factor = self.set_lr(done)
                self.train_step(batch)
                if self.step % o.log_every == 0:  # the .item() calls here wait for the device
                    text = self.log(factor, before + time.monotonic() - started)
                    bar.set_postfix_str(text)
                self.seconds = before + time.monotonic() - started
                bar.update(int(1000 * self.progress(total)) - bar.n)
                if self.step % o.eval_every == 0:
                    self.write("eval", self.evaluate_holdout())
                if time.monotonic() - saved > o.checkpoint_every_seconds:
                    self.save_checkpoint()
                    self.export(self.out / "drafters")
                    saved = time.monotonic()
            else:
                self.epoch += 1
                self.batch_in_epoch = 0
        bar.close()
        result = self.evaluate_holdout()
        self.write("final", result)
        self.save_checkpoint()
        if self.board is not None:
            self.board.close()
        return result

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
        return {name: round(a / max(1, b), 4) for name, (a, b) in kept.items()}

    # -- logs and checkpoints -----------------------------------------------------------------

    def log(self, lr_factor: float, seconds: float) -> str:
        """One row of metrics.jsonl; returns the progress bar's text."""
        rate = self.rows_since_log / max(1e-6, seconds - self.last_log)
        self.last_log = seconds
        values: dict[str, float] = {
            "lr_factor": round(lr_factor, 5),
            "answer_tokens_per_s": round(rate),
        }
        for c in self.candidates:
            values[f"loss/{c.name}"] = round(float(c.loss) / self.rows_since_log, 4)
            values[f"right/{c.name}"] = round(float(c.right) / self.rows_since_log, 4)
            c.loss = c.right = None
        self.rows_since_log = 0
        self.write("train", values)
        first = self.candidates[0].name
        return f"loss {values[f'loss/{first}']:.3f} right {values[f'right/{first}']:.3f}"

    def write(self, kind: str, values: dict[str, float]) -> None:
        """Append to metrics.jsonl, and to TensorBoard if asked."""
        row = {
            "kind": kind,
            "step": self.step,
            "epoch": self.epoch,
            "answer_tokens": self.answers_seen,
            "seconds": round(self.seconds, 1),
            **values,
        }
        with open(self.out / "metrics.jsonl", "a") as handle:
            handle.write(json.dumps(row) + "\n")
        if kind != "train":
            print(f"\n{kind} step {self.step}: {values}", file=sys.stderr, flush=True)
        if self.board is not None:
            for key, value in values.items():
                self.board.add_scalar(f"{kind}/{key}", value, self.step)

    def save_checkpoint(self) -> None:
        """Everything a resumed run needs, written aside and renamed into place."""
        state = {
            "drafters": {c.name: c.drafter.state_dict() for c in self.candidates},
            "wrong": {c.name: c.wrong for c in self.candidates},
            "optimizers": [opt.state_dict() for opt in self.optimizers],
            "counters": {k: getattr(self, k) for k in COUNTERS},
        }
        temporary = self.out / "checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(self.out / "checkpoint.pt")

    def resume(self) -> bool:
        """Continue from OUTPUT/checkpoint.pt if there is one."""
        path = self.out / "checkpoint.pt"
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        names = {c.name for c in self.candidates}
        tokens = {len(w) for w in state["wrong"].values()}
        if set(state["drafters"]) != names or tokens != {len(self.store.tokens)}:
            raise ValueError(f"{path} is of other drafters or data: choose another output_dir")
        for c in self.candidates:
            c.drafter.load_state_dict(state["drafters"][c.name])
            c.wrong.copy_(state["wrong"][c.name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for key in COUNTERS:
            setattr(self, key, state["counters"][key])
        self.last_log = self.seconds
        return True

    def export(self, folder: Path) -> dict[str, Path]:
        """Write every drafter in the folder format, in bfloat16."""
        paths = {}
        for c in self.candidates:
            c.drafter.config.save(folder / c.name, c.drafter.export(torch.bfloat16))
            paths[c.name] = folder / c.name
        return paths


COUNTERS = ("step", "epoch", "batch_in_epoch", "tokens_seen", "answers_seen", "seconds")
BAR = "{desc} {percentage:3.0f}%|{bar:20}| {elapsed}<{remaining} {postfix}"
