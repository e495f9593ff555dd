"""The benchmark of memory that goes and comes back, where functions stand for graphs and a CPU for the GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pagoda.backends.torch_cuda.device import CPU


class Graph:
    def __init__(self, layers: list, x: torch.Tensor, run) -> None:
        self._run, self.found = lambda: run(layers, x), run(layers, x)

    def replay(self) -> None:
        self.found.copy_(self._run())


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import gpu_sleep

    def captured(layers: list, x: torch.Tensor) -> tuple[Graph, torch.Tensor]:
        graph = Graph(layers, x, gpu_sleep.run)
        return graph, graph.found

    monkeypatch.setattr(gpu_sleep, "captured", captured)
    monkeypatch.setattr(gpu_sleep, "median_ms", lambda run, **_: (run(0), 1.0)[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(gpu_sleep, "WIDTH", 64)
    monkeypatch.setattr(gpu_sleep, "LAYERS", 5)
    yield gpu_sleep
    for name in ("gpu_sleep", "gpu_measure"):
        sys.modules.pop(name, None)


@torch.inference_mode()
def test_both_parts_say_whether_the_numbers_came_back(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0, 1 << 20] * 2 + [0, 0] * 2)
    monkeypatch.setattr(benchmark, "free", lambda device: next(readings))
    assert benchmark.sleep(CPU)["right"]
    assert not benchmark.sleep(CPU)["right"], "no memory was given back"
    found = benchmark.offload(CPU)
    assert (found["right"], found["layers_on_host"]) == (True, 5)
