# SPDX-License-Identifier: Apache-2.0
"""Prompts that the demo and the CPU benchmark run when no data set is given (written for this)."""

from __future__ import annotations

import json
from pathlib import Path

BUILT_IN = (
    "Explain in simple words why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a violin and a cello?",
    "Tom has 12 apples. He gives 5 to Ann and buys 8 more. How many does he have? Show the steps.",
    "Give me five tips for growing tomatoes on a balcony.",
    "Translate to English: Der Zug nach Berlin faehrt heute eine Stunde spaeter ab.",
    "Summarize: The council met on Monday to discuss the new bridge. Most members agreed that the "
    "old one is unsafe, but the cost worried them. A vote will follow next month.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Who was Marie Curie and what is she known for?",
    "List the planets of the solar system and one fact about each.",
    "How does a refrigerator keep food cold?",
    "Write a polite email that asks a landlord to repair a broken heater.",
    "What is the difference between weather and climate?",
    "Describe how to make a simple vegetable soup.",
    "A train travels 180 km in 3 hours. What is its average speed? Explain.",
    "Why do leaves change their colour in autumn?",
)


def load_prompts(count: int, data: str | None = None, max_chars: int = 600) -> list[str]:
    """`count` prompts, the first turns of a Spec-Bench style JSONL file or the built-in ones."""
    prompts = list(BUILT_IN)
    if data is not None:
        rows = map(json.loads, Path(data).read_text().splitlines())
        prompts = [row["prompt_turns"][0] for row in rows]
        # Evenly over the file, which is sorted by task.
        prompts = [p for p in prompts if len(p) <= max_chars]
        prompts = prompts[:: max(1, len(prompts) // count)]
    if not prompts:
        raise ValueError(f"{data} has no prompt of at most {max_chars} characters")
    return [prompts[i % len(prompts)] for i in range(count)]


def chat_token_ids(model: str, prompts: list[str]) -> list[list[int]]:
    """Each prompt as one user turn in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False
            )
        )
        for p in prompts
    ]
