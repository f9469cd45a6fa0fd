# SPDX-License-Identifier: Apache-2.0
"""The length predictor inside a stage, and its probabilities' way to the scheduler; no engine."""

import contextlib
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spexis.bench.tiny import EXIT_LAYER, HIDDEN, LAYERS, tiny_model, tiny_predictor
from spexis.config import ConfigError, SpexisConfig
from spexis.lengths import resolve as resolving
from spexis.lengths.config import LengthConfig
from spexis.lengths.module import load_predictor

pytestmark = pytest.mark.engine  # no engine starts, but vLLM is imported
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> str:
    return tiny_predictor(model, tmp_path_factory.mktemp("predictor") / "tiny")


def runner(model: str, predictor, stage: int = 1, stages: int = 2, layers: int = LAYERS):
    """As much of a model runner as StagePredictor.load() looks at."""
    from transformers import AutoConfig

    config = SimpleNamespace(
        model=model,
        revision=None,
        max_model_len=64,
        hf_text_config=AutoConfig.from_pretrained(model),
        get_total_num_hidden_layers=lambda: layers,
    )
    return SimpleNamespace(
        spexis_config=SpexisConfig.from_dict({"lookahead": True, "length_predictor": predictor}),
        pp=SimpleNamespace(rank_in_group=stage, world_size=stages),
        model_config=config,
        device=CPU,
    )


# -- inside a stage -------------------------------------------------------------------------------


def test_loaded_on_the_second_stage_only(model, folder):
    from spexis.lengths.engine import StagePredictor

    assert StagePredictor.load(runner(model, False)) is None
    assert StagePredictor.load(runner(model, folder, stage=0)) is None
    assert StagePredictor.load(runner(model, folder)) is not None


def test_another_split_or_other_weights_end_the_worker_in_one_line(model, folder, tmp_path):
    from spexis.lengths.engine import StagePredictor

    with pytest.raises(ValueError, match=r"reads layer 3, but the first stage ends after layer 4"):
        StagePredictor.load(runner(model, folder, layers=8))
    other = tiny_model("llama", tmp_path / "other", seed=9)
    with pytest.raises(ValueError, match="whose weights are others") as error:
        StagePredictor.load(runner(other, folder))
    assert "\n" not in str(error.value)


@pytest.fixture
def stage(folder):
    """stage(is_last) -> a V1 stage whose layers work in place on what was received."""
    from spexis.engine.runner_v1 import SpexisV1Mixin
    from spexis.lengths.engine import StagePredictor

    class FakeStage(SpexisV1Mixin):
        def _prepare_device_inputs(self, rows, start, token):
            return rows.of_ran(torch.cumsum(rows.num_scheduled, 0) - 1)

        def _forward_context(self, rows):
            return contextlib.nullcontext()

        def _forward(self, rows, received):
            received["hidden_states"].zero_()
            received["residual"].fill_(7.0)
            return received["hidden_states"]

        def _send_to_next_stage(self, output, start, token, rows, ends):
            self.sent = ends

    def make(is_last: bool, predictor=True):
        fake = object.__new__(FakeStage)
        fake.device = CPU
        fake.length_predictor = StagePredictor(load_predictor(folder)) if predictor else None
        fake.pp = SimpleNamespace(is_last_rank=is_last, is_first_rank=False)
        fake.model = SimpleNamespace(compute_logits=lambda states: states)
        fake.last_stage = SimpleNamespace(judge=lambda *args: "good")
        fake.input_batch = SimpleNamespace(num_prompt_tokens=np.array([9, 30, 4, 0], np.int32))
        return fake

    return make


def one_step(stage, held=None, **more):
    """Rows: the last chunk of a prompt of 9, a chunk inside one of 30, a decode row."""
    from vllm.sequence import IntermediateTensors

    from spexis.engine.runner_v1 import StepRows

    torch.manual_seed(0)
    received = {"hidden_states": torch.randn(14, HIDDEN), "residual": torch.randn(14, HIDDEN)}
    stream = received["hidden_states"] + received["residual"]
    scheduled = np.array([6, 7, 1], np.int32)
    rows = StepRows(
        req_ids=["a", "b", "c"],
        slots_np=np.arange(3),
        slots=torch.arange(3),
        num_scheduled_np=scheduled,
        num_scheduled=torch.from_numpy(scheduled.astype(np.int64)),
        num_computed=torch.tensor([3, 10, 99]),
        is_prefill=torch.tensor([True, True, False]),
        samples=torch.tensor([True, False, True]),
        has_prefill=True,
        num_tokens=14,
    )
    if held is not None:
        rows.hold(np.array(held))
    start, token = torch.tensor([0, 0, 20]), torch.tensor([0, 0, 5])
    with torch.inference_mode():
        stage._run_stage("step", rows, start, token, IntermediateTensors({**received, **more}))
    last = torch.cumsum(rows.num_scheduled, 0) - 1
    return stream[rows.of_ran(last)]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_stage_says_what_the_definition_says(stage, folder, is_last):
    """Of the state as received, counted from each request's own prompt."""
    fake = stage(is_last)
    states = one_step(fake)
    ends = fake.pending.ends if is_last else fake.sent
    with torch.no_grad():
        wanted = load_predictor(folder)(states, torch.tensor([0, -13, 17]))
    assert ends.shape == (3, 5) and ends.dtype == torch.float32
    assert torch.allclose(ends, wanted, atol=1e-6)
    assert (wanted[0] - wanted[2]).abs().max() > 0.01  # else the comparison shows little


def test_a_row_that_was_left_out_moves_nobody_elses_words(stage, folder):
    """Rows without tokens (mode "sp-alpha") have no state; the others keep their places."""
    fake = stage(is_last=True)
    states = one_step(fake, held=[False, True, False])
    with torch.no_grad():
        wanted = load_predictor(folder)(states, torch.tensor([0, 17]))
    assert fake.pending.ends.shape == (3, 5)
    assert torch.allclose(fake.pending.ends[[0, 2]], wanted, atol=1e-6)


def test_later_stages_pass_on_what_the_second_one_said(stage):
    from spexis.engine.runner_v1 import ENDS_KEY

    said = torch.rand(3, 5)
    for is_last in (True, False):
        fake = stage(is_last, predictor=False)
        one_step(fake, **{ENDS_KEY: said})
        assert (fake.pending.ends if is_last else fake.sent) is said
        one_step(fake)
        assert (fake.pending.ends if is_last else fake.sent) is None


def test_v2_reads_before_the_layers_run_and_speaks_after_the_verdict(folder, monkeypatch):
    runner_v2 = pytest.importorskip("spexis.engine.runner_v2", reason="needs Triton")
    from spexis.lengths.engine import StagePredictor

    class Stock:
        def sample_tokens(self, grammar_output):
            happened.append("verdict")
            return "vLLM's"

    class FakeStage(runner_v2.SpexisV2Mixin, Stock):
        main_stream, output_copy_stream = "main", "copy"

    happened = []
    fake = object.__new__(FakeStage)
    fake.pp, fake.device = SimpleNamespace(is_first_rank=False), CPU
    fake.length_predictor, fake.exit_rows = StagePredictor(load_predictor(folder)), None
    monkeypatch.setattr(runner_v2, "AsyncExtras", lambda *args: args)
    assert fake.sample_tokens(None) == "vLLM's"  # a dummy step: nothing was read

    torch.manual_seed(0)
    hidden, residual = torch.randn(16, HIDDEN), torch.randn(16, HIDDEN)  # whole buffers
    states = (hidden + residual)[[5, 12, 13]]
    received = {"hidden_states": hidden, "residual": residual}
    fake.received = SimpleNamespace(tensors=received)
    prompt_len = np.array([9, 30, 4, 8], np.int32)  # by slot
    fake.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompt_len))
    batch = SimpleNamespace(
        num_reqs=3,
        idx_mapping_np=np.array([2, 0, 1]),
        logits_indices=torch.tensor([5, 12, 13], dtype=torch.int32),
        seq_lens=torch.tensor([4, 17, 50, 0], dtype=torch.int32),  # padded
    )
    fake._read_exit(batch)
    hidden.zero_()  # as the layers do, in place
    output, ends, rows, *streams = fake.sample_tokens(None)
    assert (output, streams, happened) == ("vLLM's", ["main", "copy"], ["verdict", "verdict"])
    assert rows is None
    with torch.no_grad():
        wanted = load_predictor(folder)(states, torch.tensor([0, 8, 20]))
    assert torch.allclose(ends, wanted, atol=1e-6)


# -- on the way -----------------------------------------------------------------------------------


def output(**more):
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=["a", "b"],
        req_id_to_index={"a": 0, "b": 1},
        sampled_token_ids=[[3], []],
        **more,
    )


def test_the_output_is_vllms_with_one_field_more_and_survives_pickling():
    from vllm.v1.outputs import ModelRunnerOutput

    from spexis.engine.outputs import SpexisOutput

    ends = np.random.default_rng(0).random((2, 5), np.float32)
    sent = SpexisOutput.of(output(num_nans_in_logits={"a": 1}), ends=ends)
    buffers: list = []  # as vLLM's shared-memory queue: protocol 5, small buffers in line
    data = pickle.dumps(sent, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda b: True)
    for got in (pickle.loads(data, buffers=buffers), pickle.loads(pickle.dumps(sent))):
        assert type(got) is SpexisOutput and isinstance(got, ModelRunnerOutput)
        assert (got.ends == ends).all()
        assert got.sampled_token_ids == [[3], []] and got.num_nans_in_logits == {"a": 1}


def test_through_vllms_shared_memory_queue():
    """The queue that workers answer the engine by, writer and reader in one process."""
    from threading import Thread

    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from spexis.engine.outputs import SpexisOutput

    ends = np.random.default_rng(0).random((2, 5), np.float32)
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    waiting = Thread(target=writer.wait_until_ready, daemon=True)
    waiting.start()
    reader.wait_until_ready()
    waiting.join()
    writer.enqueue(("success", SpexisOutput.of(output(), ends=ends)))
    _, got = reader.dequeue(timeout=30)
    assert type(got) is SpexisOutput and (got.ends == ends).all()


def test_v2_output_waits_for_its_own_copy(monkeypatch):
    v2_extras = pytest.importorskip("spexis.engine.v2_extras")
    events = []

    class Event:
        def __init__(self, blocking):
            assert blocking

        def record(self, stream):
            events.append(f"record on {stream.name}")

        def synchronize(self):
            events.append("synchronize")

    @contextlib.contextmanager
    def stream(to, back):
        events.append(f"{back.name} -> {to.name}")
        yield

    monkeypatch.setattr(v2_extras, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    main = SimpleNamespace(name="main")
    copy = SimpleNamespace(name="copy", wait_stream=lambda s: events.append(f"wait {s.name}"))
    ends = torch.rand(2, 5)
    inner = SimpleNamespace(get_output=lambda: events.append("vLLM's") or output())
    pending = v2_extras.AsyncExtras(inner, ends, None, main, copy)
    assert events == ["main -> copy", "wait main", "record on copy"]
    got = pending.get_output()
    assert events[3:] == ["vLLM's", "synchronize"]
    assert (got.ends == ends.numpy()).all() and got.sampled_token_ids == [[3], []]


# -- which one ------------------------------------------------------------------------------------


def served(model: str, **changes):
    from spexis.drafters import served_by_vllm

    return served_by_vllm(runner(model, False, **changes).model_config)


def test_asked_for_by_folder(model, folder, tmp_path):
    found, what = resolving.resolve(folder, served(model), EXIT_LAYER)
    assert str(found) == folder and folder in what
    wrong = tiny_predictor(model, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"x")
    cases = [
        (str(tmp_path / "nowhere"), model, EXIT_LAYER, "config.json is missing"),
        (wrong, model, EXIT_LAYER, "does not match weights_sha256"),
        (folder, model, 2, "first stage ends after layer 2"),
        (folder, tiny_model("llama", tmp_path / "m", seed=5), EXIT_LAYER, "weights are others"),
    ]
    for asked, where, layers, words in cases:
        with pytest.raises(ConfigError, match=r"^spexis\.length_predictor: ") as error:
            resolving.resolve(asked, served(where), layers)
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_shipped_one_is_taken_only_where_it_fits(model, folder, tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.setattr(resolving, "shipped", lambda: {"tiny": Path(folder)})
    assert resolving.resolve("tiny", served(model), EXIT_LAYER)[0] == Path(folder)
    assert resolving.resolve(None, served(model), EXIT_LAYER)[0] == Path(folder)
    found, why = resolving.resolve(None, served(model), 4)
    assert found is None and "ends after layer 4" in why
    # Sizes alone do not say that it is the model.
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    found, why = resolving.resolve(None, served(str(tmp_path)), EXIT_LAYER)
    assert found is None and "not on this machine yet" in why
    assert resolving.resolve("tiny", served(str(tmp_path)), EXIT_LAYER)[0] == Path(folder)
    monkeypatch.setattr(resolving, "shipped", dict)
    assert resolving.resolve(None, served(model), EXIT_LAYER) == (
        None,
        "no length predictor (none ships)",
    )


def test_the_shipped_predictors_load_and_fit_in_front_of_a_stage():
    from spexis.lengths import shipped

    for folder in shipped().values():
        config = LengthConfig.load(folder)
        load_predictor(folder)
        assert 0 < config.exit_layer < config.num_hidden_layers
