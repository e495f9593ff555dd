"""The checks of the benchmark of quantised experts, with the kernels in Triton's interpreter; its times need a GPU."""

from __future__ import annotations

import pytest
import support.kernels.triton_interpreter  # noqa: F401
import torch

from pagoda.backends.torch_cuda.kernels.experts.moe import kernel as moe_kernel
from pagoda.backends.torch_cuda.kernels.experts.moe_w8a8 import kernel
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu.kernels import experts, gemm
from pagoda.benchmarks.gpu.measure import Bench


class Interpreted(Bench):
    use_kernel = True


BENCH = Interpreted(torch.device("cpu"), CHIPS["sm_90"], tiny=True)


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no bfloat16."""
    monkeypatch.setattr(experts, "BF16", torch.float16)
    monkeypatch.setattr(gemm, "BF16", torch.float16)


def test_kernels_pass() -> None:
    results = {number.name: number.run() for number in experts.checks(BENCH)}
    assert len(results) == 2 * len(experts.SCHEMES)
    assert all(one["right"] for one in results.values()), results


@pytest.mark.parametrize("scheme", experts.SCHEMES)
def test_a_wrong_kernel_does_not(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = moe_kernel.mix
    monkeypatch.setattr(moe_kernel, "mix", lambda parts, weights, x: right(parts, weights, x) * 1.3)
    assert not experts.error(BENCH, scheme, (4, 2, 64, 48), 40)["right"]


@pytest.mark.slow_matrix
def test_settings_on_trial_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    right = kernel.tile_settings
    monkeypatch.setattr(kernel, "tile_settings", lambda *given: used.append(right(*given)) or used[-1])
    trials = [number for number in experts.trials(BENCH) if "int8-rows" in number.name]
    tried = [number.run()["settings"] for number in trials]
    assert len(tried) == 2
    assert {one["num_stages"] for one in used} == {one["num_stages"] for one in tried}
