# SPDX-License-Identifier: Apache-2.0
"""The drafter's part of the V2 runner: eager or as a CUDA graph, and what memory it takes.

Mixed into SpexisV2Mixin, on the first stage. DrafterMixin._draft_and_advance() is the step's
end: guesses for every row, and position, token and planned tokens of their slots advanced.

Invariants: eager and captured runs call the same drafter on the same rows; weights, keys and
values, activations and graphs of the drafter are inside vLLM's memory profile, since they are
allocated where vLLM measures (load_model, _dummy_run, the capture that vLLM's model states may
add to its own, KV cache layers); what each takes is logged at start.
"""

from contextlib import contextmanager

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

from spexis.drafters.base import DraftRows, Guesses
from spexis.engine import kernels
from spexis.engine.draft_graph import CudaGraphRecorder, DraftGraphs, decode_sizes, is_decode
from spexis.engine.kernels import RowBuffers

logger = init_logger("vllm.spexis.v2_drafter")

DRAFTER_PREFIX = "spexis_drafter."  # names of the drafter's attention layers begin so


class DrafterMixin:
    def init_drafter_rows(self) -> None:
        slots = self.num_slots
        self.rows = RowBuffers.allocate(slots, self.first_stage.dummy_slot, self.device)
        self.row_numbers = torch.arange(slots, device=self.device)  # [M] int64
        self.sent: torch.Tensor | None = None  # [2, R] int32, positions and tokens of the rows
        self.guess_positions: torch.Tensor | None = None  # [R] int64
        self.batch_desc = None  # how vLLM runs this step's batch; None in a dummy step
        self.drafter_bytes = {}  # what of the drafter -> bytes on this device

    # ---------------------------------------------------------------- hot path
    def _begin_rows(self, batch) -> None:
        self.sent, self.guess_positions = kernels.begin_rows(
            self.first_stage,
            batch.idx_mapping,
            batch.seq_lens,
            self.req_states.prefill_len.gpu,
            self.rows,
            batch.num_reqs_after_padding,
        )
        if self.chains is not None and batch.has_prefill:
            rows, count = self.rows, batch.num_reqs
            self.chains.begun(rows.slots[:count], rows.ends[:count], rows.is_prefill[:count])

    def _draft_and_advance(self) -> None:
        if (size := self._graph_size()) is not None:
            self.cudagraph_manager.spexis_draft_graphs.replay(size)
            return
        batch, guesses = self.execute_model_state.input_batch, self._draft()
        # Rows inside a prompt advance by their chunk; their guess is never looked at.
        self._advance(batch.idx_mapping, self.guess_positions, guesses)

    def _advance(
        self,
        slots: torch.Tensor,  # [R]; padded rows share the dummy slot, which nobody reads
        positions: torch.Tensor,  # [R] of the guesses
        guesses: Guesses,
    ) -> None:
        everyone = self.pp_handler.all_rows[: len(slots)]
        kernels.propose(self.first_stage, slots, positions, guesses.tokens, everyone)
        self.first_stage.confidence[slots.long()] = guesses.confidence
        if self.chains is not None:
            self.chains.guessed(slots.long(), positions, guesses.confidence)

    def _graph_size(self) -> int | None:
        """Rows of the drafter's graph for this step; None where it drafts eagerly."""
        desc, graphs = self.batch_desc, getattr(self.cudagraph_manager, "spexis_draft_graphs", ())
        if desc is None or desc.cg_mode != CUDAGraphMode.FULL or not is_decode(desc):
            return None
        return desc.num_tokens if desc.num_tokens in graphs else None

    def _draft(self) -> Guesses:
        """From the output that this step's forward left."""
        state, output, rows = self.execute_model_state, self.stage_output, self.rows
        batch = state.input_batch
        num_reqs = batch.num_reqs
        draft_rows = DraftRows(
            req_ids=batch.req_ids,
            slots=batch.idx_mapping,
            hidden_states=output["hidden_states"],
            residual=output["residual"],
            token_positions=batch.positions,
            last=batch.logits_indices,
            start=rows.start[:num_reqs],
            tokens=rows.tokens[:num_reqs],
            draft_positions=rows.ends[:num_reqs],
            is_prefill=rows.is_prefill[:num_reqs],
            has_prefill=batch.has_prefill,
        )
        with set_forward_context(
            state.attn_metadata,
            self.vllm_config,
            num_tokens=batch.num_tokens_after_padding,
            slot_mapping=state.slot_mappings_by_layer,
            is_padding=batch.is_padding,
        ):
            return self.spexis_drafter.propose(draft_rows)

    def _draft_decode_rows(
        self,
        num_rows: int,  # P, padded ones included
    ) -> None:
        """What a graph holds: reads and writes nothing but tensors that stay where they are.

        Runs inside a forward context.
        """
        rows, output = self.rows, self.cudagraph_manager.intermediate_tensors
        slots, ends = rows.slots[:num_rows], rows.ends[:num_rows]
        draft_rows = DraftRows(
            req_ids=(),
            slots=slots,
            hidden_states=output["hidden_states"][:num_rows],
            residual=output["residual"][:num_rows],
            token_positions=self.input_buffers.positions[:num_rows],
            last=self.row_numbers[:num_rows],
            start=rows.start[:num_rows],
            tokens=rows.tokens[:num_rows],
            draft_positions=ends,
            is_prefill=rows.is_prefill[:num_rows],
            has_prefill=False,
        )
        self._advance(slots, ends, self.spexis_drafter.propose(draft_rows))

    # ----------------------------------------------------------------- capture
    def plan_draft_graphs(self) -> None:
        """Joins vLLM's capture, at the place that it leaves for graphs of its model states."""
        if not self.spexis_config.draft_graphs or self.parallel_config.tensor_parallel_size > 1:
            return
        if not self.spexis_drafter.capturable:
            logger.info("Drafter %s cannot be captured; it runs eagerly", self.spexis_drafter.name)
            return
        inner = self.model_state.capture_inner_cudagraphs

        def capture(*args, **kwargs):
            inner(*args, **kwargs)
            self._capture_draft_graphs(*args, **kwargs)

        self.model_state.capture_inner_cudagraphs = capture

    def _capture_draft_graphs(self, input_buffers, block_tables, attn_groups, kv_cache_config):
        manager = self.cudagraph_manager
        sizes = decode_sizes(manager._capture_descs.get(CUDAGraphMode.FULL, ()))
        if not sizes or manager.intermediate_tensors is None:
            logger.info("No full decode graphs for the drafter's to join; it runs eagerly")
            return

        @contextmanager
        def dummy_batch(num_rows: int):
            self.rows.pad(self.first_stage.dummy_slot)
            metadata, slot_mappings = prepare_inputs_to_capture(
                num_rows,
                num_rows,
                self.model_state,
                input_buffers,
                block_tables,
                attn_groups,
                kv_cache_config,
                full_cudagraph=True,
                max_query_len=1,
            )
            input_buffers.is_padding.fill_(True)
            with set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=num_rows,
                slot_mapping=slot_mappings,
                is_padding=input_buffers.is_padding[:num_rows],
            ):
                yield

        pool = manager.pool  # not by the manager: it must end with vLLM's profiling, at once
        recorder = CudaGraphRecorder(lambda: capture_pool(pool, self.vllm_config))
        graphs = DraftGraphs(self._draft_decode_rows, recorder)
        free_before = torch.accelerator.get_memory_info()[0]
        with graph_capture(device=self.device):
            for num_rows in sizes:
                graphs.record(num_rows, dummy_batch)
        manager.spexis_draft_graphs = graphs
        taken = free_before - torch.accelerator.get_memory_info()[0]
        self.drafter_bytes["graphs"] = taken
        logger.info("Captured %d graphs of the drafter: %s GiB", len(graphs), format_gib(taken))

    # ------------------------------------------------------------------ memory
    def initialize_kv_cache(self, kv_cache_config, is_profiling: bool = False, *args, **kwargs):
        result = super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        if self.pp.is_first_rank and not is_profiling:
            layers = self.compilation_config.static_forward_context
            mine, total = kv_bytes(layers, DRAFTER_PREFIX), kv_bytes(layers)
            self.drafter_bytes["kv_cache"] = mine
            logger.info(
                "Drafter's share of this stage's memory: weights %s of %s GiB, keys and values "
                "%s of %s GiB",
                format_gib(self.drafter_bytes["weights"]),
                format_gib(self.model_memory_usage),
                format_gib(mine),
                format_gib(total),
            )
        return result


def kv_bytes(layers: dict, prefix: str = "") -> int:
    """Bytes of keys and values of the layers whose name begins so.

    layers: name -> layer, vLLM's static forward context; not all of them need have a cache.
    """
    caches = (
        getattr(layer, "kv_cache", None)
        for name, layer in layers.items()
        if name.startswith(prefix)
    )
    tensors = (
        c for cache in caches for c in (cache if isinstance(cache, list | tuple) else [cache])
    )
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
