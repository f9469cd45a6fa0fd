# SPDX-License-Identifier: Apache-2.0
"""The length predictor inside vLLM says what its PyTorch definition says of the same answer.

One stream. What look-ahead learnt from is in the iteration log: every fourth prediction of each
answer. The definition gets the hidden states of the target in plain transformers. Guesses are wrong
about half of the time, so a prediction of a row that did not count would be noticed. With three
stages the second one predicts and the last one passes it on.
"""

import json

import numpy as np
import pytest
import torch

from spexis.bench.engines import EngineSpec, Work, run_engine
from spexis.bench.tiny import EXIT_LAYER, tiny_drafter, tiny_model, tiny_predictor
from spexis.core.predictions import LEARN_EVERY
from spexis.core.replay import replay

pytestmark = pytest.mark.engine

NUM_TOKENS = 50
PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 130)]


@pytest.mark.parametrize(
    ("stages", "tensor"),
    [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 1), (2, 2)))],
)
def test_engine_says_what_the_definition_says(stages, tensor, tmp_path):
    model = tiny_model("llama", tmp_path / "model")
    folder = tiny_predictor(model, tmp_path / "predictor")
    log = tmp_path / "steps.jsonl"
    settings = {"lookahead": True, "length_predictor": folder, "iteration_log": str(log)}
    drafter = {"method": "exit", "model": tiny_drafter(model, tmp_path / "drafter")}
    if stages == 3:
        drafter = {"method": "none"}
        settings["placement"] = {"layers": [EXIT_LAYER, 2, 1]}
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    work = [
        Work(name=str(i), rows=[{"prompt_token_ids": p, "params": params}])
        for i, p in enumerate(PROMPTS)
    ]
    spec = EngineSpec(model=model, stages=stages, tensor=tensor, drafter=drafter, settings=settings)
    run = run_engine(spec, work, timeout=300)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert replay(lines) == []
    ended = [entry for line in lines for entry in line["lookahead"] if "ended" in entry]
    for i, prompt in enumerate(PROMPTS):
        answer = run[str(i)]["rows"][0]["outputs"][0]["token_ids"]
        assert run[str(i)]["predictor"]["answers"] == i + 1
        assert ended[i]["ended"] == NUM_TOKENS
        learnt = ended[i]["learnt"]
        assert learnt["limit"] == NUM_TOKENS
        assert learnt["at"] == list(range(0, NUM_TOKENS, LEARN_EVERY))
        greedy, ends = _by_definition(model, folder, prompt, answer)
        assert answer == greedy
        wanted = ends[learnt["at"]]
        assert np.allclose(np.array(learnt["said"]), wanted, atol=2e-3)
        assert wanted.std(axis=0).max() > 0.01  # else the comparison shows little


def _by_definition(model, folder, prompt, answer) -> tuple[list[int], np.ndarray]:
    """The greedy answer, and [answer, 5] the prediction of each token's row."""
    from transformers import AutoModelForCausalLM

    from spexis.lengths.module import load_predictor

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    predictor = load_predictor(folder)
    rows = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    with torch.no_grad():
        out = target(torch.tensor([prompt + answer]), output_hidden_states=True)
        states = out.hidden_states[predictor.config.exit_layer][0, rows]
        ends = predictor(states, torch.arange(len(answer)))
    return out.logits[0, rows].argmax(-1).tolist(), ends.numpy()
