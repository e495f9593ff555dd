"""The compiled kernels against their definitions in torch, in both dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.engines.reference_driver import Driver, tiny_spec
from torch import Tensor

from pagoda.backends.reference.execution import ViewBatch
from pagoda.backends.reference.model import ops
from pagoda.backends.reference.model.linear import float32_linear, linear
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.torch_decoder import functions
from pagoda.common.models.primitives import Norm

pytest.importorskip("llvmlite")

from pagoda.backends.cpu_kernels.attention import tile_attention
from pagoda.backends.cpu_kernels.emission import tiles as matrix_tiles
from pagoda.backends.cpu_kernels.emission.jit import has_feature
from pagoda.backends.cpu_kernels.products import choice, tile_products
from pagoda.backends.cpu_kernels.products import paired_products as products
from pagoda.backends.reference.programs import operators
from pagoda.backends.reference.programs.operators import HeadShape, Operators, packed_product

HEADS = HeadShape(heads=6, kv_heads=2, head_dim=32, value_dim=48, scale=0.2)
PAIRED = HeadShape(heads=6, kv_heads=2, head_dim=64, value_dim=96, scale=0.2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
pair_instructions = pytest.mark.skipif(not has_feature("avx512bf16"), reason="the processor has no AVX512-BF16")


has_tiles = matrix_tiles.available("amx-bf16")
needs_tiles = pytest.mark.skipif(not has_tiles, reason="the processor has no matrix tiles")


@pytest.fixture(params=[pytest.param(True, marks=needs_tiles, id="tiles"), pytest.param(False, id="no-tiles")])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether kernels use matrix tiles."""
    if not request.param:
        for module in (tile_products, tile_attention):
            monkeypatch.setattr(module, "supported", lambda _: False)
    operators._paged_attend.cache_clear()
    yield request.param
    operators._paged_attend.cache_clear()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    close = {"atol": 3e-6, "rtol": 1e-5} if actual.dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(actual, expected, **close)


def defined(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention of q [T, N, H] at positions to k [C, K, H], v [C, K, V]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("tnh,cnh->ntc", q.float(), k.float().repeat_interleave(group, 1)) * HEADS.scale
    keys = torch.arange(len(k))
    seen = (keys <= positions[:, None]) & (keys > positions[:, None] - (window or len(k)))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("ntc,cnh->tnh", weights, v.float().repeat_interleave(group, 1)).flatten(1).to(q.dtype)


@DTYPES
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "block"), [(HEADS, 4), (PAIRED, 16), (PAIRED, 48)], ids=["4", "16", "48"])
def test_attention_over_scattered_blocks(
    dtype: torch.dtype, window: int | None, heads: HeadShape, block: int, tiles: bool
) -> None:
    context, new = [0, 3, 4, 30, 71, 0, 9, 37], [1, 1, 1, 1, 1, 5, 40, 2]
    pages = 20
    table = 1 + np.random.default_rng(0).permutation(len(new) * pages).astype(np.int32).reshape(len(new), pages)
    slots = (1 + table.size) * block
    keys, values = (random(2, slots, dim, dtype=dtype) for dim in (heads.head_dim, heads.value_dim))
    keys[:, :block], values[:, :block] = torch.nan, torch.nan
    queries = random(sum(new), heads.heads, heads.head_dim, dtype=dtype)
    attend = Operators(dtype).attention(heads, block)
    query_tiles, expected, begin = [], [], 0
    freed = [0 if window is None else max(0, cached + 1 - window) // block for cached in context]
    for row, (cached, count) in enumerate(zip(context, new)):
        positions = torch.arange(cached, cached + count)
        seen = torch.arange(cached + count)
        at = torch.from_numpy(table[row].astype(np.int64))[seen // block] * block + seen % block
        k, v = keys[:, at].transpose(0, 1), values[:, at].transpose(0, 1)
        expected.append(defined(queries[begin : begin + count], k, v, positions, window))
        unwritten = torch.from_numpy(table[row].astype(np.int64))[(cached + count) // block] * block
        keys[:, unwritten + (cached + count) % block], values[:, unwritten + (cached + count) % block] = (
            torch.nan,
        ) * 2
        if count > 1:
            step = attend.tile_tokens
            query_tiles += [(row, begin + t, cached + t, min(step, count - t)) for t in range(0, count, step)]
        begin += count
    for row, blocks in zip(table, freed):
        row[:blocks] = 0  # holds NaN
    run = partial(attend, queries, (keys, values), table, np.array(context, np.int32), 5)
    assert_close(run(np.array(query_tiles, np.int32), window), torch.cat(expected))


@pair_instructions
@pytest.mark.parametrize("block", [16, 48, 128])
def test_shared_prefixes(block: int, tiles: bool) -> None:
    """Sequences 0 to 5 share 300 positions, 6 to 9 share 140, 10 and 11 are alone or too few."""
    shared, pages = {0: (range(6), 300), 6: (range(6, 10), 140), 10: (range(10, 12), 200)}, -(-340 // block)
    table = 1 + np.arange(12 * pages, dtype=np.int32).reshape(12, pages)
    for first, (rows, positions) in shared.items():
        table[rows, : positions // block] = table[first, : positions // block]
    context = np.array([300 + 5 * row if row < 6 else 200 + row for row in range(12)], np.int32)
    keys, values = (
        random(2, (1 + table.size) * block, dim, dtype=torch.bfloat16) for dim in (PAIRED.head_dim, PAIRED.value_dim)
    )
    queries = random(12, PAIRED.heads, PAIRED.head_dim, dtype=torch.bfloat16) * 3
    slots = torch.from_numpy(table.astype(np.int64))[:, :, None] * block + torch.arange(block)
    expected = []
    for row, cached in enumerate(context.tolist()):
        at = slots[row].flatten()[: cached + 1]
        k, v = keys[:, at].transpose(0, 1), values[:, at].transpose(0, 1)
        expected.append(defined(queries[row : row + 1], k, v, torch.tensor([cached]), None))
        keys[:, slots[row].flatten()[cached + 1 :]] = torch.nan
    ones = np.ones(12, np.int32)
    view = ViewBatch(torch.zeros(12, dtype=torch.int64), table, context, ones, None, block)
    attend = Operators(torch.bfloat16).attention(PAIRED, block)
    found = view.prefixes(12, attend.tile_tokens)
    assert found is not None
    assert found.begins.tolist() == [300 // block * block] * 6 + [140 // block * block] * 4 + [0] * 2
    run = partial(attend, queries, (keys, values), table, context, 12, np.zeros((0, 4), np.int32), None)
    assert_close(run(prefixes=view.prefixes), torch.cat(expected))
    assert_close(run(), torch.cat(expected))


@DTYPES
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm(dtype: torch.dtype, unit_offset: bool) -> None:
    x, weight = random(11, 80, dtype=dtype)[:, :64], random(64, dtype=dtype)
    norm = Operators(dtype).norm(weight, 1e-5, unit_offset=unit_offset)
    assert norm is not None
    assert_close(norm(x), functions.norm(x, Norm(1e-5, unit_offset=unit_offset), weight))


@DTYPES
@pytest.mark.parametrize("unit_offset", [False, True])
def test_head_norm(dtype: torch.dtype, unit_offset: bool) -> None:
    shape = HeadShape(heads=3, kv_heads=2, head_dim=48, value_dim=16, scale=1.0)
    heads = random(11, 7, 48, dtype=dtype)[:, :5]
    weights = random(48, dtype=dtype), random(2, 48, dtype=dtype)[1]
    head_norm = Operators(dtype).head_norm(shape, 1e-5, *weights, unit_offset=unit_offset)
    assert head_norm is not None
    spec = Norm(1e-5, unit_offset=unit_offset)
    expected = [functions.norm(part, spec, weight) for part, weight in zip(heads.split([3, 2], 1), weights)]
    assert_close(head_norm(heads), torch.cat(expected, 1))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(dtype: torch.dtype, activation: str) -> None:
    both = random(9, 96, dtype=dtype) * 30
    gate = Operators(dtype).gate(48, activation)
    assert gate is not None
    assert_close(gate(both), ops.activation(activation)(both[:, :48]) * both[:, 48:])  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize("rotary", [0, 32])
def test_cache_writer(dtype: torch.dtype, rotary: int) -> None:
    shape = HeadShape(heads=3, kv_heads=2, head_dim=48, value_dim=16, scale=1.0)
    heads, values = random(10, 5, 48, dtype=dtype), random(10, 2, 16, dtype=dtype)
    positions, slots = torch.randperm(20)[:10], torch.randperm(30)[:10]
    cos, sin = random(20, max(rotary, 1), dtype=dtype), random(20, max(rotary, 1), dtype=dtype)
    cache = torch.zeros(2, 30, 48, dtype=dtype), torch.zeros(2, 30, 16, dtype=dtype)
    expected = heads.float()
    if rotary:
        low = expected[..., :rotary]
        turned = low * cos[positions, None].float() + low.roll(rotary // 2, -1) * sin[positions, None].float()
        expected = torch.cat((turned, expected[..., rotary:]), -1)
    write = Operators(dtype).cache_writer(shape, rotary)
    assert write is not None
    write(heads, values, (cos, sin) if rotary else None, positions, slots, cache)
    assert_close(heads[:, :3], expected[:, :3].to(dtype))
    assert_close(cache[0][:, slots], expected[:, 3:].transpose(0, 1).to(dtype))
    assert_close(cache[1][:, slots], values.transpose(0, 1))
    assert cache[0].count_nonzero() == 2 * 10 * 48


@pair_instructions
@pytest.mark.parametrize(
    ("outputs", "inputs", "with_bias"), [(64, 48, False), (50, 34, True), (7, 2, True), (96, 64, False), (50, 96, True)]
)
@pytest.mark.parametrize("rows", [29, 16, 32, 77])
def test_products(outputs: int, inputs: int, with_bias: bool, rows: int, tiles: bool) -> None:
    weight = random(outputs, inputs, dtype=torch.bfloat16)
    x = random(rows, inputs + 5, dtype=torch.bfloat16)[:, :inputs]
    bias = random(outputs, dtype=torch.bfloat16) if with_bias else None
    numerics = Numerics(torch.bfloat16, torch.bfloat16)
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(float32_linear(weight, bias, numerics)(x), wide, atol=1e-4, rtol=1e-5)
    together = linear(weight, bias, numerics)(x)
    assert_close(together, wide.bfloat16())
    alone = torch.cat([linear(weight, bias, numerics)(row[None]) for row in x])
    assert torch.equal(alone, together)
    assert packed_product(weight[:, :-1], bias, torch.bfloat16) is None


@needs_tiles
def test_products_of_more_rows_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_products, "_CACHED_BYTES", 32 * 2 * 128)
    tile_products.tile_product_kernel.cache_clear()
    weight, x = random(96, 128, dtype=torch.bfloat16), random(81, 128, dtype=torch.bfloat16)
    product = products.PackedProduct(weight, None, torch.bfloat16)
    assert tile_products.tasks(128, 81, 3) == 6
    assert_close(product(x), F.linear(x.float(), weight.float()).bfloat16())
    tile_products.tile_product_kernel.cache_clear()


@needs_tiles
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 75])
def test_gated_products(activation: str, with_bias: bool, rows: int) -> None:
    weight, x = random(2 * 80, 96, dtype=torch.bfloat16), random(rows, 96, dtype=torch.bfloat16)
    bias = random(160, dtype=torch.bfloat16) if with_bias else None
    both = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    gated = Operators(torch.bfloat16).gated(products.PackedProduct(weight, bias, torch.bfloat16), activation)
    assert gated is not None
    wanted = ops.activation(activation)(both[:, :80]) * both[:, 80:]  # type: ignore[arg-type]
    assert_close(gated(x), wanted.bfloat16())
    assert torch.equal(torch.cat([gated(row[None]) for row in x]), gated(x))


def test_which_layers_are_gated_in_one_kernel(tiles: bool) -> None:
    native, weight = Operators(torch.bfloat16), random(64, 64, dtype=torch.bfloat16)
    packed = partial(products.PackedProduct, bias=None)
    assert (native.gated(packed(weight, result=torch.bfloat16), "silu") is not None) == tiles
    assert native.gated(packed(weight, result=torch.bfloat16), "relu") is None
    assert native.gated(packed(weight, result=torch.float32), "silu") is None
    assert native.gated(packed(weight[:48], result=torch.bfloat16), "silu") is None
    assert native.gated(lambda x: x, "silu") is None


@pytest.mark.parametrize(("granted", "features"), [(True, True), (False, True), (True, False)])
def test_tiles_need_the_systems_permission(granted: bool, features: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        @staticmethod
        def syscall(*arguments: object) -> int:
            return 0 if granted else -1

    monkeypatch.setattr(matrix_tiles, "has_feature", lambda name: features)
    monkeypatch.setattr(matrix_tiles.ctypes, "CDLL", lambda name: Libc)
    assert matrix_tiles.available.__wrapped__("amx-bf16") == (granted and features)


@pytest.mark.parametrize("order", ["consecutive", "scattered"])
def test_decoder_with_kernels_generates_what_it_does_without(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
    with_kernels = Driver(tiny_spec(window=6), order).generate(prompt, 12)
    monkeypatch.setattr("pagoda.backends.reference.model.decoder.operators", lambda numerics: None)
    assert Driver(tiny_spec(window=6), order).generate(prompt, 12) == with_kernels


@pair_instructions
def test_choice_of_products_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[int] = []
    monkeypatch.setattr(choice, "faster", lambda width: measured.append(width) or width == 266)
    with caplog.at_level("INFO"):
        assert (choice.serves(266), choice.serves(270), choice.serves(266)) == (True, False, True)
    assert "bfloat16 products of 270 inputs: oneDNN" in caplog.text
    choice._choice.cache_clear()
    assert (choice.serves(266), choice.serves(270), choice.serves(267)) == (True, False, False)
    assert measured == [266, 270]
    weight = torch.ones(32, 270, dtype=torch.bfloat16)
    assert packed_product(weight, None, torch.bfloat16) is None
    choice.cache_file().write_text("[]")
    choice._choice.cache_clear()
    assert choice.serves(266)
    choice._choice.cache_clear()


@pair_instructions
@pytest.mark.parametrize(("own", "other", "chosen"), [(1.0, 1.0, True), (1.05, 1.0, True), (1.2, 1.0, False)])
def test_compiled_products_serve_unless_onednn_is_clearly_faster(own: float, other: float, chosen: bool) -> None:
    steps = iter([0.0, own] * 4 + [0.0, other] * 4)
    ticks = itertools.chain.from_iterable([list(steps)] * 3)
    assert choice.faster(64, lambda: next(ticks)) == chosen
