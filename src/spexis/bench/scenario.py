# SPDX-License-Identifier: Apache-2.0
"""What a scenario is made of: requests, the context they are built in, and checks of results.

    @scenario(check=lambda result: [])       # registers it in SCENARIOS under the function's name
    def base(ctx: Context) -> list[Request]: ...

Invariant: what build() returns follows from names, numbers and the stock engine's earlier answers
only, so that the stock engine and the engine under test get the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Request:
    """One request; steps are calls of the engine's step()."""

    prompt: list[int]
    params: Any  # SamplingParams
    arrive: int = 0
    """Steps after the scenario began."""
    arrive_seconds: float = 0.0
    """Not before so many seconds, either."""
    abort: int | None = None
    """Steps after its arrival. The stock engine lets it finish: partial answers are prefixes."""
    abort_at: int | None = None
    """The same, once an answer has so many tokens: in mid-answer, however long it had to wait."""
    priority: int = 0


@dataclass(kw_only=True, slots=True)
class Context:
    """What a scenario may know of the engine."""

    tokenizer: Any
    vocab_size: int
    max_model_len: int
    block_size: int
    chat: bool
    """The model answers questions, so prompts are text; else they are random tokens."""
    size: int
    """Number of requests wanted."""
    previous: dict[str, dict] = field(default_factory=dict)
    """Results of earlier scenarios on the stock engine."""
    _plain: list[int] = field(default_factory=list)

    def prompt(self, name: str, index: int, length: int = 24) -> list[int]:
        """About `length` tokens (exactly, for random tokens), different for each (name, index)."""
        if not self.chat:
            rng = random.Random(f"{name}/{index}")
            return rng.choices(self._plain_tokens(), k=length)
        filler = "The quick brown fox jumps over the lazy dog. " * max(0, (length - 45) // 10)
        topic = _TOPICS[index % len(_TOPICS)]
        text = f"{filler}Write a short story about {topic}, number {index} of {name}."
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )

    def _plain_tokens(self) -> list[int]:
        """Tokens of ASCII text: behind half a character, vLLM's detokenizer repeats the prompt."""
        if self.tokenizer is None:
            return list(range(1, self.vocab_size))
        if not self._plain:
            texts = ((i, self.tokenizer.decode([i])) for i in range(1, self.vocab_size))
            self._plain.extend(i for i, text in texts if text.isascii())
        return self._plain

    def base_answer(self, index: int) -> tuple[list[int], list[int], str]:
        """Prompt, answer and text of a request of scenario `base` on the stock engine."""
        row = self.previous["base"]["rows"][index % len(self.previous["base"]["rows"])]
        output = row["outputs"][0]
        return row["prompt_token_ids"], output["token_ids"], output["text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    name: str
    build: Callable[[Context], list[Request]]
    check: Callable[[dict], list[str]]
    actions: dict[int, str] = field(default_factory=dict)
    """Step -> what to do to the engine under test then."""
    same_cached_tokens: bool = False
    """The number of prompt tokens found in the prefix cache must equal the stock engine's."""


SCENARIOS: dict[str, Scenario] = {}
"""In the order in which they run: later ones build on the answers of earlier ones."""


def scenario(check: Callable[[dict], list[str]] = lambda result: [], **options: Any):
    def add(build: Callable[[Context], list[Request]]):
        name = build.__name__
        SCENARIOS[name] = Scenario(name=name, build=build, check=check, **options)
        return build

    return add


def greedy(max_tokens: int = 40, **options: Any):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def seeded(seed: int, max_tokens: int = 40, **options: Any):
    from vllm import SamplingParams

    options.setdefault("temperature", 0.8)
    return SamplingParams(seed=seed, max_tokens=max_tokens, **options)


# -- checks ----------------------------------------------------------------------------------------


def outputs(result: dict) -> list[dict]:
    return [output for row in result["rows"] for output in row["outputs"]]


def some(result: dict, what: str, test: Callable[[dict], bool], at_least: int = 1) -> list[str]:
    found = sum(map(test, outputs(result)))
    return [] if found >= at_least else [f"{what}: {found} of {len(outputs(result))}"]


def stopped_at(kind: type, what: str):
    return lambda result: some(result, what, lambda o: isinstance(o["stop_reason"], kind), 2)


def lengths(result: dict) -> list[int]:
    return [len(output["token_ids"]) for output in outputs(result)]


_TOPICS = ("a fox", "the sea", "an old clock", "rain", "a robot", "the moon", "a baker", "winter")
