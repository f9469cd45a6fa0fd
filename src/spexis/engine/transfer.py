# SPDX-License-Identifier: Apache-2.0
"""A stage's output to the next stage without a message that describes it (V2 runner).

    transfer = FixedTransfer.install(pp, schema, buffers, device)   once a model is loaded
    transfer.expect(num_tokens, num_rows)                            before each step, every stage

vLLM sends a pickled list of names, shapes and dtypes ahead of the tensors, and the receiver's
host waits for it. Both are known without: names, widths and dtypes from the model, the numbers
of tokens and rows from the step that the scheduler gave to every stage. So the receive is posted
before the sender has launched anything, into the tensors that the stage runs from (vLLM's own
copy into them then has nothing to do), and only tokens travel, no padding.

Takes the place of two methods of one object, the pipeline's GroupCoordinator, so vLLM's worker
stays as it is. On as long as `fixed_transfer` is not false and a stage is one device: with tensor
parallelism vLLM sends a part per rank and gathers, which stays vLLM's. Invariants: all stages use
it or none (agree); a tensor that is not as the schema says is refused, never sent.

Shapes: T tokens, R rows of the step, W the model's width.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

logger = logging.getLogger("vllm.spexis.transfer")

ROWS = "spexis_rows"  # [2, R] int32: position and input token of each row; more lines: v2_choice.py


@dataclass(frozen=True, slots=True)
class Schema:
    """What travels with every step, in this order: name -> (width, dtype) of its [T, W]."""

    tensors: tuple[tuple[str, int, torch.dtype], ...]

    @classmethod
    def of_model(cls, model, dtype: torch.dtype) -> "Schema":
        """model: vLLM's, on any stage; what one stage hands to the next has the same names.

        dtype: of its activations. Raises ValueError where one is not [tokens, width].
        """
        empty = model.make_empty_intermediate_tensors(
            batch_size=1, dtype=dtype, device=torch.device("cpu")
        )
        return cls.of_tensors(empty.tensors)

    @classmethod
    def of_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Schema":
        found = []
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor.dim() != 2:
                raise ValueError(f"{name} has {tensor.dim()} dimensions, not [tokens, width]")
            found.append((name, tensor.shape[1], tensor.dtype))
        return cls(tuple(found))

    def check(
        self, tensors: dict[str, torch.Tensor], num_tokens: int, num_rows: int, row_lines: int = 2
    ) -> None:
        """Raises ValueError unless the tensors are what the other side will wait for."""
        wanted = {name for name, _, _ in self.tensors} | {ROWS}
        if tensors.keys() != wanted:
            raise ValueError(f"stage output holds {sorted(tensors)}, not {sorted(wanted)}")
        for name, width, dtype in self.tensors:
            tensor = tensors[name]
            if tensor.shape[0] < num_tokens or tensor.shape[1:] != (width,):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, not [{num_tokens}, {width}]")
            if tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
        rows = tensors[ROWS]
        if rows.shape != (row_lines, num_rows) or rows.dtype != torch.int32:
            wanted = f"[{row_lines}, {num_rows}]"
            raise ValueError(f"{ROWS} is {tuple(rows.shape)} {rows.dtype}, not {wanted}")


class FixedTransfer:
    @classmethod
    def install(
        cls,
        group,
        schema: Schema,
        buffers: dict[str, torch.Tensor] | None,
        device: torch.device,
        row_lines: int = 2,
    ) -> "FixedTransfer":
        """group: the pipeline's GroupCoordinator. buffers: what this stage runs from, each
        [max tokens, W]; None on the first stage. row_lines: of ROWS."""
        transfer = cls(group, schema, buffers, device, row_lines)
        group.isend_tensor_dict = transfer.isend_tensor_dict
        group.irecv_tensor_dict = transfer.irecv_tensor_dict
        logger.info("Stages send %s without describing them", [n for n, *_ in schema.tensors])
        return transfer

    def __init__(self, group, schema, buffers, device, row_lines=2):
        self.row_lines = row_lines
        self.schema, self.buffers, self.device = schema, buffers, device
        # As vLLM does: tensors on the CPU have a group of their own.
        self.group = group.cpu_group if device.type == "cpu" else group.device_group
        rank, ranks = group.rank_in_group, group.ranks
        self.previous = ranks[rank - 1] if rank > 0 else None
        self.next = ranks[rank + 1] if rank + 1 < len(ranks) else None
        self.num_tokens = self.num_rows = 0
        self._sending: list[torch.Tensor] = []  # must live until the next step has waited

    def expect(self, num_tokens: int, num_rows: int) -> None:
        """What the coming step will send and receive: the same numbers on every stage."""
        self.num_tokens, self.num_rows = num_tokens, num_rows

    # -------------------------------------- in place of the GroupCoordinator's
    def isend_tensor_dict(
        self,
        tensor_dict: dict[str, torch.Tensor],
        dst: int | None = None,
        all_gather_group=None,
        all_gather_tensors: dict[str, bool] | None = None,
    ) -> list:
        """Handles as vLLM's worker wants them: it drops the first, that of the description."""
        self.schema.check(tensor_dict, self.num_tokens, self.num_rows, self.row_lines)
        tensors = [tensor_dict[name][: self.num_tokens] for name, _, _ in self.schema.tensors]
        tensors.append(tensor_dict[ROWS])
        self._sending = [tensor.contiguous() for tensor in tensors]
        works = [dist.isend(t, dst=self.next, group=self.group) for t in self._sending]
        return [None, *works]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group=None,
        all_gather_tensors: dict[str, bool] | None = None,
    ) -> tuple[dict[str, torch.Tensor], list, list[Callable[[], None]]]:
        """Tensors, handles to wait for before using them, and nothing to do afterwards.

        The tensors are whole buffers: rows from T on are those of earlier steps, and finite.
        """
        rows = torch.empty(self.row_lines, self.num_rows, dtype=torch.int32, device=self.device)
        received = {name: self.buffers[name] for name, _, _ in self.schema.tensors}
        parts = [buffer[: self.num_tokens] for buffer in received.values()]
        works = [dist.irecv(t, src=self.previous, group=self.group) for t in [*parts, rows]]
        return {**received, ROWS: rows}, works, []


def agree(group, schema: Schema | None) -> bool:
    """Whether every stage offers the same schema; None: this stage cannot. Asks all stages."""
    offers: list = [None] * group.world_size
    dist.all_gather_object(offers, schema, group=group.cpu_group)
    return offers[0] is not None and all(offer == offers[0] for offer in offers)
