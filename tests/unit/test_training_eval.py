# SPDX-License-Identifier: Apache-2.0
"""Evaluation without an engine, the shipped drafters, and training of every family."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spexis.drafters.exit.config import ExitConfig
from spexis.training import eval_exit
from spexis.training.batches import make_batch
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.specbench import TASKS, by_task, read_specbench
from spexis.training.target import Target
from spexis.training.trainer import Trainer

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None, "head_dim": 8},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_comes_back_from_disk(family, tied, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        **FAMILIES[family],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    rows = [
        (rng.integers(0, 64, 4).tolist(), rng.integers(0, 64, 12).tolist(), True, i)
        for i in range(12)
    ]
    store = TokenStore.from_rows(rows, 64)
    run = RunConfig.load(
        None,
        [
            f"model={tmp_path / 'model'}",
            "data.prompts=none",
            f"output_dir={tmp_path / 'run'}",
            "drafter.exit_layers=[2]",
            "drafter.num_drafter_layers=[1]",
        ],
    )
    target = Target(run.model, torch.device("cpu"))
    everything = np.arange(12)
    trainer = Trainer(run, target, store, np.arange(40), everything, everything)
    trainer.train_step(make_batch(store, everything, target.device))
    (folder,) = trainer.export(tmp_path / "drafters").values()
    config = ExitConfig.load(folder)
    assert config.tied_head is tied and config.acceptance is None  # not looked at yet
    sizes = [None, 20, *([eval_exit.FULL] if tied else [])]
    counts = eval_exit.simulate(target, [folder], store, sizes, 256, [True, False])
    assert len(counts) == 2 * len(sizes)
    for found in counts.values():
        assert found.drafted.tolist() == [12] * 12
        assert (found.accepted <= found.drafted).all()
        assert sum(line["drafts"] for line in found.reliability()) == 144


def test_reliability_is_by_confidence():
    counts = eval_exit.Counts(2)
    sure, right = np.array([0.05, 0.92, 0.98, 1.0]), np.array([False, True, True, False])
    counts.add(np.array([0, 0, 1, 1]), right, sure)
    assert counts.accepted.tolist() == [1, 1]
    assert counts.reliability() == [
        {"drafts": 1, "confidence": 0.05, "accepted": 0.0},
        {"drafts": 3, "confidence": pytest.approx(2.9 / 3, abs=1e-4), "accepted": 0.6667},
    ]
    assert counts.calibration_error() == pytest.approx((0.05 + 0.9) / 4)


def test_by_task_weighs_tasks_alike_and_tokens_within_a_task():
    names = ["qa", "qa", "rag"]
    table = by_task(np.array([1, 9, 5]), np.array([10, 10, 10]), names)
    assert table == {"qa": 0.5, "rag": 0.5, "avg": 0.5}


def test_specbench_rows(tmp_path):
    path = tmp_path / "bench.jsonl"
    rows = [{"task": t, "prompt_turns": [f"{t} {i}"]} for i in range(3) for t in TASKS]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [r["prompt_turns"][0] for r in read_specbench(path, 1)] == [f"{t} 0" for t in TASKS]
    path.write_text('{"task": "dancing"}')
    with pytest.raises(ValueError, match=r"bench\.jsonl:1"):
        read_specbench(path, None)


def test_refusals_are_one_line_and_a_json(tmp_path, capsys):
    assert eval_exit.main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out.strip().splitlines()[-1])
    assert report["name"] == "eval-drafter" and report["ok"] is False
    assert "config.json is missing" in report["error"]
    assert len(captured.err.strip().splitlines()) == 1
    with pytest.raises(ValueError, match="give its place with --data"):
        read_specbench(tmp_path / "none.jsonl", None)


def test_shipped_drafters_are_whole_and_small():
    folders = eval_exit.shipped_folders()
    assert folders
    for folder in folders:
        config = ExitConfig.load(folder)
        config.load_tensors(folder)  # checks the hash, the names and the shapes
        size = sum(f.stat().st_size for f in Path(folder).iterdir())
        assert size <= 10_000_000
        assert (folder / "train_command.txt").is_file()
