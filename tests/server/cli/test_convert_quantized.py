"""pagoda convert --quantization: folders in the compressed-tensors format, by our reader and by the format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.cases import tiny
from safetensors.numpy import load_file
from support.checkpoints.tiny_folder import write_model

from pagoda.common.errors import ModelError
from pagoda.common.models.families.mixtures import LLAMA4
from pagoda.common.models.family import Rename
from pagoda.common.models.primitives import Param
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.towers import TextTower
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.dtypes import BFLOAT16, as_uint, to_float32
from pagoda.common.weights.quantization.export import write_quantized
from pagoda.common.weights.quantization.on_the_fly import quantize, rounded_int4, scheme_of
from pagoda.common.weights.quantization.read import join_scales, read_quantization, without_quantization
from pagoda.common.weights.quantization.tensors import QuantizedTensor, Value, take_matrix
from pagoda.common.weights.rules import apply_rules, experts_one_by_one, tensor_uses
from pagoda.common.weights.safetensors import SafetensorsFile
from pagoda.server.cli import main
from pagoda.tests.common.weights.gguf.gguf_writing import convert as write_gguf

MIXTRAL = tiny.Tiny("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("convert") / "tiny", hidden_size=64, intermediate_size=128)
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "nested").mkdir()
    (folder / "nested" / "notes.txt").write_text("kept")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    return folder


def convert(model: Path, out: Path, method: str, *more: str) -> Path:
    assert main.main(["convert", str(model), str(out), "--quantization", method, *more]) == 0
    return out


def stored(folder: Path) -> dict[str, Any]:
    """Return the tensors of all weight files."""
    files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.tensor(name) for file in files for name in file.sizes}


def quantised(folder: Path) -> dict[str, QuantizedTensor]:
    """Return the matrices that pagoda reads as quantised."""
    checkpoint = open_checkpoint(folder)
    config = read_quantization(checkpoint.config())
    assert config is not None
    values = join_scales(checkpoint.tensors(), config)
    return {name: value for name, value in values if isinstance(value, QuantizedTensor)}


@pytest.mark.command("convert")
@pytest.mark.setting("--quantization")
@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_matrices_of_8_bits_are_those_of_quantisation_while_loading(method: str, model: Path, tmp_path: Path) -> None:
    out, dense = convert(model, tmp_path / "out", method), load_file(model / "model.safetensors")
    read = quantised(out)
    assert set(read) == {name for name in dense if name.endswith("_proj.weight")}
    for name, tensor in read.items():
        scheme = scheme_of(method, dense[name].shape[1])
        assert scheme is not None
        assert tensor.scheme == scheme
        np.testing.assert_array_equal(tensor.dequantize(), quantize(dense[name], scheme).dequantize())
    whole = stored(out)
    np.testing.assert_array_equal(whole["lm_head.weight"], dense["lm_head.weight"])
    config = json.loads((out / "config.json").read_text())
    assert without_quantization(config) == json.loads((model / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert (group["input_activations"]["dynamic"], group["input_activations"]["strategy"]) == (True, "token")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert (out / "nested" / "notes.txt").read_text() == "kept"
    assert not (out / "pytorch_model.bin").exists()


@pytest.mark.setting("--quantization")
def test_int4_is_packed_as_the_format_says(model: Path, tmp_path: Path) -> None:
    out, dense = convert(model, tmp_path / "out", "int4"), load_file(model / "model.safetensors")
    tensors = stored(out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["ignore"]) == ("pack-quantized", ["lm_head"])
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["group_size"], weights["symmetric"]) == (64, False)  # of 128 inputs, too
    for name in (name for name in dense if name.endswith("_proj.weight")):
        module, shape = name.removesuffix("weight"), dense[name].shape
        words, scales, zeros = (tensors[f"{module}weight_{part}"] for part in ("packed", "scale", "zero_point"))
        assert (words.dtype, scales.dtype, zeros.dtype) == (np.int32, BFLOAT16, np.int32)
        assert tensors[f"{module}weight_shape"].tolist() == list(shape)
        numbers = (words[..., None] >> np.arange(0, 32, 4) & 15).reshape(shape)
        points = (zeros[:, None] >> np.arange(0, 32, 4)[:, None] & 15).reshape(-1, zeros.shape[1])[: shape[0]]
        steps = np.repeat(to_float32(scales), 64, 1)
        values = (numbers - np.repeat(points, 64, 1)) * steps
        np.testing.assert_array_equal(values, rounded_int4(dense[name], 64, symmetric=False).dequantize())
        assert np.median(np.abs(values - dense[name]) / steps) < 0.3
        assert (np.abs(values - dense[name]) / steps).max() < 3
        assert np.abs(values - dense[name]).mean() / np.abs(dense[name]).mean() < 0.12
        np.testing.assert_array_equal(quantised(out)[name].dequantize(), values)


def test_zero_points_fit_what_is_not_around_zero() -> None:
    """The error of symmetric numbers is twice that, where half of them are not used."""
    values = np.random.default_rng(0).uniform(-0.02, 0.1, (24, 128)).astype(np.float32)
    errors = [np.abs(rounded_int4(values, 64, symmetric=kind).dequantize() - values).mean() for kind in (True, False)]
    assert errors[1] < 0.62 * errors[0]
    flat = np.concatenate([np.zeros((1, 64)), np.full((1, 64), 0.5), np.full((1, 64), -0.25)]).astype(np.float32)
    np.testing.assert_allclose(rounded_int4(flat, 64, symmetric=False).dequantize(), flat, rtol=0.02)


def test_int4_experts_have_no_zero_points(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
    tiny.Tiny("mixtral", "MixtralForCausalLM", wide).save(tmp_path / "dense")
    out = convert(tmp_path / "dense", tmp_path / "out", "int4", "--skip-tokenizer-init")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["symmetric"] is True
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    read = quantised(out)
    assert sum(".experts." in name for name in read) == 2 * 2 * 3
    for name, tensor in read.items():
        assert tensor.offsets is None
        np.testing.assert_array_equal(
            tensor.dequantize(), rounded_int4(dense[name], 64, symmetric=True).dequantize(), err_msg=name
        )


def test_experts_are_quantised_one_by_one_and_routers_are_not(tmp_path: Path) -> None:
    MIXTRAL.save(tmp_path / "dense")
    out = convert(tmp_path / "dense", tmp_path / "out", "int8", "--skip-tokenizer-init")
    read = quantised(out)
    assert sum(".experts." in name for name in read) == 2 * 4 * 3
    assert not any("gate.weight" in name for name in read)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", *(f"model.layers.{index}.block_sparse_moe.gate" for index in (0, 1))]


FUSED = {case.name: case for case in tiny.TINY if case.name in ("granite-moe", "llama4", "gemma4-experts")} | {
    "gpt-oss": replace(tiny.GPT_OSS, extra={**tiny.GPT_OSS.extra, "hidden_size": 64, "intermediate_size": 64})
}
"""Models whose experts are in one tensor per matrix, or in one with gate and up: after each other, or by turns."""


@pytest.mark.parametrize(
    ("name", "method", "module"),
    [
        ("gpt-oss", "int4", "model.layers.1.mlp.experts.2.down_proj"),
        ("llama4", "fp8", "model.layers.1.feed_forward.experts.1.up_proj"),
        ("granite-moe", "int8", "model.layers.0.block_sparse_moe.experts.3.gate_proj"),
        ("gemma4-experts", "fp8", "model.layers.5.experts.0.up_proj"),
    ],
)
def test_experts_in_one_tensor_are_quantised_one_by_one(name: str, method: str, module: str, tmp_path: Path) -> None:
    """Each matrix as rounded by itself; biases and routers are those of the model."""
    FUSED[name].save(tmp_path / "dense")
    out = convert(tmp_path / "dense", tmp_path / "out", method, "--skip-tokenizer-init")
    names = {each.removeprefix(f"{module}.") for each in stored(out) if each.startswith(f"{module}.")}
    parts = ("packed", "scale", "shape") if method == "int4" else ("scale",)
    assert names - {"weight", "bias"} == {f"weight_{part}" for part in parts}
    dense, read = parameters(tmp_path / "dense"), parameters(out)
    assert dense.keys() == read.keys()
    experts = 0
    for each, value in read.items():
        original = dense[each]
        assert isinstance(original, np.ndarray)
        if not isinstance(value, QuantizedTensor):
            np.testing.assert_array_equal(value, original, err_msg=each)
        elif ".experts." in each:
            experts += 1
            for number, matrix in enumerate(original):
                scheme = scheme_of(method, matrix.shape[1])
                assert scheme is not None
                rounded = rounded_int4(matrix, 64, symmetric=True) if method == "int4" else quantize(matrix, scheme)
                np.testing.assert_array_equal(take_matrix(value, number).dequantize(), rounded.dequantize())
    assert experts == sum(each.rpartition(".experts.")[2] in ("gate", "up", "down") for each in dense) > 0


def parameters(folder: Path) -> dict[str, Value]:
    """Return the parameters of a dense or quantised model."""
    checkpoint = open_checkpoint(folder)
    config = read_quantization(checkpoint.config())
    spec, family = spec_from_config(without_quantization(checkpoint.config()))
    tensors = checkpoint.tensors() if config is None else join_scales(checkpoint.tensors(), config)
    return dict(apply_rules(family.rules, params(spec), tensors, family.ignored))


def test_experts_that_no_rule_reads_one_by_one_are_refused(tmp_path: Path) -> None:
    name, experts = "layers.0.ffn.experts.down", np.zeros((2, 64, 64), np.float32)
    shapes = {name: Param(name, experts.shape, "...")}
    rules = (Rename("layers.{l}.mlp.down_proj", "layers.{l}.ffn.experts.down"),)
    tensors = experts_one_by_one(rules, shapes, [("layers.0.mlp.down_proj", experts)])
    with pytest.raises(ModelError, match=r"mlp.down_proj \[2, 64, 64\] has several experts, which .* one by one; qua"):
        write_quantized(tensors, tensor_uses(rules, shapes), shapes, "int8", None, tmp_path)


@pytest.mark.parametrize("prefix", ["model.language_model.layers", "language_model.model.layers", "model.layers"])
def test_experts_of_a_multimodal_checkpoint_keep_its_names(prefix: str) -> None:
    family = TextTower("Llama4ForCausalLM").family(LLAMA4)
    shapes = {
        name: Param(name, shape, "...")
        for name, shape in {
            "layers.0.ffn.experts.gate": (2, 3, 5),
            "layers.0.ffn.experts.up": (2, 3, 5),
            "layers.0.ffn.experts.down": (2, 5, 3),
        }.items()
    }
    fused = np.arange(60, dtype=np.float32).reshape(2, 5, 6)
    single = dict(experts_one_by_one(family.rules, shapes, [(f"{prefix}.0.feed_forward.experts.gate_up_proj", fused)]))
    expected = {
        f"{prefix}.0.feed_forward.experts.{number}.{part}_proj.weight": fused[number, :, rows].T
        for part, rows in (("gate", slice(3)), ("up", slice(3, 6)))
        for number in range(2)
    }
    assert list(single) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(single[name], value)
        assert np.shares_memory(single[name], fused)


def test_a_gguf_file_is_converted(model: Path, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "tiny.gguf", "llama")
    out = convert(tmp_path / "tiny.gguf", tmp_path / "out", "int8", "--dtype", "half", "--tokenizer", str(model))
    tensors = stored(out)
    assert tensors["lm_head.weight"].dtype == np.float16
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert (out / "tokenizer.json").exists()
    assert set(quantised(out)) == {name for name in load_file(model / "model.safetensors") if "_proj" in name}


def test_large_models_are_written_in_several_files(model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model)
    spec, family = spec_from_config(checkpoint.config())
    parameters = params(spec)
    out = tmp_path / "out"
    out.mkdir()
    uses = tensor_uses(family.rules, parameters)
    exported = write_quantized(checkpoint.tensors(), uses, parameters, "fp8", "bfloat16", out, shard_bytes=40_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(names) > 2
    assert names == [f"model-{at:05d}-of-{len(names):05d}.safetensors" for at in range(1, len(names) + 1)]
    (out / "config.json").write_text(json.dumps(checkpoint.config()))
    loaded = dict(open_checkpoint(out).tensors())
    assert {name: out / index["weight_map"][name] for name in loaded}.keys() == index["weight_map"].keys()
    assert sum(array.nbytes for array in loaded.values()) == exported.num_bytes == index["metadata"]["total_size"]
    assert loaded["model.embed_tokens.weight"].dtype == BFLOAT16
    assert as_uint(loaded["model.layers.0.mlp.up_proj.weight"]).dtype == np.uint8


@pytest.mark.setting("--tensor-parallel-size", "--load-format")
def test_invalid_conversions(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(source: Path, *words: str) -> str:
        assert main.main(["convert", str(source), str(tmp_path / "bad"), *words]) != 0
        assert not (tmp_path / "bad").exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    once = convert(model, tmp_path / "once", "fp8")
    assert "is quantised by compressed-tensors; use its unquantised weights" in error(once, "--quantization", "int4")
    assert "a quantised folder is not sharded" in error(model, "--quantization", "int4", "-tp", "2")
    assert "dummy has no weights to quantise" in error(model, "--quantization", "int4", "--load-format", "dummy")
    assert "int3" in error(model, "--quantization", "int3")
    narrow = write_model(tmp_path / "narrow", hidden_size=16, intermediate_size=40, num_attention_heads=2)
    assert "has no matrix that can be quantised" in error(narrow, "--quantization", "int4")
