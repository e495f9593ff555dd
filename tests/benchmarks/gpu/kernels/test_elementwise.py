"""The definitions in the benchmark against plain torch in bfloat16, which the interpreter lacks."""

from __future__ import annotations

import torch

from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu.kernels import elementwise
from pagoda.benchmarks.gpu.measure import Bench

CPU = Bench(torch.device("cpu"), CHIPS["sm_90"])


def test_references_are_right_at_the_sizes_of_a_gpu() -> None:
    results = {number.name: number.run() for number in elementwise.checks(CPU)}
    assert len(results) == 15
    assert all(one["right"] for one in results.values())


def test_an_error_of_ten_percent_is_wrong_everywhere() -> None:
    spoiled = Bench(CPU.device, CPU.chip, tiny=True, spoil=0.1)
    assert not any(number.run()["right"] for number in elementwise.checks(spoiled))


def test_every_kernel_is_timed() -> None:
    kernels = elementwise.timed_kernels(CPU, 16, 256)
    assert len(kernels) == 7
    make, moved = kernels["copy"]
    assert moved == 2 * 16 * 256 * 2
    make()()
