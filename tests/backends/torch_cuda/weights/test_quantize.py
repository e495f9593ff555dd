"""--quantization on torch_cuda: exactly the maths of rounded matrices, close to unquantized; what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.reference_driver import Driver, random_weights, tiny_spec

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.kernels.linear import scaled_linear
from pagoda.backends.torch_cuda.kernels.linear.packed_linear import packed_linear
from pagoda.backends.torch_cuda.kernels.linear.quantize_rows import quantize_rows_reference
from pagoda.backends.torch_cuda.kernels.linear.weight_only import FEW, pack, unpack
from pagoda.backends.torch_cuda.kernels.pointwise import activation
from pagoda.backends.torch_cuda.kernels.pointwise.norm import RowNorm
from pagoda.backends.torch_cuda.model import parts
from pagoda.backends.torch_cuda.weights.load import packing
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.weights.quantization.on_the_fly import quantize_on_the_fly
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.server.llm import LLM

SPECS = {"dense": tiny_spec(window=6), "moe": tiny_spec(moe=True)}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1)
MATRICES = tuple(f".{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))
NEAR = {"int8": 0.1, "fp8": 0.3, "int4": 1.0}
"""How far logprobs may be from those of unquantized matrices, on average."""


def rounded(spec: ModelSpec, method: str) -> Iterator[tuple[str, np.ndarray]]:
    """The weights with what is left of the matrices of layers: as the host rounds them where its groups fit."""
    for name, array in random_weights(spec):
        if name.startswith("layers.") and name.endswith(MATRICES):
            value = quantize_on_the_fly(name, array, method)
            stored = isinstance(value, QuantizedTensor)
            array = value.dequantize() if stored else unpack(pack(torch.from_numpy(array), method)).numpy()
        yield name, array


def logprobs(spec: ModelSpec, **make) -> np.ndarray:
    """Of the token after PROMPT, [V], of a prompt in two pieces."""
    d = Driver(spec, "scattered", backend="torch_cuda", device=CPU, **make)
    d.step({3: PROMPT[:6]}, [d.start(3, PROMPT, EVERYTHING)], {3: False})
    _, result = d.step({3: PROMPT[6:]})
    actual, out = result.logprobs[0], np.zeros(spec.vocab, np.float32)
    out[actual.token_ids[0, 1:]] = actual.logprobs[0, 1:]
    return out


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_logprobs_equal_those_of_rounded_matrices(method: str, kind: str) -> None:
    spec = SPECS[kind]
    actual, unquantized = logprobs(spec, quantization=method), logprobs(spec)
    want = NaiveModel(spec, rounded(spec, method)).logits(PROMPT).log_softmax(-1)[-1].numpy()
    np.testing.assert_allclose(actual, want, atol=5e-5)
    assert 1e-4 < np.abs(actual - unquantized).mean() < NEAR[method]


def test_names_of_a_scheme() -> None:
    assert packing(None) is None
    for one, other in (("fp8", "fp8_per_channel"), ("int8", "int8_per_channel_weight_only")):
        np.testing.assert_array_equal(*(logprobs(SPECS["dense"], quantization=method) for method in (one, other)))


METHODS = {
    "fp8": "float8",
    "fp8_per_channel": "float8",
    "int8": "int8",
    "int8_per_channel_weight_only": None,
    "int4": None,
}


@pytest.mark.parametrize("method", METHODS)
def test_many_rows_of_activations_are_rounded(method: str) -> None:
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 64, generator=noise), torch.randn(48, 64, generator=noise)
    pack_matrix, numbers = packing(method), METHODS[method]
    assert pack_matrix is not None
    packed = pack_matrix(weight)
    values = x if numbers is None else quantize_rows_reference(x, numbers).values()
    actual = packed_linear(x, packed, None, use_kernel=False, chip=CPU.chip)
    torch.testing.assert_close(actual, values @ unpack(packed).T)


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_norms_and_activations_round_what_a_product_reads(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer's four products the three that such a kernel precedes; int8 has none."""
    spec, prompt = SPECS["dense"], [(7 * at + at * at) % 96 for at in range(FEW + 6)]
    counts: Counter[str] = Counter()

    def counted(module: ModuleType | type, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **how: Any) -> Any:
            counts[name] += 1
            return function(*args, **how)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (RowNorm, "quantised"),
        (activation, "gated_quantised"),
        (scaled_linear, "quantize_rows"),
    ):
        counted(module, name)

    def tokens() -> np.ndarray:
        d = Driver(spec, "scattered", backend="torch_cuda", device=CPU, quantization=method)
        _, result = d.step({3: prompt}, [d.start(3, prompt, EVERYTHING)])
        return result.logprobs[0].logprobs

    fused, of_fused = tokens(), dict(counts)
    counts.clear()
    monkeypatch.setattr(parts.CudaBuildContext, "rounds", lambda *_: False)
    np.testing.assert_array_equal(fused, tokens())
    layers = len(spec.layers)
    assert counts == {"quantize_rows": 4 * layers}
    of_fp8 = {"quantised": 2 * layers, "gated_quantised": layers, "quantize_rows": layers}
    assert of_fused == (of_fp8 if method == "fp8" else counts)


def answer(model: Path, method: str) -> str:
    question = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "enforce_eager": True}
    llm = LLM(str(model), backend="torch_cuda", dtype="float32", disable_log_stats=True, quantization=method, **sizes)
    try:
        actual = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=7), use_tqdm=False)
    finally:
        llm.shutdown()
    text: str = actual[0].outputs[0].text
    return text


@pytest.mark.model
@pytest.mark.setting("--quantization")
@pytest.mark.parametrize("method", ["int8", pytest.param("int4", marks=pytest.mark.slow_matrix)])
def test_a_real_model_in_fewer_bits(method: str, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers keep their sense; a wrong scale or a wrong order of numbers gives noise."""
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    assert answer(model_file, method).startswith("The capital of France is Paris")


def test_a_method_without_packing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization: torch_cuda does not support fp8_per_block; use fp8, "):
        packing("fp8_per_block")
