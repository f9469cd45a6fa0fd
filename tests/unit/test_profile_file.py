# SPDX-License-Identifier: Apache-2.0
"""One schema: what `spexis profile` writes is what every reader takes, or refuses in one line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spexis.core.cost_model import CostModel
from spexis.core.profile_file import FORMAT, LAYER_SIZES, ProfileFile
from spexis.core.stage_profile import ProfileError

STORED = Path(__file__).parents[2] / "benchmarks/results/2026-11-30-gpu-profile-l70.json"
MEASURED = {
    "format": FORMAT,
    "date": "2026-01-02",
    "command": "spexis profile tiny",
    "hardware": {"cpu": "some CPU", "gpus": []},
    "model": {
        "name": "tiny",
        "num_hidden_layers": 9,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
    "layers": 4,
    "tensor_parallel_size": 1,
    "engine": {"cudagraph_capture_sizes": [8, 1], "kv_tokens": 1600, "async_scheduling": True},
    "points": [
        {"rows": 8, "context": 64, "seconds": 0.02},
        {"rows": 1, "context": 16, "seconds": 0.01},
    ],
    "head_seconds": {"8": 0.003, "1": 0.001},
    "drafter_seconds": None,
    "host_seconds": {"1": {"scheduler": 1e-4, "worker": None}},
    "link_seconds": {"gloo": {"send": {"1": 2e-5, "8": 3e-5}, "all_reduce": {"1": 1e-4}}},
}


def changed(**changes) -> ProfileFile:
    return ProfileFile.of({**MEASURED, **changes})


def test_what_spexis_profile_writes_is_read(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(MEASURED))
    file = ProfileFile.load(tmp_path / "p.json")
    p = file.stage_profile()
    assert p.layers_per_stage == (4, 4, 1) and p.hardware == "some CPU"
    assert p.stages[0].points == ((1, 16, 0.01), (8, 64, 0.02))
    assert p.stages[0].graph_sizes == (1, 8)
    assert p.head == ((1, 0.001), (8, 0.003)) and p.drafter == ()
    assert p.host == ((1, 1e-4),) and p.host_overlaps
    assert p.hidden_link == ((1, 2e-5), (8, 3e-5))
    assert p.kv_blocks == 100
    assert (file.model.layers, file.model.head_dim, file.device_memory) == (9, 16, None)
    # The third stage has one layer, not the four that were measured.
    last = CostModel.from_profile(p).stages[2]
    assert last.seconds(1) == pytest.approx(0.01 / 4 + 0.001)


def test_what_was_not_measured_is_not_made_up():
    alone = changed(link_seconds=None, host_seconds={}, engine={}).stage_profile()
    assert (alone.hidden_link, alone.all_reduce, alone.host) == ((), (), ())
    assert alone.kv_blocks is None and not alone.host_overlaps
    assert alone.split(1, 2) is None and alone.split(3, 1) is not None


def test_links_with_and_without_peer_access():
    links = {
        "p2p": {"send": {"1": 1e-5}, "all_reduce": {"1": 4e-5}, "tp_all_reduce": {"1": 2e-5}},
        "no_p2p": {"send": {"1": 3e-5}, "all_reduce": {"1": 9e-5}, "tp_all_reduce": None},
    }
    file = changed(link_seconds=links)
    near, far = file.stage_profile(), file.stage_profile(p2p=False)
    assert (near.hidden_link[0][1], near.all_reduce[0][1], near.all_reduce_by) == (
        1e-5,
        2e-5,
        "vllm",
    )
    assert (far.hidden_link[0][1], far.all_reduce[0][1], far.all_reduce_by) == (3e-5, 9e-5, "torch")


def test_vllms_all_reduce_is_taken_from_a_preset_where_only_nccls_was_measured():
    """On H200s that reach each other's memory; NCCL's where that is faster, or nothing known."""

    def reduce(name="NVIDIA H200", near=4e-5, far=17e-5, p2p=True):
        links = {
            "p2p": {"all_reduce": {"1": 4e-5, "256": near}},
            "no_p2p": {"all_reduce": {"1": 3e-5, "256": far}},
        }
        file = changed(
            link_seconds=links,
            hardware={"gpus": [{"name": name}] * 2},
            model={**MEASURED["model"], "hidden_size": 8192, "num_attention_heads": 64},
        )
        profile = file.stage_profile(p2p)
        return profile.all_reduce_by, dict(profile.all_reduce)

    by, seconds = reduce()
    assert by == "preset"
    assert seconds[1] == pytest.approx(13e-6, rel=0.01) and seconds[256] == 4e-5  # not 42 us
    assert reduce(p2p=False) == ("torch", {1: 3e-5, 256: 17e-5})
    assert reduce("NVIDIA A10")[0] == "torch"
    assert reduce(near=15e-5)[0] == "torch"  # no peer access after all


def test_split_halves_the_layers_and_adds_all_reduces():
    p = ProfileFile.load(STORED).stage_profile()
    assert p.layers_per_stage == (40, 40) and p.all_reduce_by == "preset"
    same = CostModel.from_profile(p.split(2, 1), drafter=False)
    stage, last = CostModel.from_profile(p, drafter=False).stages
    assert same.step_seconds(64) == pytest.approx(last.seconds(64))
    tensor = CostModel.from_profile(p.split(1, 2))
    head = last.seconds(64) - stage.seconds(64)
    reduce = 160 * dict(p.all_reduce)[64]
    assert tensor.step_seconds(64) == pytest.approx(stage.seconds(64) + head / 2 + reduce)
    # Four stages of 20 layers; two stages of 40 halved ones; a ring of four sends 3/2 of two's.
    assert CostModel.from_profile(p.split(4, 1)).stages[1].seconds(64) == pytest.approx(
        stage.seconds(64) / 2
    )
    mixed = CostModel.from_profile(p.split(2, 2), drafter=False).stages[0]
    assert mixed.seconds(64) == pytest.approx(stage.seconds(64) / 2 + reduce / 2)
    assert p.split(1, 4).all_reduce[0][1] == pytest.approx(1.5 * p.all_reduce[0][1])
    assert p.split(81, 1) is None


def test_a_stage_measured_over_two_devices_says_nothing_of_other_numbers():
    p = changed(tensor_parallel_size=2).stage_profile()
    assert p.all_reduce == ()  # the points hold them
    assert p.split(1, 1) is None and p.split(1, 4) is None
    assert p.split(2, 2).of_stage(0).points[0][2] == pytest.approx(0.01 * 5 / 4)


def test_the_memory_of_a_device_is_in_the_file():
    assert ProfileFile.load(STORED).device_memory == 143771 * 2**20
    unknown = changed(hardware={"gpus": [{"name": "some GPU", "memory.total": "[N/A] MiB"}]})
    assert unknown.device_memory is None


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, "64", True, None, 10**12])
def test_sizes_that_no_model_has(key, value):
    file = changed(model={**MEASURED["model"], key: value})
    with pytest.raises(ProfileError, match=f"{key} is {value!r}"):
        _ = file.model


def test_a_file_of_another_model_is_refused():
    file = ProfileFile.of(MEASURED)
    same = SimpleNamespace(**MEASURED["model"])
    file.check_model(same)
    file.check_model(SimpleNamespace(vocab_size=1000))  # states no more
    same.num_hidden_layers = 8
    file.check_model(same, LAYER_SIZES)
    with pytest.raises(ProfileError, match="num_hidden_layers is 9 there and 8 here"):
        file.check_model(same)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "spexis-profile/1"}, "write one with `spexis profile`"),
        ({"points": []}, "has no points"),
        ({"points": None}, "points is missing"),
        ({"points": [1]}, r"points\[0\] is 1"),
        ({"points": [{"rows": 1, "context": 0, "seconds": -2}]}, r"points\[0\].seconds is -2"),
        ({"points": [{"rows": 1, "seconds": 1}]}, r"points\[0\].context is None"),
        ({"chunks": [1]}, "chunks: allowed is a list of JSON"),
        ({"chunks": [{"tokens": 128}]}, r"chunks\[0\].seconds is None"),
        ({"layers": 0}, "layers is 0: allowed is a whole number above 0"),
        ({"head_seconds": 1}, "allowed is an object of seconds by rows"),
        ({"head_seconds": {"x": 1}}, "has a key 'x'"),
        ({"head_seconds": {"²": 1}}, "has a key '²'"),
        *(
            ({key: "x"}, f"{key} is 'x': allowed is a JSON object")
            for key in ("model", "hardware", "engine", "host_seconds", "link_seconds")
        ),
        ({"hardware": {"gpus": ["x"]}}, "hardware.gpus: allowed is a list of JSON objects"),
        ({"engine": {"kv_tokens": -5}}, "engine has -5"),
        ({"engine": {"kv_tokens": "x"}}, "engine has 'x'"),
        ({"engine": {"cudagraph_capture_sizes": 0.5}}, "engine has 0.5"),
        ({"engine": {"cudagraph_capture_sizes": [1, None]}}, "engine has None"),
        ({"host_seconds": {"1": {}}}, "host_seconds.1.scheduler is None"),
        ({"link_seconds": {"gloo": 3}}, "link_seconds.gloo is 3"),
    ],
)
def test_mistakes_are_one_line(change, words):
    with pytest.raises(ProfileError, match=words) as error:
        changed(**change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"name": "m"}}, "num_hidden_layers is None"),
        ({"drafter_seconds": {"1": "fast"}}, "drafter_seconds.1 is 'fast'"),
        ({"link_seconds": {"gloo": {"send": [1]}}}, "link_seconds.send is"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'"),
    ],
)
def test_mistakes_that_the_cost_model_asks_for(change, words):
    file = changed(**change)
    with pytest.raises(ProfileError, match=words) as error:
        file.stage_profile()
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read"):
        ProfileFile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="allowed is a JSON object"):
        ProfileFile.of([])
    with pytest.raises(ProfileError, match="no dense decoder's config"):
        assert changed(model={"name": "m", "num_hidden_layers": 2}).model
