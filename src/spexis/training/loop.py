# SPDX-License-Identifier: Apache-2.0
"""The loop of every training run: schedule, progress, metrics.jsonl, checkpoints, resuming.

    class Mine(TrainingLoop):        # see trainer.py (exit drafters), length_trainer.py
        def backward(self, batch): ...           one forward and backward pass of all modules
        def evaluate_holdout(self): ...          numbers for metrics.jsonl
        def log_values(self): ...                numbers since the last log
        def export(self, folder): ...            the folders that users get

Invariant: a resumed run takes the batch it would have taken next; several modules trained side by
side never share a parameter or a gradient.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from spexis.training.batches import Batch, epoch_batches, prefetch
from spexis.training.config import OptimConfig
from spexis.training.data import TokenStore
from spexis.training.optim import clip_each, make_optimizers
from spexis.training.target import Target

COUNTERS = ("step", "epoch", "batch_in_epoch", "tokens_seen", "answers_seen", "seconds")
BAR = "{desc} {percentage:3.0f}%|{bar:20}| {elapsed}<{remaining} {postfix}"


class TrainingLoop:
    """Trains some modules on batches of one token store."""

    def __init__(
        self,
        options: OptimConfig,
        seed: int,
        out: Path,  # metrics.jsonl, checkpoint.pt
        folders: Path,  # where the trained parts are written
        target: Target,
        store: TokenStore,
        train_rows: np.ndarray,
        holdout_rows: np.ndarray,
    ) -> None:
        self.options, self.seed, self.out, self.folders = options, seed, out, folders
        self.target, self.store, self.device = target, store, target.device
        self.train_rows, self.holdout_rows = train_rows, holdout_rows
        self.modules: dict[str, nn.Module] = {}
        self.step = self.epoch = self.batch_in_epoch = self.tokens_seen = self.answers_seen = 0
        self.seconds = 0.0
        self.rows_since_log, self.last_log = 0, 0.0
        self.board: Any = None
        self.out.mkdir(parents=True, exist_ok=True)

    def start(self, modules: dict[str, nn.Module]) -> None:
        """The modules to train, by name; called once by the subclass when they are made."""
        o, self.modules = self.options, modules
        self.optimizers = make_optimizers(
            list(modules.values()), o.optimizer, o.lr, o.adamw_lr, o.weight_decay
        )
        self.base_lrs = [[g["lr"] for g in opt.param_groups] for opt in self.optimizers]

    # -- what a subclass says -----------------------------------------------------------------

    def backward(self, batch: Batch) -> None:
        """Forward and backward pass of every module."""
        raise NotImplementedError

    def evaluate_holdout(self) -> dict[str, float]:
        """Numbers on held-out prompts, for metrics.jsonl."""
        raise NotImplementedError

    def log_values(self) -> tuple[dict[str, float], str]:
        """(numbers since the last log, the progress bar's text); begins to count anew."""
        raise NotImplementedError

    def export(self, folder: Path) -> dict[str, Path]:
        """Write every module in its folder format."""
        raise NotImplementedError

    def extra_state(self) -> dict[str, Any]:
        """What a resumed run needs beside modules, optimizers and counters: tensors, numbers."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """The same, back."""

    # -- one step -----------------------------------------------------------------------------

    def train_step(self, batch: Batch) -> None:
        """Gradients of all modules, then one update of each."""
        self.backward(batch)
        if self.options.grad_clip:
            clip_each(list(self.modules.values()), self.options.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.batch_in_epoch += 1
        self.rows_since_log += len(batch.rows)
        self.answers_seen += len(batch.rows)
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
        """Train to the end; returns the numbers on held-out prompts."""
        o = self.options
        lengths = np.diff(self.store.offsets)
        total = o.epochs * len(
            epoch_batches(lengths, self.train_rows, o.tokens_per_batch, self.seed, 0)
        )
        if o.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out / "tensorboard"))
        started, before = time.monotonic(), self.seconds
        saved = started
        bar = tqdm(total=1000, desc="train", unit="", mininterval=5, bar_format=BAR)
        while self.epoch < o.epochs and self.progress(total) < 1.0:
            batches = epoch_batches(
                lengths, self.train_rows, o.tokens_per_batch, self.seed, self.epoch
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
                    self.export(self.folders)
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

    # -- logs and checkpoints -----------------------------------------------------------------

    def log(self, lr_factor: float, seconds: float) -> str:
        """One row of metrics.jsonl; returns the progress bar's text."""
        rate = self.rows_since_log / max(1e-6, seconds - self.last_log)
        self.last_log = seconds
        values, text = self.log_values()
        rates = {"lr_factor": round(lr_factor, 5), "answer_tokens_per_s": round(rate)}
        self.rows_since_log = 0
        self.write("train", rates | values)
        return text

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
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "optimizers": [opt.state_dict() for opt in self.optimizers],
            "counters": {k: getattr(self, k) for k in COUNTERS},
            "tokens": len(self.store.tokens),
            "extra": self.extra_state(),
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
        mine = {name: module.state_dict() for name, module in self.modules.items()}
        same = state.get("tokens") == len(self.store.tokens)
        if not same or _shapes(state["modules"]) != _shapes(mine):
            raise ValueError(f"{path} is of another run or data: choose another output_dir")
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.load_extra_state(state["extra"])
        for key in COUNTERS:
            setattr(self, key, state["counters"][key])
        self.last_log = self.seconds
        return True


def _shapes(modules: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Size]]:
    return {name: {key: t.shape for key, t in state.items()} for name, state in modules.items()}
