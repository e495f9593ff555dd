"""Quantising dense matrices: which ones, the rounding of each method against torch's types, and its errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.suite.rows import each_row

from pagoda.common.models.primitives import Param
from pagoda.common.weights.dtypes import as_uint, to_bfloat16, to_float32
from pagoda.common.weights.quantization.on_the_fly import (
    METHODS,
    quantize_on_the_fly,
    quantized,
    scheme_of,
    schemes_on_the_fly,
)
from pagoda.common.weights.quantization.schemes import E2M1, TABLES, Activations, Codes4, Float8, Int4, Int8, Mxfp4
from pagoda.common.weights.quantization.tensors import QuantizedTensor

UP = "layers.0.ffn.up"


def matrix(*shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    values[..., 1, :] *= 30
    values[..., 2, :] = 0
    return values


def quantise(values: np.ndarray, method: str) -> QuantizedTensor:
    tensor = quantize_on_the_fly(UP, values, method)
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.shape == values.shape
    return tensor


def errors(tensor: QuantizedTensor, values: np.ndarray, size: int) -> np.ndarray:
    """Return the rounding errors in units of the scale of each group. `size`: inputs of a group."""
    scales = np.repeat(tensor.scales, size, -1)[..., : values.shape[-1]]
    return (tensor.dequantize() - values) / scales


@each_row(
    ("method", "scales"),
    [("fp8", (200, 1)), ("ptpc_fp8", (200, 1)), ("fp8_per_tensor", (1, 1)), ("fp8_per_block", (2, 3))],
)
def test_float8_spans_each_group_and_rounds_to_nearest(method: str, scales: tuple[int, int]) -> None:
    values = matrix(200, 320)
    tensor = quantise(values, method)
    assert isinstance(tensor.scheme, Float8)
    assert tensor.scheme.activations is not None
    assert tensor.scales.shape == scales
    exact = tensor.scales
    for axis, (part, extent) in enumerate(zip(tensor.group_shape, values.shape)):
        exact = np.repeat(exact, part, axis).take(range(extent), axis)
    expected = (values / exact).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(as_uint(tensor.data), expected.view(np.uint8))
    assert np.abs(expected.astype(np.float32)).max() == 448


@pytest.mark.parametrize("method", ["int8", "tpu_int8", "int8_per_channel_weight_only"])
def test_int8_spans_each_channel(method: str) -> None:
    values = matrix(40, 96)
    tensor = quantise(values, method)
    assert isinstance(tensor.scheme, Int8)
    assert (tensor.scheme.activations is not None) == (method == "int8")
    assert (np.abs(tensor.data).max(-1)[[0, 1, 2]] == [127, 127, 0]).all()
    assert np.abs(errors(tensor, values, 96)).max() <= 0.5 + 1e-5


@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (576, 64), (96, 32)])
def test_int4_has_errors_that_sum_to_little_in_each_group(inputs: int, group: int) -> None:
    values = matrix(40, inputs) + np.float32(0.3)
    tensor = quantise(values, "int4")
    assert tensor.scheme == Int4((1, group), offsets=True)
    assert tensor.offsets is not None
    assert tensor.offsets.shape == tensor.scales.shape == (40, inputs // group)
    units = errors(tensor, values, group)
    assert np.abs(units).max() < 1.3
    sums = np.abs(units.reshape(40, -1, group).mean(-1))
    assert sums.mean() < 0.02
    assert np.array_equal(to_float32(to_bfloat16(tensor.scales)), tensor.scales)
    constant = quantise(np.full((8, 32), 0.25, np.float32), "int4")
    np.testing.assert_allclose(constant.dequantize(), 0.25, rtol=2**-7)
    assert not quantise(np.zeros((8, 32), np.float32), "int4").dequantize().any()


def test_nf4_has_the_nearest_values_of_the_table() -> None:
    values = matrix(8, 128)
    tensor = quantise(values, "bitsandbytes")
    assert tensor.scheme == Codes4("nf4", (1, 64))
    units = values.reshape(8, 2, 64) / tensor.scales[..., None]
    nearest = TABLES["nf4"][np.abs(units[..., None] - TABLES["nf4"]).argmin(-1)]
    np.testing.assert_allclose(tensor.dequantize().reshape(8, 2, 64), nearest * tensor.scales[..., None], rtol=1e-6)


def test_mxfp8_has_powers_of_two() -> None:
    values = matrix(64, 96)
    tensor = quantise(values, "mxfp8")
    assert tensor.scheme == Float8((1, 32), Activations("float8", 32))
    assert tensor.scales.shape == (64, 3)
    assert (np.frexp(tensor.scales)[0] == 0.5).all()
    numbers = to_float32(tensor.data).reshape(64, 3, 32)
    peaks = np.abs(numbers).max(-1)
    assert ((peaks > 223) & (peaks <= 448) | (peaks == 0)).all(), "of numbers up to 448, less than one octave is unused"
    expected = (values.reshape(64, 3, 32) / tensor.scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(numbers, expected.astype(np.float32))


def test_mxfp4_has_the_nearest_values_times_powers_of_two() -> None:
    values = matrix(64, 96)
    tensor = quantise(values, "mxfp4")
    assert tensor.scheme == Mxfp4()
    assert (np.frexp(tensor.scales)[0] == 0.5).all()
    candidates = E2M1 * tensor.scales[..., None, None]
    best = np.abs(candidates - values.reshape(64, 3, 32, 1)).min(-1)
    got = tensor.dequantize().reshape(64, 3, 32)
    np.testing.assert_allclose(np.abs(got - values.reshape(64, 3, 32)), best, rtol=1e-5, atol=1e-7)
    peaks = np.abs(got / tensor.scales[..., None]).max(-1)
    assert set(np.unique(peaks)) <= {0, 3, 4, 6}
    narrow = quantize_on_the_fly(UP, matrix(8, 48), "mxfp4")
    assert isinstance(narrow, np.ndarray), "32 does not divide its inputs"


@each_row("method", METHODS)
def test_experts_are_quantised_one_by_one_and_other_types_converted(method: str) -> None:
    name, values = "layers.0.ffn.experts.up", matrix(3, 40, 128)
    whole = quantize_on_the_fly(name, to_bfloat16(values), method)
    assert isinstance(whole, QuantizedTensor)
    last = quantize_on_the_fly(name, to_float32(to_bfloat16(values[2])), method)
    assert isinstance(last, QuantizedTensor)
    np.testing.assert_array_equal(whole.dequantize()[2], last.dequantize())
    dense = quantize_on_the_fly(UP, values[0], method)
    assert isinstance(dense, QuantizedTensor) == (method != "experts_int8")


def test_large_matrices_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(300, 256)
    for method in METHODS[:-1]:
        if method == "experts_int8":
            continue
        expected = quantise(values, method)
        monkeypatch.setattr("pagoda.common.weights.quantization.on_the_fly._CHUNK", 5000)
        np.testing.assert_array_equal(quantise(values, method).dequantize(), expected.dequantize())
        monkeypatch.undo()


def test_matrices_of_layers_are_quantised() -> None:
    names = {
        **{"layers.0.mixers.0.q": True, "layers.0.ffn.experts.down": True, "layers.1.ffn.shared.up": True},
        **{"embed": False, "head": False, "layers.0.ffn.router": False, "layers.0.mixers.0.indexer.q": False},
        **{"layers.0.per_layer.gate": False, "layers.0.norms.before_ffn": False},
    }
    params = {name: Param(name, (64, 128) if "norm" not in name else (64,), "FD") for name in names}
    wide = Param("layers.2.mixers.0.k", (64, 128), "KD", float32=True)
    odd = Param("layers.2.mixers.0.v", (64, 72), "KD")
    schemes = schemes_on_the_fly("int4", {**params, wide.name: wide, odd.name: odd})
    assert set(schemes) == {name for name, expected in names.items() if expected}
    assert scheme_of("int4", 72) is None
    assert odd.name in schemes_on_the_fly("int8", {odd.name: odd})
    assert {"head"} == set(schemes_on_the_fly("int8", {}, head=True)) > set(schemes_on_the_fly("int4", {}, head=True))
    stream = dict(
        quantized(
            [(name, matrix(*param.shape, seed=1)) for name, param in params.items() if len(param.shape) > 1], schemes
        )
    )
    assert {name for name, value in stream.items() if isinstance(value, QuantizedTensor)} == set(schemes)
