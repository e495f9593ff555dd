"""The table of what backends do with settings, held against the engine's own checks on each backend."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import interface
import pytest
from support.checkpoints.tiny_folder import write_model
from support.suite.rows import each_row

from pagoda.common.config import backend_support, env
from pagoda.common.config.backend_support import BACKENDS, RULES, by_backend, status_on, variable_status_on
from pagoda.common.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.startup.engine import check_engine

SAMPLES: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "data_parallel_mode": "engines",
    "nnodes": 2,
    "master_addr": "10.0.0.1",
    "master_port": 29600,
    "enable_sleep_mode": True,
    "fully_sharded_loras": True,
    "cpu_offload_gb": 1.0,
    "gpu_memory_utilization": 0.5,
    "kv_cache_dtype": "fp8",
    "calculate_kv_scales": True,
    "attention_backend": "TRITON_ATTN",
    "logits_processors": ("x.Y",),
    "enforce_eager": True,
    "cudagraph_capture_sizes": (1, 2),
    "max_cudagraph_capture_size": 2,
    "compilation_config": {"cudagraph_mode": "NONE"},
    "compiled_bundle": "/no/such",
    "xla_cache_path": "/tmp/programs",
    "xla_check_recompilation": True,
    "xla_profiler_port": 9012,
    "enable_lora": True,
    "enable_prompt_embeds": True,
    "calibration": "/no/such",
    "hardware": "h100",
    "compile_report": "/no/such",
    "acceptance_rate": 0.5,
    "simulated_time": "none",
}
"""A value of each setting of which all values but the default are the same to a backend."""

NEEDS_MORE: set[tuple[str, str]] = {
    *(("jax_tpu", name) for name in ("tensor_parallel_size", "data_parallel_size", "nnodes", "compiled_bundle")),
    *(("jax_tpu", name) for name in ("calculate_kv_scales", "load_format")),
    *(("torch_cuda", name) for name in ("calculate_kv_scales", "logits_processors", "cpu_offload_gb")),
    ("reference", "logits_processors"),
}
"""Supported, but the check of a start needs more than this test has: devices, files or other settings."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def cells() -> list[Any]:
    """Setting, value and backend of every cell of the table in which backends differ."""
    return [
        pytest.param(rule.setting, value, backend, id=f"{rule.setting} {value} {backend}")
        for rule in dict.fromkeys(RULES)
        for value in (rule.values or (SAMPLES[rule.setting],))
        for backend in BACKENDS
    ]


@each_row(("name", "value", "backend"), cells())
def test_a_start_does_what_the_table_says(
    name: str,
    value: Any,
    backend: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip({"jax_tpu": "jax"}.get(backend, "torch"))
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    setting = ENGINE_SETTINGS[name]
    rules = [r for r in backend_support.rules_of(name, backend) if r.concerns(value, setting.default)]
    config = EngineArgs(folder, backend=backend, **{name: value}).create_engine_config()
    if "refused" in [rule.status for rule in rules]:
        with pytest.raises(ConfigError, match=f"^{setting.flag}: ") as error:
            check_engine(config, "server")
        assert str(error.value) == f"{setting.flag}: {rules[0].text(backend)}"
        return
    if (backend, name) in NEEDS_MORE or value == "int8":
        return
    with caplog.at_level(logging.WARNING):
        check_engine(config, "server")
    said = [record.getMessage() for record in caplog.records if f"{setting.flag}: no effect on" in record.getMessage()]
    assert said == [f"{setting.flag}: no effect on {backend}: {rule.text(backend)}" for rule in rules]


def test_settings_without_a_rule_have_their_status_on_every_backend() -> None:
    for backend in BACKENDS:
        assert status_on(ENGINE_SETTINGS["max_num_seqs"], backend).status == "implemented"
        assert status_on(ENGINE_SETTINGS["default_mm_loras"], backend).status == "refused"
        assert status_on(SERVER_SETTINGS["port"], backend).status == "implemented"


def test_columns_of_the_documentation() -> None:
    settings = ENGINE_SETTINGS
    assert by_backend({each: status_on(settings["enable_sleep_mode"], each) for each in BACKENDS}) == (
        *("refused", "implemented", "implemented"),
        "`reference`: it cannot move its weights; drop it, or use --backend torch_cuda or jax_tpu",
    )
    variables = {variable.name: variable for variable in env.VARIABLES}
    cells = {
        name: [variable_status_on(variables[name], backend).status for backend in BACKENDS]
        for name in ("CUDA_VISIBLE_DEVICES", "PAGODA_XLA_CACHE_PATH", "VLLM_USE_V1", "PAGODA_API_KEY")
    }
    assert cells == {
        "CUDA_VISIBLE_DEVICES": ["no effect", "implemented", "no effect"],
        "PAGODA_XLA_CACHE_PATH": ["no effect", "no effect", "implemented"],
        "VLLM_USE_V1": ["no effect"] * 3,
        "PAGODA_API_KEY": ["implemented"] * 3,
    }


def test_the_pages_say_what_each_backend_does() -> None:
    reference = Path(interface.ROWS).parents[2] / "docs" / "reference"
    assert "| `reference` | `torch_cuda` | `jax_tpu` | reason |" in (reference / "environment.md").read_text()
    flags = (reference / "flags.md").read_text()
    (sleep,) = re.findall(r"^- .*\*\*`--enable-sleep-mode`\*\*.*$", flags, re.MULTILINE)
    assert "*Refused* on `reference`: it cannot move its weights" in sleep
    folded, *_ = re.findall(r"^- .*\*\*`--tokenizer-mode`\*\*.*$", flags, re.MULTILINE)
    assert "*Refused*: only tokenizer.json" in folded
    assert flags.index("<details") < flags.index(folded)
