# SPDX-License-Identifier: Apache-2.0
"""The `spexis` command. `spexis --help` lists the subcommands, `spexis COMMAND --help` one of them.

Invariant: nothing heavy is imported before a command is chosen, so help comes at once; a command's
own module parses its arguments. Settings that are refused end with one line and exit code 2.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    target: str
    """"module:function", called with the remaining arguments."""
    help: str
    """One line."""


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "spexis.bench.demo:main", "the same prompts through stock vLLM and Spexis, side by side"
    ),
    "serve": Command("spexis.cli.serve:main", "`vllm serve` with Spexis on"),
    "model": Command("spexis.cli.model:main", "make the demo model's folder"),
    "train exit": Command("spexis.training.train_exit:main", "train an exit drafter for a model"),
    "train length": Command(
        "spexis.training.train_length:main", "train a predictor of how near an answer's end is"
    ),
    "eval exit": Command(
        "spexis.training.eval_exit:main",
        "an exit drafter's accuracy by task, and its acceptance in the engine",
    ),
    "eval length": Command(
        "spexis.training.eval_length:main", "a length predictor's precision, recall, calibration"
    ),
    "bench": Command("spexis.bench.presets:main", "measure Spexis against stock vLLM"),
    "profile": Command(
        "spexis.bench.profile:main", "measure this hardware's times for one pipeline stage"
    ),
    "plan": Command("spexis.cli.plan:main", "rank TP, PP, SP and mixes for given hardware"),
    "simulate": Command(
        "spexis.cli.simulate:main", "a trace through the scheduling policies, without a GPU"
    ),
    "top": Command("spexis.cli.top:main", "a live view of a running server"),
    "env": Command(
        "spexis.cli.env:main", "versions, platform, and whether the plugin is effective"
    ),
    "version": Command("spexis.cli.env:version", "print the version"),
}
ALIASES = {"doctor": "env", "--version": "version", "-V": "version"}
GROUPS = ("train", "eval")

EXAMPLES = """\
examples:
  spexis demo                                       see it, on a CPU
  spexis serve demo                                 serve the demo model on port 8000
  spexis serve MODEL --tensor-parallel-size 2       any `vllm serve` flag goes through
  spexis serve MODEL --auto --hardware h100         parallel sizes by `spexis plan`
  spexis serve MODEL --spexis '{"drafter": {"model": "my-drafter"}}'
  spexis train exit --config run.yaml output_dir=my-drafter
  spexis eval exit my-drafter
  spexis train length --config run.yaml             on the same answers
  spexis bench --preset cpu
  spexis bench --preset gpu2 --dims l70
  spexis profile MODEL --output profile.json
  spexis plan llama-70b --hardware a100 --gpus 8
  spexis simulate --trace azure2023_conv.csv.gz     or poisson:rate=6,requests=2000
  spexis top http://localhost:8000                  what a running server does, live
  spexis env                                        is everything in place?
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name, rest = _split(args)
    if name not in COMMANDS:
        return _unknown(name)
    # Looked up by name only now: `spexis --help` must not wait for torch.
    from spexis.config import ConfigError

    try:
        return _load(COMMANDS[name].target)(rest) or 0
    except ConfigError as error:
        print(f"spexis {name}: {error}", file=sys.stderr)
        return 2


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: spexis COMMAND [arguments]",
            "",
            "Speculative parallelism for vLLM: one request fills every pipeline stage, exactly.",
            "",
            "commands:",
            *lines,
            "",
            EXAMPLES.rstrip(),
            "",
            "`spexis COMMAND --help` for one command.",
        )
    )


def _split(args: list[str]) -> tuple[str, list[str]]:
    """("train exit", rest) for the two-word commands, ("serve", rest) for the others."""
    first = ALIASES.get(args[0], args[0])
    if first in GROUPS and len(args) > 1 and f"{first} {args[1]}" in COMMANDS:
        return f"{first} {args[1]}", args[2:]
    return first, args[1:]


def _unknown(name: str) -> int:
    if name in GROUPS:
        words = [key for key in COMMANDS if key.startswith(name)]
        print(f"spexis {name}: say what; try `spexis {words[0]}`", file=sys.stderr)
        return 2
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean `spexis {close[0]}`?" if close else "see `spexis --help`"
    print(f"spexis: no command {name!r}; {hint}", file=sys.stderr)
    return 2


def _load(target: str) -> Callable[[list[str]], int | None]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
