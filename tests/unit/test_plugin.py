# SPDX-License-Identifier: Apache-2.0
"""The plugin: inert unless asked, refusals in one line, environment taken back.

Most tests use stand-ins for vLLM's configuration objects; those marked `engine` build real ones
(no engine starts, but importing vLLM takes seconds).
"""

import json
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest

from spexis import checks, guards, plugin
from spexis.config import ConfigError, SpexisConfig

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
NONE = {"drafter": {"method": "none"}}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (plugin.PARTITION_ENV, plugin.BIND_ENV, guards.ALLOW_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "_own_env", {})
    yield
    plugin._take_back_env()


# -- inert unless asked ---------------------------------------------------------------------------


def run_python(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_register_imports_nothing_heavy():
    code = (
        "import sys, spexis.plugin as p; p.register(); p.register(); "
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy') if m in sys.modules], "
        "sum(type(f).__name__ == '_WrapOnImport' for f in sys.meta_path))"
    )
    assert run_python(code) == ["[]", "1"]


def test_registered_before_the_module_is_imported(tmp_path):
    """A stand-in `vllm.engine.arg_utils`, imported after register(), gets wrapped once."""
    package = tmp_path / "vllm" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "arg_utils.py").write_text(
        "class EngineArgs:\n"
        "    additional_config = None\n"
        "    def create_engine_config(self, usage_context=None, headless=False):\n"
        "        return ('stock', usage_context, headless)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import spexis.plugin as p\n"
        "p.register(); print(p.is_effective())\n"
        "from vllm.engine.arg_utils import EngineArgs; p.register()\n"
        "print(p.is_effective(), EngineArgs().create_engine_config(1, headless=2)[1:], "
        "any(type(f).__name__ == '_WrapOnImport' for f in sys.meta_path))"
    )
    assert run_python(code) == ["False", "True", "(1,", "2)", "False"]


def fake_module(create):
    module = types.ModuleType(plugin.TARGET)
    module.EngineArgs = type("EngineArgs", (), {"create_engine_config": create})
    return module


@pytest.mark.parametrize("additional", [None, {}, {"other": {}}])
def test_not_asked_means_the_original_is_called_as_given(additional):
    module = fake_module(lambda self, *a, **k: (self.scheduler_cls, a, k))
    plugin._wrap(module)
    args = module.EngineArgs()
    args.additional_config, args.scheduler_cls = additional, "mine"
    environment = dict(os.environ)
    assert args.create_engine_config(1, headless=True) == ("mine", (1,), {"headless": True})
    assert dict(os.environ) == environment


def test_wrapping_twice_wraps_once():
    module = fake_module(lambda self: None)
    plugin._wrap(module)
    once = module.EngineArgs.create_engine_config
    plugin._wrap(module)
    assert module.EngineArgs.create_engine_config is once


def test_a_vllm_without_the_function_is_left_alone():
    plugin._wrap(types.ModuleType("empty"))


def test_environment_set_here_is_taken_back_but_not_the_users(monkeypatch):
    plugin._set_env(plugin.PARTITION_ENV, "4,2")
    plugin._set_env(plugin.BIND_ENV, "0|1")
    monkeypatch.setenv(plugin.BIND_ENV, "0|0")  # changed by the user meanwhile
    plugin._take_back_env()
    assert plugin.PARTITION_ENV not in os.environ
    assert os.environ[plugin.BIND_ENV] == "0|0"


# -- version and source guards --------------------------------------------------------------------


@pytest.fixture
def fake_vllm(monkeypatch):
    module = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_tested_versions(fake_vllm, version):
    fake_vllm.__version__ = version
    guards.check_version()


def test_untested_version_is_refused_with_a_way_out(fake_vllm, monkeypatch, caplog):
    fake_vllm.__version__ = "0.33.0"
    with pytest.raises(ConfigError, match=r"0\.33\.0 is not tested .*SPEXIS_ALLOW_UNTESTED=1"):
        guards.check_version()
    monkeypatch.setenv(guards.ALLOW_ENV, "1")
    with caplog.at_level("WARNING", logger="vllm.spexis"):
        guards.check_version()
    assert "not on 0.33.0" in caplog.text


def test_source_guard(monkeypatch):
    def symbols(**expected):
        return {"test": {f"json:{name}": names for name, names in expected.items()}}

    monkeypatch.setattr(guards, "SOURCES", symbols(dumps=("obj",)))
    guards.check_sources("test")
    monkeypatch.setattr(guards, "SOURCES", symbols(dumps=("text",)))
    with pytest.raises(ConfigError, match="json:dumps takes"):
        guards.check_sources("test")
    monkeypatch.setattr(guards, "SOURCES", symbols(gone=()))
    with pytest.raises(ConfigError, match="json:gone does not exist"):
        guards.check_sources("test")


@pytest.mark.engine
@pytest.mark.parametrize("group", sorted(guards.SOURCES))
def test_source_guards_hold_on_the_installed_vllm(group):
    guards.check_version()
    guards.check_sources(group)


# -- refusals -------------------------------------------------------------------------------------


def fake_args(**changes):
    defaults = {
        "scheduler_cls": None,
        "worker_cls": "auto",
        "pipeline_parallel_size": 2,
        "speculative_config": None,
        "enable_lora": False,
    }
    return SimpleNamespace(**{**defaults, **changes})


def fake_config(*, model=None, text=None, parallel=None, **changes):
    hf_text = SimpleNamespace(**{"layer_types": None, **(text or {})})
    model_defaults = {
        "model": "m",
        "architecture": "LlamaForCausalLM",
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "is_multimodal_model": False,
        "is_hybrid": False,
        "has_inner_state": False,
        "is_attention_free": False,
        "hf_text_config": hf_text,
        "get_sliding_window": lambda: getattr(hf_text, "sliding_window", None),
    }
    parallel_defaults = {
        "pipeline_parallel_size": 2,
        "nnodes": 1,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "mp",
    }
    defaults = {
        "model_config": SimpleNamespace(**{**model_defaults, **(model or {})}),
        "parallel_config": SimpleNamespace(**{**parallel_defaults, **(parallel or {})}),
        "device_config": SimpleNamespace(device_type="cuda"),
        "scheduler_config": SimpleNamespace(async_scheduling=True),
        "use_v2_model_runner": True,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**defaults, **changes})


def one_line(error) -> str:
    message = str(error.value)
    assert message.startswith("spexis") and "\n" not in message and "; " in message
    return message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scheduler_cls": "my.Scheduler"}, ["my.Scheduler", "--scheduler-cls"]),
        ({"scheduler_cls": dict}, ["dict"]),
        ({"worker_cls": "my.Worker"}, ["my.Worker", "--worker-cls"]),
        ({"pipeline_parallel_size": 1}, ["no pipeline to fill", "--pipeline-parallel-size 2"]),
        ({"speculative_config": {"method": "ngram"}}, ["--speculative-config"]),
        ({"enable_lora": True}, ["LoRA", "--enable-lora"]),
    ],
)
def test_refused_by_flags(change, words):
    checks.check_args(fake_args())
    checks.check_args(fake_args(scheduler_cls=checks.SCHEDULER, worker_cls=checks.CPU_WORKER))
    with pytest.raises(ConfigError) as error:
        checks.check_args(fake_args(**change))
    assert all(word in one_line(error) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallel": {"data_parallel_size": 2}}, ["--data-parallel-size"]),
        ({"parallel": {"decode_context_parallel_size": 2}}, ["--decode-context-parallel-size"]),
        ({"parallel": {"prefill_context_parallel_size": 2}}, ["--prefill-context-parallel-size"]),
        ({"parallel": {"nnodes": 3}}, ["2 stages on 3 nodes", "--pipeline-parallel-size 3"]),
        ({"parallel": {"distributed_executor_backend": "uni"}}, ["uni", "mp"]),
        ({"speculative_config": object()}, ["its own speculative_config"]),
        ({"lora_config": object()}, ["LoRA"]),
        ({"kv_transfer_config": object()}, ["KV connectors", "--kv-transfer-config"]),
        ({"ec_transfer_config": object()}, ["encoder-cache"]),
        ({"watermark_config": object()}, ["watermark"]),
        ({"diffusion_config": object()}, ["diffusion"]),
        ({"use_v2_model_runner": False}, ["V1 model runner", "VLLM_USE_V2_MODEL_RUNNER"]),
        ({"scheduler_config": SimpleNamespace(async_scheduling=False)}, ["--no-async"]),
        ({"model": {"runner_type": "pooling"}}, ["'pooling'"]),
        ({"model": {"enable_prompt_embeds": True}}, ["--enable-prompt-embeds"]),
        ({"model": {"is_encoder_decoder": True}}, ["encoder-decoder"]),
        ({"model": {"is_multimodal_model": True}}, ["multimodal"]),
        ({"model": {"is_hybrid": True}}, ["recurrent"]),
        ({"model": {"has_inner_state": True}}, ["recurrent"]),
        ({"model": {"is_attention_free": True}}, ["recurrent"]),
        ({"text": {"layer_types": ["linear_attention", "full_attention"]}}, ["recurrent"]),
        ({"text": {"layer_types": ["sliding_attention"]}}, ["by layer"]),
        ({"text": {"sliding_window": 4096}}, ["4096", "--disable-sliding-window"]),
        ({"model": {"architecture": "GPT2LMHeadModel"}}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
    ],
)
def test_refused_by_config(change, words):
    with pytest.raises(ConfigError) as error:
        checks.check_config(fake_config(**change), SpexisConfig())
    assert all(word in one_line(error) for word in words)


def test_ray_is_refused_with_vllms_older_executor_only(monkeypatch):
    config = fake_config(parallel={"distributed_executor_backend": "ray"})
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", raising=False)
    checks.check_config(config, SpexisConfig())
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ConfigError) as error:
        checks.check_config(config, SpexisConfig())
    assert "unset it" in one_line(error)


def test_ray_does_not_split_a_stage():
    ray = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    with pytest.raises(ConfigError) as error:
        checks.check_config(fake_config(parallel=ray), SpexisConfig())
    assert "--tensor-parallel-size 1" in one_line(error)


@pytest.mark.parametrize("architecture", checks.EXIT_ARCHITECTURES)
def test_accepted(architecture):
    full = {"layer_types": ["full_attention"] * 2}
    checks.check_config(
        fake_config(text=full, model={"architecture": architecture}), SpexisConfig()
    )
    on_cpu = fake_config(
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=False,
    )
    checks.check_config(on_cpu, SpexisConfig())


def test_other_architectures_run_with_other_drafters():
    config = fake_config(model={"architecture": "GPT2LMHeadModel"})
    checks.check_config(config, SpexisConfig.from_dict(NONE))


@pytest.mark.parametrize(
    ("stages", "steps", "good"),
    [
        (2, 2, True),
        (2, 4, True),
        (4, 5, True),
        (2, 1, False),
        (2, 5, False),
        (4, 3, False),
    ],
)
def test_steps_in_flight(stages, steps, good):
    config = fake_config(parallel={"pipeline_parallel_size": stages})
    spexis = SpexisConfig.from_dict({"steps_in_flight": steps})
    if good:
        checks.check_config(config, spexis)
        return
    with pytest.raises(ConfigError) as error:
        checks.check_config(config, spexis)
    assert f"{stages} to {2 * stages}" in one_line(error)


def test_oracle_reference_must_be_a_file(tmp_path):
    block = {"drafter": {"method": "oracle", "reference": str(tmp_path / "no.jsonl")}}
    with pytest.raises(ConfigError) as error:
        checks.check_config(fake_config(), SpexisConfig.from_dict(block))
    assert "no.jsonl is not a file" in one_line(error)


# -- layers to stages -----------------------------------------------------------------------------


def test_partition_follows_the_exit_layer():
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 30)
    assert plugin._exit_partition(model, 3, 18, None) == "18,6,6"
    assert os.environ[plugin.PARTITION_ENV] == "18,6,6"


@pytest.mark.parametrize("given", ["18,12", " 18,12"])
def test_users_partition_with_the_right_first_stage_stays(given):
    assert plugin._exit_partition(None, 2, 18, given) == given
    assert plugin._own_env == {}


def test_users_partition_that_ends_elsewhere_is_refused():
    with pytest.raises(ConfigError, match=r"15,15 ends the first stage elsewhere .* exit layer 18"):
        plugin._exit_partition(None, 2, 18, "15,15")


@pytest.mark.parametrize("given", ["18,13", "18", "18,12,0", "30,0", "31,-1", "a,b", "", "15,15,"])
def test_users_partition_that_is_none_is_refused(given):
    with pytest.raises(ConfigError, match=r"must be 2 counts above 0 that add up to .* 30 layers"):
        plugin._check_partition(given, 2, 30)


def test_users_partition_that_vllm_can_build_passes():
    plugin._check_partition("18, 12", 2, 30)


def test_partition_that_cannot_be_is_refused():
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 6)
    with pytest.raises(ConfigError, match="cannot split 6 layers over 4 stages"):
        plugin._exit_partition(model, 4, 5, None)


def placement(**block):
    return SpexisConfig.from_dict({"placement": block}).placement


def placed(block, *, layers=30, stages=2, given=None, exit_layer=None, **sizes):
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: layers, hf_text_config=SimpleNamespace(**sizes)
    )
    if exit_layer is not None:
        return plugin._exit_partition(model, stages, exit_layer, given, placement(**block))
    return plugin._chosen_partition(model, stages, placement(**block), given)


@pytest.fixture
def profile(tmp_path):
    """A stage of 10 layers of 1 ms each, a head of 4 ms."""
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps(
            {
                "format": "spexis-profile-1",
                "model": {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256},
                "layers": 10,
                "points": [{"rows": 1, "context": 128, "seconds": 0.01}],
                "head_seconds": {"1": 0.004},
            }
        )
    )
    return str(path)


def test_placement_by_count_and_by_measured_times(profile, caplog):
    assert placed({"layers": [16, 14]}) == "16,14"
    assert os.environ[plugin.PARTITION_ENV] == "16,14"
    with caplog.at_level("INFO", logger="vllm.spexis"):
        assert placed({"profile": profile}) == "17,13"
    assert "17.00, 17.00 ms" in caplog.text
    assert placed({"profile": profile, "drafter_seconds": 0.004}) == "15,15"


def test_placement_leaves_the_exit_drafters_stage_alone(profile):
    assert placed({"profile": profile}, stages=3, exit_layer=18) == "18,8,4"
    with pytest.raises(ConfigError, match="elsewhere than the drafter's exit layer 18"):
        placed({"layers": [16, 14]}, exit_layer=18)


@pytest.mark.parametrize("exit_layer", [None, 10])
def test_vllms_own_variable_wins_over_the_placement(exit_layer, caplog):
    assert placed({"layers": [16, 14]}, given="10,20", exit_layer=exit_layer) == "10,20"
    assert "10,20 wins over" in caplog.text and plugin._own_env == {}


@pytest.mark.parametrize("layers", [[16, 15], [10, 10, 10]])
def test_placement_must_add_up(layers):
    with pytest.raises(ConfigError, match="2 counts that add up to the model's 30 layers"):
        placed({"layers": layers})


def test_profile_of_another_model_or_more_rows_is_refused(profile, tmp_path):
    with pytest.raises(ConfigError, match=r"another model .hidden_size is 64 there and 128 here"):
        placed({"profile": profile}, hidden_size=128)
    with pytest.raises(ConfigError, match="8 rows were not measured"):
        placed({"profile": profile, "rows": 8})
    with pytest.raises(ConfigError, match=r"no\.json"):
        placed({"profile": str(tmp_path / "no.json")})


# -- the length predictor -------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize(
    ("block", "v2", "stages", "said"),
    [
        ({}, False, 2, None),  # without look-ahead nobody asks
        ({"lookahead": True, "length_predictor": False}, True, 2, False),
        ({"lookahead": True}, False, 2, "found"),
        ({"lookahead": True}, False, 3, "found"),
        ({"lookahead": True}, True, 2, "found"),
        ({"lookahead": True}, True, 3, False),
        ({"lookahead": True, "length_predictor": "mine"}, True, 2, "found"),
    ],
)
def test_every_process_reads_which_length_predictor_runs(
    monkeypatch, caplog, block, v2, stages, said
):
    pytest.importorskip("vllm")
    asked = []

    def resolve(name, model, first_layers):
        asked.append((name, model, first_layers))
        return "found", "length predictor X"

    monkeypatch.setattr("spexis.lengths.resolve.resolve", resolve)
    monkeypatch.setattr("spexis.drafters.served_by_vllm", lambda model: "served")
    monkeypatch.setenv(plugin.PARTITION_ENV, "4,2" if stages == 2 else "4,1,1")
    vllm_config = fake_config(
        model={"get_total_num_hidden_layers": lambda: 6},
        parallel={"pipeline_parallel_size": stages},
        use_v2_model_runner=v2,
    )
    config = SpexisConfig.from_dict(block)
    with caplog.at_level("INFO", logger="vllm.spexis"):
        resolved = plugin._with_length_predictor(vllm_config, config)
    assert resolved.length_predictor == said
    if said == "found":
        assert asked == [(config.length_predictor, "served", 4)]
        assert "look-ahead with length predictor X" in caplog.text
    elif config.lookahead and config.length_predictor is None:
        assert "with two stages, not 3" in caplog.text


def test_a_length_predictor_asked_for_is_refused_on_three_v2_stages():
    pytest.importorskip("vllm")
    config = SpexisConfig.from_dict({"lookahead": True, "length_predictor": "mine"})
    vllm_config = fake_config(parallel={"pipeline_parallel_size": 3})
    with pytest.raises(ConfigError) as error:
        plugin._with_length_predictor(vllm_config, config)
    assert "'mine'" in one_line(error) and "two stages only" in one_line(error)


# -- real vLLM configurations ---------------------------------------------------------------------


@pytest.fixture
def build(tmp_path):
    """Build a real VllmConfig from a config.json; no weights, no engine."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()

    def build(spexis=None, hf=None, **kwargs):
        (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **(hf or {})}))
        args = EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            additional_config={} if spexis is None else {"spexis": spexis},
            **{"pipeline_parallel_size": 2, **kwargs},
        )
        before = json.dumps(args.additional_config), args.scheduler_cls, args.worker_cls
        try:
            return args.create_engine_config()
        finally:
            after = json.dumps(args.additional_config), args.scheduler_cls, args.worker_cls
            assert after == before, "the caller's EngineArgs were changed"

    return build


@pytest.mark.engine
def test_asked_and_not_asked_in_one_process(build):
    stock = build()
    assert stock.scheduler_config.scheduler_cls is None
    assert not stock.parallel_config.worker_cls.startswith("spexis")
    asked = build(NONE)
    assert asked.scheduler_config.scheduler_cls == checks.SCHEDULER
    assert asked.parallel_config.worker_cls in (checks.CPU_WORKER, checks.CUDA_WORKER)
    assert SpexisConfig.from_vllm(asked) == SpexisConfig.from_dict(NONE)
    json.dumps(asked.additional_config)
    asked.compute_hash()
    again = build()
    assert again.scheduler_config.scheduler_cls is None
    assert plugin.PARTITION_ENV not in os.environ and plugin.BIND_ENV not in os.environ
    assert again.compute_hash() == stock.compute_hash()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("spexis", "changes", "words"),
    [
        ({"drafter": {"metod": "none"}}, {}, "did you mean method?"),
        (NONE, {"pipeline_parallel_size": 1}, "no pipeline to fill"),
        (NONE, {"scheduler_cls": "a.B"}, "a.B"),
        (NONE, {"enable_lora": True}, "LoRA"),
        (NONE, {"data_parallel_size": 2}, "data_parallel_size 2"),
        (
            NONE,
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "--speculative-config",
        ),
        (
            NONE,
            {
                "hf": {
                    "architectures": ["MistralForCausalLM"],
                    "model_type": "mistral",
                    "sliding_window": 64,
                }
            },
            "sliding windows (64)",
        ),
        ({}, {"hf": {"num_hidden_layers": 7}}, "no shipped drafter fits"),
        ({"drafter": {"model": "nowhere"}}, {}, "nowhere is neither a folder"),
        (
            {**NONE, "lookahead": True, "length_predictor": "nowhere"},
            {},
            "no length predictor in nowhere",
        ),
    ],
)
def test_refusals_on_real_configurations(build, spexis, changes, words):
    with pytest.raises(ConfigError) as error:
        build(spexis, **changes)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_classes_named_exist():
    """By source, since importing the workers binds device libraries."""
    import importlib.util
    from pathlib import Path

    for path in (checks.SCHEDULER, checks.CPU_WORKER, checks.CUDA_WORKER):
        module, _, name = path.rpartition(".")
        spec = importlib.util.find_spec(module)
        assert spec is not None and f"class {name}(" in Path(spec.origin).read_text()
