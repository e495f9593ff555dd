"""--quantization on torch_cuda: exactly the maths of rounded matrices, close to unquantized; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.reference_driver import Driver, random_weights, tiny_spec
from support.tiny_folder import write_model

from pagoda.backends.reference.model.naive import NaiveModel
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.kernels.weight_only import pack, unpack
from pagoda.backends.torch_cuda.weights import packing
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.engine.sampling import SamplingRules
from pagoda.common.errors import ConfigError
from pagoda.common.models.spec import ModelSpec
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm import LLM

SPECS = {"dense": tiny_spec(window=6), "moe": tiny_spec(moe=True)}
PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]
EVERYTHING = SamplingRules(logprobs=-1)
MATRICES = tuple(f".{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))
NEAR = {"int8": 0.1, "fp8": 0.3, "int4": 1.0}
"""How far logprobs may be from those of unquantized matrices, on average."""


def rounded(spec: ModelSpec, method: str) -> Iterator[tuple[str, np.ndarray]]:
    """The weights with what is left of the matrices of layers."""
    for name, array in random_weights(spec):
        if name.startswith("layers.") and name.endswith(MATRICES):
            array = unpack(pack(torch.from_numpy(array), method)).numpy()
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


@pytest.mark.setting("--quantization")
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_real_model_in_fewer_bits(method: str, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers keep their sense; a wrong scale or a wrong order of numbers gives noise."""
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    assert answer(model_file, method).startswith("The capital of France is Paris")


def test_a_quantization_of_another_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    with pytest.raises(ConfigError, match="--quantization: torch_cuda does not support tpu_int8; use fp8, "):
        answer(write_model(tmp_path / "tiny"), "tpu_int8")
