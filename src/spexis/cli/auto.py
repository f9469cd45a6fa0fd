# SPDX-License-Identifier: Apache-2.0
"""`spexis serve MODEL --auto`: the parallel sizes by the planner, the first that can run here.

    spexis serve MODEL --auto --profile profile.json --streams 32          # measured: better
    spexis serve MODEL --auto --hardware h100 --trace requests.csv --drafter my-drafter \
        --acceptance 0.7

The planner (cli/plan.py) ranks TP, PP, SP and mixes over the GPUs of this machine. Of its ranking
the first split is taken that one server of this vLLM and Spexis can run: weights that fit are the
planner's business, whether Spexis takes the model, its drafter and the other flags is asked here
(checks.py, drafters/). SP runs with `mode`: "auto", so it stops speculating where that does not
pay; TP and PP are vLLM's own, without a spexis block.

Invariant: parallel sizes and spexis blocks that the user gave are never changed, only refused; the
choice and its runner-up are printed with what they rest on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spexis.cli import plan, platform
from spexis.cli.flags import ADDITIONAL, PP_FLAGS, TP_FLAGS, Given, value_of
from spexis.cli.numbers import share, whole
from spexis.config import CONFIG_KEY, ConfigError, SpexisConfig

OPTIONS = ("--gpus", "--profile", "--hardware", "--trace", "--streams", "--acceptance")
SWITCHES = ("--no-p2p",)
# Sizes that the plan decides; a flag of them and --auto contradict each other.
SIZES = (
    *PP_FLAGS,
    *TP_FLAGS,
    *("--data-parallel-size", "-dp", "--decode-context-parallel-size", "-dcp"),
    "--prefill-context-parallel-size",
)
MODES = ("tp", "pp", "sp")  # of the planner's, those served unasked
SLACK = 1.15  # longest stage over an even share of the layers that the planner's figures allow


@dataclass(frozen=True, slots=True)
class Choice:
    flags: list[str]
    """The parallel sizes."""
    block: dict[str, Any] | None
    """The spexis block, None for vLLM without Spexis."""
    lines: list[str]
    """What was chosen and why."""


def choose(
    options: argparse.Namespace, flags: list[str], model: str | None, block: dict[str, Any]
) -> Choice:
    """options: of serve.parse(). model: as `vllm serve` will be given it, a folder for "demo".

    block: what --drafter says. ConfigError: a contradiction, or nothing can run.
    """
    given = Given(flags)
    refuse_contradictions(options, given)
    model = model or given.file.get("model")
    if model is None:
        raise ConfigError("--auto needs MODEL: what fits depends on its sizes")
    folder = model_config(model, flags)
    wanted = planned(options, folder, value_of(flags, "--max-num-seqs"))
    block = {"mode": "auto", **block}
    config = json.loads((folder / "config.json").read_text())
    fit = Fit(config, model, block, given)
    of_drafter = wanted.acceptance is None and fit.acceptance is not None
    if of_drafter:
        wanted.acceptance = fit.acceptance
    ranked, notes = plan.rank_splits(wanted, wanted.most)
    passed: dict[str, str] = {}
    fitting = []
    for option in ranked:
        if why := fit.refusal(option):
            passed.setdefault(option.label, why)
        else:
            fitting.append(option)
    if ranked and wanted.acceptance is None and not any(option.mode == "sp" for option in ranked):
        unknown = "how often its drafts are right is not known; give --acceptance"
        passed["SP"] = fit.refusal_of_sp or unknown
    if not fitting:
        raise ConfigError(_nothing(model, wanted, passed))
    best = fitting[0]
    sizes = [TP_FLAGS[0], str(best.tensor), PP_FLAGS[0], str(best.stages)]
    lines = _lines(fitting, passed, wanted, notes)
    if of_drafter:
        lines.append(
            f"{fit.acceptance:.0%} of its drafts are right, the drafter says; for other traffic "
            "give --acceptance"
        )
    if "quantization_config" in config or given.has("--quantization", "-q"):
        lines.append("the plan is for bfloat16: quantised weights are smaller, and read faster")
    return Choice(sizes, block if best.mode == "sp" else None, lines)


def refuse_contradictions(options: argparse.Namespace, given: Given) -> None:
    for name in SIZES:
        if given.has(name):
            raise ConfigError(
                f"--auto chooses the parallel sizes: leave out {name}, or leave out --auto"
            )
    if options.spexis is not None or CONFIG_KEY in given.additional():
        where = "--spexis" if options.spexis is not None else f"{CONFIG_KEY} in {ADDITIONAL}"
        raise ConfigError(
            f"--auto writes the spexis block: leave out {where} (--drafter is allowed), or leave "
            "out --auto"
        )


def planned(options: argparse.Namespace, folder: Path, max_num_seqs: str | None):
    """What `spexis plan` would be asked, as its own options, and `most` requests at once."""
    most = _checked("--max-num-seqs", max_num_seqs, whole) or plan.MOST_STREAMS
    streams = _checked("--streams", options.streams, whole)
    if options.trace and streams:
        raise ConfigError("--trace and --streams: give one of them")
    if options.profile and options.hardware:
        raise ConfigError("--profile and --hardware: give one of them")
    acceptance = _checked("--acceptance", options.acceptance, share)
    wanted = argparse.Namespace(
        model=str(folder),
        gpus=_checked("--gpus", options.gpus, whole),
        profile=options.profile,
        hardware=options.hardware,
        no_p2p=options.no_p2p,
        trace=options.trace,
        batch=min(streams, most) if streams else None,
        context=None,
        prompt=None,
        acceptance=acceptance,
        stack="vllm-0.32",
        most=most,
    )
    if options.profile:
        _of_this_platform(options.profile)
    else:
        _preset(options)
    if wanted.gpus is None and not platform.is_cpu():
        wanted.gpus = num_gpus()
    return wanted


def _of_this_platform(path: str) -> None:
    from spexis.core.profile_file import ProfileFile

    device = ProfileFile.load(path).block.get("device")
    here = "cpu" if platform.is_cpu() else "cuda"
    if device is not None and device != here:
        raise ConfigError(
            f"--profile {path} is of device {device!r}, and vLLM here runs on {here!r}: measure "
            "here with `spexis profile`"
        )


def _preset(options: argparse.Namespace) -> None:
    """--hardware, or what to do without one."""
    from spexis.core.presets import HARDWARE

    if platform.is_cpu():
        raise ConfigError(
            "--auto on a CPU needs --profile FILE, since presets are of GPUs: write one with "
            "`spexis profile MODEL_FOLDER --output FILE` (for GPUs install vLLM's CUDA build)"
        )
    if options.no_p2p:
        raise ConfigError("--no-p2p needs --profile; of presets choose --hardware h200-no-p2p")
    known = ", ".join(HARDWARE)
    if options.hardware is None:
        raise ConfigError(
            "--auto needs --profile FILE (`spexis profile MODEL --output FILE`: minutes, better) "
            f"or --hardware, one of {known}"
        )
    if options.hardware not in HARDWARE:
        raise ConfigError(f"--hardware {options.hardware}: allowed are {known}")


def num_gpus() -> int:
    """GPUs that this process sees; none is a refusal."""
    import torch

    count = torch.cuda.device_count()
    if count < 1:
        raise ConfigError(
            "--auto sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or say for how many to "
            "plan with --gpus N"
        )
    return count


def model_config(model: str, flags: list[str]) -> Path:
    """The folder with the model's config.json; of a Hugging Face name that file is fetched."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--auto: {folder} has no config.json to read the model's sizes from")
        return folder
    try:
        from huggingface_hub import hf_hub_download

        found = hf_hub_download(model, "config.json", revision=value_of(flags, "--revision"))
    except Exception as error:  # no network, no such name, no access: many types, one meaning
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--auto cannot read the config.json of {model} ({reason}): give its local folder"
        ) from None
    return Path(found).parent


class Fit:
    """Whether one server can run a planned option."""

    def __init__(self, config: Mapping[str, Any], model: str, block: dict[str, Any], given: Given):
        """config: the model's config.json. block: the one that SP would run with."""
        self.config, self.model, self.given = config, model, given
        self.spexis = SpexisConfig.from_dict(block)
        self.exit_layer: int | None = None
        self.acceptance: float | None = None
        """What the exit drafter says of itself."""
        self.refusal_of_sp = self._refusal_of_sp()

    def refusal(self, option) -> str | None:
        """Why not, in a few words; None: it can."""
        if option.replicas > 1:
            return f"{option.replicas} servers, to be started each by itself"
        if option.mode not in MODES:
            return "drafts are selected only where mode sp-alpha is asked for"
        if option.mode != "sp":
            return None
        return self.refusal_of_sp or self._refusal_of_stages(option.stages)

    def _refusal_of_sp(self) -> str | None:
        from spexis import checks

        if not self.spexis.drafter.speculates:
            return "drafter none makes no drafts"
        args = SimpleNamespace(
            scheduler_cls=value_of(self.given.flags, "--scheduler-cls"),
            worker_cls=value_of(self.given.flags, "--worker-cls") or "auto",
            pipeline_parallel_size=2,
            speculative_config={} if self.given.has("--speculative-config", "-sc") else None,
            enable_lora=self.given.has("--enable-lora"),
        )
        try:
            checks.check_args(args)
            window = not self.given.has("--disable-sliding-window")
            checks.check_hf_config(self.config, self.spexis, sliding_window=window)
            if self.spexis.drafter.method == "exit":
                found = self._drafter()
                self.exit_layer, self.acceptance = found.exit_layer, found.acceptance
        except ConfigError as error:
            return str(error).removeprefix("spexis: ")
        return None

    def _drafter(self) -> Any:
        from spexis.drafters import resolve, served_model

        folder = self.model if Path(self.model).is_dir() else None
        context = value_of(self.given.flags, "--max-model-len")
        served = served_model(
            self.model,
            self.config,
            folder=folder,
            context=int(context) if context and context.isdigit() else None,
        )
        return resolve(self.spexis.drafter, served)

    def _refusal_of_stages(self, stages: int) -> str | None:
        """The planner's stages are even; an exit drafter's first stage ends at its exit."""
        from spexis.core.placement import layer_partition

        if self.exit_layer is None:
            return None
        layers = self.config["num_hidden_layers"]
        why = f"the drafter's exit, layer {self.exit_layer} of {layers}, is not made for it"
        try:
            split = layer_partition(layers, self.exit_layer, stages)
        except ValueError:
            return why
        return why if max(split) > SLACK * -(-layers // stages) else None


def _lines(fitting: list, passed: dict[str, str], wanted, notes: list[str]) -> list[str]:
    best = fitting[0]
    source = f"by {wanted.profile}" if wanted.profile else f"estimated for {wanted.hardware}"
    # What a trace was taken for is the last of the planner's notes.
    load = notes[-1] if wanted.trace else f"{wanted.batch} requests of {wanted.context} tokens"
    lines = [f"{best.label}, {source}, at {load}: {_figures(best)}; {best.reason}"]
    if len(fitting) > 1:
        other = fitting[1]
        share = other.tokens_per_second / best.tokens_per_second
        lines.append(f"next {other.label}: {_figures(other)} ({share:.2f} of it); {other.reason}")
    else:
        lines.append("nothing else can run")
    if passed:
        lines.append("passed over " + "; ".join(f"{k} ({why})" for k, why in _short(passed)))
    if any(option.tensor > 1 for option in fitting) and not platform.is_cpu():
        lines += [n for n in notes if plan.TOO_HIGH in n or n.startswith(plan.BY_PRESET)]
    return lines


def _short(passed: dict[str, str]) -> list[tuple[str, str]]:
    """One entry a reason, the first label for it; three at most."""
    labels: dict[str, list[str]] = {}
    for label, why in passed.items():
        labels.setdefault(why, []).append(label)
    return [(", ".join(names[:3]), why) for why, names in labels.items()][:3]


def _figures(option) -> str:
    rate, each = option.tokens_per_second, 1e3 * option.seconds_per_token
    return f"{rate:.0f} tokens/s, {each:.1f} ms a token predicted"


def _nothing(model: str, wanted, passed: dict[str, str]) -> str:
    if passed:
        why = "; ".join(f"{label}: {why}" for label, why in _short(passed))
        return f"--auto finds nothing that can run {model} on {wanted.gpus} devices ({why})"
    return (
        f"--auto finds no split of {model} that fits the memory of {wanted.gpus} devices: use more "
        "(--gpus), or a smaller model"
    )


def _checked(name: str, text: str | None, read: Callable[[str], Any]) -> Any:
    if text is None:
        return None
    try:
        return read(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name} {error}") from None
