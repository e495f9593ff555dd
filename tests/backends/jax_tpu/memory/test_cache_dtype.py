"""KV caches of another dtype than the activations: rounding, memory, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flax")

import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices  # noqa: F401
import torch
from support.checkpoints.tiny_folder import write_model
from support.engines.reference_driver import Driver, random_weights, tiny_spec
from support.suite.slow_matrix import thinned

from pagoda.backends.jax_tpu.ahead_of_time.compile import find_target, model_for
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.backends.jax_tpu.memory.kv_scales import HEADROOM, KV_SCALE
from pagoda.backends.jax_tpu.memory.plan import cache_dtype
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.errors import ConfigError
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.server.cli import main

SPEC = tiny_spec(window=6)
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1)


STORED = {"layers.0.mixers.0.k_scale": 0.02, "layers.0.mixers.0.v_scale": 0.03, "layers.1.mixers.0.v_scale": 0.05}
"""Scales of a checkpoint; those that are not there are 1."""


def driver(tensor: int = 1, data: int = 1, weights=None, **cache) -> Driver:
    make = {"cache": CacheConfig(**cache), "tensor": tensor, "data": data, "weights": weights}
    return Driver(SPEC, "scattered", block_size=8, backend="jax_tpu", **make)


def scales(d: Driver) -> np.ndarray:
    """The KV scales on the device, [L, 2]."""
    backend = d.backend
    leaves = [leaf for path, leaf in zip(backend.model.paths, backend._leaves) if path[-1] == KV_SCALE]
    return np.concatenate([np.asarray(leaf) for leaf in leaves])


def rounded(x: torch.Tensor, dtype: str, scale: float) -> torch.Tensor:
    """Return x rounded as in the cache."""
    x = x / scale
    x = x.round().clamp(-127, 127) if dtype == "int8" else x.to(getattr(torch, dtype)).float()
    return x * scale


TYPES: list[tuple[str, str, bool | str]] = [
    ("bfloat16", "bfloat16", False),
    ("fp8", "float8_e4m3fn", False),
    ("fp8", "float8_e4m3fn", "stored"),
    ("fp8_e5m2", "float8_e5m2", True),
    ("int8", "int8", True),
]
"""As requested and as stored, and whether with scales."""


@pytest.mark.setting("--calculate-kv-scales")
@thinned(
    lambda numbers, tensor: TYPES.index(numbers) % 2 == tensor - 1,
    numbers=TYPES,
    tensor=[1, 2],
)
def test_outputs_equal_those_with_rounded_keys_and_values(
    numbers: tuple[str, str, bool | str], tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, stored, scaled = numbers
    weights = list(random_weights(SPEC))
    if scaled == "stored":
        weights += [(name, np.array(scale, np.float32)) for name, scale in STORED.items()]
    d = driver(tensor, weights=iter(weights), cache_dtype=requested, calculate_kv_scales=scaled is True)
    if scaled == "stored":
        np.testing.assert_allclose(scales(d), [[0.02, 0.03], [1, 0.05]])
    used = iter(scales(d).ravel().tolist() if requested != "bfloat16" else [1.0] * 4)  # K, V of each layer in turn
    spread = torch.Tensor.repeat_interleave
    monkeypatch.setattr(
        torch.Tensor,
        "repeat_interleave",
        lambda x, *args, **named: spread(rounded(x, stored, next(used)), *args, **named),
    )
    want = NaiveModel(SPEC, random_weights(SPEC)).logits(PROMPT).log_softmax(-1)[-1].numpy()
    d.step({3: PROMPT[:6]}, [d.start(3, PROMPT, EVERYTHING)], {3: False})
    _, result = d.step({3: PROMPT[6:]})
    logprobs = result.logprobs[0]
    np.testing.assert_allclose(logprobs.logprobs[0, 1:], want[logprobs.token_ids[0, 1:]], atol=3e-5)


def test_scales_have_headroom() -> None:
    """V of the first layer depends on the token only, and calibration covers most of the 96 tokens."""
    d = driver(cache_dtype="int8", calculate_kv_scales=True)
    weights = dict(random_weights(SPEC))
    embedded = weights["embed"]
    normed = embedded / np.sqrt((embedded**2).mean(-1, keepdims=True) + 1e-5) * weights["layers.0.norms.before_mixer"]
    values = normed @ weights["layers.0.mixers.0.v"].T + weights["layers.0.mixers.0.v_bias"]
    most = np.abs(values).max() * HEADROOM / 127
    assert 0.9 * most < scales(d)[0, 1] < 1.001 * most
    np.testing.assert_array_equal(scales(driver(cache_dtype="fp8")), np.ones((2, 2)))
    copies = driver(cache_dtype="int8", calculate_kv_scales=True, data=2)
    np.testing.assert_allclose(scales(copies), scales(d), rtol=1e-6)


LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=128)
STEP = Forward(StepShape(64, 64, 8, 1, True))


def test_half_the_bytes_stored_and_read() -> None:
    wide = replace(SPEC.layers[0].attention, heads=32, kv_heads=8, head_dim=128)
    spec = replace(SPEC, layers=tuple(replace(layer, mixers=(wide,)) for layer in SPEC.layers))
    target, load = find_target("cpu"), BatchLoad(64 * 1024, 64 * 1024)
    plain, small = (
        model_for(target, spec, LIMITS, kv_layout(spec, 128), "bfloat16", 1, cache=CacheConfig(cache_dtype=requested))
        for requested in ("auto", "fp8")
    )
    assert plain.block_bytes == (2 * 2 * 8 * 128 * 128 * 2,)
    assert small.block_bytes == (plain.block_bytes[0] // 2,)
    assert STEP.cost(small, load).kernel_bytes == pytest.approx(STEP.cost(plain, load).kernel_bytes / 2, rel=0.02)


@pytest.mark.setting("--kv-cache-dtype")
def test_the_budget_of_a_smaller_cache(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    words = ["--max-model-len", "32", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--block-size", "8"]
    words += ["--topology", "cpu", "--budget-only", "--num-gpu-blocks-override", "9", "--dtype", "float32"]
    table = tmp_path / "table.json"
    assert main.main(["compile", str(model), *words, "--kv-cache-dtype", "fp8", "--output-json", str(table)]) == 0
    in_float32 = 9 * 2 * 2 * 8 * 128 * 4  # K and V are rows of their own, in 8 bits they share one
    assert json.loads(table.read_text())["budget"]["kv_cache"] == in_float32 / 2


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: int8 .* add --calculate-kv-scales, or use fp8"):
        cache_dtype(CacheConfig(cache_dtype="int8"), jnp.dtype("bfloat16"), None)
    with pytest.raises(ConfigError, match="--calculate-kv-scales: a KV cache of data type bfloat16 has no scales"):
        cache_dtype(CacheConfig(cache_dtype="bfloat16", calculate_kv_scales=True), jnp.dtype("bfloat16"), None)
    with pytest.raises(ConfigError, match="--calculate-kv-scales: a KV cache of data type auto has no scales"):
        Driver(SPEC, cache=CacheConfig(calculate_kv_scales=True))
    int8 = CacheConfig(cache_dtype="int8", calculate_kv_scales=True)
    with pytest.raises(ConfigError, match="--kv-cache-dtype: v7x has no int8; use fp8"):
        cache_dtype(int8, jnp.dtype("bfloat16"), CHIPS["v7x"])
    assert cache_dtype(int8, jnp.dtype("bfloat16"), CHIPS["v6e"]) == "int8"
    with pytest.raises(ConfigError, match="--kv-cache-dtype: the reference backend's cache has the activations' dtype"):
        Driver(SPEC, cache=CacheConfig(cache_dtype="fp8"))
