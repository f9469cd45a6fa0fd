# SPDX-License-Identifier: Apache-2.0
"""The exit drafter inside vLLM drafts what its PyTorch definition drafts, token by token.

One stream, so every row runs a guess. The definition replays the same answer teacher-forced
(training/simulate.py) and must find exactly as many accepted drafts as the engine counted, on
a drafter that is right about half of the time and reads older final states. With tensor parallelism
(slow) the guess is the best of all ranks' shares of the vocabulary.
"""

import pytest
import torch

from spexis.bench.engines import EngineSpec, Work, run_engine
from spexis.bench.tiny import tiny_drafter, tiny_model

pytestmark = pytest.mark.engine

NUM_TOKENS = 60
PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 130)]


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", 1),
        pytest.param("llama", 2, marks=pytest.mark.slow),  # tied: cut as the embedding is
        pytest.param("qwen2", 2, marks=pytest.mark.slow),  # a head of its own, 3/4 of the tokens
    ],
)
def test_engine_drafts_as_the_definition(family, tensor, tmp_path):
    model = tiny_model(family, tmp_path / "model")
    folder = tiny_drafter(model, tmp_path / "drafter")
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    work = [
        Work(name=str(i), rows=[{"prompt_token_ids": p, "params": params}])
        for i, p in enumerate(PROMPTS)
    ]
    drafter = {"method": "exit", "model": folder}
    spec = EngineSpec(model=model, stages=2, tensor=tensor, drafter=drafter)
    run = run_engine(spec, work, timeout=300)
    for i, prompt in enumerate(PROMPTS):
        result = run[str(i)]
        answer = result["rows"][0]["outputs"][0]["token_ids"]
        kept = _accepted_by_definition(model, folder, prompt, answer)
        # The draft of the last token is never run: its request has ended.
        assert result["counters"]["drafts"] == NUM_TOKENS - 1
        assert result["counters"]["accepted"] == sum(kept[:-1])
        assert 5 < sum(kept) < NUM_TOKENS - 5  # else the comparison shows little


def _accepted_by_definition(model, folder, prompt, answer) -> list[bool]:
    from transformers import AutoModelForCausalLM

    from spexis.drafters.exit.module import load_drafter
    from spexis.training.simulate import serve_drafts

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    drafter = load_drafter(folder)
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        out = target.model(ids, output_hidden_states=True)
        head = target.get_output_embeddings().weight[drafter.draft_vocab_ids.long()]
        drafts = serve_drafts(
            drafter,
            head,
            h=out.hidden_states[drafter.config.exit_layer],
            final=out.last_hidden_state,
            ids=ids,
            prompt_len=torch.tensor([len(prompt)]),
            length=torch.tensor([ids.shape[1]]),
        )
    assert drafts.settled
    return drafts.accepted.tolist()
