"""A real model on the accelerators' backends, on the CPU, against what transformers answers with the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda import LLM, SamplingParams

pytestmark = pytest.mark.model

FEW = 3
"""Prompts that are answered, on a CPU slowly."""
KEPT = json.loads((Path(__file__).parents[2] / "data" / "smollm2_answers.json").read_text(encoding="utf-8"))[:FEW]
"""Prompts, and the tokens that transformers answers greedily with the same file in float32."""
PROMPTS = [row["prompt"] for row in KEPT]
ANSWERS = [row["token_ids"] for row in KEPT]
GREEDY = SamplingParams(temperature=0.0, max_tokens=len(ANSWERS[0]), ignore_eos=True)


def answers(model_file: Path, **options: Any) -> list[list[int]]:
    """Return the tokens of an engine, which answers the prompts together."""
    engine = LLM(str(model_file), dtype="float32", max_num_seqs=FEW, **options)
    try:
        together = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    finally:
        engine.shutdown()
    return [list(one.outputs[0].token_ids) for one in together]


def test_torch_cuda_answers_the_same(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's steps on CPU tensors, some of them captured and some not."""
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    limits = {"max_model_len": 128, "max_num_batched_tokens": 128, "cudagraph_capture_sizes": [4]}
    assert answers(model_file, backend="torch_cuda", **limits) == ANSWERS


@pytest.mark.slow_matrix
def test_jax_tpu_answers_the_same(model_file: Path) -> None:
    """The TPU's programs, few of them, on XLA's CPU client."""
    pytest.importorskip("flax")
    import support.devices.jax_devices  # noqa: F401

    assert answers(model_file, backend="jax_tpu", max_model_len=64, max_num_batched_tokens=32) == ANSWERS
