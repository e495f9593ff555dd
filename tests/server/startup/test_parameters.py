"""Dummy weights are complete, reproducible and small enough for finite outputs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.quantized_folder import compressed_tensors, write_quantized
from support.checkpoints.tiny_folder import write_model

from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm, Param
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Norms
from pagoda.common.weights.dtypes import dtype_name, to_float32
from pagoda.common.weights.quantization.schemes import Float8, Int8, Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import resolve
from pagoda.server.startup.parameters import dummy_weights, read_matrices, read_weights, with_progress
from pagoda.tests.common.weights.gguf.gguf_writing import convert

NORM = Norm(1e-5, kind="layer", bias=True)
LAYER = Layer(
    (Attention(4, 2, 8, 0.3, Rope(1e4, 8), qk_norm=Norm(1e-5)),), Mlp(64, "silu", True), Norms(NORM, None, NORM)
)
PARAMS = params(ModelSpec(vocab=500, width=32, layers=(LAYER,) * 2, final_norm=NORM, tied=False, max_positions=64))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dummy_weights_have_every_parameter_once(dtype: str) -> None:
    weights = list(dummy_weights(PARAMS, dtype=dtype))
    assert [name for name, _ in weights] == list(PARAMS)
    for name, array in weights:
        assert (array.shape, dtype_name(array.dtype)) == (PARAMS[name].shape, dtype)
        values = to_float32(array)
        assert np.abs(values - (1 if "norm" in name and not name.endswith("_bias") else 0)).max() < 0.2, name
        assert values.std() > 0.005, name


def test_dummy_weights_depend_on_the_seed() -> None:
    first, again, other = (dict(dummy_weights(PARAMS, seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_dummy_parameters_differ() -> None:
    weights = dict(dummy_weights(PARAMS))
    assert not np.array_equal(weights["layers.0.mixers.0.q"], weights["layers.1.mixers.0.q"])
    assert not np.array_equal(weights["layers.0.ffn.gate"], weights["layers.0.ffn.up"])


@pytest.mark.parametrize("scheme", [Float8("tensor"), Float8((16, 24)), Int8("channel")])
def test_dummy_weights_have_the_schemes_of_the_checkpoint(scheme: Scheme) -> None:
    experts = {"experts": Param("experts", (3, 40, 32), "EFD")}
    quantised = {name: scheme for name in (*PARAMS, *experts) if name == "experts" or "ffn." in name}
    dense, weights = dict(dummy_weights(PARAMS)), dict(dummy_weights(PARAMS | experts, schemes=quantised))
    assert {name for name, value in weights.items() if isinstance(value, QuantizedTensor)} == set(quantised)
    for name in quantised:
        weight = weights[name]
        assert isinstance(weight, QuantizedTensor)
        assert weight.scheme == scheme
        assert 0.018 < weight.dequantize().std() < 0.022
    assert all(np.array_equal(weights[name], array) for name, array in dense.items() if name not in quantised)


def test_dummy_weights_refuse_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="int8 is not one of float32"):
        list(dummy_weights(PARAMS, dtype="int8"))


@pytest.mark.parametrize("source", ["safetensors", "gguf", "dummy", "quantised", "quantised on the host"])
def test_some_matrices_of_a_running_model_are_read_again(source: str, tmp_path: Path) -> None:
    """As they were loaded, but for --quantization, in any order; nothing else is."""
    folder = write_model(tmp_path / "model")
    settings: dict[str, Any] = {"backend": "reference", "max_model_len": 64}
    if source == "gguf":
        convert(folder, tmp_path / "model.gguf", "llama")
        folder = tmp_path / "model.gguf"
    if source == "dummy":
        settings["load_format"] = "dummy"
    if source == "quantised":
        folder, _ = write_quantized(folder, tmp_path / "quantised", compressed_tensors())
    if source == "quantised on the host":
        settings["quantization"] = "int8_per_channel_weight_only"
    config = EngineArgs(str(folder), **settings).create_engine_config()
    resolved = resolve(config, "llm", weights=True)
    assert resolved.quantizes_on_host == (source == "quantised on the host")
    names = {"embed", "layers.1.ffn.up", "layers.0.mixers.0.q"}
    again = dict(read_matrices(resolved, resolved.checkpoint, names))
    loaded = dict(read_weights(config, resolved.checkpoint, resolved))
    assert again.keys() == names
    for name in names:
        first, second = (values(weight[name]) for weight in (loaded, again))
        near = 0.02 if source == "quantised on the host" else 0
        np.testing.assert_allclose(second, first, rtol=0, atol=near)


def values(weight: Value) -> np.ndarray:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else to_float32(weight)


TENSORS = [("a", np.zeros(1024, np.uint8)), ("b", np.zeros(3072, np.uint8))]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "disable"), [(io.StringIO(), False), (Terminal(), True)])
def test_no_progress_bar_without_a_terminal_or_when_disabled(
    stream: io.StringIO, disable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    assert list(with_progress(TENSORS, 4096, disable=disable)) == TENSORS
    assert stream.getvalue() == ""


def test_progress_bar_counts_bytes_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(with_progress(iter(TENSORS), 4096)) == TENSORS
    assert "Loading" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert "4.00k/4.00k" in terminal.getvalue()
