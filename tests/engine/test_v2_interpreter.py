# SPDX-License-Identifier: Apache-2.0
"""The V2 (CUDA) runner on the CPU: every token equals stock vLLM's on one stage.

    python -m pytest tests/engine/test_v2_interpreter.py

vLLM's V2 runner needs Triton; here its kernels run in Triton's interpreter (v2_on_cpu/), which
is slow, so the model is tiny and each engine gets one mix of about 20 requests: chunked
prompts, penalties, biases, logprobs, stops, a grammar, seeds, several answers, a shared prefix.
The counters asserted on make sure that what the runs are for did happen in them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from v2_on_cpu.drive import DRAWN, requests

from spexis.bench.tiny import steep_profile
from spexis.core.replay import replay

HERE = Path(__file__).parent / "v2_on_cpu"
SRC = Path(__file__).resolve().parents[2] / "src"

pytestmark = pytest.mark.engine


class World:
    """A tiny model, its drafter, and engine runs on it, each once."""

    def __init__(self, folder: Path):
        from spexis.bench.tiny import tiny_drafter, tiny_model, tiny_predictor

        self.folder = folder
        self.model = tiny_model("llama", folder / "model")
        self.drafter = tiny_drafter(self.model, folder / "drafter")
        self.predictor = tiny_predictor(self.model, folder / "predictor")
        self._runs: dict[str, dict] = {}

    def run(self, name: str, *options: str, v2: bool = True) -> dict:
        if name not in self._runs:
            out = self.folder / f"{name}.json"
            self._runs[name] = drive([self.model, str(out), *options], v2, out)
        return self._runs[name]

    def stock(self, v2: bool) -> dict:
        """Stock vLLM on one stage, with memory to spare."""
        return self.run("stock_v2" if v2 else "stock_v1", v2=v2)

    def oracle(self) -> str:
        """What stock vLLM answers, as the oracle drafter's reference."""
        path = self.folder / "oracle.jsonl"
        rows = [
            {"prompt_token_ids": requests(gpu=False)[name][0], "token_ids": answer["token_ids"]}
            for name, answers in self.stock(v2=True)["texts"].items()
            for answer in answers.values()
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)


def drive(args: list[str], v2: bool, out: Path) -> dict:
    paths = [str(SRC)]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        # With tensor parallelism vLLM compiles its embedding's mask, and Inductor would ask the
        # stand-in Triton back end what device it is for.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PP_LAYER_PARTITION"):
        env.pop(name, None)
    if v2:
        env.update(VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1")
        paths.insert(0, str(HERE))  # sitecustomize.py
    env["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, str(HERE / "drive.py"), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    pytest.importorskip("triton", reason="the V2 runner needs Triton (requirements/dev.lock)")
    return World(tmp_path_factory.mktemp("v2"))


def different(run: dict, stock: dict, what: tuple[str, ...] = ("token_ids", "logprobs")):
    """Names of the requests whose answers differ; of aborted ones, what they had."""
    return [name for name in stock["texts"] if not same(run, stock, name, what)]


def same(run: dict, stock: dict, name: str, what: tuple[str, ...]) -> bool:
    mine, theirs = run["texts"][name], stock["texts"][name]
    if name in run["aborted"]:
        length = len(mine["0"]["token_ids"])
        return mine["0"]["token_ids"] == theirs["0"]["token_ids"][:length]
    return mine.keys() == theirs.keys() and all(
        mine[i][key] == theirs[i][key] for i in mine for key in what
    )


@pytest.mark.slow
def test_the_stock_runners_agree(world: World):
    """The reference itself: V1 as the CPU ships it, V2 in the interpreter."""
    v1, v2 = world.stock(v2=False), world.stock(v2=True)
    assert (v1["runner_v2"], v2["runner_v2"]) == (False, True)
    # V1 draws from one generator per request, V2 keys its noise by seed and position.
    assert set(different(v2, v1)) <= DRAWN
    assert len(v1["texts"]) >= 16


def test_two_stages_with_an_exit_drafter(world: World):
    """Own keys and values, final states, too few blocks, aborts, one step more in flight."""
    spexis = {"drafter": {"method": "exit", "model": world.drafter}, "steps_in_flight": 3}
    options = ["--stages", "2", "--blocks", "11", "--abort", "--spexis", json.dumps(spexis)]
    run = world.run("exit", *options)
    assert run["runner_v2"]
    assert different(run, world.stock(v2=True)) == []
    assert run["blocks_leaked"] == 0
    counters = run["counters"]
    assert len(run["aborted"]) == 2
    assert counters["preemptions"] > 0
    assert 0 < counters["accepted"] < counters["drafts"]
    assert counters["discarded_rows"] > 0


@pytest.mark.slow
def test_three_stages_with_an_oracle(world: World):
    """A middle stage, which learns positions from the rows; a shared prefix is found again."""
    drafter = {"method": "oracle", "reference": world.oracle(), "acceptance": 0.6}
    spexis = json.dumps({"drafter": drafter})
    run = world.run("oracle", "--stages", "3", "--abort", "--spexis", spexis)
    assert different(run, world.stock(v2=True)) == []
    assert run["blocks_leaked"] == 0
    counters = run["counters"]
    assert len(run["aborted"]) == 2
    assert 0 < counters["accepted"] < counters["drafts"]
    # Behind a wrong guess two rows are discarded, unless the request ended meanwhile.
    assert counters["discarded_rows"] > counters["drafts"] - counters["accepted"]
    assert run["texts"]["prefix"]["0"]["cached"] >= 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "acceptance", "steps"), [(2, None, 3), (3, 1.0, 4), (4, 0.0, 4), (4, 0.5, 5)]
)
def test_other_pipelines(world: World, stages: int, acceptance: float | None, steps: int):
    """No drafts at all, always right, always wrong, and four stages; vLLM's own transfer."""
    drafter = {"method": "none"}
    if acceptance is not None:
        drafter = {"method": "oracle", "reference": world.oracle(), "acceptance": acceptance}
    # Without drafts the data goes from stage to stage as vLLM sends it.
    block = {"drafter": drafter, "steps_in_flight": steps, "fixed_transfer": acceptance is not None}
    spexis = json.dumps(block)
    options = ["--stages", str(stages), "--blocks", "11", "--abort", "--spexis", spexis]
    run = world.run(f"stages{stages}-{acceptance}", *options)
    assert different(run, world.stock(v2=True)) == []
    assert run["blocks_leaked"] == 0
    if acceptance is None:
        assert run["counters"]["discarded_rows"] == 0


@pytest.mark.slow
def test_tensor_parallel_stages(world: World):
    spexis = json.dumps({"drafter": {"method": "exit", "model": world.drafter}})
    run = world.run("tensor", "--stages", "2", "--tensor", "2", "--spexis", spexis)
    # Sums over two ranks round differently, so logprobs may differ in the last digit.
    assert different(run, world.stock(v2=True), what=("token_ids",)) == []
    assert 0 < run["counters"]["accepted"] < run["counters"]["drafts"]


@pytest.mark.slow
def test_rows_chosen_by_the_scheduler(world: World, tmp_path: Path):
    """Mode "sp-alpha" on this runner: the scheduler leaves rows out."""
    drafter = {"method": "exit", "model": world.drafter}
    # About what a row takes in the interpreter: these runs are too short to learn it first.
    profile = steep_profile(tmp_path / "steep.json", row_seconds=0.1)
    spexis = json.dumps({"drafter": drafter, "mode": "sp-alpha", "profile": profile})
    run = world.run("chosen", "--stages", "2", "--blocks", "11", "--abort", "--spexis", spexis)
    assert run["runner_v2"]
    assert different(run, world.stock(v2=True)) == []
    assert run["blocks_leaked"] == 0
    assert run["counters"]["held"] > 20
    assert 0 < run["counters"]["accepted"] < run["counters"]["drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, pytest.param([3, 2, 1], id="three stages")])
def test_rows_chosen_by_the_device(world: World, tmp_path: Path, stages):
    """The same, where the scheduler says how many rows run and the first stage's device which."""
    profile = steep_profile(tmp_path / "steep.json", row_seconds=0.1)
    log = tmp_path / "steps.jsonl"
    spexis = {
        "drafter": {"method": "exit", "model": world.drafter},
        "mode": "sp-alpha",
        "selection": "stage",
        "profile": profile,
        "iteration_log": str(log),
    }
    if stages == 2:
        spexis["length_predictor"] = world.predictor
        spexis["lookahead"] = True
    else:
        spexis |= {"placement": {"layers": stages}, "fixed_transfer": False}
    count = 2 if stages == 2 else len(stages)
    options = ["--stages", str(count), "--blocks", "11", "--abort", "--spexis", json.dumps(spexis)]
    run = world.run(f"chosen-{count}", *options)
    assert run["runner_v2"]
    assert different(run, world.stock(v2=True)) == []
    assert run["blocks_leaked"] == 0
    counters = run["counters"]
    assert counters["held"] > 20
    assert 0 < counters["accepted"] < counters["drafts"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert replay(lines) == []
    counted = [e for line in lines for e in line["selection"] if "choose" in e]
    assert any(e["run"][0] < e["choose"][0] for e in counted)


@pytest.mark.slow
def test_both_runners_count_alike(world: World):
    """The rules and the drafter are shared: every guess and every discard is the same."""
    drafter = {"method": "exit", "model": world.drafter}
    spexis = json.dumps({"drafter": drafter, "steps_in_flight": 2})
    options = ["--stages", "2", "--greedy", "--spexis", spexis]
    v1, v2 = (world.run(f"greedy-{v2}", *options, v2=v2) for v2 in (False, True))
    assert (v1["runner_v2"], v2["runner_v2"]) == (False, True)
    assert different(v2, v1) == []
    assert v1["counters"] == v2["counters"]


@pytest.mark.slow
def test_both_runners_say_the_same_of_lengths(world: World):
    """What the length predictor said of each answer, as look-ahead learnt from it."""
    said = {}
    for v2 in (False, True):
        log = world.folder / f"length-{v2}.jsonl"
        block = {
            "drafter": {"method": "exit", "model": world.drafter},
            "steps_in_flight": 2,
            "lookahead": True,
            "length_predictor": world.predictor,
            "iteration_log": str(log),
        }
        options = ["--stages", "2", "--greedy", "--no-grammar", "--spexis", json.dumps(block)]
        run = world.run(f"length-{v2}", *options, v2=v2)
        if v2:
            assert run["runner_v2"]
            assert different(run, world.run("length-False", v2=False)) == []
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert replay(lines) == []
        ended = [entry for line in lines for entry in line["lookahead"] if "learnt" in entry]
        said[v2] = sorted(ended, key=lambda entry: (entry["ended"], entry["learnt"]["limit"]))
    assert len(said[True]) == len(said[False]) > 10
    for mine, theirs in zip(said[True], said[False], strict=True):
        assert mine["learnt"]["at"] == theirs["learnt"]["at"]
        assert mine["learnt"]["limit"] == theirs["learnt"]["limit"]
        pairs = zip(mine["learnt"]["said"], theirs["learnt"]["said"], strict=True)
        assert all(abs(a - b) < 2e-3 for row in pairs for a, b in zip(*row, strict=True))
