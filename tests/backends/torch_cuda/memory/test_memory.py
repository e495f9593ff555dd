"""The memory plan of a GPU, and its error messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.torch_cuda.backend import create
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.memory.cache import allocate, block_bytes
from pagoda.backends.torch_cuda.memory.plan import GIB, MemoryUsage, cpu_usage, plan_blocks
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.errors import ConfigError
from pagoda.common.weights.quantization.schemes import Int8
from pagoda.common.weights.quantization.tensors import random_quantized

LIMITS = Limits(max_model_len=1 << 17, max_num_batched_tokens=8192, max_num_seqs=256, block_size=16)
LAYOUT = kv_layout(tiny_spec(window=6), 16)
BLOCK = (1 << 20,)


def usage(share: float = 0.9, weights: int = 15 * GIB) -> MemoryUsage:
    return MemoryUsage(
        "NVIDIA L4",
        total=22 * GIB,
        usable=int(22 * GIB * share),
        weights=weights,
        buffers=GIB // 4,
        activations=GIB,
        graphs=GIB // 2,
        other=GIB // 4,
    )


@pytest.mark.setting("--gpu-memory-utilization")
def test_the_kv_cache_gets_the_remaining_memory() -> None:
    plans = [plan_blocks(usage(share), LIMITS, LAYOUT, CacheConfig(), BLOCK) for share in (0.9, 1.0)]
    assert [plan.num_blocks for plan in plans] == [(int((22 * share - 17) * 1024),) for share in (0.9, 1.0)]
    assert plans[0].kv_cache == plans[0].num_blocks[0] << 20
    assert str(plans[0]).startswith("weights 15.00 GiB, activations 1.25 GiB, graphs 0.50 GiB, KV cache 2.80 GiB in ")


def test_blocks_that_no_running_request_needs_cache_prefixes() -> None:
    """Eight sequences of 8192 tokens of Llama-3-8B on an H200, which need 4096 blocks."""
    h200 = MemoryUsage(
        "NVIDIA H200",
        total=140 * GIB,
        usable=126 * GIB,
        weights=15 * GIB,
        buffers=GIB // 4,
        activations=GIB,
        graphs=GIB // 2,
        other=GIB // 4,
    )
    small = replace(LIMITS, max_model_len=8192, max_num_seqs=8)
    layout = kv_layout(tiny_spec(), 16)
    plan = plan_blocks(h200, small, layout, CacheConfig(), (2 << 20,))
    assert plan.kv_cache == plan.num_blocks[0] * (2 << 20) == 109 * GIB
    assert plan == plan_blocks(h200, LIMITS, layout, CacheConfig(), (2 << 20,))


def test_a_cpu_keeps_no_more_than_requests_need() -> None:
    small = replace(LIMITS, max_model_len=32, max_num_seqs=4)
    room = cpu_usage(GIB, small, LAYOUT, BLOCK)
    assert plan_blocks(room, small, LAYOUT, CacheConfig(), BLOCK).num_blocks == (1 + 4 * 2 * 2,)
    assert cpu_usage(GIB, LIMITS, LAYOUT, BLOCK).available <= 4 * GIB


def test_no_more_slots_than_an_int32_counts() -> None:
    most, tiny = (1 << 31) // 16, CacheConfig()
    assert plan_blocks(usage(), LIMITS, LAYOUT, tiny, (8,)).num_blocks == (most,)
    for configured, flag in (
        (CacheConfig(num_gpu_blocks_override=most + 1), "--num-gpu-blocks-override"),
        (CacheConfig(kv_cache_memory_bytes=8 * (most + 1)), "--kv-cache-memory-bytes"),
    ):
        with pytest.raises(ConfigError, match=f"{flag}: 134217729 KV blocks are more than the 134217728 that can be"):
            plan_blocks(usage(), LIMITS, LAYOUT, configured, (8,))


def test_configured_cache_sizes_are_used() -> None:
    configured = plan_blocks(usage(), LIMITS, LAYOUT, CacheConfig(kv_cache_memory_bytes=(100 << 20) + 1), BLOCK)
    assert configured.num_blocks == (100,)
    assert plan_blocks(usage(), LIMITS, LAYOUT, CacheConfig(num_gpu_blocks_override=7), BLOCK).num_blocks == (7,)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes: 2 KV blocks .* use 3145728 or more"):
        plan_blocks(usage(), LIMITS, LAYOUT, CacheConfig(kv_cache_memory_bytes=2 << 20), BLOCK)


@pytest.mark.parametrize(
    ("configured", "named"),
    [
        ({}, "--gpu-memory-utilization"),
        ({"kv_cache_memory_bytes": 1 << 50}, "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 1 << 40}, "--num-gpu-blocks-override"),
    ],
)
def test_more_blocks_than_there_is_memory_for(
    monkeypatch: pytest.MonkeyPatch, configured: dict[str, int], named: str
) -> None:
    limits = Limits(max_model_len=32, max_num_batched_tokens=32, max_num_seqs=2, block_size=4)
    spec = tiny_spec()
    cache, layout = CacheConfig(**configured), kv_layout(spec, 4)
    backend = create(make_options(spec, limits=limits, layout=layout, cache=cache), CPU)
    backend.load(random_weights(spec))

    def full(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend._cache, "empty", full)
    with pytest.raises(ConfigError, match=f"{named}: the device has no memory for 9 KV blocks; use less"):
        backend.init_cache((9,))


@pytest.mark.parametrize(
    ("options", "suggested"),
    [({}, True), ({"quantization": "int8"}, False), ({"schemes": {"layers.0.mixers.0.o": Int8("channel")}}, False)],
)
def test_weights_are_not_quantised_twice(
    options: dict[str, Any], suggested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_model_len=32, max_num_batched_tokens=32, max_num_seqs=2, block_size=4)
    spec = tiny_spec()
    backend = create(make_options(spec, limits=limits, layout=kv_layout(spec, 4), **options), CPU)
    stored = {name: random_quantized(scheme, (32, 64), 0, 0.25) for name, scheme in options.get("schemes", {}).items()}
    backend.load((dict(random_weights(spec)) | stored).items())
    monkeypatch.setattr("pagoda.backends.torch_cuda.backend.cpu_usage", lambda *_: usage(weights=26 * GIB))
    with pytest.raises(ConfigError, match=r"are missing; use .*--tensor-parallel-size 2$") as caught:
        backend.plan_memory()
    assert ("--quantization" in str(caught.value)) is suggested
    backend.close()


@pytest.mark.parametrize(
    ("weights", "missing", "remedies"),
    [
        (18, "0.20", "--gpu-memory-utilization 0.91 or --max-num-batched-tokens 6656 with --max-num-seqs 208 or "
         "--enforce-eager or --quantization int8 or --tensor-parallel-size 2"),
        (26, "8.20", "--quantization int8 or --tensor-parallel-size 2"),
        (34, "16.20", "--quantization int4 or --tensor-parallel-size 2"),
        (140, "122.20", "--tensor-parallel-size 8"),
    ],
)  # fmt: skip
def test_too_little_memory_says_how_much_and_what_would_do(weights: int, missing: str, remedies: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_blocks(usage(weights=weights * GIB), LIMITS, LAYOUT, CacheConfig(), BLOCK)
    assert str(caught.value) == (
        "--gpu-memory-utilization: of 22.00 GiB of NVIDIA L4 19.80 may be used: "
        f"weights {weights}.00, graphs 0.50, activations 1.00, buffers 0.25, other 0.25; "
        f"{missing} GiB are missing; use {remedies}"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_block_bytes_equal_what_is_allocated(ranks: int) -> None:
    shard = RankShard(0, ranks)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        caches = allocate(LAYOUT, (5,), dtype, shard, empty)
        arrays = {array.data_ptr(): array.nbytes for cache in caches.values() for array in (cache.keys, cache.values)}
        assert [5 * size for size in block_bytes(LAYOUT, dtype, shard)] == [sum(arrays.values())]
