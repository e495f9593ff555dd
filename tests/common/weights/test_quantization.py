"""Quantised tensors, the config that describes them, and the stream that joins them with their scales."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.checkpoints.quantized_folder import awq, compressed_tensors, fp8, gptq
from support.checkpoints.torchao_tiles import in_tiles, quantised
from support.suite.rows import each_row

from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.family import Rename, Split, Stack, linear
from pagoda.common.models.primitives import Param
from pagoda.common.weights import dtypes
from pagoda.common.weights.folder import FolderCheckpoint
from pagoda.common.weights.gguf.dequantize import BlockType
from pagoda.common.weights.quantization.config import QuantizationConfig, parameter_schemes
from pagoda.common.weights.quantization.kv_scales import (
    Scales,
    kv_scale_weights,
    scales_of_caches,
    take_kv_scales,
    without_kv_scales,
)
from pagoda.common.weights.quantization.read import join_scales, read_quantization, without_quantization
from pagoda.common.weights.quantization.schemes import (
    TABLES,
    Activations,
    Blocks,
    Codes4,
    Float8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
)
from pagoda.common.weights.quantization.tensors import (
    QuantizedTensor,
    Value,
    concatenate,
    dequantized,
    random_quantized,
    scaled,
    stack,
    take_rows,
)
from pagoda.common.weights.rules import apply_rules, quantised_pieces, sources, stored_shapes

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


def fours(experts: int = 2, rows: int = 6, groups: int = 3) -> tuple[Value, np.ndarray]:
    """A stack in MXFP4 as it is stored, and its values, number by number."""
    noise = np.random.default_rng(0)
    blocks = noise.integers(256, size=(experts, rows, groups, 16), dtype=np.uint8)
    scales = noise.integers(0, 200, size=(experts, rows, groups), dtype=np.uint8)
    halves = np.stack((blocks & 15, blocks >> 4), -1).reshape(experts, rows, groups, 32)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[halves & 7] * np.where(halves & 8, -1, 1)
    expected = sizes * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    config = read_quantization({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}})
    assert config is not None
    ((name, value),) = join_scales([("m.w_scales", scales), ("m.w_blocks", blocks)], config)
    assert name == "m.w_blocks"
    return value, expected.reshape(experts, rows, -1).astype(np.float32)


def test_numbers_of_four_bits_and_parts_of_them() -> None:
    value, expected = fours()
    assert isinstance(value, QuantizedTensor)
    assert value.shape == expected.shape == (2, 6, 96)
    assert value.nbytes == 2 * 6 * (48 + 3 * 4)
    np.testing.assert_array_equal(values(value), expected)
    for columns in (slice(0, 32), slice(48, 96), slice(0, 20), slice(24, 72)):
        np.testing.assert_array_equal(values(value[slice(1), slice(2, 5), columns]), expected[:1, 2:5, columns])
    np.testing.assert_array_equal(values(value[:, 1::2]), expected[:, 1::2])
    with pytest.raises(WeightError, match="4-bit weights cannot be divided at input 0 or 7; use fewer ranks"):
        value[slice(2), slice(6), slice(7)]


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"w_blocks": (2, 4, 16)}, "tensor w_blocks: the checkpoint lacks its scales; download it again"),
        ({"w_scales": (2, 4)}, "tensor w_scales: the checkpoint lacks its blocks; download it again"),
        ({"w_scales": (2, 4), "w_blocks": (2, 4, 8)}, r"tensor w_blocks uint8 \[2, 4, 8\] .* are not MXFP4"),
    ],
)
def test_blocks_without_scales_that_fit(tensors: dict[str, tuple[int, ...]], problem: str) -> None:
    config = read_quantization({"quantization_config": {"quant_method": "mxfp4"}})
    assert config is not None
    with pytest.raises(WeightError, match=problem):
        list(join_scales([(name, np.zeros(shape, np.uint8)) for name, shape in tensors.items()], config))


@each_row("kind", BLOCKS)
def test_values_of_parts(kind: str) -> None:
    tensor, expected = random_tensor(kind)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    for rows in (slice(0, 10), slice(4, 8), slice(3, 9), slice(6, 10), slice(8, 10), slice(1, 2)):
        np.testing.assert_array_equal(tensor[(rows,)].dequantize(), expected[rows])
        for columns in (slice(0, 8), slice(8, 12), slice(2, 6)):
            part = tensor[rows, columns]
            np.testing.assert_array_equal(part.dequantize(), expected[rows, columns])
            np.testing.assert_array_equal(part[(slice(0, 1),)].dequantize(), expected[rows, columns][:1])
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


ROWS = Activations("float8", "row")


@each_row(
    ("config", "scheme", "scale"),
    [
        (compressed_tensors(), Float8("channel", ROWS), "weight_scale"),
        (compressed_tensors(strategy="tensor"), Float8("tensor", ROWS), "weight_scale"),
        (compressed_tensors(strategy="block"), Float8((16, 8), ROWS), "weight_scale"),
        (compressed_tensors("int"), Int8("channel", Activations("int8", "row")), "weight_scale"),
        (compressed_tensors(sparsity_config={"format": "dense"}), Float8("channel", ROWS), "weight_scale"),
        (fp8(), Float8("tensor", ROWS), "weight_scale"),
        (fp8(True, scale_fmt="ue8m0"), Float8((16, 8), Activations("float8", 8)), "weight_scale_inv"),
        (
            fp8(activation_scheme="static"),
            Float8("tensor", Activations("float8", "tensor", static=True)),
            "weight_scale input_scale",
        ),
    ],
)
def test_schemes_of_published_configs(config: dict[str, Any], scheme: Float8 | Int8, scale: str) -> None:
    read = read_quantization({"model_type": "llama", "quantization_config": config})
    assert read is not None
    assert read.method == config["quant_method"]
    assert read.parts == {"weight", *scale.split()}
    assert read.scheme("model.layers.3.mlp.up_proj") == scheme
    assert read.scheme("lm_head") is None
    assert without_quantization({"a": 1, "quantization_config": config, "compression_config": None}) == {"a": 1}
    assert read_quantization({"compression_config": config}) == read


def test_a_dense_config_has_no_schemes() -> None:
    assert read_quantization({"model_type": "llama", "quantization_config": None}) is None


@each_row("key", ["ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"])
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
    assert [read.scheme(name) for name in (*others, "model.layers.5.mlp.gate_proj")] == [Float8("tensor", ROWS)] * 4


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
    assert [read.scheme(name) for name in names] == [Float8("tensor", ROWS), Float8("channel", ROWS), None]


def mxfp8(**more: object) -> dict[str, object]:
    return {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], **more}


def hqq(**params: object) -> dict[str, Any]:
    weights = {"nbits": 8, "axis": 1, "group_size": 4, "channel_wise": True, "view_as_float": False, **params}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}, "skip_modules": ["lm_head"]}


def torchao_int4(group_size: object = 32, packing: str = "PLAIN", tile: int = 8, **data: object) -> dict[str, object]:
    packed = {"_type": "Int4PackingFormat", "_data": packing}
    data |= {"group_size": group_size, "int4_packing_format": packed, "int4_tile_packed_ntile": tile}
    kind = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": kind}}


def test_a_rule_whose_tensor_is_not_stored_does_not_decide_a_scheme() -> None:
    rules = (
        Rename("[model.]layers.{l}.down", "down", transpose="unless_it_fits"),
        Stack("[model.]layers.{l}.{e}.down.weight", "down"),
    )
    params = {"layers.0.down": Param("layers.0.down", (2, 8, 4), "...")}
    rules = tuple(replace(rule, target="layers.{l}.down") for rule in rules)
    read = config_of(fp8(weight_block_size=[4, 4]))
    one_by_one = [f"layers.0.{expert}.down.{part}" for expert in range(2) for part in ("weight", "weight_scale_inv")]
    for prefix in ("", "model."):
        names = [f"{prefix}{name}" for name in one_by_one]
        assert parameter_schemes(read, params, sources(rules, params), names) == {
            "layers.0.down": read.groups[0].scheme
        }
    assert parameter_schemes(read, params, sources(rules, params), ["model.layers.0.down"]) == {}
    assert parameter_schemes(read, params, sources(rules, params)) == {}


def rotated(location: object, **changes: object) -> dict[str, Any]:
    """A rotation into the weights and one elsewhere."""
    uses = [{"targets": ["v_proj"], "location": "weight_output"}, {"targets": ["o_proj"], "location": location}]
    rotation = {"type": "hadamard", "apply": uses, "block_size": 32, "randomize": False, **changes}
    return compressed_tensors(transform_config={"config_groups": {"R2": rotation}})


def weights_with(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors()
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def group_with(**changes: Any) -> dict[str, Any]:
    config = compressed_tensors()
    config["config_groups"]["group_0"] |= changes
    return config


@each_row(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config: the weights are quantised by aqlm, "),
        ({"compression_config": {"quant_method": "x", "format": "y"}}, r"compression_config: .* by x, which"),
        ({"quantization_config": []}, "a method it does not name"),
        ({"quantization_config": {"bits": 4}}, "a method it does not name, which this version does not read"),
        (
            {"quantization_config": weights_with(num_bits=4, type="int", strategy="group")},
            "weights: strategy is group, but group_size is None",
        ),
        (
            {"quantization_config": weights_with(num_bits=9, type="int")},
            "9-bit int weights, strategy channel, in format float-quantized",
        ),
        (
            {"quantization_config": weights_with(num_bits=4)},
            "4-bit float weights, strategy channel, in format float-qu",
        ),
        ({"quantization_config": compressed_tensors(format="marlin-24")}, "format is marlin-24, only int-quantized, "),
        ({"quantization_config": weights_with(strategy="block")}, "group_0: its weights have strategy block, but no"),
        ({"quantization_config": weights_with(symmetric=False)}, "asymmetric weights, which are read of integers"),
        ({"quantization_config": weights_with(actorder="group")}, "weights that are reordered .actorder., which is"),
        ({"quantization_config": weights_with(dynamic=True)}, "weights that are quantised dynamically"),
        ({"quantization_config": group_with(input_activations={"num_bits": 4})}, "activations of 4 bits, type None"),
        (
            {"quantization_config": group_with(input_activations=[8])},
            "group_0: input_activations is not an object",
        ),
        (
            {"quantization_config": group_with(output_activations={"num_bits": 8})},
            "group_0: output_activations is",
        ),
        ({"quantization_config": group_with(targets="Linear")}, "group_0: targets is not a list of layers"),
        (
            {"quantization_config": group_with(targets=["re:("])},
            r"targets has 're:\(', which is not a pattern",
        ),
        ({"quantization_config": group_with(weights=None)}, "group_0: it describes no weights"),
        ({"quantization_config": compressed_tensors(config_groups={})}, "config_groups is missing"),
        ({"quantization_config": compressed_tensors(hadamard=True)}, "hadamard is True, which this version does not"),
        ({"quantization_config": gptq(bits=5)}, "5-bit weights, only 2, 3, 4, 8 are read"),
        ({"quantization_config": gptq(group_size=0)}, "group_size is 0"),
        (
            {"quantization_config": gptq(checkpoint_format="marlin")},
            "checkpoint_format is marlin, only gptq and gptq_v2",
        ),
        ({"quantization_config": gptq(pack_dtype="int16")}, "pack_dtype is int16, only int32"),
        (
            {"quantization_config": gptq(dynamic={"+:.*q_proj": {"bits": 7}})},
            r"dynamic.\+:.*q_proj: it has 7-bit weights",
        ),
        ({"quantization_config": gptq(is_marlin_format=True)}, "is_marlin_format is True"),
        ({"quantization_config": awq(bits=8)}, "8-bit weights, AWQ is read with 4 only"),
        ({"quantization_config": awq(version="gemv_fast")}, "version is gemv_fast, only gemm and gemv"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
            "quant_algo is W4A8_AWQ, only",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}},
            "bnb_4bit_quant_storage is bfloat16, only uint8",
        ),
        (
            {"quantization_config": {"quant_method": "torchao", "quant_type": "int8_weight_only"}},
            "whose tensors are pickled; save the model again with torchao 0.14 or later",
        ),
        ({"quantization_config": torchao_int4({"x": 1})}, "group_size is {'x': 1}, not a positive number"),
        ({"quantization_config": torchao_int4(0)}, "group_size is 0, not a positive number"),
        (
            {"quantization_config": torchao_int4(packing="PRESHUFFLED")},
            "int4_packing_format is PRESHUFFLED, which only its own kernels read; use PLAIN or TILE_PACKED_TO_4D",
        ),
        (
            {"quantization_config": torchao_int4(layout={"_type": "TensorCoreTiledLayout", "_data": {}})},
            "layout is TensorCoreTiledLayout, that of version 1, whose tensors are pickled; save the model again",
        ),
        ({"quantization_config": torchao_int4(tile=16)}, "int4_tile_packed_ntile is 16, the layout of AMD's GPUs; use"),
        (
            {"quantization_config": {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}},
            "data_type is mx_fp, only int is read",
        ),
        (
            {"quantization_config": {"quant_method": "quark", "algo_config": {"name": "rotation"}}},
            "rotates activations",
        ),
        *(
            (
                {"quantization_config": rotated(location)},
                f"transform_config.config_groups.R2.apply: location is {location}, only weight_input and weight_output",
            )
            for location in ("input", "output", "q_attn", "k_cache", None)
        ),
        ({"quantization_config": rotated("weight_input", requires_grad=True)}, "R2: requires_grad is true: the rot"),
        ({"quantization_config": rotated("weight_input", apply={})}, "R2: apply is not a list of uses"),
        ({"quantization_config": rotated("weight_input", angle=1)}, "R2: angle is 1, which this version does not read"),
        (
            {"quantization_config": compressed_tensors(sparsity_config={"format": "24"})},
            "sparsity_config: format is 24, only dense, sparse-bitmask, sparse-24-bitmask are read",
        ),
        ({"quantization_config": compressed_tensors(ignore="lm_head")}, "ignore is not a list of layers"),
        ({"quantization_config": fp8(fmt="e5m2")}, "fmt is e5m2"),
        ({"quantization_config": fp8(weight_block_size=[128])}, r"weight_block_size is \[128\]"),
        ({"quantization_config": fp8(zero_point=True)}, "quantization_config: zero_point is True, which"),
        ({"quantization_config": mxfp8(weight_block_size=[1, 64])}, r"weight_block_size is \[1, 64\], only \[1, 32\]"),
        ({"quantization_config": {"quant_method": "bitnet", "use_rms_norm": True}}, "use_rms_norm is set: norms of"),
        ({"quantization_config": {"quant_method": "bitnet", "linear_class": "x"}}, "linear_class is x, only bitlinear"),
        (
            {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}},
            "quantization_mode is online with linear_class bitlinear",
        ),
        (
            {"quantization_config": hqq(nbits=1.58)},
            "weight_quant_params: nbits is 1.58, only 8, 6, 5, 4, 3, 2, 1 are read",
        ),
        ({"quantization_config": hqq(axis=0)}, "weight_quant_params: axis is 0, only 1 is read: groups of inputs"),
        ({"quantization_config": hqq(group_size=0)}, "weight_quant_params: group_size is 0, not a positive number"),
        ({"quantization_config": hqq(view_as_float=True)}, "view_as_float and scales of a whole matrix"),
        ({"quantization_config": {"quant_method": "hqq", "quant_config": {}}}, "quant_config is missing"),
        (
            {
                "quantization_config": {
                    "quant_method": "hqq",
                    "quant_config": {"weight_quant_params": {}, "zero_quant_params": {"nbits": 8}},
                }
            },
            "quant_config: zero_quant_params is set",
        ),
        ({"quantization_config": mxfp8(scale_fmt="float32")}, "scale_fmt is float32, only ue8m0 is read"),
        ({"quantization_config": mxfp8(moe_quant_algo="NVFP4")}, "moe_quant_algo is 'NVFP4', which this version"),
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


def test_rotations_that_are_multiplied_into_the_weights_need_nothing() -> None:
    """Of quantised weights, and of dense ones."""
    assert config_of(rotated("weight_input")) == CHANNELS
    assert config_of({**rotated("weight_input"), "config_groups": {}}).groups == ()


DATA = np.arange(6, dtype=np.uint8).reshape(2, 3).view(dtypes.FLOAT8_E4M3FN)
NAME = "layers.0.out"


def joined(config: QuantizationConfig = CHANNELS, **tensors: np.ndarray) -> dict[str, Value]:
    return dict(join_scales(((f"{NAME}.{name}", tensor) for name, tensor in tensors.items()), config))


@each_row("shape", [(), (1,), (2,), (2, 1)])
def test_scales_join_their_matrix_in_any_order(shape: tuple[int, ...]) -> None:
    scales = np.full(shape, 2, np.float32)
    for tensors in ({"weight": DATA, "weight_scale": scales}, {"weight_scale": scales, "weight": DATA}):
        together = joined(**tensors, bias=scales, input_scale=scales)
        assert list(together) == [f"{NAME}.weight", f"{NAME}.bias"]
        np.testing.assert_array_equal(values(together[f"{NAME}.weight"]), 2 * dtypes.to_float32(DATA))


def test_static_scales_that_no_config_states_are_dropped_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scale = np.ones(1, np.float32)
    tensors = {"weight": DATA, "weight_scale": scale, "input_scale": scale, "input_zero_point": scale}
    with caplog.at_level("INFO"):
        assert list(joined(**tensors)) == [f"{NAME}.weight"]
        assert list(joined(weight=DATA, weight_scale=scale)) == [f"{NAME}.weight"]
    (line,) = caplog.messages
    assert line.startswith(f"{NAME}.input_scale and 1 more: not used: ")


def test_dense_matrices_pass_through() -> None:
    dense = np.ones((2, 3), np.float32)
    assert joined(weight=dense) == {f"{NAME}.weight": dense}


def test_blocks_join_their_scales() -> None:
    scales = np.array([[1, 2]], np.float32)
    weight = joined(config_of(fp8(weight_block_size=[2, 2])), weight=DATA, weight_scale_inv=scales)[f"{NAME}.weight"]
    np.testing.assert_array_equal(values(weight), dtypes.to_float32(DATA) * [1, 1, 2])


def test_pieces_of_a_fused_matrix_have_scales_and_rows_of_all_parameters() -> None:
    """Two pieces, each of four rows of q, two of k and one of v, in blocks of five; dense rows are q, k, then v."""
    parts = ("q", "k", "v")
    rules = (Split("layers.{l}.qkv.weight", parts, quantised_pieces=2),)
    params = {name: Param(name, (rows, 3), "..") for name, rows in zip(parts, (8, 4, 2))}
    data = np.arange(42, dtype=np.uint8).reshape(14, 3).view(dtypes.FLOAT8_E4M3FN)
    scales = np.array([[1], [2], [4], [8]], np.float32)
    tensors = [("layers.0.qkv.weight", data), ("layers.0.qkv.weight_scale_inv", scales)]
    config = config_of(fp8(weight_block_size=[5, 4]))
    filled = dict(apply_rules(rules, params, join_scales(tensors, config, partial(quantised_pieces, rules))))
    numbers = dtypes.to_float32(data) * np.repeat([1, 2, 4, 8], [5, 2, 5, 2])[:, None]
    for name, rows in (("q", [*range(4), *range(7, 11)]), ("k", [4, 5, 11, 12]), ("v", [6, 13])):
        np.testing.assert_array_equal(values(filled[name]), numbers[rows])
    dense = dict(apply_rules(rules, params, [("layers.0.qkv.weight", numbers)]))
    assert [len(dense[name]) for name in parts] == [8, 4, 2]
    np.testing.assert_array_equal(np.concatenate([dense[name] for name in parts]), numbers)
    with pytest.raises(WeightError, match="does not fit"):
        list(join_scales(tensors, config))


def test_numbers_of_an_ignored_layer_are_read_by_their_dtype() -> None:
    config = config_of(compressed_tensors(ignore=[NAME]))
    weight = joined(config, weight=DATA, weight_scale=np.ones((2, 1), np.float32))[f"{NAME}.weight"]
    assert isinstance(weight, QuantizedTensor)
    assert weight.scheme == Float8("channel", ROWS)


@each_row(
    ("tensors", "message"),
    [
        ({"weight": DATA}, r"layers.0.out.weight: the checkpoint lacks its weight_scale; download"),
        ({"weight_scale": DATA}, r"layers.0.out.weight_scale: the checkpoint lacks its weight; download"),
        (
            {"weight": DATA, "weight_scale": np.ones(3, np.float32)},
            r"_scale has shape \[3\], .* fit \[2, 3\] float8_e4m3fn num",
        ),
        ({"weight": DATA.view(np.int8), "weight_scale": np.ones(2)}, "weight is int8, which quantization_conf"),
        ({"weight": DATA[None], "weight_scale": np.ones(2)}, r"weight \[1, 2, 3\] is quantised, but not a matrix"),
        ({"weight": DATA, "weight_scale": DATA[:, 0].view(dtypes.FLOAT8_E5M2FNUZ)}, "float8_e5m2fnuz cannot be conv"),
        (
            {"weight": DATA, "weight_scale": np.array([1, np.nan], np.float32)},
            "layer layers.0.out: its scales have values that are not finite numbers; download",
        ),
        ({"weight": DATA, "weight_scale": np.full((), np.inf, np.float32)}, "not finite numbers"),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        joined(**tensors)


@each_row("part", ["weight_scale_inv", "weight_scale"])
@each_row("dtype", [np.dtype(np.uint8), dtypes.FLOAT8_E8M0FNU])
def test_exponents_of_mxfp8_have_one_of_two_names(part: str, dtype: np.dtype[Any]) -> None:
    data = np.arange(128, dtype=np.uint8).reshape(2, 64) & 0x3F
    exponents = np.array([[127, 128], [120, 130]], np.uint8)
    config = config_of(mxfp8(ignored_layers=["model.visual*"]))
    tensors = {"weight": data.view(dtypes.FLOAT8_E4M3FN)}
    (weight,) = joined(config, **tensors, **{part: exponents.view(dtype)}).values()
    factors = np.repeat(np.array([[1, 2], [2**-7, 8]]), 32, 1)
    np.testing.assert_array_equal(values(weight), dtypes.to_float32(tensors["weight"]) * factors)
    assert config.scheme("model.visual.blocks.0.fc1") is None
    with pytest.raises(WeightError, match=r"layer layers.0.out has no exponents, where mxfp8 weights have one of"):
        joined(config, **tensors)
    with pytest.raises(WeightError, match="has weight_scale_inv and weight_scale, where mxfp8 weights have one of"):
        joined(config, **tensors, weight_scale=exponents, weight_scale_inv=exponents)


SPARSE = compressed_tensors(config_groups={}, format="dense", sparsity_config={"format": "sparse-bitmask"})
KEPT_VALUES = {
    "shape": np.array([2, 10]),
    "bitmask": np.array([[0b10000001, 0b10], [0b100, 0]], np.uint8),
    "compressed": np.array([1, 2, 3, 4], np.float32),
    "row_offsets": np.array([0, 3]),
}


def test_sparse_matrices_are_expanded() -> None:
    """A dense one, without scales; and numbers of float8, with them."""
    expected = np.zeros((2, 10), np.float32)
    expected[0, [0, 7, 9]] = 1, 2, 3
    expected[1, 2] = 4
    (weight,) = joined(config_of(SPARSE), **KEPT_VALUES).values()
    np.testing.assert_array_equal(weight, expected)
    numbers = config_of(compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}))
    stored = dtypes.to_float8(KEPT_VALUES["compressed"])
    tensors = {**KEPT_VALUES, "shape": KEPT_VALUES["shape"][:, None], "compressed": stored.reshape(2, 2)}
    tensors["weight_scale"] = np.array([[2], [3]], np.float32)
    ((name, weight),) = joined(numbers, **tensors).items()
    assert name == f"{NAME}.weight"
    np.testing.assert_array_equal(values(weight), expected * [[2], [3]])


@each_row(
    ("part", "value", "message"),
    [
        ("shape", np.array([2, 17]), r"out: a bitmask uint8 \[2, 2\] does not fit a matrix of shape \[2, 17\]; downl"),
        ("shape", np.array([-2, 10]), r"does not fit a matrix of shape \[-2, 10\]"),
        ("shape", np.array([2.0, 10.0]), r"does not fit a matrix of shape \[2.0, 10.0\]"),
        ("bitmask", np.zeros((2, 2), np.int8), r"a bitmask int8 \[2, 2\] does not fit"),
        (
            "compressed",
            np.ones(5, np.float32),
            "out: its bitmask keeps 4 values, but 5 are stored; download it",
        ),
        ("compressed", None, "layer layers.0.out: the checkpoint lacks its compressed; download it again"),
    ],
)
def test_sparse_matrices_that_do_not_fit(part: str, value: np.ndarray | None, message: str) -> None:
    tensors = {name: tensor for name, tensor in {**KEPT_VALUES, part: value}.items() if tensor is not None}
    with pytest.raises(WeightError, match=message):
        joined(config_of(SPARSE), **tensors)


HQQ_NUMBERS = np.arange(32).reshape(8, 4)
"""The numbers of a matrix [4, 8] in groups of 4, by group, before they are cut to their bits."""


@each_row(
    ("bits", "packed"),
    [
        (8, HQQ_NUMBERS.astype(np.uint8)),
        (2, np.array([[0, 85, 170, 255]] * 2, np.uint8)),
        (1, np.array([[0, 255, 0, 255]], np.uint8)),
    ],
)
def test_numbers_of_hqq_are_unpacked_by_blocks_of_groups(bits: int, packed: np.ndarray) -> None:
    """The numbers of all rows are 0, 1, 2, 3 of two bits, or 0, 1, 0, 1 of one."""
    groups = (HQQ_NUMBERS & (1 << bits) - 1).astype(np.float32)
    scales = np.arange(1, 9, dtype=np.float32)[:, None]
    zeros = np.full((8, 1), 0.5, np.float32)
    tensors = {"W_q": packed, "scale": scales, "zero": zeros, "shape": np.array([4, 8])}
    config = config_of(hqq(nbits=bits))
    (weight,) = joined(config, **tensors, nbits=np.array(bits, np.int32), round_zero=np.array(0, np.uint8)).values()
    np.testing.assert_array_equal(values(weight), ((groups - 0.5) * scales).reshape(4, 8))
    assert isinstance(weight, QuantizedTensor)
    assert weight.scheme == config.scheme(NAME)
    assert config.scheme("lm_head") is None


def test_layers_of_hqq_have_settings_by_their_names() -> None:
    settings = {"self_attn.q_proj": hqq(nbits=4)["quant_config"], "mlp.up_proj": hqq(nbits=8)["quant_config"]}
    config = config_of({"quant_method": "hqq", "quant_config": settings, "skip_modules": []})
    names = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    found = [config.scheme(f"model.layers.0.{name}") for name in names]
    assert found == [Int4((1, 4), offsets=True), Int8((1, 4), offsets=True), None]


@each_row(
    ("part", "value", "message"),
    [
        ("nbits", np.array(4, np.int32), "tensor layers.0.out.nbits is not 8, as quantization_config says"),
        ("axis", np.array(0, np.int32), "tensor layers.0.out.axis is not 1, as quantization_config says"),
        ("shape", np.array([4]), r"out.shape \[4\] is not the two sizes of a matrix"),
        ("shape", np.array([4, 16]), r"W_q is uint8 \[8, 4\], but 8-bit hqq weights have uint8 \[16, 4\] there"),
        ("W_q", np.zeros((8, 4), np.int8), r"W_q is int8 \[8, 4\], but 8-bit hqq weights have uint8 \[8, 4\] there"),
        ("zero", np.zeros(4, np.float32), r"out.zero \[4\] has not one value for each of the 8 groups of 4 inputs"),
    ],
)
def test_tensors_of_hqq_that_do_not_fit(part: str, value: np.ndarray, message: str) -> None:
    tensors = {"W_q": HQQ_NUMBERS.astype(np.uint8), "shape": np.array([4, 8])}
    tensors |= {"scale": np.ones((8, 1), np.float32), "zero": np.ones((8, 1), np.float32), part: value}
    with pytest.raises(WeightError, match=message):
        joined(config_of(hqq()), **tensors)


TILES = torchao_int4(packing="TILE_PACKED_TO_4D")


def tiled(words: np.ndarray, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """A layer in tiles whose values are its numbers."""
    outputs, inputs = 8 * len(words), 32 * words.shape[1] * words.shape[3]
    factors = np.ones((inputs // 32, outputs, 2), np.float32)
    factors[..., 1] = 8
    return {"_weight_qdata": words, "_weight_scale_and_zero": factors, **changes}


@each_row(
    ("place", "output", "inputs"),
    [
        ((0, 0, 0, 0), 0, (0, 8, 16, 24, 1, 9, 17, 25)),
        ((0, 0, 5, 0), 1, (2, 10, 18, 26, 3, 11, 19, 27)),
        ((0, 0, 31, 1), 7, (38, 46, 54, 62, 39, 47, 55, 63)),
        ((1, 1, 14, 2), 11, (196, 204, 212, 220, 197, 205, 213, 221)),
    ],
)
def test_a_word_of_a_lane_has_the_numbers_of_two_tiles(place: Any, output: int, inputs: tuple[int, ...]) -> None:
    """The digits 1 to 8 of the word, the lowest first, by the table."""
    words = np.zeros((2, 2, 32, 4), np.int32)
    words[place] = 0x07654321
    words.view(np.uint32)[place] |= np.uint32(8 << 28)
    (weight,) = joined(config_of(TILES), **tiled(words)).values()
    expected = np.zeros((16, 256), np.float32)
    expected[output, inputs] = np.arange(1, 9)
    np.testing.assert_array_equal(values(weight), expected)


@each_row("per_lane", [1, 2, 4])
def test_tiles_of_tensor_cores_are_unpacked(per_lane: int) -> None:
    numbers = np.random.default_rng(0).integers(16, size=(24, 256), dtype=np.uint8)
    (weight,) = joined(config_of(TILES), **tiled(in_tiles(numbers, per_lane))).values()
    np.testing.assert_array_equal(values(weight), numbers)
    assert isinstance(weight, QuantizedTensor)
    assert weight.scheme == config_of(TILES).scheme(NAME) == Int4((1, 32), offsets=True)


def test_padding_of_tiles_is_cut_where_the_shape_is_known() -> None:
    """Of a matrix of its own, of two that are one tensor, and of experts; another shape than that padded stays."""
    dense = torch.randn(12, 96, generator=torch.Generator().manual_seed(0))
    stored, expected = quantised(dense)
    tensors = {name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
               for name, tensor in stored.items()}  # fmt: skip
    params = {name: Param(name, shape, "..") for name, shape in
              {"w": (12, 96), "a": (4, 96), "b": (8, 96), "e": (1, 12, 96)}.items()}  # fmt: skip
    rules = (Rename("own.weight", "w"), Split("fused.weight", ("a", "b")), Stack("experts.{e}.weight", "e"))
    modules = ("own", "fused", "experts.0")
    stream = [(f"{module}.{name}", tensor) for module in modules for name, tensor in tensors.items()]
    shape_of = stored_shapes(rules, params)
    cut = join_scales(stream, config_of(TILES), shape_of=shape_of)
    filled = {name: values(weight) for name, weight in apply_rules(rules, params, cut)}
    np.testing.assert_array_equal(filled["w"], expected)
    np.testing.assert_array_equal(np.concatenate([filled["a"], filled["b"]]), expected)
    np.testing.assert_array_equal(filled["e"], expected[None])
    assert {name: shape_of(f"{name}.weight") for name in (*modules, "other")} == {
        **dict.fromkeys(modules, (12, 96)),
        "other": None,
    }
    for shape in ((12, 1025), (17, 96), (12,), None):
        (kept,) = dict(join_scales(stream[:2], config_of(TILES), shape_of=lambda name, shape=shape: shape)).values()
        assert kept.shape == (16, 1024)


@each_row(
    ("changes", "message"),
    [
        (
            {"_weight_qdata": np.zeros((2, 1, 32, 3), np.int32)},
            r"qdata is int32 \[2, 1, 32, 3\], but int4 weights in tiles have int32 \[O / 8, I / 32 / W, 32, W\] there",
        ),
        ({"_weight_qdata": np.zeros((2, 1, 64, 4), np.int32)}, r"qdata is int32 \[2, 1, 64, 4\], but int4 weights"),
        ({"_weight_qdata": np.zeros((4, 2, 1, 32, 4), np.int32)}, r"qdata is int32 \[4, 2, 1, 32, 4\], but"),
        ({"_weight_qdata": np.zeros((2, 1, 32, 4), np.uint32)}, "qdata is uint32"),
        ({"_weight_scale_and_zero": np.ones((4, 8, 1))}, r"_zero \[4, 8, 1\] has not a scale and an offset per group"),
        ({"_weight_scale_and_zero": np.ones((3, 8, 2))}, r"scales \[8, 3\] do not fit 4-bit weights \[8, 128\] in"),
    ],
)
def test_tensors_in_tiles_that_do_not_fit(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        joined(config_of(TILES), **tiled(np.zeros((1, 1, 32, 4), np.int32), **changes))


TERNARY = np.array([[0b00011000, 0b10100001], [0b01010101, 0b00000110]], np.uint8)
"""Bytes of eight rows of two numbers: the pairs of bits from the lowest on are rows 0, 2, 4 and 6, less 1."""

ROWS_OF_TERNARY = np.array([[-1, 0], [0, 1], [1, -1], [0, 0], [0, 1], [0, -1], [-1, 1], [0, -1]], np.float32)


@each_row(("linear_class", "factor"), [("bitlinear", 0.25), ("autobitlinear", 4.0)])
def test_ternary_weights_are_unpacked_by_blocks_of_rows(linear_class: str, factor: float) -> None:
    config = config_of({"quant_method": "bitnet", "linear_class": linear_class, "modules_to_not_convert": ["b"]})
    scale = np.array([4], np.float32)
    (weight,) = joined(config, weight=TERNARY, weight_scale=scale).values()
    np.testing.assert_array_equal(values(weight), ROWS_OF_TERNARY * np.float32(factor))
    assert config.scheme("a") == Int4((1, -1), Activations("int8", "row"))
    assert [config.scheme(name) for name in ("b", "lm_head")] == [None, None]
    with pytest.raises(WeightError, match=r"out.weight has numbers other than -1, 0 and 1; download it again"):
        joined(config, weight=TERNARY | np.uint8(0b1100), weight_scale=scale)
    with pytest.raises(
        WeightError, match=r"weights uint8 \[2, 2\] with 2 scales are not those of bitnet, bytes of four"
    ):
        joined(config, weight=TERNARY, weight_scale=np.ones(2, np.float32))


@each_row("dtype", ["float32", "bfloat16"])
def test_dense_matrices_of_bitnet_are_rounded_to_three_values(dtype: str) -> None:
    online = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    config = config_of({**online, "modules_to_not_convert": ["layers.1.v_proj"]})
    dense = np.array([[0.5, -3], [0.25, 0.25]], np.float32)  # The mean magnitude is 1.
    stored = dense if dtype == "float32" else dtypes.to_bfloat16(dense)
    others = ("embed_tokens.weight", "lm_head.weight", "layers.1.v_proj.weight")
    stream = [("layers.0.q_proj.weight", stored), ("layers.0.norm.weight", stored[0])]
    tensors = dict(join_scales([*stream, *((name, stored) for name in others)], config))
    rounded = tensors.pop("layers.0.q_proj.weight")
    assert isinstance(rounded, np.ndarray)
    assert rounded.dtype == stored.dtype
    np.testing.assert_array_equal(dtypes.to_float32(rounded), [[0, -1], [0, 0]])
    assert all(np.shares_memory(tensor, stored) for tensor in tensors.values() if isinstance(tensor, np.ndarray))
    assert len(tensors) == 4
    with pytest.raises(WeightError, match=r"tensor a.router.weight \[2, 2\]: bitnet in online mode is read of models"):
        list(join_scales([("a.router.weight", stored)], config))


def words(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-(2**31), 2**31, size=shape, dtype=np.int64).astype(np.int32)


def gptq_tensors(**changes: Any) -> dict[str, Any]:
    """A layer of 16 outputs and 32 inputs, in groups of 8."""
    groups = np.arange(32, dtype=np.int32) // 8
    tensors = {"qweight": words(4, 16), "qzeros": np.full((4, 2), 0x77777777, np.int32), "g_idx": groups}
    return {**tensors, "scales": np.ones((4, 16), np.float16), **changes}


@each_row(
    ("config", "tensors", "message"),
    [
        (
            gptq(),
            {"qweight": words(4, 8)},
            r"out.qweight is int32 \[4, 8\], but 4-bit gptq weights have int32 \[4, 16\]",
        ),
        (gptq(), {"qweight": words(4, 16).view(np.float32)}, r"out.qweight is float32 \[4, 16\], but .* have int32"),
        (gptq(), {"qzeros": words(4, 3)}, r"out.qzeros is int32 \[4, 3\], but 4-bit gptq weights have int32 \[4, 2\]"),
        (gptq(), {"qzeros": words(4, 2)}, "layer layers.0.out: 4-bit weights have zero points, but .* symmetric; down"),
        (
            gptq(),
            {"g_idx": np.arange(32, dtype=np.int32) % 4},
            "g_idx reorders the inputs, but .* says that they are n",
        ),
        (gptq(desc_act=True), {"g_idx": np.zeros(32, np.int32)}, "g_idx does not divide 32 inputs into groups of 8"),
        (gptq(group_size=24), {}, "layer layers.0.out: groups of 24 inputs do not divide its 32; quantise it again"),
        (
            gptq(group_size=16),
            {"g_idx": None},
            r"scales \[16, 4\] do not fit 4-bit weights \[16, 32\] in groups of 16 inputs; down",
        ),
        (gptq(), {"scales": None}, "out.qweight: the checkpoint lacks its scales; download it again"),
        (gptq(desc_act=True), {"g_idx": None}, "out.qweight: the checkpoint lacks its g_idx; download it again"),
        (awq(), {"g_idx": None}, r"out.qweight is int32 \[4, 16\], but packed 4-bit weights have int32 \[4, 2\]"),
    ],
)
def test_integers_that_do_not_fit(config: dict[str, Any], tensors: dict[str, Any], message: str) -> None:
    whole = {name: tensor for name, tensor in gptq_tensors(**tensors).items() if tensor is not None}
    with pytest.raises(WeightError, match=message) as error:
        joined(config_of(config), **whole)
    assert "\n" not in str(error.value)


@each_row(
    ("part", "values", "message"),
    [
        (
            "weight_shape",
            np.array([16, 32], np.float32),
            r"out.weight_shape is float32 \[2\], not the two sizes of a matrix",
        ),
        (
            "weight_shape",
            np.array([16], np.int64),
            r"out.weight_shape is int64 \[1\], not the two sizes of a matrix that 4",
        ),
        (
            "weight_shape",
            np.array([-16, 32], np.int64),
            r"out.weight_packed is int32 \[16, 4\], but .* have int32 \[-16",
        ),
        ("weight_scale", np.ones(16, np.float32), r"out.weight_scale \[16\] has no scale per output and group"),
        ("weight_zero_point", words(2), r"out.weight_zero_point is int32 \[2\], but .* have int32 \[2, 4\]"),
        ("weight_zero_point", None, "the checkpoint lacks its weight_zero_point"),
    ],
)
def test_packed_integers_that_do_not_fit(part: str, values: np.ndarray | None, message: str) -> None:
    """Of a layer of 16 outputs and 32 inputs, in groups of 8."""
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    group = {"targets": ["Linear"], "weights": weights}
    tensors = {"weight_packed": words(16, 4), "weight_scale": np.ones((16, 4), np.float32)}
    tensors |= {"weight_shape": np.array([16, 32], np.int64), "weight_zero_point": words(2, 4)}
    whole = {name: tensor for name, tensor in {**tensors, part: values}.items() if tensor is not None}
    with pytest.raises(WeightError, match=message):
        joined(config_of(config | {"config_groups": {"group_0": group}}), **whole)


def test_zero_points_of_many_outputs_fill_whole_words() -> None:
    tensors = {"qweight": words(4, 512), "qzeros": np.full((4, 64), 0x77777777, np.int32)}
    weights = joined(config_of(gptq()), **gptq_tensors(**tensors, scales=np.ones((4, 512), np.float16)))
    (weight,) = weights.values()
    assert weight.shape == (512, 32)


def test_a_tensor_that_the_config_does_not_state_is_named() -> None:
    config = compressed_tensors()
    config["config_groups"]["group_1"] = {**weights_with(type="int", symmetric=False)["config_groups"]["group_0"]}
    config["config_groups"]["group_1"]["targets"] = ["other"]
    tensors = {"weight_zero_point": DATA, "weight": DATA, "weight_scale": np.ones(2, np.float32)}
    for order in (tensors, dict(reversed(tensors.items()))):
        with pytest.raises(
            WeightError, match=r"tensor layers.0.out.weight_zero_point: compressed-tensors weights have no"
        ):
            joined(config_of(config), **order)


def test_layers_wait_for_the_tensors_that_the_file_has() -> None:
    """`g_idx` may be missing; layers come as soon as they are whole where the names are known."""
    config, tensors = config_of(gptq()), gptq_tensors()
    stream = [*((f"a.{name}", tensors[name]) for name in ("qweight", "qzeros", "scales")), ("b.weight", DATA)]
    assert [name for name, _ in join_scales(stream, config)] == ["b.weight", "a.weight"]
    names = [name for name, _ in stream]
    assert [name for name, _ in join_scales(stream, config, stored=names)] == ["a.weight", "b.weight"]
    more = [*stream, ("a.g_idx", tensors["g_idx"])]
    assert [name for name, _ in join_scales(more, config, stored=[*names, "a.g_idx"])] == ["b.weight", "a.weight"]


def test_schemes_of_single_layers_and_patterns() -> None:
    mixed = {"quantized_layers": {"a.q": {"quant_algo": "FP8"}, "a.k": {"quant_algo": "NVFP4"}}}
    config = config_of({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["*.q.b*"], **mixed})
    static = Activations("float8", "tensor", static=True)
    assert config.scheme("a.q") == Float8("tensor", static)
    assert config.scheme("a.k") == Nvfp4(Activations("fp4", 16, static=True))
    assert [config.scheme(name) for name in ("a.v", "a.q.bc")] == [None, None]
    nested = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    assert config_of({"quant_method": "modelopt", **nested}).scheme("a.q") == Float8("tensor", static)
    extra = {"a.q": {"bits": 8}, "a.v": {"bits": 16}, "lm_head": {"bits": 4}}
    rounds = config_of({"quant_method": "inc", "bits": 4, "group_size": 8, "sym": True, "extra_config": extra})
    names = ("a.q", "a.v", "a.k", "lm_head")
    assert [rounds.scheme(name) for name in names] == [Int8((1, 8)), None, Int4((1, 8)), Int4((1, 8))]


@pytest.mark.parametrize("cache", [{"kv_cache_quant_algo": "FP8"}, {}], ids=["FP8 cache", "16-bit cache"])
def test_layers_of_modelopt_with_and_without_a_quantised_cache(cache: dict[str, str]) -> None:
    config = config_of({"quant_method": "modelopt", "quant_algo": "FP8", **cache})
    assert isinstance(config.scheme("a.q"), Float8)
    assert config.fp8_cache is bool(cache)
    if cache:  # the cache alone
        assert config_of({"quant_method": "modelopt", "quant_algo": None, **cache}).scheme("a.q") is None


def test_modelopt_is_recognised_without_its_name() -> None:
    """Qwen3-32B-FP8-Static-PerTensor states a producer, `quant_algo` and the cache as a string, but no method."""
    named = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    producer = {"producer": {"name": "modelopt", "version": "0.31.0"}}
    assert config_of({**producer, **named, "quant_method": None, "kv_cache_scheme": "FP8"}).fp8_cache
    for stated in (producer, {"producer": {"name": "somebody"}}, {}):
        config = config_of({**{key: value for key, value in named.items() if key != "quant_method"}, **stated})
        assert config == config_of(named)
    nested = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    assert config_of({**producer, **nested}) == config_of(named)
    with pytest.raises(ModelError, match="a method it does not name"):
        config_of({"producer": {"name": "somebody"}, "bits": 8})


def test_static_scales_of_the_cache_beside_fp8_weights() -> None:
    """AutoFP8 writes `kv_cache_scheme`, a word; the scales are read beside the weights."""
    assert [config_of(fp8(kv_cache_scheme=scheme)).fp8_cache for scheme in ("static", None)] == [True, False]
    with pytest.raises(ModelError, match="kv_cache_scheme is dynamic, only static is read"):
        config_of(fp8(kv_cache_scheme="dynamic"))


@pytest.mark.parametrize("section", [{}, {"quant_method": "none"}, None])
def test_a_section_without_a_method_means_dense_weights(section: dict[str, Any] | None, tmp_path: Path) -> None:
    assert read_quantization({"quantization_config": section}) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    config = read_quantization(FolderCheckpoint(tmp_path, ()).config())
    assert config is not None
    assert config.method == "modelopt", "the file beside config.json counts"


def test_rows_that_are_not_whole_blocks_are_dequantised() -> None:
    """bitsandbytes counts blocks over the flat matrix: here of rows of 96."""
    config = config_of({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    codes = np.random.default_rng(0).integers(256, size=(96, 1), dtype=np.uint8)
    state = np.frombuffer(json.dumps({"shape": [2, 96], "blocksize": 64}).encode(), np.uint8)
    tensors = {"weight": codes, "weight.absmax": np.array([1, 2, 4], np.float32), "weight.quant_map": TABLES["nf4"]}
    dense = joined(config, **tensors, **{"weight.quant_state.bitsandbytes__nf4": state})[f"{NAME}.weight"]
    numbers = TABLES["nf4"][np.stack((codes >> 4, codes & 15), -1).reshape(-1)]
    np.testing.assert_array_equal(dense, (numbers * np.repeat([1, 2, 4], 64)).reshape(2, 96).astype(np.float32))
    assert Codes4("nf4", (1, 64)).with_inputs(96) is None
    with pytest.raises(WeightError, match=r"out.weight.quant_state.bitsandbytes__nf4 is not a JSON object; download"):
        joined(config, **tensors, **{"weight.quant_state.bitsandbytes__nf4": codes.reshape(-1)})


def test_rules_for_some_layers_of_gptq() -> None:
    dynamic = {"+:.*layers\\.0\\.": {"bits": 8, "group_size": 16}, "-:.*down_proj": {}, ".*up_proj": {"desc_act": True}}
    config = config_of(gptq(dynamic=dynamic))
    assert config.scheme("model.layers.0.out") == Int8((1, 16))
    assert config.scheme("model.layers.1.down_proj") is None
    assert config.scheme("model.layers.1.up_proj") == Int4((1, 8), ordered=True)
    assert config.scheme("model.layers.1.q_proj") == Int4((1, 8))
    assert config.scheme("lm_head") is None
    assert config_of(gptq(lm_head=True, sym=False)).scheme("lm_head") == Int4((1, 8), offsets=True)


@pytest.mark.parametrize("numbers", ["int8", "fp8_e4m3"])
def test_quark_with_scales_of_groups(numbers: str) -> None:
    weight = {"dtype": numbers, "qscheme": "per_group", "group_size": 4, "symmetric": True}
    config = config_of({"quant_method": "quark", "global_quant_config": {"weight": weight}})
    data = np.arange(120, dtype=np.int8).reshape(10, 12)
    data = data.view(dtypes.FLOAT8_E4M3FN) if numbers == "fp8_e4m3" else data - np.int8(60)
    scales = np.random.default_rng(0).uniform(0.5, 1, (10, 3)).astype(np.float32)
    ((_, tensor),) = join_scales([("a.weight", data), ("a.weight_scale", scales)], config)
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.scheme == (Int8((1, 4)) if numbers == "int8" else Float8((1, 4))) == config.scheme("a")
    np.testing.assert_array_equal(tensor.dequantize(), dtypes.to_float32(data) * np.repeat(scales, 4, 1))
    with pytest.raises(WeightError, match=r"tensor a.weight_scale has shape \[10, 2\], which does not fit \[10, 12\]"):
        list(join_scales([("a.weight", data), ("a.weight_scale", scales[:, :2])], config))
    with pytest.raises(ModelError, match="qscheme per_group, group_size None are not read"):
        config_of({"quant_method": "quark", "global_quant_config": {"weight": weight | {"group_size": None}}})


RULES = (
    Rename("[model.]embed.weight", "embed"),
    *linear("[model.]layers.{l}.out", "layers.{l}.o"),
    Split("layers.{l}.both.weight", ("layers.{l}.x", "layers.{l}.y")),
    Rename("layers.{l}.turned.weight", "layers.{l}.t", transpose=True),
    Stack("layers.{l}.experts.{e}.w.weight", "layers.{l}.experts"),
)
SHAPES = {"layers.0.o": (10, 12), "layers.0.x": (3, 12), "layers.0.y": (7, 12), "layers.0.t": (10, 12)}
PARAMS = {
    name: Param(name, shape, "." * len(shape)) for name, shape in (SHAPES | {"layers.0.experts": (2, 10, 12)}).items()
}


@each_row("kind", BLOCKS)
def test_every_rule_keeps_tensors_quantised(kind: str) -> None:
    tensors = [random_tensor(kind, seed) for seed in range(5)]
    names = ["layers.0.out.weight", "layers.0.both.weight", "layers.0.turned.weight"]
    names += [f"layers.0.experts.{index}.w.weight" for index in (1, 0)]
    stream = [(name, tensor) for name, (tensor, _) in zip(names, tensors)]
    filled = {name: values(value) for name, value in apply_rules(RULES, PARAMS, stream)}
    expected = [dense for _, dense in tensors]
    np.testing.assert_array_equal(filled["layers.0.o"], expected[0])
    np.testing.assert_array_equal(np.concatenate([filled["layers.0.x"], filled["layers.0.y"]]), expected[1])
    np.testing.assert_array_equal(filled["layers.0.t"], expected[2], "as linear layers are, whatever dense ones are")
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
    quantised = ("layers.0.o", "layers.0.x", "layers.0.y", "layers.0.t", "layers.0.experts", "layers.1.experts")
    assert parameter_schemes(config, params, names) == dict.fromkeys(quantised, Float8("channel", ROWS))


def test_layers_without_scales_in_the_file_are_dense() -> None:
    config, names = config_of(gptq(group_size=-1)), sources(RULES, PARAMS)
    stored = ["layers.0.out.qweight", "layers.0.turned.qweight", "layers.0.both.weight", "layers.0.both.bias"]
    assert parameter_schemes(config, PARAMS, names, stored) == dict.fromkeys(
        ("layers.0.o", "layers.0.t"), Int4((1, 12))
    )


def test_a_stack_that_is_stored_transposed_is_dense() -> None:
    rules = (Rename("layers.{l}.experts.w.weight", "layers.{l}.experts", transpose=True),)
    params = {name: param for name, param in PARAMS.items() if name.endswith("experts")}
    assert not parameter_schemes(config_of(compressed_tensors()), params, sources(rules, params))


ATTENTION = (
    *linear("[model.]layers.{l}.attn.k_proj", "layers.{l}.mixers.0.k"),
    Split("layers.{l}.attn.qkv_proj.weight", ("layers.{l}.mixers.0.k", "layers.{l}.mixers.0.v")),
)
KV = sources(ATTENTION, {f"layers.{each}.mixers.0.k": Param("", (2, 2), "..") for each in range(2)})


@each_row(
    ("names", "found"),
    [
        (["attn.k_proj.k_scale", "attn.v_proj.v_scale"], "kv"),
        (["attn.attn.k_scale", "attn.attn.v_scale", "attn.attn.q_scale", "attn.prob_scale"], "kv"),
        (["attn.k_proj.output_scale", "attn.v_proj.output_scale", "attn.q_proj.output_scale"], "kv"),
        (["attn.qkv_proj.k_scale"], "k"),
        (["attn.kv_scale"], "kv"),
    ],
)
@each_row("prefix", ["model.", ""])
def test_scales_of_k_and_v(names: list[str], found: str, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = [(f"{prefix}layers.1.{name}", np.full(1, 2, np.float32)) for name in names]
    scales: Scales = {}
    assert [name for name, _ in without_kv_scales([*stream, ("a.weight", DATA)], scales)] == ["a.weight"]
    named = list(kv_scale_weights(scales, KV, used=True))
    assert named == [(f"layers.1.mixers.0.{part}_scale", 2) for part in found]
    taken: dict[str, float] = {}
    assert [name for name, _ in take_kv_scales([*named, ("embed", DATA)], taken)] == ["embed"]
    numbers = [[(0,)], [(1, 4)], [(4,)]]  # the last layer reads a cache of the one before
    both = (2.0, 2.0 if found == "kv" else 1.0)
    assert scales_of_caches(numbers, taken) == {1: both, 4: both}
    with caplog.at_level("INFO"):
        assert not list(kv_scale_weights(scales, KV, used=False))
    (line,) = caplog.messages
    assert line.startswith(stream[0][0])
    assert "not used: --kv-cache-dtype is not fp8" in line


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("layers.1.attn.k_scale", (2,), "layers.1.attn.k_scale has 2 scales, only one per layer is supported; use"),
        ("layers.7.attn.k_scale", (), "layers.7.attn.k_scale belongs to no attention of this model; use --kv-cache-d"),
    ],
)
def test_scales_of_k_and_v_that_do_not_fit(name: str, shape: tuple[int, ...], problem: str) -> None:
    scales: Scales = {}
    assert not list(without_kv_scales([(name, np.ones(shape, np.float32))], scales))
    with pytest.raises(WeightError, match=problem):
        list(kv_scale_weights(scales, KV, used=True))


def test_a_scale_of_k_that_is_no_number() -> None:
    scales: Scales = {}
    assert not list(without_kv_scales([("layers.1.attn.k_scale", np.full((), np.nan, np.float32))], scales))
    with pytest.raises(WeightError, match=r"tensor layers.1.attn.k_scale is nan, which is no scale"):
        list(kv_scale_weights(scales, KV, used=True))


def test_a_parameter_of_several_sources_is_dense_if_one_is_ignored() -> None:
    rules = (*linear("layers.{l}.q", "layers.{l}.o"), Split("layers.{l}.qkv.weight", ("layers.{l}.o", "layers.{l}.x")))
    params = {name: PARAMS[name] for name in ("layers.0.o", "layers.0.x")}
    config = config_of(compressed_tensors(ignore=["layers.0.q"]))
    assert parameter_schemes(config, params, sources(rules, params)) == {"layers.0.x": Float8("channel", ROWS)}


def test_dequantised_parameters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    tensor, expected = random_tensor("channel")
    with caplog.at_level("INFO"):
        weights = dict(dequantized([("a", expected), ("b", tensor), ("c", tensor)], "reference"))
    assert weights["a"] is expected
    np.testing.assert_array_equal(weights["b"], expected)
    assert caplog.messages == ["reference: dequantised b and 1 more: it does not compute with their scheme"]


def test_static_scales_join_their_matrix_and_the_largest_counts() -> None:
    config = config_of(fp8(activation_scheme="static"))
    tensors = {"weight": DATA, "weight_scale": np.ones(1, np.float32)}
    first, second = (joined(config, **tensors, input_scale=np.array(scale, np.float32)) for scale in (2, 3))
    both = concatenate([first[f"{NAME}.weight"], second[f"{NAME}.weight"]])
    assert isinstance(both, QuantizedTensor)
    assert both.input_scale == 3
    with pytest.raises(WeightError, match=r"out.weight: the checkpoint lacks its input_scale; download it again"):
        joined(config, **tensors)
    with pytest.raises(WeightError, match=r"out.input_scale \[2\] is not one scale"):
        joined(config, **tensors, input_scale=np.ones(2, np.float32))


def grouped(scheme: Any, seed: int = 0) -> tuple[QuantizedTensor, np.ndarray]:
    """A matrix [6, 32] of 4-bit numbers in groups of 8 inputs with every field, and its values, number by number."""
    noise = np.random.default_rng(seed)
    data = noise.integers(256, size=(6, 16), dtype=np.uint8)
    numbers = np.stack((data & 15, data >> 4), -1).reshape(6, 32).astype(np.int64)
    scales, offsets = (noise.normal(size=(6, 4)).astype(np.float32) for _ in range(2))
    rows, order = noise.uniform(1, 2, size=6).astype(np.float32), noise.permutation(32).astype(np.int32)
    table = TABLES["nf4"] if isinstance(scheme, Codes4) else np.arange(-8, 8, dtype=np.float32)
    expected = np.empty((6, 32), np.float32)
    for row in range(6):
        for column in range(32):
            value = table[numbers[row, column]] * scales[row, column // 8] + offsets[row, column // 8]
            expected[row, order[column]] = value * rows[row]
    return QuantizedTensor(scheme, data, scales, (1, 8), offsets, rows, order), expected


@pytest.mark.parametrize("scheme", [Int4((1, 8), ordered=True), Codes4("nf4", (1, 8))])
def test_every_field_of_a_quantised_matrix(scheme: Any) -> None:
    tensor, expected = grouped(scheme)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    assert tensor.nbytes == 6 * 16 + 4 * (24 + 24 + 6 + 32)
    np.testing.assert_array_equal(tensor[(slice(1, 5),)].dequantize(), expected[1:5])
    np.testing.assert_array_equal(values(stack([tensor, tensor])[slice(1, 2), slice(2, 4)])[0], expected[2:4])
    np.testing.assert_array_equal(values(concatenate([tensor, tensor])), np.concatenate([expected, expected]))
    np.testing.assert_array_equal(take_rows(tensor, np.array([3, 0])).dequantize(), expected[[3, 0]])
    np.testing.assert_array_equal(values(scaled(tensor, 0.5)), expected / 2)
    with pytest.raises(WeightError, match="reordered"):
        tensor[slice(0, 6), slice(0, 8)]
    plain = replace(tensor, order=None)
    np.testing.assert_array_equal(plain[slice(0, 6), slice(4, 12)].dequantize(), plain.dequantize()[:, 4:12])
    assert plain.channel_scales() is None


def test_blocks_of_a_gguf_file() -> None:
    kind = BlockType(8, "Q8_0", 32, 34)
    noise = np.random.default_rng(0)
    data = noise.integers(256, size=(3, 2 * 34), dtype=np.uint8)
    data[:, [1, 35]] &= 0x3F  # finite scales
    tensor = QuantizedTensor(Blocks(kind), data, np.empty(0, np.float32), ())
    blocks = data.reshape(3, 2, 34)
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    expected = (blocks[..., 2:].view(np.int8).astype(np.float32) * scales).reshape(3, 64)
    assert tensor.shape == (3, 64)
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    np.testing.assert_array_equal(tensor[slice(1, 3), slice(32, 64)].dequantize(), expected[1:, 32:])
    np.testing.assert_array_equal(take_rows(tensor, np.array([2, 0])).dequantize(), expected[[2, 0]])
    np.testing.assert_array_equal(values(stack([tensor, tensor])[slice(1, 2), slice(0, 1)])[0], expected[:1])
    with pytest.raises(WeightError, match="Q8_0 blocks cannot be divided at input 0 or 16; use fewer ranks"):
        tensor[slice(0, 3), slice(0, 16)]
    np.testing.assert_array_equal(tensor.values((slice(0, 3), slice(5, 50))), expected[:, 5:50])
    half = scaled(scaled(tensor, 0.25), 2)
    np.testing.assert_array_equal(values(half), expected / 2)
    np.testing.assert_array_equal(values(stack([half, half])), np.stack([expected, expected]) / 2)
    np.testing.assert_array_equal(values(concatenate([half, half])), np.concatenate([expected, expected]) / 2)
    rows = [replace(tensor, data=row[None]) for row in data]
    assert np.shares_memory(stack(rows).data, data)
    np.testing.assert_array_equal(values(stack(rows)), expected[:, None])
    np.testing.assert_array_equal(values(stack(rows[::2])), expected[::2, None])


@each_row(
    "scheme",
    [Float8("channel"), Int8((1, 8)), Int4((1, 8), ordered=True), Mxfp4(), Nvfp4(), Codes4("fp4", (1, 8))],
)
def test_random_values_have_the_deviation_asked_for(scheme: Any) -> None:
    tensor = random_quantized(scheme, (2, 64, 128), 0, 0.5)
    assert tensor.shape == (2, 64, 128)
    assert tensor.dequantize().std() == pytest.approx(0.5, rel=0.05)
