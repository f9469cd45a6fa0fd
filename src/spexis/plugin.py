# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point to Spexis: inert unless `additional_config` has a "spexis" block.

    [project.entry-points."vllm.general_plugins"]
    spexis = "spexis.plugin:register"

vLLM calls register() in every process of every user who has Spexis installed. It wraps one
function, EngineArgs.create_engine_config, through which `vllm serve`, `LLM(...)` and
`AsyncLLM.from_engine_args` all build their configuration in the front-end process, before any
other process starts. Asked for, the wrapper checks versions and settings, resolves the drafter,
and then uses vLLM's own doors only: scheduler_cls, worker_cls and two environment variables.

Invariant: without the block, the wrapper calls the original and nothing else is touched; with it,
environment variables set here are taken back before the next configuration is built, so a stock
engine in the same process never inherits them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
from typing import Any

from spexis.config import CONFIG_KEY, ConfigError, DrafterConfig, PlacementConfig, SpexisConfig

TARGET = "vllm.engine.arg_utils"
PARTITION_ENV = "VLLM_PP_LAYER_PARTITION"
BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"

logger = logging.getLogger("vllm.spexis")

# Environment variables this process set itself, with the value it gave them.
_own_env: dict[str, str] = {}


def register() -> None:
    """Wrap create_engine_config, now or when its module is first imported. Re-entrant."""
    if TARGET in sys.modules:
        _wrap(sys.modules[TARGET])
    elif not any(isinstance(finder, _WrapOnImport) for finder in sys.meta_path):
        # Workers and helpers never import it: importing it here would cost them seconds.
        sys.meta_path.insert(0, _WrapOnImport())


def is_effective() -> bool:
    """Whether create_engine_config is wrapped in this process ("installed" is not "effective")."""
    engine_args = getattr(sys.modules.get(TARGET), "EngineArgs", None)
    create = getattr(engine_args, "create_engine_config", None)
    return getattr(create, "_spexis", False)


class _WrapOnImport(importlib.abc.MetaPathFinder):
    """Wraps TARGET right after its first import, then leaves sys.meta_path."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    engine_args = getattr(module, "EngineArgs", None)
    create = getattr(engine_args, "create_engine_config", None)
    if create is None or getattr(create, "_spexis", False):
        # A vLLM without this function is unknown to us, and nobody asked: stay out of the way.
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _take_back_env()
        if not _asked(self.additional_config):
            return create(self, *args, **kwargs)
        return _create_spexis_config(create, self, *args, **kwargs)

    create_engine_config._spexis = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config


def _asked(additional_config: Any) -> bool:
    return isinstance(additional_config, dict) and CONFIG_KEY in additional_config


def _create_spexis_config(create: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """create_engine_config() for an engine that asked for Spexis."""
    from vllm.platforms import current_platform

    from spexis import checks, guards

    guards.check_version()
    guards.check_sources("frontend")
    config = SpexisConfig.from_dict(engine_args.additional_config[CONFIG_KEY])
    checks.check_args(engine_args)
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        checks.refuse(
            f"platform {current_platform.device_name!r} is not tested",
            "use the CPU or CUDA build of vLLM, or remove the spexis block",
        )
    before = engine_args.scheduler_cls, engine_args.worker_cls
    engine_args.scheduler_cls = checks.SCHEDULER
    engine_args.worker_cls = checks.CPU_WORKER if current_platform.is_cpu() else checks.CUDA_WORKER
    try:
        vllm_config = create(engine_args, *args, **kwargs)
    finally:
        # The caller's object stays as it was: it may be reused without the block.
        engine_args.scheduler_cls, engine_args.worker_cls = before
    checks.check_config(vllm_config, config)
    config = _place(vllm_config, config)
    if config.mode == "sp-alpha" and config.selection is None and config.drafter.speculates:
        where = "scheduler" if vllm_config.use_v2_model_runner else "stage"
        config = dataclasses.replace(config, selection=where)
    # A copy, so that the user's own dict is left alone. Every process reads the resolved block.
    vllm_config.additional_config = {
        **vllm_config.additional_config,
        CONFIG_KEY: config.to_dict(),
    }
    from spexis.observability import install

    install()
    return vllm_config


def _place(vllm_config: Any, config: SpexisConfig) -> SpexisConfig:
    """Layers to stages, cores to workers; returns the config with the drafter's folder resolved."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    split = os.environ.get(PARTITION_ENV)
    if split is not None:
        _check_partition(split, stages, model.get_total_num_hidden_layers())
    if config.drafter.method == "exit":
        resolved = _resolve_drafter(model, config.drafter)
        split = _exit_partition(model, stages, resolved.exit_layer, split, config.placement)
        drafter = DrafterConfig(
            method="exit",
            model=resolved.folder,
            draft_vocab_size=resolved.draft_vocab_size,
        )
        config = SpexisConfig.from_dict({**config.to_dict(), "drafter": drafter.to_dict()})
    elif config.placement is not None:
        split = _chosen_partition(model, stages, config.placement, split)
    config = _with_length_predictor(vllm_config, config)
    if vllm_config.device_config.device_type == "cpu":
        _bind_cores(parallel.local_world_size)
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    logger.info(
        "Spexis: drafter %s%s, %d stages of %s layers, %s steps in flight, %s runner",
        config.drafter.method,
        f" ({config.drafter.model})" if config.drafter.model else "",
        stages,
        split or "evenly split",
        config.steps_in_flight or vllm_config.max_concurrent_batches,
        runner,
    )
    if not config.drafter.lossless:
        logger.warning("Spexis: the synthetic drafter changes the output; for measurements only")
    return config


def _resolve_drafter(model: Any, drafter: DrafterConfig) -> Any:
    from spexis.drafters import resolve, served_by_vllm

    resolved = resolve(drafter, served_by_vllm(model))
    if not resolved.fingerprint_checked:
        logger.warning(
            "Spexis: %s is not on this machine yet; the drafter was matched by sizes, the workers "
            "compare the weights",
            model.model,
        )
    return resolved


def _with_length_predictor(vllm_config: Any, config: SpexisConfig) -> SpexisConfig:
    """The config with the predictor's folder resolved, or false where none is to run.

    Called once the layers are placed: a predictor belongs to the layer that ends the first stage.
    """
    asked = config.length_predictor
    if not config.lookahead or asked is False:
        return config
    from vllm.distributed.utils import get_pp_indices

    from spexis.drafters import served_by_vllm
    from spexis.lengths.resolve import resolve

    model = vllm_config.model_config
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if vllm_config.use_v2_model_runner and stages > 2:
        if asked is not None:
            raise ConfigError(
                f"spexis.length_predictor is {asked!r}: on the V2 runner it runs with two stages "
                f"only, not {stages}; leave it out, or set it to false"
            )
        folder, what = None, f"no length predictor (on the V2 runner with two stages, not {stages})"
    else:
        first_layers = get_pp_indices(model.get_total_num_hidden_layers(), 0, stages)[1]
        folder, what = resolve(asked, served_by_vllm(model), first_layers)
    logger.info("Spexis: look-ahead with %s", what)
    block = {**config.to_dict(), "length_predictor": str(folder) if folder else False}
    return SpexisConfig.from_dict(block)


def _exit_partition(
    model: Any,
    stages: int,
    exit_layer: int,
    given: str | None,
    placement: PlacementConfig | None = None,
) -> str:
    """Layers per stage with the first ending at the exit layer; sets the variable when unset."""
    from spexis.core.placement import layer_partition

    if given is not None:
        if given.split(",")[0].strip() != str(exit_layer):
            raise ConfigError(
                f"spexis: {PARTITION_ENV}={given} ends the first stage elsewhere than the "
                f"drafter's exit layer {exit_layer}; unset it, or start it with {exit_layer}"
            )
        if placement is not None:
            _warn_of_variable(given)
        return given
    if placement is not None:
        if placement.layers is not None and placement.layers[0] != exit_layer:
            raise ConfigError(
                f"spexis.placement.layers {list(placement.layers)} ends the first stage elsewhere "
                f"than the drafter's exit layer {exit_layer}; start it with {exit_layer}"
            )
        return _chosen_partition(model, stages, placement, None, exit_layer)
    try:
        split = layer_partition(model.get_total_num_hidden_layers(), exit_layer, stages)
    except ValueError as err:
        raise ConfigError(
            f"spexis: {err}; use fewer stages or a drafter with an earlier exit"
        ) from None
    return _set_partition(split)


def _check_partition(given: str, stages: int, num_layers: int) -> None:
    """vLLM builds what it says, also stages without a layer or with layers that are not there."""
    from spexis.core.placement import read_partition

    if len(read_partition(given, num_layers) or ()) != stages:
        raise ConfigError(
            f"spexis: {PARTITION_ENV}={given} must be {stages} counts above 0 that add up to the "
            f"model's {num_layers} layers; mend it or unset it"
        )


def _chosen_partition(
    model: Any,
    stages: int,
    placement: PlacementConfig,
    given: str | None,
    first_layers: int | None = None,
) -> str:
    """Layers per stage as the block asks, by count or by measured times."""
    from spexis.core.placement import balanced_partition

    if given is not None:
        _warn_of_variable(given)
        return given
    num_layers = model.get_total_num_hidden_layers()
    if placement.layers is not None:
        split = list(placement.layers)
        if len(split) != stages or sum(split) != num_layers:
            raise ConfigError(
                f"spexis.placement.layers {split} must be {stages} counts that add up to the "
                f"model's {num_layers} layers"
            )
        return _set_partition(split)
    try:
        costs = _profile_costs(model.hf_text_config, placement)
        split = balanced_partition(num_layers, stages, costs, first_layers)
    except (OSError, ValueError, KeyError) as err:
        raise ConfigError(f"spexis.placement.profile {placement.profile}: {err}") from None
    times = ", ".join(f"{1e3 * seconds:.2f}" for seconds in costs.of_split(split))
    logger.info("Spexis: stage times by %s: %s ms", placement.profile, times)
    return _set_partition(split)


def _warn_of_variable(given: str) -> None:
    logger.warning("Spexis: %s=%s wins over spexis.placement", PARTITION_ENV, given)


def _profile_costs(sizes: Any, placement: PlacementConfig) -> Any:
    """What a layer, the drafter and the head take, by the profile of the same model."""
    from spexis.core.profile_file import LAYER_SIZES, ProfileFile
    from spexis.core.stage_curve import StageCurve

    file = ProfileFile.load(placement.profile)
    file.check_model(sizes, LAYER_SIZES)
    curve = StageCurve.from_profile(file.block)
    return curve.costs(placement.rows or curve.max_rows, placement.drafter_seconds)


def _set_partition(split: list[int]) -> str:
    value = ",".join(map(str, split))
    _set_env(PARTITION_ENV, value)
    return value


def _bind_cores(num_workers: int) -> None:
    """One share of cores per worker. vLLM's "auto" needs one NUMA node per worker and asserts."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_visible_memory_node

    from spexis.core.placement import cpu_binding

    if os.environ.get(BIND_ENV) is not None or len(get_visible_memory_node()) >= num_workers:
        return
    # One logical CPU per physical core: two threads of a core share its vector units.
    cores = {(cpu.numa_node, cpu.physical_core): cpu.id for cpu in get_allowed_cpu_list()}
    _set_env(BIND_ENV, cpu_binding(sorted(cores.values()), num_workers))


def _set_env(name: str, value: str) -> None:
    os.environ[name] = value
    _own_env[name] = value


def _take_back_env() -> None:
    for name, value in _own_env.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _own_env.clear()
