"""The sampling benchmark's own checks, with the kernels in Triton's interpreter; its times need a GPU."""

from __future__ import annotations

import pytest
import support.kernels.triton_interpreter  # noqa: F401
import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu.kernels import sampling
from pagoda.benchmarks.gpu.measure import Bench

CPU = torch.device("cpu")


class Interpreted(Bench):
    use_kernel = True


BENCH = Interpreted(CPU, CHIPS["sm_90"], tiny=True)


@pytest.mark.parametrize("check", [sampling.right_logprobs, sampling.right_edits, sampling.right_noise])
def test_kernels_pass(check) -> None:
    assert check(BENCH, 600)


def test_spoiled_results_fail_every_check() -> None:
    spoiled = Bench(CPU, CHIPS["sm_90"], tiny=True, spoil=0.1)
    assert not any(number.run()["right"] for number in sampling.checks(spoiled))


def test_the_sort_draws_from_what_is_kept() -> None:
    torch.manual_seed(0)
    logits = sampling.make_logits("peaked", 200, 600, CPU)
    rules = sampling.CudaSamplingRules.unpack(sampling.make_rules(200, ["top_k", "filtered"], CPU))
    kept = logits >= rules.lowest_kept(logits, use_kernel=False)[:, None]
    drawn = sampling.by_sort(logits, rules)
    assert kept.gather(1, drawn[:, None]).all()
    assert drawn.unique().numel() > 20
