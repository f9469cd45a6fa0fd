# SPDX-License-Identifier: Apache-2.0
"""Generation around the engine: openings, shards, second turns. The engine itself is a stand-in."""

from types import SimpleNamespace

import pytest

from spexis.training import generate
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore

END = 2


class StandIn:
    """Answers n tokens: the prompt's sum modulo 50, counted on; ends with END after 6 tokens."""

    def __init__(self):
        self.calls = []

    def generate(self, inputs, params, use_tqdm):
        self.calls.append(
            [
                (len(i["prompt_token_ids"]), p.temperature)
                for i, p in zip(inputs, params, strict=True)
            ]
        )
        return [self.one(i["prompt_token_ids"], p) for i, p in zip(inputs, params, strict=True)]

    def one(self, ids, params):
        start = next((k for k, t in enumerate(ids) if t >= 100), len(ids))
        tokens = []
        for k in range(len(ids) - start, 7):
            if len(tokens) == params.max_tokens:
                break
            tokens.append(END if k == 6 else 100 + k)
        reason = "stop" if tokens and tokens[-1] == END else "length"
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)])


class Letters:
    """A tokenizer of one token per letter."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % 90 for c in text]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def __len__(self):
        return 200


def run_config(tmp_path, *overrides):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(5)))
    return RunConfig.load(
        None,
        [
            "model=m",
            f"data.prompts={prompts}",
            f"output_dir={tmp_path}",
            "generate.shard_prompts=3",
            *overrides,
        ],
    )


def test_an_opening_is_sampled_and_the_rest_greedy():
    pytest.importorskip("vllm")
    engine = StandIn()
    prompts = [[1, 2, 3], [4, 5]]
    whole = [100, 101, 102, 103, 104, 105, END]
    assert generate.answer(engine, prompts, 20, 64) == [whole, whole]
    assert generate.answer(engine, prompts, 20, 64, temperature=1.0, opening=4) == [whole, whole]
    assert engine.calls[-2:] == [[(3, 1.0), (2, 1.0)], [(7, 0.0), (6, 0.0)]]
    # An answer that ends inside its opening is not continued; limits count for both parts.
    assert generate.answer(engine, prompts, 20, 64, temperature=1.0, opening=9) == [whole, whole]
    assert engine.calls[-1] == []
    assert generate.answer(engine, prompts, 5, 64, temperature=1.0, opening=4)[0] == whole[:5]
    assert generate.answer(engine, prompts, 20, 5)[0] == whole[:2]


def test_shards_cover_every_prompt_once_and_second_turns_follow_the_first_answers(tmp_path):
    pytest.importorskip("vllm")
    config = run_config(tmp_path, "generate.passes=[{temperature: 0.0}, {follow_up: true}]")
    chats = generate.all_chats(config)
    assert chats == generate.all_chats(config) and len(chats) == 5
    assert generate.num_shards(config, 5) == 2
    for shard in range(2):
        for index_pass in range(2):
            generate.write_shard(config, StandIn(), Letters(), chats, index_pass, shard)
    store = generate.load_answers(config)
    assert store.prompt_index.tolist() == [0, 1, 2, 3, 4] * 2
    assert store.greedy.all() and store.answer_tokens == 70
    assert (store.prompt_lens[5:] > store.prompt_lens[:5]).all()
    first = TokenStore.load(generate.shard_path(config, 0, 0))
    assert first.row(0)[first.prompt_lens[0] :].tolist() == [100, 101, 102, 103, 104, 105, END]


def test_no_answers_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="run the generation first"):
        generate.load_answers(run_config(tmp_path))
