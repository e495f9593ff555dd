"""Products with quantised weights, against float64 products of the same values and the same rounded activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.reference.memory import held_bytes
from pagoda.backends.reference.model.linear import float32_linear, linear
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.quantized import compiled, layer
from pagoda.backends.reference.model.quantized.groups import grouped, is_grouped
from pagoda.backends.reference.model.quantized.int8 import OnednnLinear
from pagoda.backends.reference.weights.load import Packer
from pagoda.common.models.spec import Mlp, Moe, Router
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.schemes import (
    SCHEME_ROWS,
    Activations,
    Blocks,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    Scheme,
)
from pagoda.common.weights.quantization.tensors import QuantizedTensor, concatenate, random_quantized, take_matrix

NARROW = Numerics(torch.bfloat16, torch.bfloat16)
WIDENED = Numerics(torch.bfloat16, torch.float32)
W8A8 = Int8("channel", Activations("int8", "row"))


@dataclass(frozen=True)
class Case:
    scheme: Scheme
    shape: tuple[int, int]
    group: int  # of inputs that are rounded with one scale
    offsets: bool = False
    rows: int = 1  # outputs per scale


CASES = {
    "w8a8": Case(W8A8, (50, 160), 32),
    "w8a8-tensor": Case(Int8("tensor", Activations("int8", "row")), (64, 192), 64),
    "w8a8-odd": Case(W8A8, (48, 90), 32),
    "int8": Case(Int8("channel"), (48, 256), 128),
    "int8-odd": Case(Int8("channel"), (48, 96), 32),
    "int8-blocks": Case(Int8((16, 32)), (56, 96), 32, rows=16),
    "int8-groups": Case(Int8((1, 32)), (70, 160), 32),
    "int8-groups-16": Case(Int8((1, 16)), (64, 80), 16, offsets=True),
    "int4-groups": Case(Int4((1, 32)), (100, 160), 32),
    "int4-offsets": Case(Int4((1, 32)), (100, 160), 32, offsets=True),
    "int4-groups-128": Case(Int4((1, 128)), (40, 256), 128, offsets=True),
    "int4-rows": Case(Int4((1, 160)), (40, 160), 32),
    "mxfp4": Case(Mxfp4(), (64, 160), 32),
    "nvfp4": Case(Nvfp4(), (64, 160), 16),
}


@pytest.fixture(params=[16, 8])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Literal[8, 16]:
    """The width of the compiled kernels."""
    pytest.importorskip("llvmlite")
    if compiled.lanes() < request.param:
        pytest.skip(f"needs a processor that multiplies {request.param} quads of 8-bit numbers at a time")
    monkeypatch.setattr(layer, "lanes", lambda: request.param)
    return request.param


def tensor(case: Case, seed: int = 0) -> QuantizedTensor:
    """A random matrix, whose scales and offsets are float16."""
    noise, stored = np.random.default_rng(seed), random_quantized(case.scheme, case.shape, seed, 0.05)
    if isinstance(case.scheme, Mxfp4 | Nvfp4):
        powers = np.exp2(noise.integers(-6, 3, stored.scales.shape)).astype(np.float32)
        return replace(stored, scales=powers)
    scales = (stored.scales * noise.uniform(0.01, 3, stored.scales.shape)).astype(np.float16).astype(np.float32)
    if not case.offsets:
        return replace(stored, scales=scales)
    minima = noise.normal(0, 0.1, scales.shape).astype(np.float16).astype(np.float32)
    zero = 8 if isinstance(case.scheme, Int4) else 128
    return replace(stored, scales=scales, offsets=minima + zero * scales)


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [T, I] as its 8-bit numbers times their scales."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    peaks = padded.abs().amax(-1, keepdim=True)
    numbers = torch.where(peaks > 0, (padded * torch.tensor(127.0).div(peaks)).round(), 0)
    return (numbers.double() * (peaks / 127)).view(len(x), -1)[:, : x.shape[1]]


def expected(stored: QuantizedTensor, x: torch.Tensor, group: int) -> torch.Tensor:
    return rounded(x, group) @ torch.from_numpy(stored.dequantize()).double().T


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("name", CASES)
def test_compiled_products(name: str, lanes: int) -> None:
    case, noise = CASES[name], torch.Generator().manual_seed(0)
    stored = tensor(case)
    x = torch.randn(27, case.shape[1], generator=noise).bfloat16()
    x[3] = 0
    bias = torch.randn(case.shape[0], generator=noise)
    product = float32_linear(stored, bias, NARROW)
    assert isinstance(product, compiled.CompiledLinear)
    want = expected(stored, x, case.group) + bias
    assert_near(product(x), want)
    assert_near(linear(stored, bias, NARROW)(x).float(), want, 2**-8)
    assert_near(linear(stored, None, WIDENED)(x.float()), want - bias)
    assert len(product(x[:0])) == 0


@pytest.mark.parametrize("name", ["int8", "int4-offsets", "nvfp4", "w8a8"])
def test_precise_layers_keep_16_bits_of_activations(name: str, lanes: int) -> None:
    """But where the checkpoint rounds them to 8 bits."""
    case, noise = CASES[name], torch.Generator().manual_seed(0)
    stored, bias = tensor(case), torch.randn(case.shape[0], generator=noise)
    x = torch.randn(27, case.shape[1], generator=noise)
    x[:, 5] *= 50  # an outlier
    x[3] = 0
    exact = x.double() @ torch.from_numpy(stored.dequantize()).double().T + bias
    precise = linear(stored, bias, WIDENED, precise=True)(x)
    if name == "w8a8":
        assert_near(precise, expected(stored, x, case.group) + bias)
    else:
        assert_near(precise, exact, 2**-12)
        assert (expected(stored, x, case.group) + bias - exact).abs().max() > 2**-8 * exact.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_independent_of_the_others(name: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_SERIAL_WORK", 0)
    monkeypatch.setattr(compiled, "_PANEL_BYTES", 1)  # 32 rows at a time
    case = CASES[name]
    x = torch.randn(87, case.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    product = linear(tensor(case), None, replace(NARROW, batch_invariant=True))
    assert torch.equal(product(x), torch.cat([product(row) for row in x.split(1)]))
    assert torch.equal(product(x), torch.cat([product(part) for part in x.split(6)]))


def test_a_nan_stays_one(lanes: int) -> None:
    x = torch.ones(2, 160, dtype=torch.bfloat16)
    x[1, 40] = float("nan")
    got = linear(tensor(CASES["int4-groups"]), None, NARROW)(x)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_inputs_in_an_order_of_their_own(lanes: int) -> None:
    stored = tensor(CASES["int4-groups"])
    order = np.random.default_rng(1).permutation(160).astype(np.int32)
    ordered = replace(stored, scheme=Int4((1, 32), ordered=True), order=order)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = x[:, torch.from_numpy(order).long()]
    assert_near(float32_linear(ordered, None, NARROW)(x), expected(stored, moved, 32))
    assert_near(rounded(moved, 32) @ torch.from_numpy(stored.dequantize()).double().T, expected(stored, moved, 32))
    np.testing.assert_array_equal(ordered.dequantize()[:, order], stored.dequantize())


def test_several_matrices(lanes: int) -> None:
    """Neighbours of one form are one product."""
    names = ("int4-groups", "int4-groups", "int8-groups")
    parts = [tensor(CASES[name], seed) for seed, name in enumerate(names)]
    bias = torch.randn(270, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = torch.cat([expected(part, x, 32) for part in parts], 1) + bias
    assert_near(linear(parts, bias, WIDENED)(x.float()), want)
    joined = linear(parts[:2], None, WIDENED)
    assert isinstance(joined, compiled.CompiledLinear)
    assert_near(joined(x.float()), (want - bias)[:, :200])


@pytest.mark.parametrize(
    ("kind", "group", "share"),
    [
        ("Q4_0", 32, 1.0),
        ("Q4_1", 32, 1.0),
        ("Q5_0", 32, 1.0),
        ("Q5_1", 32, 1.0),
        ("Q8_0", 32, 1.0),
        ("Q4_K", 32, 1.12),
        ("Q5_K", 32, 1.1),
        ("Q6_K", 16, 1.07),
    ],
)
def test_blocks_of_ggml(kind: str, group: int, share: float, lanes: int) -> None:
    """`share`: bytes in memory per byte of the file, but for 4 per output."""
    quants = pytest.importorskip("gguf").quants
    noise = np.random.default_rng(0)
    scheme = SCHEME_ROWS[f"GGUF {kind}"]
    assert isinstance(scheme, Blocks)
    if kind.endswith("K"):
        data = noise.integers(0, 256, (64, 2 * scheme.kind.bytes), np.uint8)
        scales = noise.uniform(0.001, 0.1, (64, 2, 2)).astype(np.float16).view(np.uint8)
        if kind == "Q6_K":
            data.reshape(64, 2, -1)[..., -2:] = scales[..., :2]
        else:
            data.reshape(64, 2, -1)[..., :4] = scales
    else:
        values = noise.normal(0, 0.1, (64, 512)).astype(np.float32)
        data = quants.quantize(values, getattr(quants.GGMLQuantizationType, kind))
    stored = QuantizedTensor(scheme, data, np.empty(0, np.float32), ())
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    product = float32_linear(stored, None, NARROW)
    assert isinstance(product, compiled.CompiledLinear)
    assert_near(product(x), expected(stored, x, group), 4e-4 if kind.endswith("K") else 3e-6)
    assert product.nbytes - 4 * 64 <= share * data.nbytes


@pytest.mark.parametrize("name", ["w8a8", "w8a8-tensor", "int8"])
@pytest.mark.parametrize("rows", [1, 70])
def test_products_by_onednn(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "lanes", lambda: 0)
    case = CASES[name]
    stored, bias = tensor(case), torch.randn(case.shape[0], generator=torch.Generator().manual_seed(1))
    x = torch.randn(rows, case.shape[1], generator=torch.Generator().manual_seed(0))
    x[0] = 0 if rows > 1 else x[0]
    product = linear(stored, bias, WIDENED)
    assert isinstance(product, OnednnLinear)
    want = expected(stored, x, case.shape[1]) + bias
    assert_near(product(x), want, 1e-3)  # numbers halfway between two may be rounded to the other
    assert_near(linear(stored, bias, NARROW)(x.bfloat16()).float(), want, 2e-2)


@pytest.mark.parametrize("name", ["w8a8", "int4-offsets"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_float32_keeps_the_activations(name: str, batch_invariant: bool) -> None:
    case = CASES[name]
    stored, x = tensor(case), torch.randn(3, case.shape[1], generator=torch.Generator().manual_seed(0))
    exact = x.double() @ torch.from_numpy(stored.dequantize()).double().T
    assert_near(linear(stored, None, Numerics(torch.float32, torch.float32, batch_invariant))(x), exact)


@pytest.mark.parametrize(
    ("scheme", "inputs", "can"),
    [(W8A8, 90, True), (Int4((1, 32)), 96, True), (Int4((1, 24)), 96, False), (Int8((1, 8)), 96, False)],
)
def test_which_groups_have_kernels(scheme: Scheme, inputs: int, can: bool) -> None:
    assert is_grouped(scheme, inputs) == can


def test_scales_that_float16_does_not_hold_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tensor(CASES["int4-groups"])
    far = stored.scales.copy()
    far[:, 0] *= 2.0**-14  # still within float16's normal numbers, since each row has a power of two of its own
    near = grouped(replace(stored, scales=far))
    assert near is not None
    got = near.scales.astype(np.float32) * near.factors[:, None]
    np.testing.assert_allclose(got, far, rtol=2**-11)
    far[:, 0] *= 2.0**-12
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    unheld = replace(stored, scales=far * np.float32(1.0001))
    want = x.double() @ torch.from_numpy(unheld.dequantize()).double().T
    assert_near(linear(unheld, None, WIDENED)(x.float()), want, 2e-2)


def test_bytes_in_memory(lanes: int) -> None:
    for name, bits in {"w8a8": 8, "int4-groups": 4.5, "int4-offsets": 5, "int8-groups": 8.5}.items():
        case = replace(CASES[name], shape=(256, 160))
        stored = tensor(case)
        product = linear(stored, None, NARROW)
        assert isinstance(product, compiled.CompiledLinear)
        assert product.nbytes == held_bytes(product) == 256 * 160 * bits / 8 + 256 * 4


def test_a_model_computes_with_its_experts(lanes: int) -> None:
    base = tiny_spec()
    moe = Moe(3, Mlp(64, "silu", True), Router(2, True))
    spec = replace(base, layers=tuple(replace(each, ffn=moe) for each in base.layers))
    dense = dict(random_weights(spec))
    weights = {
        name: quantize(value, W8A8) if ".experts." in name or name.endswith((".q", ".k", ".v", ".o")) else value
        for name, value in dense.items()
    }
    model = Packer(spec, NARROW).pack(iter(weights.items()))
    attention = model.parts["layers.0.mixers.0"]
    experts = [model.parts[f"layers.0.ffn.experts.{e}.{part}"] for e in range(3) for part in ("inner", "down")]
    assert all(isinstance(part, compiled.CompiledLinear) for part in experts)
    assert isinstance(attention.qkv, compiled.CompiledLinear)
    x = torch.randn(4, spec.width, generator=torch.Generator().manual_seed(0)).bfloat16()
    names = [f"layers.0.ffn.experts.{part}" for part in ("gate", "up")]
    second = [weights[name] for name in names]
    assert all(isinstance(stack, QuantizedTensor) for stack in second)
    rows = [take_matrix(stack, 1) for stack in second]  # type: ignore[arg-type]
    joined = concatenate(rows)
    assert isinstance(joined, QuantizedTensor)
    want = expected(joined, x, spec.width)
    assert_near(experts[2](x).float(), want, 2**-8)
    plain = Packer(spec, NARROW).pack(iter(dense.items())).num_bytes
    assert 0.5 < model.num_bytes / plain < 0.8


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_quantised_when_it_is_packed(tied: bool) -> None:
    spec = replace(tiny_spec(), tied=tied)
    weights, scheme = dict(random_weights(spec)), Int8("channel")
    name = "embed" if tied else "head"
    packed = Packer(spec, NARROW, scheme).pack(list(weights.items()))
    expected = quantize(torch.from_numpy(weights[name]).bfloat16().float().numpy(), scheme)
    x = torch.randn(3, spec.width).bfloat16()
    torch.testing.assert_close(packed.parts["head"](x), float32_linear(expected, None, NARROW)(x), rtol=0, atol=0)
    torch.testing.assert_close(packed.parts["embed"], torch.from_numpy(weights["embed"]).bfloat16(), rtol=0, atol=0)
    plain = Packer(spec, NARROW).pack(list(weights.items())).parts["head"]
    assert not torch.equal(packed.parts["head"](x), plain(x))
