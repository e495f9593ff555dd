"""The checks of the benchmark of products, with the kernels in Triton's interpreter; its times need a GPU."""

from __future__ import annotations

import pytest
import support.kernels.triton_interpreter  # noqa: F401
import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.linear.scaled_linear import kernel as scaled_kernel
from pagoda.backends.torch_cuda.kernels.linear.weight_only import kernel
from pagoda.benchmarks.gpu.kernels import gemm, packed
from pagoda.benchmarks.gpu.measure import Bench


class Interpreted(Bench):
    use_kernel = True


BENCH = Interpreted(torch.device("cpu"), CHIPS["sm_90"], tiny=True)


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no bfloat16."""
    for module in (gemm, packed):
        monkeypatch.setattr(module, "BF16", torch.float16)


def test_kernels_pass() -> None:
    results = {number.name: number.run() for number in gemm.checks(BENCH)}
    assert len(results) == 13
    assert all(one["right"] for one in results.values()), results


def test_kernels_of_stored_matrices_pass() -> None:
    """With errors that would pass in bfloat16, too."""
    results = {number.name: number.run() for number in packed.checks(BENCH)}
    assert len(results) == 3 * len(packed.SCHEMES)
    assert all(one["right"] and 8 * one["error"] < 1.01 for one in results.values()), results


def test_a_wrong_product_of_rounded_rows_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scaled_kernel.linear
    monkeypatch.setattr(scaled_kernel, "linear", lambda *arguments: right(*arguments) * 1.05)
    assert not packed.error(BENCH, "int8_channel", 70)["right"]


def test_a_wrong_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.product
    monkeypatch.setattr(kernel, "product", lambda x, packed, bias, chip: right(x, packed, bias, chip) * 1.1)
    assert not gemm.linear_error(BENCH, "int8", 7)["right"]


def test_settings_on_trial_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(kernel, "product", lambda x, packed, bias, chip: used.append(settings(packed, x, chip)))

    def settings(packed, x, chip) -> dict:
        return kernel.tile_settings(kernel.TUNING, packed.scheme, packed.group, x.shape[1], 8, chip)

    trials = [number for number in gemm.trials(BENCH) if number.name.startswith("weight_only int8-8")]
    tried = [number.run()["settings"] for number in trials]
    assert len(tried) == 2
    stages = [one["num_stages"] for one in tried]
    assert {one["num_stages"] for one in used} == set(stages)
    assert len(set(stages)) == 2 or tried[0] != tried[1]


def test_the_loop_is_the_mixture() -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(9, 32), torch.randn(9, 4)
    inner, down = torch.randn(4, 48, 32) / 6, torch.randn(4, 32, 24) / 5
    loop = gemm.loop_over_experts(x, logits, inner, down, 2)
    torch.testing.assert_close(loop.double(), gemm.mixture64(x, logits, inner, down, 2), rtol=1e-4, atol=1e-5)
