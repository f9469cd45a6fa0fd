# SPDX-License-Identifier: Apache-2.0
"""Batches of similar length, built ahead of the step that needs them.

Invariant: the order of an epoch follows from (seed, epoch) alone, so a resumed run continues with
the batch it would have taken next.
"""

import dataclasses
import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch

from spexis.training.data import TokenStore

PAD_TO = 32


@dataclasses.dataclass(slots=True)
class Batch:
    """One padded batch on the device."""

    ids: torch.Tensor  # [batch, length] int64, padded with 0
    places: torch.Tensor  # [batch, length] int64 index into the store's flat tokens
    prompt_len: torch.Tensor  # [batch]
    length: torch.Tensor  # [batch]
    rows: torch.Tensor  # [answer rows] int64 index into the flattened [batch * length]


def epoch_batches(
    lengths: np.ndarray, rows: np.ndarray, tokens_per_batch: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Store rows of each batch: similar lengths together, batches in random order."""
    rng = np.random.default_rng([seed, epoch])
    rows = rng.permutation(rows)
    # A little noise mixes the neighbours from epoch to epoch.
    rows = rows[np.argsort(lengths[rows] * rng.uniform(0.93, 1.07, len(rows)), kind="stable")]
    batches, start = [], 0
    while start < len(rows):
        end, longest = start, 0
        while end < len(rows):
            longest = max(longest, padded(int(lengths[rows[end]])))
            if end > start and longest * (end - start + 1) > tokens_per_batch:
                break
            end += 1
        batches.append(rows[start:end])
        start = end
    return [batches[i] for i in rng.permutation(len(batches))]


def padded(length: int) -> int:
    """Length after padding."""
    return -(-length // PAD_TO) * PAD_TO


def make_batch(store: TokenStore, rows: np.ndarray, device: torch.device) -> Batch:
    """Pad the store's rows and send them to the device."""
    starts = store.offsets[rows]
    length = store.offsets[rows + 1] - starts
    prompt_len = store.prompt_lens[rows].astype(np.int64)
    width = padded(int(length.max()))
    q = np.arange(width)[None]
    places = np.minimum(starts[:, None] + q, len(store.tokens) - 1)
    ids = np.where(q < length[:, None], store.tokens[places], 0).astype(np.int64)
    answer = (q >= prompt_len[:, None] - 1) & (q <= length[:, None] - 2)

    def send(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor

    return Batch(
        ids=send(ids),
        places=send(places),
        prompt_len=send(prompt_len),
        length=send(length),
        rows=send(np.flatnonzero(answer)),
    )


def prefetch(
    store: TokenStore, batches: list[np.ndarray], device: torch.device, depth: int = 4
) -> Iterator[Batch]:
    """make_batch in a thread, a few steps ahead."""
    if device.type != "cuda":
        yield from (make_batch(store, rows, device) for rows in batches)
        return
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def fill() -> None:
        try:
            for rows in batches:
                item = make_batch(store, rows, device)
                while not stop.is_set():
                    try:
                        ready.put(item, timeout=0.2)
                        break
                    except queue.Full:
                        continue
                if stop.is_set():
                    return
            ready.put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            ready.put(error)

    threading.Thread(target=fill, daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
