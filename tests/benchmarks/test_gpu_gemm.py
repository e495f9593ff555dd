"""The checks of the benchmark of products, with the kernels in Triton's interpreter; its times need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import support.triton_interpreter  # noqa: F401
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_gemm as benchmark

from pagoda.backends.torch_cuda.kernels.chips import CHIPS
from pagoda.backends.torch_cuda.kernels.weight_only import kernel

CPU, CHIP = torch.device("cpu"), CHIPS["sm_90"]


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no bfloat16."""
    monkeypatch.setattr(benchmark, "BF16", torch.float16)


def test_kernels_pass() -> None:
    torch.manual_seed(0)
    errors = benchmark.linear_errors(CPU, CHIP, (40, 300), 70)
    errors |= benchmark.moe_errors(CPU, CHIP, ((4, 2, 64, 48),), (1, 40))
    assert len(errors) == 22
    assert max(errors.values()) <= 1


def test_a_wrong_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    right = kernel.product
    monkeypatch.setattr(kernel, "product", lambda x, packed, bias, chip: right(x, packed, bias, chip) * 1.1)
    errors = benchmark.linear_errors(CPU, CHIP, (40, 300), 70)
    assert errors["int8_7"] > 1


def test_the_loop_is_the_mixture() -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(9, 32), torch.randn(9, 4)
    inner, down = torch.randn(4, 48, 32) / 6, torch.randn(4, 32, 24) / 5
    loop = benchmark.loop_over_experts(x, logits, inner, down, 2)
    torch.testing.assert_close(loop.double(), benchmark.mixture64(x, logits, inner, down, 2), rtol=1e-4, atol=1e-5)
