"""Environment variables: the setting each maps to, notes on those without effect, refused and unknown ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.common.config import env
from pagoda.common.config.env import is_secret
from pagoda.common.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS, from_environment
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.plugins import load_general_plugins
from pagoda.server.settings.resolve import resolve

TABLES = [ENGINE_SETTINGS, SERVER_SETTINGS]
SETTINGS = [name for table in TABLES for name in table]


def settings_from(**environ: str) -> dict[str, Any]:
    return {name: sourced.value for name, sourced in from_environment(TABLES, environ).items()}


def test_every_variable_has_a_help_text_status_and_unique_name() -> None:
    names = [name for variable in env.VARIABLES for name in variable.names]
    assert len(names) == len(set(names))
    for variable in env.VARIABLES:
        assert variable.help.endswith("."), variable.name
        assert bool(variable.reason) == (variable.status != "implemented"), variable.name
        assert variable.maps_to is None or variable.status == "implemented", variable.name


@pytest.mark.variable("PAGODA_API_KEY", "HF_TOKEN", "PAGODA_TEST_FORCE_LOAD_FORMAT", "PAGODA_CPU_KVCACHE_SPACE")
@each_row(
    ("name", "text", "setting", "value"),
    [
        ("VLLM_API_KEY", "k", "api_key", ("k",)),
        ("PAGODA_API_KEY", "k", "api_key", ("k",)),
        ("HF_TOKEN", "t", "hf_token", "t"),
        ("HUGGING_FACE_HUB_TOKEN", "t", "hf_token", "t"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1", "allow_long_max_model_len", True),
        ("VLLM_TEST_FORCE_LOAD_FORMAT", "gguf", "load_format", "gguf"),
        ("VLLM_PLUGINS", "a, b", "plugins", ("a", "b")),
        ("VLLM_ATTENTION_BACKEND", "TORCH_SDPA", "attention_backend", "TORCH_SDPA"),
        ("VLLM_CPU_KVCACHE_SPACE", "2", "kv_cache_memory_bytes", 2**31),
        ("PAGODA_CPU_KVCACHE_SPACE", "0.5", "kv_cache_memory_bytes", 2**29),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-2,7", "cpu_omp_threads_bind", "0-2,7"),
        ("VLLM_CONFIGURE_LOGGING", "0", "configure_logging", False),
        ("VLLM_LOGGING_CONFIG_PATH", "x.json", "log_config_file", "x.json"),
        ("VLLM_LOGGING_LEVEL", "debug", "log_level", "DEBUG"),
        ("VLLM_LOGGING_PREFIX", "[a] ", "log_prefix", "[a] "),
        ("VLLM_LOG_BATCHSIZE_INTERVAL", "2.5", "log_stats_interval", 2.5),
        ("VLLM_RPC_BASE_PATH", "/tmp", "rpc_base_path", "/tmp"),
        ("VLLM_RPC_TIMEOUT", "5000", "rpc_timeout", 5000),
        ("VLLM_ENGINE_ITERATION_TIMEOUT_S", "60", "engine_iteration_timeout_s", 60.0),
        ("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "true", "keep_alive_on_engine_death", True),
        ("VLLM_SERVER_DEV_MODE", "1", "server_dev_mode", True),
        ("VLLM_MAX_STOP_STRINGS", "32", "max_stop_strings", 32),
        ("PAGODA_MAX_MODEL_LEN", "4k", "max_model_len", 4000),
    ],
)
def test_variables_map_to_settings(name: str, text: str, setting: str, value: Any) -> None:
    assert settings_from(**{name: text}) == {setting: value}
    assert from_environment(TABLES, {name: text})[setting].source == f"environment {name}"


def test_values_that_mean_the_default() -> None:
    assert settings_from(VLLM_CPU_KVCACHE_SPACE="0", VLLM_LOG_BATCHSIZE_INTERVAL="-1", VLLM_API_KEY="") == {}


def test_pagoda_variable_overrides_its_alias() -> None:
    assert settings_from(PAGODA_RPC_TIMEOUT="3000", VLLM_RPC_TIMEOUT="9000") == {"rpc_timeout": 3000}


@each_row(
    ("name", "text", "line"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "much", "VLLM_CPU_KVCACHE_SPACE: 'much': not a number"),
        ("VLLM_CPU_KVCACHE_SPACE", "-1", "VLLM_CPU_KVCACHE_SPACE: '-1': not a size in GiB"),
        ("VLLM_RPC_TIMEOUT", "soon", "VLLM_RPC_TIMEOUT: --rpc-timeout: 'soon' is not an integer"),
        ("VLLM_LOGGING_LEVEL", "loud", "VLLM_LOGGING_LEVEL: --log-level: 'loud': unknown log level; use one of DEBUG"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-3|4-", "is not a core number"),
        ("VLLM_CPU_OMP_THREADS_BIND", "3-0", "is an empty range"),
        ("VLLM_CPU_OMP_THREADS_BIND", "a", "is not a core number"),
        ("PAGODA_PORT", "http", "PAGODA_PORT: --port: 'http' is not an integer"),
    ],
)
def test_an_invalid_variable_is_named_in_the_error(name: str, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_from(**{name: text})
    assert line in str(error.value)
    assert error.value.setting == name


@pytest.mark.variable("PAGODA_ATTENTION_BACKEND")
def test_a_refused_value_is_reported_under_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLEX_ATTENTION")
    with pytest.raises(
        ConfigError, match=r"^VLLM_ATTENTION_BACKEND: --attention-backend: 'FLEX_ATTENTION': no backend has"
    ):
        EngineArgs()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "triton_attn")
    assert EngineArgs().attention_backend == "TRITON_ATTN"
    assert EngineArgs(attention_backend="auto").attention_backend == "AUTO"  # a keyword is stronger


def test_variables_without_effect_are_noted_once() -> None:
    assert env.notes({"VLLM_USE_V1": "1", "VLLM_NO_USAGE_STATS": "1"}) == (
        "VLLM_NO_USAGE_STATS has no effect: no usage data is collected or sent",
        "VLLM_USE_V1 has no effect: there is one engine, which follows V1",
    )
    assert env.notes({"VLLM_USE_V1": ""}) == ()


def test_shared_variables_are_not_noted() -> None:
    assert env.notes({"MAX_JOBS": "8", "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/x", "PATH": "/bin"}) == ()


def test_variables_without_effect_are_logged_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    EngineArgs()
    assert [record.message for record in caplog.records] == [
        "VLLM_MLA_DISABLE has no effect: latent attention is always computed on the latent cache"
    ]


@pytest.mark.parametrize(
    ("name", "refused", "accepted"),
    [("VLLM_USE_MODELSCOPE", "True", "0"), ("VLLM_DP_SIZE", "2", "1"), ("VLLM_DP_RANK", "1", "0")],
)
def test_a_refused_variable_raises_at_start(
    name: str, refused: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert env.notes({name: accepted}) == ()
    monkeypatch.setenv(name, refused)
    with pytest.raises(ConfigError, match=f"^{name}: '{refused}' is not supported: .*; "):
        EngineArgs()


def test_an_unknown_variable_is_reported_with_the_nearest_name_without_its_value() -> None:
    notes = env.notes({"VLLM_MAX_MODEL_LEN": "hush", "PAGODA_LOGING_LEVEL": "hush", "VLLM_ZZZZ": "hush"}, SETTINGS)
    assert notes == (
        "unknown environment variable PAGODA_LOGING_LEVEL; did you mean PAGODA_LOGGING_LEVEL?",
        "unknown environment variable VLLM_MAX_MODEL_LEN; did you mean PAGODA_MAX_MODEL_LEN?",
        "unknown environment variable VLLM_ZZZZ",
    )
    assert env.notes({"PAGODA_MAX_MODEL_LEN": "5"}, SETTINGS) == ()


def test_kubernetes_service_variables_are_ignored() -> None:
    links = {
        "PAGODA_PORT": "tcp://10.0.0.1:8000",
        "PAGODA_PORT_8000_TCP_ADDR": "10.0.0.1",
        "VLLM_PORT": "tcp://10.0.0.2:80",
        "VLLM_SERVICE_HOST": "10.0.0.2",
        "VLLM_SERVICE_PORT_HTTP": "80",
    }
    assert settings_from(**links) == {}
    (line,) = env.notes(links, SETTINGS)
    assert f"ignored Kubernetes service variables: {', '.join(sorted(links))}; " in line
    assert settings_from(PAGODA_PORT="9000") == {"port": 9000}
    assert env.notes({"VLLM_PORT": "9000"})[0].startswith("VLLM_PORT has no effect")


def test_boolean_variables() -> None:
    for text in ("1", "true", "yes", "ON"):
        assert env.HF_HUB_OFFLINE.is_on({"HF_HUB_OFFLINE": text})
    for text in ("", "0", "False", "no", "off"):
        assert not env.HF_HUB_OFFLINE.is_on({"HF_HUB_OFFLINE": text})


def test_secret_names() -> None:
    assert all(map(is_secret, ("PAGODA_API_KEY", "HF_TOKEN", "S3_SECRET_ACCESS_KEY", "S3_ACCESS_KEY_ID", "APIKEY")))
    assert not any(map(is_secret, ("PAGODA_TOKENIZER", "PAGODA_MAX_NUM_BATCHED_TOKENS", "VLLM_DISABLED_KERNELS")))


@pytest.mark.setting("--allow-long-max-model-len")
@pytest.mark.variable("PAGODA_ALLOW_LONG_MAX_MODEL_LEN")
def test_allow_long_max_model_len_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32},
        **{"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def limit() -> int:
        args = EngineArgs(tmp_path, load_format="dummy", skip_tokenizer_init=True, max_model_len=500)
        return resolve(args.create_engine_config(), "llm").limits.max_model_len

    with pytest.raises(ConfigError, match="--max-model-len"):
        limit()
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert limit() == 500


@pytest.mark.setting("--plugins")
@pytest.mark.variable("PAGODA_PLUGINS")
def test_plugins_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    load_general_plugins(EngineArgs().create_engine_config())
    monkeypatch.setenv("VLLM_PLUGINS", "absent")
    with pytest.raises(ConfigError, match="plugin 'absent' is not installed"):
        load_general_plugins(EngineArgs().create_engine_config())


@pytest.mark.variable("HF_HUB_OFFLINE")
def test_hf_hub_offline_makes_no_connection() -> None:
    program = (
        "from pagoda.common.weights.hub import resolve_model\n"
        "try: resolve_model('org/never-downloaded')\n"
        "except Exception as error: print(error)"
    )
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60)
    assert "HF_HUB_OFFLINE" in done.stdout, done.stderr
