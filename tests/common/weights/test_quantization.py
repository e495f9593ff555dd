"""Quantised tensors, the config that describes them, and the stream that joins them with their scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.quantized_folder import compressed_tensors, fp8

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.family import Rename, Split, Stack, linear
from pagoda.common.models.primitives import Param
from pagoda.common.weights import dtypes
from pagoda.common.weights.quantization import (
    Float8,
    Int8,
    QuantizationConfig,
    QuantizedTensor,
    Value,
    dequantized,
    join_scales,
    parameter_schemes,
    read_quantization,
    stack,
    without_quantization,
)
from pagoda.common.weights.rules import apply_rules, sources

BLOCKS = {"tensor": (10, 12), "channel": (1, 12), "block": (4, 8), "columns": (10, 1)}


def random_tensor(kind: str, seed: int = 0) -> tuple[QuantizedTensor, np.ndarray]:
    """A matrix [10, 12], and its values."""
    noise, group = np.random.default_rng(seed), BLOCKS[kind]
    numbers = noise.normal(size=(10, 12)).astype(ml_dtypes.float8_e4m3fn)
    scales = noise.uniform(1, 2, size=[-(-size // part) for size, part in zip((10, 12), group)]).astype(np.float32)
    spread = scales.repeat(group[0], 0)[:10].repeat(group[1], 1)[:, :12]
    data = numbers.view(np.uint8).view(dtypes.FLOAT8_E4M3FN)
    return QuantizedTensor(Float8(kind), data, scales, group), numbers.astype(np.float32) * spread


def values(weight: Value) -> np.ndarray:
    assert isinstance(weight, QuantizedTensor)
    return weight.dequantize()


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_of_parts_and_of_the_transposed(kind: str) -> None:
    tensor, expected = random_tensor(kind)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    np.testing.assert_array_equal(tensor.T.dequantize(), expected.T)
    for rows in (slice(0, 10), slice(4, 8), slice(3, 9), slice(6, 10), slice(8, 10), slice(1, 2)):
        np.testing.assert_array_equal(tensor[(rows,)].dequantize(), expected[rows])
        for columns in (slice(0, 8), slice(8, 12), slice(2, 6)):
            part = tensor[rows, columns]
            np.testing.assert_array_equal(part.dequantize(), expected[rows, columns])
            np.testing.assert_array_equal(part[(slice(0, 1),)].T.dequantize(), expected[rows, columns][:1].T)
    both = stack([tensor, random_tensor(kind, 1)[0]])
    np.testing.assert_array_equal(both.dequantize(), [expected, random_tensor(kind, 1)[1]])
    np.testing.assert_array_equal(both[slice(1, 2), slice(3, 7)].dequantize()[0], random_tensor(kind, 1)[1][3:7])
    assert tensor.nbytes == 120 + 4 * tensor.scales.size


def test_channel_scales_where_inputs_share_them() -> None:
    assert random_tensor("block")[0].channel_scales() is None
    assert random_tensor("columns")[0].channel_scales() is None
    for kind in ("tensor", "channel"):
        tensor, expected = random_tensor(kind)
        scales = tensor.channel_scales()
        assert scales is not None
        assert scales.shape == (10,)
        np.testing.assert_array_equal(dtypes.to_float32(tensor.data) * scales[:, None], expected)
        half = stack([tensor, tensor])[slice(0, 2), slice(2, 7)].channel_scales()
        assert half is not None
        np.testing.assert_array_equal(half, [scales[2:7]] * 2)


@pytest.mark.parametrize(
    ("config", "scheme", "scale"),
    [
        (compressed_tensors(), Float8("channel"), "weight_scale"),
        (compressed_tensors(strategy="tensor"), Float8("tensor"), "weight_scale"),
        (compressed_tensors(strategy="block"), Float8((16, 8)), "weight_scale"),
        (compressed_tensors("int"), Int8("channel"), "weight_scale"),
        (compressed_tensors(sparsity_config={"format": "dense"}), Float8("channel"), "weight_scale"),
        (fp8(), Float8("tensor"), "weight_scale"),
        (fp8(True, scale_fmt="ue8m0"), Float8((16, 8)), "weight_scale_inv"),
    ],
)
def test_schemes_of_published_configs(config: dict[str, Any], scheme: Float8 | Int8, scale: str) -> None:
    read = read_quantization({"model_type": "llama", "quantization_config": config})
    assert read is not None
    assert (read.method, read.scale) == (config["quant_method"], scale)
    assert read.scheme("model.layers.3.mlp.up_proj") == scheme
    assert read.scheme("lm_head") is None
    assert without_quantization({"a": 1, "quantization_config": config, "compression_config": None}) == {"a": 1}
    assert read_quantization({"compression_config": config}) == read


def test_a_dense_config_has_no_schemes() -> None:
    assert read_quantization({"model_type": "llama", "quantization_config": None}) is None


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"])
def test_ignored_layers(key: str) -> None:
    names = ["model.layers.0.mlp.down_proj", r"re:.*layers\.1\..*(q|k)_proj", "model.layers.2", "gate"]
    read = read_quantization({"quantization_config": fp8(**{key: names})})
    assert read is not None
    ignored = [
        *("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.2.mlp.up_proj"),
        *("model.layers.5.mlp.gate", "lm_head"),
    ]
    assert [read.scheme(name) for name in ignored] == [None] * 5
    others = ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.v_proj", "model.layers.20.mlp.up_proj"]
    assert [read.scheme(name) for name in (*others, "model.layers.5.mlp.gate_proj")] == [Float8("tensor")] * 4


def test_targets_choose_the_group() -> None:
    config = compressed_tensors()
    first = config["config_groups"]["group_0"]
    config["config_groups"] = {
        "a": {**first, "targets": [r"re:.*mlp.*"], "weights": {**first["weights"], "strategy": "tensor"}},
        "b": {**first, "targets": ["model.layers.0.self_attn.q_proj"]},
    }
    read = read_quantization({"quantization_config": config})
    assert read is not None
    names = ("layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    assert [read.scheme(name) for name in names] == [Float8("tensor"), Float8("channel"), None]


def weights_with(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors()
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def group_with(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors()
    config["config_groups"]["group_0"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: the weights are quantised by gptq, "),
        ({"compression_config": {"quant_method": "x", "format": "y"}}, r"compression_config: .* by x \(y\), which"),
        ({"quantization_config": []}, "a method it does not name"),
        ({"quantization_config": {}}, "a method it does not name, which this version does not read"),
        ({"quantization_config": weights_with(num_bits=4, type="int", strategy="group")}, "group_0 has 4-bit int we"),
        ({"quantization_config": weights_with(num_bits=4, type="int")}, "group_0 has 4-bit int weights, strategy chan"),
        ({"quantization_config": weights_with(strategy="block")}, "group_0 has 8-bit float weights, strategy block"),
        ({"quantization_config": weights_with(symmetric=False)}, "asymmetric, reordered or quantised dynamically"),
        ({"quantization_config": weights_with(actorder="group")}, "asymmetric, reordered or quantised dynamically"),
        ({"quantization_config": group_with(input_activations={"num_bits": 4})}, "activations of 4 bits"),
        (
            {"quantization_config": group_with(input_activations=[8])},
            "input_activations that are no object",
        ),
        ({"quantization_config": group_with(output_activations={"num_bits": 8})}, "group_0 has output_activations"),
        ({"quantization_config": group_with(targets="Linear")}, "targets of group_0 is not a list of layers"),
        (
            {"quantization_config": group_with(targets=["re:("])},
            r"targets .* has 're:\(', which is not a pattern",
        ),
        ({"quantization_config": group_with(weights=None)}, "group_0 describes no weights"),
        ({"quantization_config": compressed_tensors(config_groups={})}, "config_groups is missing"),
        ({"quantization_config": compressed_tensors(kv_cache_scheme={"num_bits": 8})}, "has kv_cache_scheme"),
        ({"quantization_config": compressed_tensors(sparsity_config={"format": "24"})}, "has sparsity_config"),
        ({"quantization_config": compressed_tensors(ignore="lm_head")}, "ignore is not a list of layers"),
        ({"quantization_config": fp8(fmt="e5m2")}, "fmt is e5m2"),
        ({"quantization_config": fp8(weight_block_size=[128])}, r"weight_block_size is \[128\]"),
        ({"quantization_config": fp8(zero_point=True)}, "quantization_config has zero_point"),
    ],
)
def test_other_quantisations_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: .*{words}.*; serve a GGUF file of the model .*$") as error:
        read_quantization(config)
    assert "\n" not in str(error.value)
    assert read_quantization(dict.fromkeys(config)) is None


def config_of(config: dict[str, Any]) -> QuantizationConfig:
    read = read_quantization({"quantization_config": config})
    assert read is not None
    return read


CHANNELS = config_of(compressed_tensors())
DATA = np.arange(6, dtype=np.uint8).reshape(2, 3).view(dtypes.FLOAT8_E4M3FN)
NAME = "layers.0.out"


def joined(config: QuantizationConfig = CHANNELS, **tensors: np.ndarray) -> dict[str, Value]:
    return dict(join_scales(((f"{NAME}.{name}", tensor) for name, tensor in tensors.items()), config))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1)])
def test_scales_join_their_matrix_in_any_order(shape: tuple[int, ...]) -> None:
    scales = np.full(shape, 2, np.float32)
    for tensors in ({"weight": DATA, "weight_scale": scales}, {"weight_scale": scales, "weight": DATA}):
        together = joined(**tensors, bias=scales, input_scale=scales)
        assert list(together) == [f"{NAME}.weight", f"{NAME}.bias"]
        np.testing.assert_array_equal(values(together[f"{NAME}.weight"]), 2 * dtypes.to_float32(DATA))


def test_static_scales_of_activations_are_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    scale = np.ones(1, np.float32)
    tensors = {"weight": DATA, "weight_scale": scale, "input_scale": scale, "input_zero_point": scale}
    with caplog.at_level("INFO"):
        assert list(joined(**tensors)) == [f"{NAME}.weight"]
        assert list(joined(weight=DATA, weight_scale=scale)) == [f"{NAME}.weight"]
    (line,) = caplog.messages
    assert line.startswith(f"{NAME}.input_scale and 1 more: static scales of activations are not used: ")


def test_dense_matrices_pass_through() -> None:
    dense = np.ones((2, 3), np.float32)
    assert joined(weight=dense) == {f"{NAME}.weight": dense}


def test_blocks_join_their_scales() -> None:
    scales = np.array([[1, 2]], np.float32)
    weight = joined(config_of(fp8(weight_block_size=[2, 2])), weight=DATA, weight_scale_inv=scales)[f"{NAME}.weight"]
    np.testing.assert_array_equal(values(weight), dtypes.to_float32(DATA) * [1, 1, 2])


def test_numbers_of_an_ignored_layer_are_read_by_their_dtype() -> None:
    config = config_of(compressed_tensors(ignore=[NAME]))
    weight = joined(config, weight=DATA, weight_scale=np.ones((2, 1), np.float32))[f"{NAME}.weight"]
    assert isinstance(weight, QuantizedTensor)
    assert weight.scheme == Float8("channel")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": DATA}, r"layers.0.out.weight: the checkpoint lacks its weight_scale; download"),
        ({"weight_scale": DATA}, r"layers.0.out.weight_scale: the checkpoint lacks its quantised weight; download"),
        (
            {"weight": DATA, "weight_scale": np.ones(3, np.float32)},
            r"_scale has shape \[3\], .* fit \[2, 3\] num",
        ),
        ({"weight": DATA.view(np.int8), "weight_scale": np.ones(2)}, "weight is int8, which quantization_conf"),
        ({"weight": DATA[None], "weight_scale": np.ones(2)}, r"weight \[1, 2, 3\] is quantised, but not a matrix"),
        ({"weight": DATA, "weight_scale": DATA[:, 0].view(dtypes.FLOAT8_E8M0FNU)}, "float8_e8m0fnu cannot be conv"),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        joined(**tensors)


RULES = (
    Rename("[model.]embed.weight", "embed"),
    *linear("[model.]layers.{l}.out", "layers.{l}.o"),
    Split("layers.{l}.both.weight", ("layers.{l}.x", "layers.{l}.y")),
    Rename("layers.{l}.turned.weight", "layers.{l}.t", transpose=True),
    Stack("layers.{l}.experts.{e}.w.weight", "layers.{l}.experts"),
)
SHAPES = {"layers.0.o": (10, 12), "layers.0.x": (3, 12), "layers.0.y": (7, 12), "layers.0.t": (12, 10)}
PARAMS = {
    name: Param(name, shape, "." * len(shape)) for name, shape in (SHAPES | {"layers.0.experts": (2, 10, 12)}).items()
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_rule_keeps_tensors_quantised(kind: str) -> None:
    tensors = [random_tensor(kind, seed) for seed in range(5)]
    names = ["layers.0.out.weight", "layers.0.both.weight", "layers.0.turned.weight"]
    names += [f"layers.0.experts.{index}.w.weight" for index in (1, 0)]
    stream = [(name, tensor) for name, (tensor, _) in zip(names, tensors)]
    filled = {name: values(value) for name, value in apply_rules(RULES, PARAMS, stream)}
    expected = [dense for _, dense in tensors]
    np.testing.assert_array_equal(filled["layers.0.o"], expected[0])
    np.testing.assert_array_equal(np.concatenate([filled["layers.0.x"], filled["layers.0.y"]]), expected[1])
    np.testing.assert_array_equal(filled["layers.0.t"], expected[2].T)
    np.testing.assert_array_equal(filled["layers.0.experts"], [expected[4], expected[3]])


def test_parts_of_a_stack_share_their_groups() -> None:
    params = {name: param for name, param in PARAMS.items() if name.endswith("experts")}
    parts = [random_tensor("channel")[0], random_tensor("block")[0]]
    stream = [(f"layers.0.experts.{index}.w.weight", part) for index, part in enumerate(parts)]
    message = r"float8_e4m3fn in groups of \[4, 8\], but parts before it have float8_e4m3fn in groups of \[1, 12\]"
    with pytest.raises(WeightError, match=message):
        list(apply_rules(RULES, params, stream))


def test_schemes_of_parameters() -> None:
    more = {"embed": (97, 12), "layers.0.o_bias": (10,), "layers.1.o": (10, 12), "layers.1.experts": (2, 10, 12)}
    params = PARAMS | {name: Param(name, shape, "." * len(shape)) for name, shape in more.items()}
    names = sources(RULES, params)
    assert names["layers.1.o"] == [(RULES[1], "model.layers.1.out.weight")]
    assert names["layers.1.experts"] == [(RULES[-1], "layers.1.experts.0.w.weight")]
    config = config_of(compressed_tensors(ignore=["model.layers.1.out"]))
    quantised = ("layers.0.o", "layers.0.x", "layers.0.y", "layers.0.experts", "layers.1.experts")
    assert parameter_schemes(config, params, names) == dict.fromkeys(quantised, Float8("channel"))


def test_a_parameter_of_several_sources_is_dense_if_one_is_ignored() -> None:
    rules = (*linear("layers.{l}.q", "layers.{l}.o"), Split("layers.{l}.qkv.weight", ("layers.{l}.o", "layers.{l}.x")))
    params = {name: PARAMS[name] for name in ("layers.0.o", "layers.0.x")}
    config = config_of(compressed_tensors(ignore=["layers.0.q"]))
    assert parameter_schemes(config, params, sources(rules, params)) == {"layers.0.x": Float8("channel")}


def test_dequantised_parameters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tensor, expected = random_tensor("channel")
    with caplog.at_level("INFO"):
        weights = dict(dequantized([("a", expected), ("b", tensor), ("c", tensor)], "reference"))
    assert weights["a"] is expected
    np.testing.assert_array_equal(weights["b"], expected)
    assert caplog.messages == ["reference: dequantised b and 1 more: it does not compute with their scheme"]
