"""Default limits of every platform, how they are clamped, and their reasons."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.common.config.defaults import (
    BatchDefaults,
    ModelLimits,
    Platform,
    ResolvedLimits,
    ResolvedRow,
    Usage,
    batch_defaults,
    resolve_limits,
)
from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs

GIB = 1 << 30
H100 = Platform("cuda", 80 * GIB, "NVIDIA H100 80GB HBM3")
MODEL = ModelLimits(4096)


def engine_config(**settings: Any) -> EngineConfig:
    return EngineArgs("m", **settings).create_engine_config()


def resolved(
    platform: Platform = H100, usage: Usage = "server", model: ModelLimits = MODEL, **settings: Any
) -> ResolvedLimits:
    return resolve_limits(engine_config(**settings), platform=platform, usage=usage, block_size=16, model=model)


def limits(platform: Platform = H100, usage: Usage = "server", max_len: int = 4096, **settings: Any) -> Limits:
    return resolved(platform, usage, ModelLimits(max_len), **settings).limits


def row(actual: ResolvedLimits, name: str) -> ResolvedRow:
    (one,) = (each for each in actual.rows if each.name == name)
    return one


@each_row(
    ("platform", "llm", "server"),
    [
        (H100, (16384, 1024), (8192, 1024)),
        (Platform("cuda", 70 * GIB, "x"), (16384, 1024), (8192, 1024)),
        (Platform("cuda", 70 * GIB - 1, "x"), (8192, 256), (2048, 256)),
        (Platform("cuda", 80 * GIB, "NVIDIA A100-SXM4-80GB"), (8192, 256), (2048, 256)),
        (Platform("cuda", 24 * GIB, "NVIDIA L4"), (8192, 256), (2048, 256)),
        (Platform("cuda"), (8192, 256), (2048, 256)),
        (Platform("tpu", 32 * GIB, "V6E"), (2048, 256), (1024, 256)),
        (Platform("tpu", 16 * GIB, "V5E"), (1024, 256), (512, 256)),
        (Platform("tpu", 95 * GIB, "V5P"), (512, 1024), (256, 1024)),
        (Platform("tpu", 0, "V5P"), (512, 256), (256, 256)),
        (Platform("tpu", 32 * GIB, "V4"), (8192, 256), (2048, 256)),
        (Platform("cpu", 512 * GIB, "x86_64"), (4096, 256), (256, 128)),
        (Platform("cpu", world_size=4), (16384, 1024), (1024, 512)),
    ],
    ids=lambda value: f"{value.kind}-{value.device_name}-{value.memory_bytes}" if isinstance(value, Platform) else "",
)
def test_batch_defaults_of_every_platform(platform: Platform, llm: tuple[int, int], server: tuple[int, int]) -> None:
    assert batch_defaults(platform, "llm") == BatchDefaults(*llm)
    assert batch_defaults(platform, "server") == BatchDefaults(*server)


def test_the_reason_names_the_number_of_cpu_devices() -> None:
    rows = [resolved(Platform(kind, world_size=3)).rows[1] for kind in ("cpu", "cuda", "tpu")]
    assert [row.reason.removeprefix("for an API server on a ") for row in rows] == ["CPU times 3 devices", "GPU", "TPU"]


@pytest.mark.setting("--max-num-batched-tokens", "--max-num-seqs", "--max-model-len", "--enable-chunked-prefill")
@each_row(
    ("max_len", "settings", "tokens", "seqs"),
    [
        (4096, {}, 8192, 1024),
        (32768, {"enable_chunked_prefill": False}, 32768, 1024),
        (448, {"max_num_seqs": 1}, 448, 1),
        (4096, {"max_num_batched_tokens": 512}, 512, 512),
        (4096, {"max_num_batched_tokens": 512, "max_num_seqs": 4}, 512, 4),
        (4096, {"max_num_seqs": 9000, "max_num_batched_tokens": 9000}, 9000, 9000),
        (4, {}, 4096, 1024),  # 1024 sequences of 4 tokens
        (1, {}, 1024, 1024),
        (32768, {"enable_chunked_prefill": False, "max_num_seqs": 1}, 32768, 1),
        (32768, {"max_model_len": 1000, "max_num_seqs": 2}, 2000, 2),
    ],
)
def test_unset_limits_are_clamped_and_given_ones_kept(
    max_len: int, settings: dict[str, Any], tokens: int, seqs: int
) -> None:
    actual = limits(max_len=max_len, **settings)
    assert (actual.max_num_batched_tokens, actual.max_num_seqs) == (tokens, seqs)


@each_row(
    ("settings", "name", "why"),
    [
        ({}, "max_num_batched_tokens", "for an API server on a GPU (NVIDIA H100 80GB HBM3) with 80 GiB"),
        ({"max_num_seqs": 1}, "max_num_batched_tokens", "max_num_seqs * max_model_len, below the default 8192"),
        ({"max_num_batched_tokens": 8}, "max_num_seqs", "max_num_batched_tokens, below the default 1024"),
        ({}, "max_model_len", "the model's maximum context length, if the KV cache is large enough"),
        ({}, "enable_prefix_caching", "supported"),
    ],
)
def test_reasons(settings: dict[str, Any], name: str, why: str) -> None:
    assert row(resolved(**settings), name).reason == why


def test_reason_of_a_budget_for_whole_prompts() -> None:
    actual = resolved(model=ModelLimits(32768), enable_chunked_prefill=False)
    why = row(actual, "max_num_batched_tokens").reason
    assert why == "max_model_len, above the default 8192, without chunked prefill"


@pytest.mark.setting("--enable-chunked-prefill", "--enable-prefix-caching")
def test_chunked_prefill_and_prefix_caching_follow_the_model_unless_stated() -> None:
    assert (limits().chunked_prefill, limits().prefix_caching) == (True, True)
    neither = ModelLimits(4096, chunked_prefill=False, prefix_caching=False)
    actual = resolved(model=neither).limits
    assert (actual.chunked_prefill, actual.prefix_caching) == (False, False)
    actual = resolved(model=neither, enable_chunked_prefill=True, enable_prefix_caching=True).limits
    assert (actual.chunked_prefill, actual.prefix_caching) == (True, True)
    actual = limits(enable_chunked_prefill=False, enable_prefix_caching=False)
    assert (actual.chunked_prefill, actual.prefix_caching) == (False, False)


@pytest.mark.parametrize("architecture", ["ppc64le", "s390x", "riscv64"])
def test_plain_architectures_disable_chunked_prefill_and_prefix_caching(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    platform = Platform("cpu", device_name=architecture)
    actual = limits(platform, enable_prefix_caching=True)
    assert (actual.chunked_prefill, actual.prefix_caching) == (False, False)
    assert [record.getMessage() for record in caplog.records] == [
        f"--enable-prefix-caching: disabled, not supported on {architecture} CPUs"
    ]
    both = limits(Platform("cpu", device_name="aarch64"))
    assert (both.chunked_prefill, both.prefix_caching) == (True, True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_model_len": 4097},
            "--max-model-len: 4097 exceeds the model's maximum context length, 4096; use 4096 or less",
        ),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, r"8 is below --max-num-seqs 9; raise it to 9"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4095},
            r"4095 is too small for a prompt of 4096 tokens without chunked prefill; raise it to 4096",
        ),
    ],
)
def test_impossible_limits_name_a_value_that_works(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        limits(**settings)


@pytest.mark.variable("PAGODA_ALLOW_LONG_MAX_MODEL_LEN")
def test_a_length_beyond_the_model_needs_to_be_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with caplog.at_level(logging.WARNING):
        assert limits(max_model_len=5000).max_model_len == 5000
    assert "--max-model-len: 5000 exceeds the model's maximum context length, 4096" in caplog.text
    with pytest.raises(ConfigError, match=r"use 4096 or less$"):
        resolved(model=ModelLimits(4096, extensible=False), max_model_len=5000)


@pytest.mark.setting("--block-size")
def test_batch_invariant_steps_of_a_tpu_are_small() -> None:
    """Each is computed as if it were full."""
    tpu, settings = Platform("tpu", 95 * GIB, "V5P"), {"batch_invariant": True}
    chosen = limits(tpu, "llm", **settings)
    assert (chosen.max_num_batched_tokens, chosen.max_num_seqs) == (256, 256)
    assert limits(tpu, max_num_seqs=300, **settings).max_num_batched_tokens == 300
    assert limits(tpu, max_num_batched_tokens=64, **settings).max_num_batched_tokens == 64
    assert limits(**settings).max_num_batched_tokens == 8192


def test_block_size() -> None:
    assert limits().block_size == 16
    assert limits(block_size=64).block_size == 64


def test_block_size_doubles_until_the_tables_fit_a_tpu() -> None:
    tpu = Platform("tpu", 32 * GIB, "V6E")
    assert limits(tpu, max_len=131072, max_num_seqs=256).block_size == 256
    assert limits(tpu, max_len=131072, max_num_seqs=16).block_size == 16
    assert limits(tpu, max_len=131072, max_num_seqs=256, block_size=16).block_size == 16
    assert limits(max_len=131072, max_num_seqs=256).block_size == 16
