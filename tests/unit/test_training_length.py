# SPDX-License-Identifier: Apache-2.0
"""Length predictors: what counts as known, decisions, the folder, a run that learns, evaluation."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spexis.bench.tiny import EOS, EXIT_LAYER, tiny_model
from spexis.core.lengths import THRESHOLDS
from spexis.lengths import shipped
from spexis.lengths.config import NEVER, LengthConfig
from spexis.lengths.module import FLOOR, LengthPredictor, length_loss, load_predictor
from spexis.training import eval_length, train_length
from spexis.training.batches import make_batch
from spexis.training.config import RunConfig
from spexis.training.data import TokenStore
from spexis.training.length_data import (
    Limits,
    Predictions,
    check_ends,
    end_tokens,
    labels,
    shares,
)
from spexis.training.length_scores import Scores, choose_decisions, table

CPU = torch.device("cpu")
M = np.array(THRESHOLDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


def length_config(**changes) -> LengthConfig:
    fields = {
        "base_model": "tiny",
        "base_model_hash": "0" * 64,
        "exit_layer": 3,
        "num_hidden_layers": 6,
        "hidden_size": 16,
        "rms_norm_eps": 1e-5,
        "width": 8,
        "max_answered": 100,
        "thresholds": list(THRESHOLDS),
        "decisions": [0.5] * 5,
        "min_precision": 0.75,
        "version": "test",
    }
    return LengthConfig(**(fields | changes))


# -- labels ---------------------------------------------------------------------------------------


def store_of(lengths, limits: Limits, prompt: int = 3) -> TokenStore:
    """Answers that end with EOS, or are cut at their limit."""
    rows = []
    for i, n in enumerate(lengths):
        cut = n > limits.max_tokens
        answer = [9] * limits.max_tokens if cut else [9] * (n - 1) + [EOS]
        rows.append(([5] * prompt, answer, True, i))
    return TokenStore.from_rows(rows, 384)


def test_a_row_knows_what_was_answered_and_what_remains():
    limits = Limits(max_tokens=100, max_len=1000)
    facts = labels(make_batch(store_of([6], limits), np.array([0]), CPU), limits)
    assert facts.answered.tolist() == [0, 1, 2, 3, 4, 5]  # the last prompt token's row first
    remaining = np.array([6, 5, 4, 3, 2, 1])
    assert (facts.ended.numpy() == (remaining[:, None] < M)).all()
    assert facts.known.all() and not facts.sequence.any()


def test_near_the_limit_nothing_is_known_however_the_answer_ended():
    limits = Limits(max_tokens=20, max_len=1000)
    batch = make_batch(store_of([18, 50], limits), np.array([0, 1]), CPU)
    facts = labels(batch, limits)
    for sequence in (0, 1):
        mine = facts.sequence == sequence
        answered = facts.answered[mine].numpy()
        assert (facts.known[mine].numpy() == (answered[:, None] + M <= 20)).all()
    # Where it is known it is true of the uncut answer.
    cut = facts.sequence == 1
    truth = (50 - facts.answered[cut].numpy())[:, None] < M
    known = facts.known[cut].numpy()
    assert (facts.ended[cut].numpy()[known] == truth[known]).all()


def test_prompts_that_leave_less_room_have_a_nearer_limit():
    limits = Limits(max_tokens=20, max_len=15)
    batch = make_batch(store_of([8], limits), np.array([0]), CPU)
    known = labels(batch, limits).known
    assert known[:, 0].tolist() == [True] * 8  # 12 tokens of room: 4 more fit until the 8th
    assert known[:, 1].tolist() == [True] * 5 + [False] * 3


def test_masking_keeps_the_shares_of_uncut_answers():
    """Labels of cut answers tell the same as those of the whole ones: no bias near the limit."""
    lengths = np.random.default_rng(0).geometric(1 / 40, 3000)
    cut, free = Limits(64, 10_000), Limits(9000, 10_000)
    facts = labels(make_batch(store_of(lengths, cut), np.arange(3000), CPU), cut)
    answered, ended, known = (x.numpy() for x in (facts.answered, facts.ended, facts.known))
    for k, m in enumerate(THRESHOLDS[:4]):
        late = known[:, k] & (answered > 64 - 2 * m)
        assert ended[late, k].mean() == pytest.approx(1 - (1 - 1 / 40) ** (m - 1), abs=0.04)
    by_rows = [ended[known[:, k], k].mean() for k in range(5)]
    np.testing.assert_allclose(shares(store_of(lengths, cut), np.arange(3000), cut), by_rows)
    whole = store_of(lengths, free)
    assert shares(whole, np.arange(3000), free)[0] == pytest.approx(by_rows[0], abs=0.02)


def test_answers_made_with_other_limits_are_refused():
    store = store_of([6, 30], Limits(20, 1000))
    assert check_ends(store, Limits(20, 1000), {EOS}) == 1
    for limits, words in (
        (Limits(25, 1000), "1 of 2 answers stop before generate.max_tokens=25"),
        (Limits(19, 1000), "longer than generate.max_tokens=19"),
    ):
        with pytest.raises(ValueError, match=words) as refusal:
            check_ends(store, limits, {EOS})
        assert "\n" not in str(refusal.value)


def test_end_tokens_come_from_every_file(model, tmp_path):
    assert end_tokens(model) == {EOS}
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert end_tokens(tmp_path) == {3, 4}


# -- decisions and scores -------------------------------------------------------------------------


def predictions(p, ended, known=None) -> Predictions:
    """The same for every head."""
    p, ended = np.asarray(p, np.float32), np.asarray(ended, bool)
    known = np.ones(len(p), bool) if known is None else np.asarray(known, bool)
    columns = [np.tile(x[:, None], (1, 5)) for x in (p, ended, known)]
    return Predictions(*columns, np.arange(len(p)))


def test_a_decision_is_the_lowest_that_is_precise_enough():
    # Precision from the top: 1, 1, .67, .75, .8, .67, .57
    found = predictions([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.1], [1, 1, 0, 1, 1, 0, 0])
    decisions = choose_decisions(found, 0.75)
    assert decisions == pytest.approx([0.45] * 5)
    scores = Scores.of(found, decisions)
    assert scores.precision["4"] == 0.8 and scores.recall["64"] == 1.0
    assert choose_decisions(found, 0.9) == pytest.approx([0.75] * 5)


def test_ties_are_not_split_and_unknown_rows_do_not_count():
    found = predictions([0.9, 0.5, 0.5, 0.5, 0.2], [1, 1, 0, 0, 1], [1, 1, 1, 1, 0])
    assert choose_decisions(found, 0.6) == pytest.approx([0.7] * 5)
    assert Scores.of(found, [0.1] * 5).tokens["8"] == 4
    hopeless = predictions([0.9, 0.1], [0, 0])
    assert choose_decisions(hopeless, 0.75) == [NEVER] * 5
    scores = Scores.of(hopeless, [NEVER] * 5)
    assert scores.precision["4"] is None and scores.recall["4"] is None
    assert not scores.good(0.0, 0.0)


def test_calibrated_probabilities_have_no_calibration_error():
    rng = np.random.default_rng(0)
    p = rng.random(40_000)
    ended = rng.random(40_000) < p
    assert Scores.of(predictions(p, ended), [0.5] * 5).calibration_error["16"] < 0.01
    assert Scores.of(predictions(p**3, ended), [0.5] * 5).calibration_error["16"] > 0.1


def test_table_has_the_papers_form():
    found = predictions([0.9, 0.8, 0.2], [1, 0, 1])
    lines = table({"SpecBench": Scores.of(found, [0.5] * 4 + [0.95])}).splitlines()
    assert lines[0].split() == ["remaining", "|", "SpecBench"]
    assert lines[1].split() == ["<", "4", "|", "50.0", "/", "50.0"]
    assert lines[5].split() == ["<", "64", "|", "-", "/", "0.0"]


# -- the module and its folder --------------------------------------------------------------------


def random_predictor(**changes) -> LengthPredictor:
    torch.manual_seed(0)
    predictor = LengthPredictor(length_config(**changes))
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return predictor


def test_probabilities_rise_with_m_whatever_the_weights():
    predictor = random_predictor()
    ends = predictor(50 * torch.randn(200, 16), torch.arange(200))
    assert (ends.diff(dim=-1) >= 0).all()
    assert ends.min() >= FLOOR and ends.max() <= 1 - FLOOR and ends.max() < NEVER


def test_the_start_is_the_share_of_all_tokens():
    predictor = random_predictor()
    wanted = torch.tensor([0.02, 0.05, 0.1, 0.3, 0.5])
    predictor.start_at(wanted)
    ends = predictor(torch.randn(4, 16), torch.arange(4))
    torch.testing.assert_close(ends, wanted.expand(4, 5), atol=1e-4, rtol=1e-3)


def test_tokens_beyond_the_longest_answer_count_as_the_longest():
    predictor, h = random_predictor(), torch.randn(1, 16).expand(3, 16)
    ends = predictor(h, torch.tensor([99, 100, 5000]))
    assert torch.equal(ends[1], ends[2]) and not torch.equal(ends[0], ends[1])


def test_loss_is_the_cross_entropy_of_what_is_known():
    predictor, h = random_predictor(), torch.randn(30, 16)
    ended, known = torch.rand(30, 5) < 0.5, torch.rand(30, 5) < 0.7
    answered = torch.arange(30)
    loss = length_loss(predictor.log_alive(h, answered), ended, known)
    wanted = F.binary_cross_entropy(predictor(h, answered), ended.float(), reduction="none")
    torch.testing.assert_close(loss, (wanted * known).sum(), rtol=1e-3, atol=1e-3)
    # Whatever is claimed about unknown rows changes nothing.
    torch.testing.assert_close(
        loss, length_loss(predictor.log_alive(h, answered), ended ^ ~known, known)
    )
    certain = length_loss(torch.zeros(1, 5), torch.ones(1, 5).bool(), torch.ones(1, 5).bool())
    assert torch.isfinite(certain)


def test_folder_round_trip_and_refusals(tmp_path, model):
    predictor = random_predictor()
    predictor.config.save(tmp_path, predictor.state_dict())
    again, h = load_predictor(tmp_path), torch.randn(5, 16)
    torch.testing.assert_close(again(h, torch.arange(5)), predictor(h, torch.arange(5)))
    assert again.decisions.tolist() == [0.5] * 5
    fields = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"format": "spexis-exit-1"}, "has format 'spexis-exit-1', not 'spexis-length-1'"),
        ({"thresholds": [4, 8, 16, 32, 65]}, "thresholds"),
        ({"colour": 1}, "unknown keys"),
        ({"exit_layer": 6}, "exit_layer 6 must lie in 1..5"),
        ({"width": 9}, "has shape"),
        ({"decisions": [0.5] * 4}, "five numbers"),
        ({"weights_sha256": "0"}, "does not match weights_sha256"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=words) as refusal:
            load_predictor(tmp_path)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="no length predictor in"):
        LengthConfig.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="belongs to tiny, not to other"):
        predictor.config.check_base(model, served_name="other")


# -- a small run ----------------------------------------------------------------------------------

LIMIT = 48


def countdown(count: int, seed: int) -> TokenStore:
    """Answers whose every token says how many follow: the state can know what remains."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, n in enumerate(rng.integers(4, 70, count)):
        answer = [100 + int(n) - 1 - k for k in range(n - 1)] + [EOS]
        rows.append((rng.integers(1, 90, 5).tolist(), answer[:LIMIT], True, i))
    return TokenStore.from_rows(rows, 384)


@pytest.fixture
def run(tmp_path, model):
    """A run folder whose answers exist already."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(120)))
    out = tmp_path / "run"
    countdown(120, 0).save(out / "answers" / "pass00-shard0000.npz")
    (out / "answers" / "done.json").write_text("{}")
    return [
        f"model={model}",
        "name=tiny",
        f"data.prompts={prompts}",
        f"output_dir={out}",
        "data.holdout=24",
        f"generate.max_tokens={LIMIT}",
        f"length.exit_layers=[2, {EXIT_LAYER}]",
        "length.width=64",
        "length.lr=0.03",
        "length.tokens_per_batch=1024",
        "length.device=cpu",
        "length.warmup_steps=2",
        "length.log_every=5",
        "length.eval_every=1000",
    ], out


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_training_learns_what_the_state_tells_and_eval_agrees(run, model, capsys, monkeypatch):
    overrides, out = run
    assert train_length.main([*overrides, "length.epochs=12"]) == 0
    report = last_json(capsys)
    assert report["name"] == "train-length" and report["ok"] is True
    assert set(report["predictors"]) == {"tiny-length2", f"tiny-length{EXIT_LAYER}"}
    assert 0 < report["answers_cut"] < 120
    rows = [
        json.loads(line)
        for line in (out / "length" / "metrics.jsonl").read_text().split("\n")
        if line
    ]
    train = [r for r in rows if r["kind"] == "train"]
    for name, path in report["predictors"].items():
        assert train[-1][f"loss/{name}"] < 0.5 * train[0][f"loss/{name}"]
        holdout = report["holdout"][name]
        for m in ("4", "8"):  # of .06 and .13 of the tokens; the model blurs what its tokens say
            assert holdout["precision"][m] > 0.6 and holdout["recall"][m] > 0.6
            assert holdout["calibration_error"][m] < 0.08
        predictor = load_predictor(path)
        predictor.config.check_base(model, predictor.config.exit_layer)
        with pytest.raises(ValueError, match=r"train one with length.exit_layers=\[5\]"):
            predictor.config.check_base(model, 5)
        text = (out / "predictors" / name / "train_command.txt").read_text()
        assert "spexis train length" in text and "prompts_sha256" in text and "exit_layers" in text
    assert not (out / "config.yaml").exists()  # the exit drafters' files are left alone

    fresh = countdown(30, 1)
    names = ["qa", "rag", "summarization"] * 10
    monkeypatch.setattr(eval_length, "greedy_answers", lambda *_: (fresh, names))
    folder = out / "predictors" / f"tiny-length{EXIT_LAYER}"
    arguments = ["--predictor", str(folder), "--model", model, "--max-tokens", str(LIMIT)]
    code = eval_length.main(arguments)
    captured = capsys.readouterr()
    found = json.loads(captured.out.strip().splitlines()[-1])
    assert found["name"] == "eval-length" and found["ok"] is (code == 0)
    assert found["precision"]["8"] > 0.6 and found["recall"]["8"] > 0.6
    assert set(found["by_task"]) == {"qa", "rag", "sum"}
    assert found["holdout"]["tokens"]["4"] > 0
    assert found["holdout"]["precision"] == report["holdout"][folder.name]["precision"]
    assert "SpecBench" in captured.err and "held-out prompts" in captured.err


def test_resume_continues_where_it_stopped(run, capsys):
    overrides, out = run
    assert train_length.main([*overrides, "length.epochs=9", "length.max_steps=3"]) == 0
    capsys.readouterr()
    assert train_length.main([*overrides, "length.epochs=9", "length.max_steps=5"]) == 0
    assert "resumed at step 3" in capsys.readouterr().err
    state = torch.load(out / "length" / "checkpoint.pt", weights_only=True)
    assert state["counters"]["step"] == 5
    for other in ("length.exit_layers=[1]", "length.width=65"):
        assert train_length.main([*overrides, other]) == 2
        assert "choose another output_dir" in last_json(capsys)["error"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("length.exit_layers=[6]", "exit_layer 6 must lie in 1..5"),
        ("generate.max_tokens=60", "set the limit they were made with"),
        ("data.holdout=0", "raise data.holdout"),
        ("length.restart_rate=1", "unknown key length.restart_rate"),
        ("length.min_precision=1.0", "between 0 and 1"),
    ],
)
def test_refusals_are_one_line_and_a_json(run, capsys, override, words):
    overrides, _ = run
    assert train_length.main([*overrides, "length.max_steps=1", override]) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out.strip().splitlines()[-1])
    assert report["ok"] is False and words in report["error"] and "\n" not in report["error"]


def test_evaluation_refuses_what_does_not_fit(tmp_path, model, capsys):
    predictor = random_predictor()
    predictor.config.save(tmp_path, predictor.state_dict())
    wanted = [(["--predictor", str(tmp_path), "--model", model], "belongs to tiny")]
    wanted += [(["--predictor", str(tmp_path / "none")], "config.json is missing")]
    if not shipped():
        wanted += [([], "no length predictor ships with this version")]
    for arguments, words in wanted:
        assert eval_length.main(arguments) == 1
        captured = capsys.readouterr()
        assert words in json.loads(captured.out)["error"]
        assert len(captured.err.strip().splitlines()) == 1


def test_a_run_file_may_serve_both_kinds_of_training(tmp_path):
    config = RunConfig.load(None, ["model=m", "data.prompts=p", "length.lr=0.5"])
    assert config.length.lr == 0.5 and config.train.lr != 0.5
    assert config.length.optimizer == "adamw"
    config.dump(tmp_path / "run.yaml")
    assert RunConfig.load(str(tmp_path / "run.yaml")) == config
    assert dataclasses.asdict(config)["length"]["min_precision"] == 0.75
