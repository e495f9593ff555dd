"""8-bit matrices: values, memory, errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("flax")

import ml_dtypes
import numpy as np
import support.jax_devices  # noqa: F401
from support.reference_driver import Driver, random_weights, tiny_spec
from support.tiny_folder import write_model

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.ahead_of_time.roofline import BatchLoad, roofline_cost
from pagoda.backends.jax_tpu.execution.program_keys import Forward, StepProgramSet
from pagoda.backends.jax_tpu.memory.plan import weight_bytes
from pagoda.backends.jax_tpu.weights import placement
from pagoda.backends.jax_tpu.weights.loading import _stored_matrix
from pagoda.backends.jax_tpu.weights.placement import matrix_dtype, quantize
from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.engine.shapes import StepShape, StepShapes
from pagoda.common.errors import ConfigError
from pagoda.common.models.primitives import Param
from pagoda.common.models.registry import spec_from_config
from pagoda.common.weights import dtypes
from pagoda.common.weights.quantization import Float8, QuantizedTensor
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.server.cli import main
from pagoda.server.llm import LLM

SPEC = tiny_spec(window=6)
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1)
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


@pytest.mark.parametrize("method", ["fp8", "tpu_int8"])
@pytest.mark.parametrize("tensor", [1, 2])
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
    matrix = _stored_matrix(stored, CHIPS[chip].float8)
    assert matrix is not None
    np.testing.assert_array_equal(matrix[0].astype(np.float32) * matrix[1][:, None], stored.dequantize())


def test_both_float8_dtypes_represent_the_same_values() -> None:
    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32) ** 3
    x[5] = 0
    values = []
    for chip in ("v6e", "v7x"):
        numbers, scale = quantize(x, CHIPS[chip].float8)
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


def test_only_matrices_decide_whether_stored_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = {f"layers.{layer}.{name}": Float8("channel") for layer in range(2) for name in MATRICES}
    own = placement.params(SPEC)
    other = Param("layers.0.mixers.0.conv", (64, 4), "..")
    monkeypatch.setattr(placement, "params", lambda spec: own | {other.name: other})
    assert matrix_dtype(None, SPEC, CHIPS["v6e"], schemes) == CHIPS["v6e"].float8
    del schemes["layers.1.ffn.down"]
    assert matrix_dtype(None, SPEC, CHIPS["v6e"], schemes) is None


def test_half_the_bytes_stored_and_read() -> None:
    plain, small = (model_on("cpu", method) for method in (None, "fp8"))
    layers = 4 * 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    rest = weight_bytes(plain) - layers
    assert weight_bytes(small) == pytest.approx(rest + layers / 2, rel=2e-3)
    needs = [roofline_cost(model, DECODE, BatchLoad(0, 0)).bytes for model in (plain, small)]
    assert needs[1] == pytest.approx(needs[0] / 2, rel=0.02)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has the compiler")
@pytest.mark.parametrize("method", ["fp8", pytest.param("tpu_int8", marks=pytest.mark.tpu_matrix)])
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
    weights = []
    for method in ([], ["--quantization", "fp8"]):
        table = tmp_path / "table.json"
        more = ["--topology", "cpu", "--budget-only", "--output-json", str(table), *method]
        assert main.main(["compile", str(model), *words, *more]) == 0
        weights.append(json.loads(table.read_text())["budget"]["weights"])
    matrices = 2 * (64 * 64 * 3 + 3 * 64 * 512)
    assert weights[0] - weights[1] == pytest.approx(3 * matrices, rel=0.05)


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization: fp8: jax_tpu cannot quantise experts; drop it"):
        matrix_dtype("fp8", tiny_spec(moe=True), CHIPS["v6e"])
    with pytest.raises(ConfigError, match="--quantization: tpu_int8: v7x has no int8; use fp8"):
        matrix_dtype("tpu_int8", SPEC, CHIPS["v7x"])
    with pytest.raises(ConfigError, match="--quantization: fp8 is not supported by reference; drop it, or use --back"):
        LLM(str(write_model(tmp_path / "tiny")), quantization="fp8", backend="reference")
