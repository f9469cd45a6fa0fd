# SPDX-License-Identifier: Apache-2.0
"""Refusals: what Spexis will not run, each as one line that says what to do instead.

`check_args` looks at the flags before vLLM resolves anything, `check_config` at the finished
VllmConfig, `check_hf_config` at a model's config.json alone. All only read. Invariant: what is
known not to work, and every feature that could lead to a wrong token and was not tested, is refused
here; docs/compatibility.md names what is neither tested nor refused. No vLLM import at module top.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from spexis.config import ConfigError, SpexisConfig
from spexis.core.profile_file import ProfileFile

logger = logging.getLogger("vllm.spexis")

# The exit drafter reads the first stage's output and rebuilds the target's attention; these
# families were run against stock vLLM token for token.
EXIT_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
)

SCHEDULER = "spexis.engine.scheduler.SpexisScheduler"
CPU_WORKER = "spexis.engine.worker_cpu.SpexisCPUWorker"
CUDA_WORKER = "spexis.engine.worker.SpexisWorker"

_FULL_ATTENTION = ("attention", "full_attention")


def refuse(reason: str, instead: str) -> None:
    raise ConfigError(f"spexis: {reason}; {instead}")


def check_args(args: Any) -> None:
    """Refuse from EngineArgs alone, before a model is looked up or downloaded."""
    if args.scheduler_cls not in (None, SCHEDULER):
        refuse(
            f"scheduler_cls {_name(args.scheduler_cls)} cannot run together with Spexis, which "
            "brings its own",
            "remove --scheduler-cls or the spexis block",
        )
    if args.worker_cls not in ("auto", CPU_WORKER, CUDA_WORKER):
        refuse(
            f"worker_cls {_name(args.worker_cls)} cannot run together with Spexis, which brings "
            "its own",
            "remove --worker-cls or the spexis block",
        )
    if args.pipeline_parallel_size < 2:
        refuse(
            "pipeline_parallel_size is 1, so there is no pipeline to fill",
            "pass --pipeline-parallel-size 2 or more, or remove the spexis block",
        )
    if args.speculative_config is not None:
        refuse(
            "vLLM's own speculative_config cannot run together with Spexis",
            "remove --speculative-config or the spexis block",
        )
    if args.enable_lora:
        refuse("LoRA is not tested", "remove --enable-lora or the spexis block")


def check_config(config: Any, spexis: SpexisConfig) -> None:
    """Refuse from the finished VllmConfig."""
    _check_steps(config, spexis)
    _check_parallel(config)
    _check_features(config)
    _check_selection(config, spexis)
    _check_model(config.model_config)
    _check_drafter(config.model_config, spexis)


def check_hf_config(
    config: Mapping[str, Any], spexis: SpexisConfig, *, sliding_window: bool = True
) -> None:
    """Refuse from a model's config.json alone, as far as that says it; for choices made before
    vLLM looks at the model. sliding_window: False if it is turned off by flag."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or () if sliding_window else ()
    model = SimpleNamespace(
        runner_type="generate",
        architecture=(config.get("architectures") or ["a model without architecture"])[0],
        is_encoder_decoder=bool(config.get("is_encoder_decoder")),
        is_multimodal_model=any(key.endswith(("vision_config", "audio_config")) for key in config),
        hf_text_config=SimpleNamespace(layer_types=kinds),
        # Of the families that exit drafters run on none is.
        is_hybrid=False,
        has_inner_state=False,
        is_attention_free=False,
        get_sliding_window=lambda: window if sliding_window else None,
    )
    _check_model(model)
    _check_drafter(model, spexis)


def _check_steps(config: Any, spexis: SpexisConfig) -> None:
    stages = config.parallel_config.pipeline_parallel_size
    steps = spexis.steps_in_flight
    if steps is not None and not stages <= steps <= 2 * stages:
        refuse(
            f"spexis.steps_in_flight is {steps} with {stages} stages",
            f"allowed are {stages} to {2 * stages}, or null for vLLM's own choice",
        )


def _check_parallel(config: Any) -> None:
    parallel = config.parallel_config
    for field, flag in (
        ("data_parallel_size", "--data-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, field, 1) > 1:
            refuse(
                f"{field} {getattr(parallel, field)} is not tested",
                f"remove {flag} or the spexis block",
            )
    nodes, stages = parallel.nnodes, parallel.pipeline_parallel_size
    if stages % nodes:
        refuse(
            f"{stages} stages on {nodes} nodes would put one stage on two nodes",
            f"pass --pipeline-parallel-size {nodes}, or a multiple of it",
        )
    if parallel.distributed_executor_backend not in ("mp", "ray"):
        refuse(
            f"distributed_executor_backend {_name(parallel.distributed_executor_backend)} is not "
            "tested",
            "pass --distributed-executor-backend mp (or ray)",
        )
    if parallel.distributed_executor_backend == "ray":
        _check_ray(config)


def _check_ray(config: Any) -> None:
    if os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1") == "0":
        refuse(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 selects vLLM's older Ray executor: not tested",
            "unset it",
        )
    if config.parallel_config.tensor_parallel_size > 1:
        refuse(
            "Ray may put one stage's tensor-parallel ranks on two nodes, which is not tested",
            "pass --distributed-executor-backend mp, or --tensor-parallel-size 1",
        )
    if config.device_config.device_type != "cpu":
        logger.warning("Spexis over Ray was tested on CPUs only; `mp` was tested on GPUs")


def _check_features(config: Any) -> None:
    if config.speculative_config is not None:
        refuse(
            f"{config.model_config.model} brings its own speculative_config",
            "serve its verifier model, or remove the spexis block",
        )
    for field, what, flag in (
        ("lora_config", "LoRA is", "--enable-lora"),
        ("kv_transfer_config", "KV connectors are", "--kv-transfer-config or --kv-offloading-size"),
        ("ec_transfer_config", "encoder-cache connectors are", "--ec-transfer-config"),
        ("diffusion_config", "diffusion models are", "the diffusion options"),
        ("watermark_config", "watermarking is", "the watermark options"),
    ):
        if getattr(config, field, None) is not None:
            refuse(f"{what} not tested", f"remove {flag} or the spexis block")
    on_cpu = config.device_config.device_type == "cpu"
    if not on_cpu and not config.use_v2_model_runner:
        refuse(
            "vLLM chose its V1 model runner, and on CUDA Spexis runs on V2 only",
            "unset VLLM_USE_V2_MODEL_RUNNER and whatever vLLM's log names as unsupported by V2",
        )
    if not on_cpu and not config.scheduler_config.async_scheduling:
        refuse(
            "async scheduling is off, so the last stage would block on every step",
            "remove --no-async-scheduling",
        )


def _check_selection(config: Any, spexis: SpexisConfig) -> None:
    if spexis.mode != "sp-alpha":
        return
    parallel = config.parallel_config
    if config.use_v2_model_runner and spexis.selection == "stage":
        hint = 'use "scheduler", or null'
        if parallel.tensor_parallel_size > 1:
            refuse('spexis.selection "stage" is not tested with tensor parallelism on V2', hint)
        if spexis.drafter.method == "oracle":
            refuse('spexis.selection "stage" on V2 hides from the oracle whose row runs', hint)
    file = ProfileFile.load(spexis.profile)
    file.check_model(config.model_config.hf_text_config)
    file.cost_model(parallel.pipeline_parallel_size, parallel.tensor_parallel_size)


def _check_model(model: Any) -> None:
    if model.runner_type != "generate":
        refuse(
            f"runner type {model.runner_type!r} generates no tokens",
            "serve a generate model or remove the spexis block",
        )
    if getattr(model, "enable_prompt_embeds", False):
        refuse(
            "prompts as embeddings are not supported: the first stage embeds tokens itself",
            "remove --enable-prompt-embeds or the spexis block",
        )
    if model.is_encoder_decoder:
        refuse(
            f"{model.architecture} is an encoder-decoder model",
            "serve a decoder-only model or remove the spexis block",
        )
    if model.is_multimodal_model:
        refuse(
            f"{model.architecture} is multimodal, which is not tested",
            "pass --language-model-only if the model has it, or remove the spexis block",
        )
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    others = sorted(set(kinds) - {*_FULL_ATTENTION, "sliding_attention"})
    if model.is_hybrid or model.has_inner_state or model.is_attention_free or others:
        refuse(
            f"{model.architecture} has recurrent or linear-attention layers, whose state cannot "
            "take back a wrong token",
            "serve a model with full attention or remove the spexis block",
        )
    window = model.get_sliding_window()
    if window or "sliding_attention" in kinds:
        refuse(
            f"sliding windows ({window or 'by layer'}) are not tested",
            "pass --disable-sliding-window if the context fits the window, or remove the spexis "
            "block",
        )


def _check_drafter(model: Any, spexis: SpexisConfig) -> None:
    drafter = spexis.drafter
    if drafter.method == "exit" and model.architecture not in EXIT_ARCHITECTURES:
        refuse(
            f"the exit drafter is not tested on {model.architecture}",
            f"tested are {', '.join(EXIT_ARCHITECTURES)}; method none runs without drafts",
        )
    if drafter.reference is not None and not os.path.isfile(drafter.reference):
        refuse(
            f"spexis.drafter.reference {drafter.reference} is not a file",
            "write it with a reference run first, one {prompt_token_ids, token_ids} object a line",
        )


def _name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__qualname__", repr(value))
