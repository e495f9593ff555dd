"""Compiled programs of pooling models: bundles, the compile cache and sharding."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from support.checkpoints.tiny_encoder import write_encoder
from support.checkpoints.tiny_folder import write_model

from pagoda.common.engine.messages import pooling_request
from pagoda.common.engine.pooling.values import PoolingRules
from pagoda.common.errors import ConfigError
from pagoda.server.cli import main
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import resolve
from pagoda.server.startup.engine import BuiltEngine, build_engine

SMALL: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
WORDS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "4")
ASKED = pooling_request("r", [2, 5, 6, 3], PoolingRules(task="embed", use_activation=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("pooling") / "tiny")


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[BuiltEngine]:
    config = EngineArgs(str(model), **{"backend": "jax_tpu"} | SMALL | settings).create_engine_config()
    built = build_engine(config, "llm")
    yield built
    built.backend.close()


def vector(built: BuiltEngine) -> np.ndarray:
    built.core.add_request(ASKED)
    step = built.core.step()
    assert step.stats.recompiles == 0
    assert step.outputs[0].pooled is not None
    return step.outputs[0].pooled.array


def test_a_bundle_has_every_program(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["--topology", "cpu", "--output", str(tmp_path), "--output-json", str(tmp_path / "table.json")]
    assert main.main(["compile", str(model), *WORDS, *words]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    names = [row["program"] for row in table["programs"]]
    assert names == ["pool 64 tokens, one output per token", "pool 64 tokens, 4 prompts"]
    assert table["budget"]["kv_cache"] == table["budget"]["history"] == 0
    assert table["budget"]["weights"] > 0
    caplog.set_level(logging.INFO)
    with engine(model, compiled_bundle=str(tmp_path), xla_check_recompilation=True) as built:
        answer = vector(built)
    assert "2 programs from the bundle" in caplog.text
    with engine(model, xla_cache_path=str(tmp_path / "cache")) as built:
        np.testing.assert_array_equal(vector(built), answer)
    with engine(model, xla_cache_path=str(tmp_path / "cache")) as built:
        np.testing.assert_array_equal(vector(built), answer)
    assert "2 of them from the compile cache" in caplog.messages[-1]
    with (
        pytest.raises(ConfigError, match="max_num_batched_tokens 64, but this engine has 128"),
        engine(model, compiled_bundle=str(tmp_path), max_num_batched_tokens=128),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="was compiled for model"),
        engine(write_model(tmp_path / "other"), compiled_bundle=str(tmp_path), runner="generate"),
    ):
        pass


def test_compile_reports_a_model_that_does_not_fit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--topology", "cpu", "--gpu-memory-utilization", "0.001"]
    assert main.main(["compile", str(model), *WORDS, *words]) == main.USAGE_ERROR
    line = capsys.readouterr().err.strip()
    assert "--max-model-len: a step of 64 tokens lacks 0." in line
    assert "\n" not in line


def test_pooling_model_is_sharded_across_devices(model: Path) -> None:
    with engine(model) as built:
        alone = vector(built)
    with engine(model, tensor_parallel_size=2) as built:
        np.testing.assert_allclose(vector(built), alone, atol=3e-5)


@pytest.mark.parametrize(
    ("more", "setting", "words"),
    [
        ({"tensor_parallel_size": 2, "backend": "reference"}, "--tensor-parallel-size", "one device"),
        ({"data_parallel_size": 2}, "--data-parallel-size", "jax_tpu runs a pooling model in one copy; use 1"),
        ({"compiled_bundle": "x", "backend": "reference"}, "--compiled-bundle", "not supported by reference"),
    ],
)
def test_unsupported_parallel_sizes_and_bundles_are_refused(
    model: Path, more: dict[str, Any], setting: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused, engine(model, **more):
        pass
    assert refused.value.setting == setting


def test_settings_without_effect_on_pooling_depend_on_the_backend(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for backend in ("jax_tpu", "reference"):
        settings = {"backend": backend, "gpu_memory_utilization": 0.5, "block_size": 32}
        resolve(EngineArgs(str(model), **settings).create_engine_config(), "llm")
    (said,) = [message for message in caplog.messages if "no effect on a pooling model" in message]
    assert said.startswith("--block-size, --gpu-memory-utilization")
