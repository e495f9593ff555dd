"""What the benchmark holds kernels against, held against their references in bfloat16: the interpreter has none."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from pagoda.backends.torch_cuda.kernels import activation, norm, rope_cache
from pagoda.backends.torch_cuda.kernels.chips import CHIPS

FUNCTIONS = (
    (norm, "norm"),
    (norm, "norm_quantised"),
    (activation, "gated"),
    (activation, "gated_quantised"),
    (rope_cache, "rope_and_cache"),
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import gpu_elementwise

    for module, name in FUNCTIONS:
        monkeypatch.setattr(module, name, partial(_by_reference, getattr(module, name)))
    yield gpu_elementwise
    for name in ("gpu_elementwise", "gpu_measure"):
        sys.modules.pop(name, None)


def _by_reference(function, *arguments, use_kernel: bool, **facts):
    assert use_kernel
    return function(*arguments, **facts, use_kernel=False)


def test_references_are_right_and_a_wrong_one_is_seen(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    device, chip = torch.device("cpu"), CHIPS["sm_90"]
    errors = benchmark.correctness(device, chip)
    assert len(errors) == 21
    assert max(errors.values()) <= 1
    right = norm.norm
    monkeypatch.setattr(norm, "norm", lambda x, *rest, **facts: right(x, *rest, **{**facts, "eps": 0.2}))
    assert benchmark.correctness(device, chip)["rms"] > 1


def test_every_kernel_is_timed(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "timed", lambda make, moved, copy: (make()(), moved)[1])
    moved = benchmark.speeds(torch.device("cpu"), CHIPS["sm_90"], 1.0, 16, 256)
    assert moved["copy_16x256"] == 2 * 16 * 256 * 2
    assert len(moved) == 7
