"""8-bit matrices: values, memory, errors."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import support.devices.jax_devices  # noqa: F401
from support.checkpoints.tiny_folder import write_model
from support.engines.reference_driver import Driver, random_weights, tiny_spec
from support.suite.slow_matrix import thinned

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.step_programs import Forward
from pagoda.backends.jax_tpu.memory.plan import weight_bytes
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.jax_tpu.model.parameters import ChannelMatrix, JaxBuildContext, project, quantize
from pagoda.backends.jax_tpu.weights.arrange import MatrixFormat
from pagoda.backends.jax_tpu.weights.formats import matrix_formats
from pagoda.backends.jax_tpu.weights.packing import quantize_groups, stored_numbers
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.shapes import StepShape, StepShapes
from pagoda.common.errors import WeightError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.weights import dtypes
from pagoda.common.weights.quantization.schemes import Activations, Codes4, Float8, Int4, Int8, Mxfp4, Nvfp4, Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor, random_quantized
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.grouped_matmul.quantized import Numbers, QuantizedWeights
from pagoda.server.cli import main

SPEC = tiny_spec(window=6)
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1)
TOKEN = Activations("int8", "row")
MATRICES = ("mixers.0.q", "mixers.0.k", "mixers.0.v", "mixers.0.o", "ffn.gate", "ffn.up", "ffn.down")


def rounded(weight: np.ndarray, method: str) -> np.ndarray:
    """Return a matrix [F, D] rounded to 8 bits. float8 is numpy's e4m3fn, whatever the chip's dtype."""
    if method == "tpu_int8":
        scale = np.abs(weight).max(1, keepdims=True) / 127
        return np.round(weight / scale) * scale
    scale = np.abs(weight).max(1, keepdims=True) / 448
    return (weight / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def logprobs(**make) -> np.ndarray:
    """Logprobs of the token after PROMPT, [V]."""
    d = Driver(SPEC, "scattered", block_size=8, backend="jax_tpu", **make)
    d.step({3: PROMPT[:6]}, [d.start(3, PROMPT, EVERYTHING)], {3: False})
    _, result = d.step({3: PROMPT[6:]})
    logprobs, out = result.logprobs[0], np.zeros(SPEC.vocab, np.float32)
    out[logprobs.token_ids[0, 1:]] = logprobs.logprobs[0, 1:]
    return out


@thinned(
    lambda tensor, method: (tensor == 2) == (method == "fp8"),
    tensor=[1, 2],
    method=["fp8", "tpu_int8"],
)
def test_outputs_equal_those_with_rounded_matrices(method: str, tensor: int) -> None:
    weights = dict(random_weights(SPEC))
    small = {
        name: rounded(array, method) if name.partition(".")[2].partition(".")[2] in MATRICES else array
        for name, array in weights.items()
    }
    assert sum(small[name] is not weights[name] for name in weights) == 2 * len(MATRICES)
    want = NaiveModel(SPEC, small.items()).logits(PROMPT).log_softmax(-1)[-1].numpy()
    np.testing.assert_allclose(logprobs(quantization=method, tensor=tensor), want, atol=3e-5)
    assert np.abs(logprobs() - want).max() > 1e-3


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_stored_float8_numbers_keep_their_values(chip: str) -> None:
    """Every float8_e4m3fn but NaN; -0 becomes 0."""
    bits = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]).reshape(2, 127)
    scales = np.array([[0.5], [3]], np.float32)
    stored = QuantizedTensor(Float8("channel"), bits.view(dtypes.FLOAT8_E4M3FN), scales, (1, 127))
    matrix = stored_numbers("w", stored, MatrixFormat(CHIPS[chip].float8))
    assert matrix is not None
    np.testing.assert_array_equal(matrix.numbers.astype(np.float32) * matrix.scales, stored.dequantize())


GROUPED = {
    "float8 blocks": (Float8((16, 32)), MatrixFormat("float8_e4m3b11fnuz", for_kernel=True, group=32)),
    "int8 groups": (Int8((1, 32), offsets=True), MatrixFormat("int8", for_kernel=True, group=32, shifted=True)),
    "int4": (Int4((1, 32), offsets=True), MatrixFormat("int4", for_kernel=True, group=32, shifted=True)),
    "mxfp4": (Mxfp4(), MatrixFormat("e2m1", for_kernel=True, group=32)),
    "nvfp4": (Nvfp4(), MatrixFormat("e2m1", for_kernel=True, group=16)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_stored_groups_keep_their_values(name: str) -> None:
    scheme, form = GROUPED[name]
    tensor = random_quantized(scheme, (48, 64), 3, 0.5)
    rng = np.random.default_rng(2)
    tensor = replace(tensor, scales=tensor.scales * rng.uniform(1, 2, tensor.scales.shape).astype(np.float32))
    if form.shifted:
        tensor = replace(tensor, offsets=tensor.scales * rng.integers(-8, 9, tensor.scales.shape).astype(np.float32))
    if tensor.row_scales is not None:
        tensor = replace(tensor, row_scales=rng.uniform(1, 2, 48).astype(np.float32))
    stored = stored_numbers("w", tensor, form)
    assert stored is not None
    numbers, scales, shifts = (
        None if array is None else jnp.asarray(array.T)[None, None, None]
        for array in (stored.numbers, stored.scales, stored.shifts)
    )
    weights = QuantizedWeights(numbers, scales, shifts, form.numbers, form.group)
    np.testing.assert_allclose(weights.values(0)[0, 0].T, tensor.dequantize(), rtol=1e-5, atol=1e-6)
    assert form == next(iter(matrix_formats(None, SPEC, CHIPS["v6e"], dict.fromkeys(NAMES, scheme)).values()))


NAMES = [f"layers.0.ffn.{part}" for part in ("gate", "up")]


def test_what_is_not_kept() -> None:
    """An order of inputs, tables of 4 bits; zero points that are not whole numbers raise."""
    for scheme in (Int4((1, 32), ordered=True), Codes4("nf4", (1, 32))):
        assert not matrix_formats(None, SPEC, CHIPS["v6e"], dict.fromkeys(NAMES, scheme))
    form, tensor = GROUPED["int4"][1], random_quantized(Int4((1, 32)), (48, 64), 3, 0.5)
    assert stored_numbers("w", replace(tensor, order=np.arange(64, dtype=np.int32)), form) is None
    with pytest.raises(WeightError, match="zero points that are whole numbers only"):
        stored_numbers("w", replace(tensor, offsets=tensor.scales * np.float32(0.5)), form)


@pytest.mark.parametrize("numbers", ["int4", "int8", "float8_e4m3b11fnuz"])
def test_quantising_in_groups(numbers: Numbers) -> None:
    """Within half a step of each number, or a sixteenth of a float8."""
    x = np.random.default_rng(0).normal(size=(1, 2, 1, 64, 3, 4)).astype(np.float32)
    stored, scales = quantize_groups(jnp.asarray(x), numbers, 32)
    assert scales.shape == (1, 2, 1, 2, 3, 4)
    flat = (array.reshape(*array.shape[:4], -1) for array in (stored, scales))
    values = QuantizedWeights(*flat, None, numbers, 32).values(0).reshape(2, 1, 64, 3, 4)
    steps = np.repeat(np.asarray(scales[0]), 32, 2) / 2
    bound = np.abs(x[0]) / 16 + 1e-3 if numbers.startswith("float8") else steps * 1.001
    assert (np.abs(values - x[0]) <= bound).all()


def test_both_float8_dtypes_represent_the_same_values() -> None:
    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32) ** 3
    x[5] = 0
    values = []
    exact = jax.jit(quantize, static_argnums=1, compiler_options={"xla_cpu_use_fusion_emitters": True})
    for chip in ("v6e", "v7x"):
        numbers, scale = exact(x, CHIPS[chip].float8)
        assert numbers.dtype.itemsize == 1
        values.append(np.asarray(numbers).astype(np.float32) * np.asarray(scale)[:, None])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)
    assert np.abs(values[0] - x).max() <= np.abs(x).max() / 16
    np.testing.assert_array_equal(values[0][5], 0)


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=128)
DECODE = Forward(StepShape(64, 64, 8, 1, True))


def model_on(topology: str, method: str | None, **config):
    spec, _ = spec_from_config({**LLAMA_8B, **config})
    return model_for(find_target(topology), spec, LIMITS, kv_layout(spec, 128), "bfloat16", 1, quantization=method)


def test_each_matrix_has_the_format_of_its_parameters(caplog: pytest.LogCaptureFixture) -> None:
    schemes: dict[str, Scheme] = {
        f"layers.{layer}.{name}": Float8("channel") for layer in range(2) for name in MATRICES
    }
    every = matrix_formats(None, SPEC, CHIPS["v6e"], schemes)
    assert set(every.values()) == {MatrixFormat("float8_e4m3b11fnuz")}
    assert {path[-1] for path in every} == {"qkv", "out", "inner", "down"}
    del schemes["layers.1.ffn.up"]
    schemes |= {f"layers.{layer}.ffn.down": Int8("channel", TOKEN) for layer in range(2)}
    with caplog.at_level("INFO"):
        some = matrix_formats(None, SPEC, CHIPS["v6e"], schemes)
    assert every.keys() - some.keys() == {("segments", 1, "layers", 0, "ffn", "inner")}  # of layer 1
    for path, form in some.items():
        assert form == (MatrixFormat("int8", True) if path[-1] == "down" else every[path])
    assert "layers.1.ffn.up in the same matrix is dense" in caplog.text


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_products_of_rounded_inputs(method: str, chip: str) -> None:
    """One matrix [3, 8, 64] against float64 arithmetic with the same rounding of weights and inputs."""
    form = next(iter(matrix_formats(method, SPEC, CHIPS[chip]).values()))
    assert form.rounds_inputs == ((method, chip) in (("int8", "v6e"), ("fp8", "v7x")))
    rng, largest = np.random.default_rng(1), 127 if method == "int8" else jnp.finfo(form.numbers).max.astype(float)
    x, dense = rng.normal(size=(5, 64)).astype(np.float32), rng.normal(size=(3, 8, 64)).astype(np.float32)
    x[3] = 0
    matrix = ChannelMatrix(form, "...", dense.shape, JaxBuildContext(jnp.dtype("float32"), 1))
    numbers, scales = quantize(jnp.asarray(dense), form.numbers)
    matrix.numbers.set_value(numbers)
    matrix.scales.set_value(scales)
    inputs = x.astype(np.float64)
    if form.rounds_inputs:
        steps = np.abs(x).max(1, keepdims=True) / np.float32(largest)
        steps[3] = 1
        inputs = (np.round(x / steps) if method == "int8" else x / steps).astype(form.numbers).astype(
            np.float64
        ) * steps
    weights = np.asarray(numbers).astype(np.float64) * np.asarray(scales, np.float64)[..., None]
    expected = np.einsum("ti,koi->tko", inputs, weights)
    np.testing.assert_allclose(project(jnp.asarray(x), matrix), expected, rtol=1e-5, atol=1e-5)
    exact = np.einsum("ti,koi->tko", x, weights)
    assert (np.abs(expected - exact).max() > 1e-3) == form.rounds_inputs


def test_half_the_bytes_stored_and_read() -> None:
    plain, small = (model_on("cpu", method) for method in (None, "fp8"))
    layers = 4 * 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    rest = weight_bytes(plain) - layers
    assert weight_bytes(small) == pytest.approx(rest + layers / 2, rel=2e-3)
    needs = [DECODE.cost(model, BatchLoad(0, 0)).bytes for model in (plain, small)]
    assert needs[1] == pytest.approx(needs[0] / 2, rel=0.02)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has the compiler")
@pytest.mark.tpu_matrix
@pytest.mark.parametrize("method", ["fp8", "tpu_int8"])
def test_the_compiler_widens_inside_the_product(method: str) -> None:
    """A decode step has no temporary of the size of a matrix, and at most two thirds of the cycles."""
    programs = []
    for quantization in (None, method):
        model = model_on("v6e:1x1", quantization)
        program_set = StepProgramSet(model, StepShapes.of(LIMITS, 1), (600,), LIMITS.max_num_seqs)
        programs += compile_programs(program_set, [DECODE])
    plain, small = programs
    assert small.memory.temporary < 4 << 20
    assert small.schedule.cycles < 0.7 * plain.schedule.cycles


@pytest.mark.setting("--quantization")
def test_the_budget_of_smaller_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", hidden_size=64, intermediate_size=512)
    words = ["--max-model-len", "32", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--block-size", "8"]
    words += ["--dtype", "float32", "--topology", "cpu", "--budget-only"]
    table = tmp_path / "table.json"
    assert main.main(["compile", str(model), *words, "--output-json", str(table), "--quantization", "fp8"]) == 0
    spec, _ = spec_from_config(json.loads((model / "config.json").read_text()))
    in_float32 = weight_bytes(model_for(find_target("cpu"), spec, LIMITS, kv_layout(spec, 128), "float32", 1))
    matrices = 2 * (64 * 64 * 3 + 3 * 64 * 512)
    saved = in_float32 - json.loads(table.read_text())["budget"]["weights"]
    assert saved == pytest.approx(3 * matrices, rel=0.05)
