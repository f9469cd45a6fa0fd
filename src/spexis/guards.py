# SPDX-License-Identifier: Apache-2.0
"""Version and source guards: Spexis overrides private parts of vLLM, so it runs on known ones only.

    check_version()              refuses an untested vLLM (SPEXIS_ALLOW_UNTESTED=1 warns instead)
    check_sources("scheduler")   refuses when an overridden symbol is gone or takes other arguments

Each process checks the symbols it uses, where they are imported anyway: the front end "frontend",
the engine core "scheduler", the workers "runner_v1" or "runner_v2". Invariant: a version number
alone is not trusted, since builds of one version differ; a changed signature is refused even there.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os

from spexis.config import ConfigError

TESTED = frozenset({"0.32.0"})
ALLOW_ENV = "SPEXIS_ALLOW_UNTESTED"

# Symbol -> its leading parameters. Overriding functions pass the rest through.
SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "frontend": {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config": (
            "self",
            "usage_context",
            "headless",
        ),
        "vllm.distributed.utils:get_pp_indices": ("num_hidden_layers", "pp_rank", "pp_size"),
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__": (
            "self",
            "vllm_config",
            "engine_idxs",
        ),
        "vllm.v1.metrics.loggers:StatLoggerBase.record": (
            "self",
            "scheduler_stats",
            "iteration_stats",
            "mm_cache_stats",
            "engine_idx",
        ),
    },
    "scheduler": {
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self", "throttle_prefills"),
        "vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed": ("self", "request"),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": (
            "self",
            "scheduler_output",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
            "self",
            "scheduler_output",
            "model_runner_output",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats": ("self", "spec_decoding_stats"),
        "vllm.v1.core.sched.scheduler:Scheduler.has_finished_requests": ("self",),
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("self", "request"),
        "vllm.v1.core.sched.scheduler:Scheduler._free_request": ("self", "request"),
        "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": ("self",),
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
            "self",
            "request",
            "num_new_tokens",
        ),
    },
    "runner_v1": {
        "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "req_id_to_index", "sampled_token_ids"),
        **{
            f"vllm.v1.worker.gpu_model_runner:GPUModelRunner.{name}": ("self", *parameters)
            for name, parameters in {
                "execute_model": ("scheduler_output", "intermediate_tensors"),
                "sample_tokens": ("grammar_output",),
                "_update_states": ("scheduler_output",),
                "_determine_batch_execution_and_padding": ("num_tokens", "num_reqs"),
                "_get_slot_mappings": (
                    "num_tokens_padded",
                    "num_reqs_padded",
                    "num_tokens_unpadded",
                ),
                "_build_attention_metadata": ("num_tokens", "num_reqs", "max_query_len"),
                "_model_forward": ("input_ids", "positions", "intermediate_tensors"),
                "_get_cumsum_and_arange": ("num_tokens",),
                "_get_prompt_logprobs_dict": ("hidden_states", "num_scheduled_tokens"),
            }.items()
        },
    },
    "runner_v2": {
        **{
            f"vllm.v1.worker.gpu.model_runner:GPUModelRunner.{name}": ("self", *parameters)
            for name, parameters in {
                "execute_model": ("scheduler_output", "intermediate_tensors", "dummy_run"),
                "sample_tokens": ("grammar_output",),
                "sample": ("hidden_states", "input_batch", "grammar_output"),
                "prepare_inputs": ("scheduler_output", "batch_req_state", "batch_desc"),
                "initialize_kv_cache": ("kv_cache_config", "is_profiling"),
                "add_requests": ("scheduler_output",),
                "finish_requests": ("scheduler_output",),
                "update_pp_decode_requests": (),
                "postprocess_num_computed_tokens": ("input_batch",),
                "postprocess_sampled": ("idx_mapping", "sampled_tokens", "num_sampled"),
                "_dummy_run": ("num_tokens",),
            }.items()
        },
        "vllm.v1.worker.gpu_worker:Worker.execute_model": ("self", "scheduler_output"),
        "vllm.v1.worker.gpu_worker:Worker.sleep": ("self",),
        "vllm.v1.worker.gpu_worker:Worker.profile": ("self",),
        "vllm.v1.worker.worker_base:WorkerBase.synchronize_device": ("self",),
        "vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict": (
            "self",
            "tensor_dict",
            "dst",
            "all_gather_group",
            "all_gather_tensors",
        ),
        "vllm.distributed.parallel_state:GroupCoordinator.irecv_tensor_dict": (
            "self",
            "src",
            "all_gather_group",
            "all_gather_tensors",
        ),
        "vllm.v1.worker.gpu.model_states.interface:ModelState.capture_inner_cudagraphs": (
            "self",
            "input_buffers",
            "block_tables",
            "attn_groups",
            "kv_cache_config",
        ),
        "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture": (
            "num_reqs",
            "num_tokens",
            "model_state",
            "input_buffers",
            "block_tables",
            "attn_groups",
            "kv_cache_config",
            "full_cudagraph",
            "max_query_len",
        ),
        "vllm.compilation.cudagraph_pool:capture_pool": ("pool", "vllm_config"),
        "vllm.distributed.parallel_state:graph_capture": ("device",),
        "vllm.v1.worker.gpu.input_batch:prepare_pos_seq_lens": (
            "idx_mapping",
            "query_start_loc",
            "num_computed_tokens",
            "pos",
            "seq_lens",
        ),
        "vllm.v1.worker.gpu.input_batch:combine_sampled_and_draft_tokens": (
            "input_ids",
            "idx_mapping",
            "last_sampled_tokens",
            "query_start_loc",
            "seq_lens",
            "prefill_len",
            "draft_tokens",
            "cu_num_logits",
            "num_logits",
        ),
        "vllm.v1.worker.gpu.async_utils:async_copy_to_np": ("x",),
        "vllm.v1.worker.gpu.async_utils:stream": ("to_stream", "from_stream"),
        "vllm.v1.worker.gpu.pp_utils:PPHandler.receive": ("self", "input_batch"),
        "vllm.v1.worker.gpu.pp_utils:PPHandler.broadcast": (
            "self",
            "sampled_token_ids",
            "num_sampled",
            "num_rejected",
            "input_batch",
        ),
        "vllm.v1.worker.gpu.pp_utils:compute_need_sampled_mask": ("input_batch",),
    },
}


def vllm_version() -> str:
    """The running vLLM's version without a local suffix: 0.32.0+cpu and 0.32.0 are one source."""
    import vllm

    return str(vllm.__version__).split("+", 1)[0]


def check_version() -> None:
    version = vllm_version()
    if version in TESTED:
        return
    tested = ", ".join(sorted(TESTED))
    if os.environ.get(ALLOW_ENV) == "1":
        logging.getLogger("vllm.spexis").warning(
            "Spexis was tested on vLLM %s, not on %s; going on because %s=1. Compare outputs with "
            "stock vLLM before trusting them.",
            tested,
            version,
            ALLOW_ENV,
        )
        return
    raise ConfigError(
        f"spexis: vLLM {version} is not tested (tested: {tested}); install vllm=={tested}, remove "
        f"the spexis block, or set {ALLOW_ENV}=1 to try anyway"
    )


def check_sources(group: str) -> None:
    for symbol, expected in SOURCES[group].items():
        problem = _problem(symbol, expected)
        if problem:
            raise ConfigError(
                f"spexis: {symbol} {problem}, so this vLLM build differs from the tested "
                f"{', '.join(sorted(TESTED))}; reinstall that version or remove the spexis block"
            )


def _problem(symbol: str, expected: tuple[str, ...]) -> str | None:
    module_name, _, path = symbol.partition(":")
    try:
        target = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return "does not exist"
    # inspect follows __wrapped__, so our own wrapper shows the original's parameters.
    found = tuple(inspect.signature(target).parameters)[: len(expected)]
    return None if found == expected else f"takes {found}, not {expected}"
