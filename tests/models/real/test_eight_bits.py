"""A real model with 8-bit matrices or an 8-bit KV cache against its own float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("flax")

import numpy as np
from support.devices.jax_model import JaxModel

from pagoda.backends.jax_tpu.weights.formats import matrix_formats
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.text.tokenizer import load_tokenizer
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.rules import apply_rules
from pagoda.kernels_pallas.chips import CHIPS

pytestmark = [pytest.mark.model, pytest.mark.slow_matrix]

Answers = Callable[[str | None, str], tuple[np.ndarray, np.ndarray]]
"""--quantization, type of the cache -> logprobs of the tokens that follow, greedy tokens."""
TEXT = (
    "Photosynthesis is the process by which green plants turn sunlight, water and carbon dioxide into sugar and "
    "oxygen. It takes place in the leaves, where a green pigment absorbs the light."
)
# how: (--quantization, KV cache), most by which a token's logprob moves on average, least share of equal greedy tokens
BOUNDS = {
    "fp8 matrices": (("fp8", "float32"), 0.25, 0.85),
    "int8 matrices": (("tpu_int8", "float32"), 0.1, 0.9),
    "int8 matrices and inputs": (("int8", "float32"), 0.3, 0.8),  # 0.20 and 0.83 with transformers' layers rounded so
    "fp8 cache": ((None, "float8_e4m3fn"), 0.15, 0.8),
    "int8 cache": ((None, "int8"), 0.15, 0.9),
}


@pytest.fixture(scope="module")
def answers(model_file: Path) -> Answers:
    checkpoint = open_checkpoint(model_file)
    spec, family = spec_from_config(checkpoint.config())
    family = checkpoint.family(family)
    weights = list(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))
    ids = load_tokenizer(str(model_file)).encode(TEXT)

    @cache
    def answer(method: str | None, numbers: str) -> tuple[np.ndarray, np.ndarray]:
        formats = matrix_formats(method, spec, CHIPS["v6e"])
        logits = JaxModel(spec, weights, 64, cache_dtype=numbers, formats=formats).logits(ids)
        logprobs = logits.log_softmax(-1).numpy()
        return logprobs[np.arange(len(ids) - 1), ids[1:]], logprobs.argmax(-1)

    return answer


@pytest.mark.parametrize("name", BOUNDS)
def test_eight_bits_are_close(name: str, answers: Answers) -> None:
    how, most, least = BOUNDS[name]
    usual, greedy = answers(None, "float32")
    logprobs, chosen = answers(*how)
    moved, same = float(np.abs(logprobs - usual).mean()), float((chosen == greedy).mean())
    print(f"{name}: {moved:.4f} {same:.3f} {float((usual - logprobs).mean()):+.4f} over {len(chosen)} tokens")
    assert 1e-4 < moved < most
    assert same >= least
