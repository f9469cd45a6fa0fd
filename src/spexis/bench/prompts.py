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
    "What is photosynthesis, and why does it matter?",
    "Write a short poem about the first snow of winter.",
    "Translate to English: Nous avons perdu les clefs de la maison pres du vieux marche.",
    "A shop sells pens at 2 dollars and books at 9 dollars. Mia buys 4 pens and 3 books. How much "
    "does she pay? Show the steps.",
    "Summarize: A small bakery in the old town was closed for two years. Last week the owner's "
    "daughter opened it again, with the same recipes and a new oven. People waited in a long line.",
    "What should I pack for a three-day hike in the mountains?",
    "Explain what a database index does, for a beginner.",
    "Who wrote Don Quixote, and what is the book about?",
    "Write a product description for a wooden desk lamp.",
    "Give me three ideas for a rainy afternoon with two children.",
    "How do vaccines protect people?",
    "Write a SQL query that finds the ten customers with the largest total of orders.",
    "What are the advantages and disadvantages of working from home?",
    "A rectangle is 8 metres long and 5 metres wide. What are its area and its perimeter? Explain.",
    "Translate to English: El mercado abre a las ocho y cierra a las dos de la tarde.",
    "Tell me a joke about a programmer and explain why it is funny.",
    "Context: The bridge at Ohrstad was built in 1931 and renewed in 1998. It carries two railway "
    "tracks. Question: when was the bridge renewed, and what does it carry?",
    "Describe the water cycle in a few sentences.",
    "Write a letter to a friend about a visit to the sea.",
    "How can I learn a new language faster?",
    "What is inflation, and how does it affect savings?",
    "Write a Python function that checks whether a word is a palindrome.",
    "Why is the sea salty?",
    "Give a short biography of Leonardo da Vinci.",
    "Plan a simple dinner for four people and list what to buy.",
    "If five workers build a wall in 12 days, how long do ten workers need? Explain.",
    "Rewrite more politely: Send me the report now, you are already late.",
    "Context: Tea plants grow best in warm, wet hills. Leaves are picked by hand, dried, rolled. "
    "Question: how are tea leaves treated after picking?",
    "What is the difference between a virus and a bacterium?",
    "Write the opening of a detective story set in a train.",
    "How does a bicycle stay upright while it moves?",
    "List four ways to save water at home.",
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
