# SPDX-License-Identifier: Apache-2.0
"""Training: run file, data formats, batches, one small run that learns, resumes and exports."""

import gzip
import json

import numpy as np
import pytest
import torch

from spexis.drafters.exit.config import ExitConfig, base_facts, fingerprint
from spexis.drafters.exit.module import load_drafter
from spexis.training import train_exit
from spexis.training.batches import epoch_batches, make_batch
from spexis.training.config import RunConfig
from spexis.training.data import (
    TokenStore,
    answer_counts,
    draft_vocabulary,
    join_prompts,
    read_prompts,
)
from spexis.training.optim import orthogonalise

VOCAB = 64


# -- the run file -----------------------------------------------------------------------------


def test_run_file_round_trip(tmp_path):
    path = tmp_path / "run.yaml"
    overrides = ["model=m", "data.prompts=p.jsonl", "drafter.exit_layers=[3, 4]", "train.lr=1"]
    config = RunConfig.load(None, overrides)
    assert config.drafter.exit_layers == [3, 4] and config.train.lr == 1.0
    config.dump(path)
    assert RunConfig.load(str(path)) == config
    assert RunConfig.load(str(path), ["train.lr=2.5"]).train.lr == 2.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key train.lrr; allowed: optimizer"),
        ("nothing=1", "unknown key nothing"),
        ("train.epochs=many", "train.epochs must be of type int"),
        ("train.epochs=true", "train.epochs must be of type int"),
        ("drafter.exit_layers=3", "drafter.exit_layers must be a list"),
        ("drafter.exit_layers=[a]", "exit_layers\\[0\\] must be of type int"),
        ("train=3", "train is a section"),
        ("generate.passes=[{heat: 1.0}]", "unknown key generate.passes\\[0\\].heat"),
        ("train.optimizer=sgd", "'muon' or 'adamw'"),
        ("train.lr", "not key=value"),
        ("model=", "must be of type str"),
    ],
)
def test_run_file_refusals_are_one_line(override, message):
    with pytest.raises(ValueError, match=message) as refusal:
        RunConfig.load(None, ["model=m", "data.prompts=p", override])
    assert "\n" not in str(refusal.value)


# -- data -------------------------------------------------------------------------------------

SHAPES = [
    {"prompt": "Hi"},
    {"prompt_turns": ["Hi", "More"]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"conversations": [{"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_every_row_shape_gives_the_same_prompt(tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    text = json.dumps(SHAPES) if suffix == ".json" else "\n".join(map(json.dumps, SHAPES)) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert read_prompts(path) == [[{"role": "user", "content": "Hi"}]] * len(SHAPES)


def test_system_and_earlier_turns_are_kept(tmp_path):
    turns = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (chat,) = read_prompts(path)
    assert [m["content"] for m in chat] == ["S", "A", "B", "C"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt"', r"p\.jsonl:2: not JSON"),
        ('{"text": "a"}', r"p\.jsonl:1: no prompt"),
        ('{"prompt": 3}', r"p\.jsonl:1: prompt must be text"),
        ("[1]", r"p\.jsonl:1: a row must be an object"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', r"p\.jsonl:1: a turn needs a role"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', r"p\.jsonl:1: no user turn"),
        ("\n", "holds no rows"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        read_prompts(path)
    assert "\n" not in str(refusal.value)


def test_joined_prompts_are_longer_and_repeatable():
    chats = [[{"role": "user", "content": f"Translate: {i} " + "x" * 50}] for i in range(120)]
    chats += [[{"role": "user", "content": f"Passage {i} " + "y" * 700}] for i in range(20)]
    joined = join_prompts(chats, 9, seed=1)
    assert joined == join_prompts(chats, 9, seed=1)
    assert len(joined) == 9
    assert all(len(c[0]["content"]) > 100 for c in joined)
    assert join_prompts(chats[:5], 9, seed=1) == []


def test_store_round_trip_counts_and_vocabulary(tmp_path):
    rows = [([1, 2, 3], [9, 9, 8], True, 0), ([4], [9], False, 7)]
    store = TokenStore.from_rows(rows, VOCAB)
    store.save(tmp_path / "s.npz")
    both = TokenStore.concat([TokenStore.load(tmp_path / "s.npz")] * 2)
    assert len(both) == 4 and both.answer_tokens == 8
    assert both.row(3).tolist() == [4, 9]
    assert both.prompt_index.tolist() == [0, 7, 0, 7]
    counts = answer_counts(both, VOCAB)
    assert counts[9] == 6 and counts[8] == 2 and counts.sum() == 8
    assert draft_vocabulary(counts, 3).tolist() == [9, 8, 0]


def test_batches_cover_every_row_once_within_the_budget():
    rng = np.random.default_rng(0)
    rows = [
        ([1] * int(rng.integers(1, 40)), [2] * int(rng.integers(1, 90)), True, i) for i in range(99)
    ]
    store = TokenStore.from_rows(rows, VOCAB)
    lengths = np.diff(store.offsets)
    batches = epoch_batches(lengths, np.arange(99), 512, seed=0, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(99))
    again = epoch_batches(lengths, np.arange(99), 512, seed=0, epoch=1)
    assert [b.tolist() for b in batches] != [b.tolist() for b in again]
    for chosen in batches:
        batch = make_batch(store, chosen, torch.device("cpu"))
        assert batch.ids.numel() <= 512
        assert len(batch.rows) == sum(len(rows[i][1]) for i in chosen)
        assert (batch.ids.flatten()[batch.rows + 1] == 2).all()


def test_orthogonalise_gives_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 32, 32), (2, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.3 and values.max() < 1.5


# -- a small run ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine cost more than such small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_llama(folder, **changes) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    LlamaForCausalLM(LlamaConfig(**(fields | changes))).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path):
    """A run folder whose answers exist already: greedy ones of a tiny random model."""
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(40)))
    net = AutoModelForCausalLM.from_pretrained(model).eval()
    prompt_ids = torch.randint(0, VOCAB, (40, 6), generator=torch.Generator().manual_seed(1))
    ids = prompt_ids
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, net(ids).logits[:, -1:].argmax(-1)], dim=1)
    rows = [(ids[i, :6].tolist(), ids[i, 6:].tolist(), True, i) for i in range(40)]
    out = tmp_path / "run"
    TokenStore.from_rows(rows, VOCAB).save(out / "answers" / "pass00-shard0000.npz")
    (out / "answers" / "done.json").write_text("{}")
    return [
        f"model={model}",
        f"data.prompts={prompts}",
        f"output_dir={out}",
        "data.holdout=5",
        "drafter.exit_layers=[2, 3]",
        "drafter.num_drafter_layers=[1]",
        "drafter.draft_vocab_size=48",
        "train.tokens_per_batch=256",
        "train.loss_rows=64",
        "train.device=cpu",
        "train.warmup_steps=2",
        "train.log_every=5",
        "train.eval_every=1000",
    ], out


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_training_lowers_the_loss_and_writes_everything(run, capsys):
    overrides, out = run
    assert train_exit.main([*overrides, "train.epochs=12"]) == 0
    report = last_json(capsys)
    assert report["name"] == "train-exit" and report["ok"] is True
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in rows if r["kind"] == "train"]
    for name in report["drafters"]:
        assert train[-1][f"loss/{name}"] < train[0][f"loss/{name}"]
        assert train[-1][f"right/{name}"] > train[0][f"right/{name}"]
        folder = out / "drafters" / name
        text = (folder / "train_command.txt").read_text()
        assert "prompts_sha256" in text and "torch==" in text and "exit_layers" in text
        drafter = load_drafter(str(folder))
        drafter.config.check_base(overrides[0].removeprefix("model="))
        final = [r for r in rows if r["kind"] == "final"][-1]
        assert drafter.config.acceptance == final[name]
    assert {r["kind"] for r in rows} >= {"train", "final"}


def test_resume_continues_where_it_stopped(run, capsys):
    overrides, out = run
    assert train_exit.main([*overrides, "train.epochs=4", "train.max_steps=7"]) == 0
    capsys.readouterr()
    assert train_exit.main([*overrides, "train.epochs=4", "train.max_steps=11"]) == 0
    assert "resumed at step 7" in capsys.readouterr().err
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state["counters"]["step"] == 11
    other = [o for o in overrides if not o.startswith("drafter.exit_layers")]
    assert train_exit.main([*other, "drafter.exit_layers=[1]"]) == 2
    assert "choose another output_dir" in last_json(capsys)["error"]


def test_unknown_key_ends_in_one_line_and_a_json(capsys):
    assert train_exit.main(["model=m", "data.prompts=p", "train.typo=1"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert len(captured.err.strip().splitlines()) == 1


# -- facts about base models ------------------------------------------------------------------


def test_fingerprint_tells_models_apart_but_not_dtypes(tmp_path):
    from transformers import AutoModelForCausalLM

    first = tiny_llama(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(first)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "b")
    assert fingerprint(first) == fingerprint(tmp_path / "b")
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(tmp_path / "c")
    assert fingerprint(first) != fingerprint(tmp_path / "c")


def test_families_and_ropes(tmp_path):
    from transformers import AutoConfig

    base = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    facts = {
        f: base_facts(AutoConfig.for_model(f, **base))
        for f in ("llama", "qwen2", "qwen3", "mistral")
    }
    assert [f for f in facts if facts[f]["qkv_bias"]] == ["qwen2"]
    assert [f for f in facts if facts[f]["qk_norm"]] == ["qwen3"]
    assert facts["qwen3"]["head_dim"] == 128 and facts["llama"]["head_dim"] == 8
    with pytest.raises(ValueError, match="'gpt2' is not supported"):
        base_facts(AutoConfig.for_model("gpt2"))
    scaled = AutoConfig.for_model(
        "llama", **base, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(ValueError, match="yarn"):
        base_facts(scaled)


def test_a_drafter_of_another_model_is_refused(run, tmp_path, capsys):
    overrides, _ = run
    assert train_exit.main([*overrides, "train.max_steps=1"]) == 0
    folder = next(iter(last_json(capsys)["drafters"].values()))
    stranger = tiny_llama(tmp_path / "stranger", num_hidden_layers=5)
    with pytest.raises(ValueError, match="train one with") as refusal:
        ExitConfig.load(folder).check_base(stranger)
    assert "\n" not in str(refusal.value)
