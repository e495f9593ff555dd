"""The sampling benchmark's own checks, with the kernels in Triton's interpreter; its times need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_sampling as benchmark

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", [benchmark.right_logprobs, benchmark.right_edits, benchmark.right_noise])
def test_kernels_pass(check) -> None:
    assert check(600, CPU)


def test_the_sort_draws_from_what_is_kept() -> None:
    torch.manual_seed(0)
    logits = benchmark.make_logits("peaked", 200, 600, CPU)
    rules = benchmark.Rules.unpack(benchmark.make_rules(200, ["top_k", "filtered"], CPU))
    kept = logits >= rules.lowest_kept(logits, use_kernel=False)[:, None]
    drawn = benchmark.by_sort(logits, rules)
    assert kept.gather(1, drawn[:, None]).all()
    assert drawn.unique().numel() > 20
