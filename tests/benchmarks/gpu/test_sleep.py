"""The sleep benchmark on a CPU in place of a GPU."""

from __future__ import annotations

import pytest
import torch

from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu import sleep
from pagoda.benchmarks.gpu.measure import Bench


class Gpu(Bench):
    """Demands of the CPU what is demanded of a GPU: that memory is given back."""

    is_gpu = True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def recorded(self, calls: list):
        return lambda: [call() for call in calls] and None


def test_both_checks_detect_changed_values() -> None:
    bench = Bench(torch.device("cpu"), CHIPS["sm_90"], tiny=True)
    results = {number.name: number.run() for number in sleep.checks(bench)}
    assert results["sleep"]["right"]
    assert (results["offload"]["right"], results["offload"]["layers_on_host"]) == (True, 5)
    spoiled = Bench(torch.device("cpu"), CHIPS["sm_90"], tiny=True, spoil=0.05)
    assert not any(number.run()["right"] for number in sleep.checks(spoiled))


def test_memory_that_is_not_released_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "device_of", lambda bench: CPU)
    readings = iter([0, 1 << 20] * 2 + [0, 0] * 2)
    monkeypatch.setattr(sleep, "free", lambda bench: next(readings))
    gpu = Gpu(torch.device("cpu"), CHIPS["sm_90"], tiny=True)
    assert sleep.sleep(gpu)["right"]
    assert not sleep.sleep(gpu)["right"]
