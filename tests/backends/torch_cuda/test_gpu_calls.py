"""CUDA calls on a machine without a GPU: their order, and arithmetic over scripted figures."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.suite import memory

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.execution.stream import GpuStream
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.memory.plan import GIB, check_weights, measure
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.steps.shapes import usual_sizes
from pagoda.common.errors import ConfigError

LADDER = tuple(usual_sizes(128))
GPU = Device(torch.device("cuda", 0), CHIPS["sm_90"], "NVIDIA H100")


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """A capture begins with a collection: of the objects that are made here."""
    memory.freeze()


class Recorder:
    """Streams, events and graphs that write down what happens to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.names = iter(("steps", "copies", "copied", "read"))
        graph = inspect.signature(torch.cuda.graph.__init__)

        @contextmanager
        def capturing(*args: Any, **keywords: Any) -> Iterator[None]:
            bound = graph.bind(None, *args, **keywords)
            self.calls.append(("begin", bound.arguments["pool"], bound.arguments["stream"].name))
            yield
            self.calls.append(("end",))

        for name, fake in {
            "Stream": lambda device: self.named(),
            "Event": self.named,
            "stream": self.on,
            "graph": capturing,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.calls.append(("replay",))),
            "graph_pool_handle": lambda: "pool",
        }.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, fake)

    def named(self) -> SimpleNamespace:
        name = next(self.names)
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.calls.append((name, "waits for", event.name)),
            record=lambda stream: self.calls.append((stream.name, "marks", name)),
            synchronize=lambda: self.calls.append(("host", "waits for", name)),
        )

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        self.calls.append(("on", stream.name))
        yield


def test_copies_and_steps_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Recorder(monkeypatch).calls
    stream = GpuStream(GPU)
    transfer, device = stream.make_transfer(), torch.zeros(3)
    transfer.wait_for_copy()
    transfer.copy(torch.ones(3), device)
    transfer.mark_read()
    assert calls == [
        ("host", "waits for", "copied"),
        ("copies", "waits for", "read"),
        ("on", "copies"),
        ("copies", "marks", "copied"),
        ("steps", "waits for", "copied"),
        ("steps", "marks", "read"),
    ]
    assert device.tolist() == [1, 1, 1]


def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch)
    stream, enabled = GpuStream(GPU), []
    stream.capture(lambda: enabled.append(gc.isenabled()), None)
    assert [*enabled, gc.isenabled()] == [True, True, False, True]


def test_a_capture_comes_after_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    stream = GpuStream(GPU)
    replay = stream.capture(lambda: recorder.calls.append(("run",)), stream.graph_pool())
    replay()
    assert recorder.calls == [("run",), ("run",), ("begin", "pool", "steps"), ("run",), ("end",), ("replay",)]
    assert stream.captures == 1


class FakeRunner:
    """Two steps that need memory, and graphs of which the first takes more. `free`: what the driver reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.reserved, self.peak = 60 * GIB, 17 * GIB, 17 * GIB
        self.captured: list[int] = []
        self.programs = SimpleNamespace(
            graph_sizes=SimpleNamespace(captured=LADDER), capture=self.capture, capture_mixed=self.capture_mixed
        )
        for name, fake in {
            "mem_get_info": lambda device: (self.free, 80 * GIB),
            "memory_reserved": lambda device: self.reserved,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: None,
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
        }.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, fake)

    def run(self, plan: int) -> SimpleNamespace:
        if self.peak == self.reserved:  # the first step: its kernels are loaded
            self.free -= GIB // 4
        self.peak = max(self.peak, self.reserved + plan * GIB)
        return SimpleNamespace(result=lambda: None)

    def capture_mixed(self) -> None:
        """They fill the pool before the decode steps do."""
        self.free -= GIB // 8

    def capture(self, sizes: tuple[int, ...]) -> None:
        """As the driver counts: the largest fills the pool, three others share a piece of 64 MiB."""
        for size in sizes:
            if not self.captured:
                self.free -= GIB // 2
            elif len(self.captured) % 3 == 1:
                self.free -= GIB // 16
            self.captured.append(size)


def test_measured_memory_leaves_out_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(monkeypatch)
    usage = measure(lambda: runner, GPU, CacheConfig(gpu_memory_utilization=0.5), 16 * GIB, [3, 5, 2])
    assert runner.captured[0] == 128, "the largest first: it fills the memory that all share"
    assert len(runner.captured) == 1 + 6, "few of the ladder's 19"
    assert (usage.total, usage.usable, usage.weights) == (80 * GIB, 40 * GIB, 16 * GIB)
    assert (usage.buffers, usage.activations, usage.other) == (GIB, 5 * GIB, 3 * GIB + GIB // 4)
    assert usage.graphs == GIB // 8 + GIB // 2 + 6 * (GIB // 16), "18 small graphs in pieces of three"


def test_graph_memory_of_a_single_size(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(monkeypatch)
    runner.programs.graph_sizes.captured = (1,)
    assert measure(lambda: runner, GPU, CacheConfig(), 16 * GIB, [3]).graphs == GIB // 8 + GIB // 2
    runner = FakeRunner(monkeypatch)
    runner.programs.graph_sizes.captured = ()
    assert measure(lambda: runner, GPU, CacheConfig(), 16 * GIB, [3]).graphs == 0


def test_a_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(monkeypatch)

    def run(plan: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner.run = run
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens: the largest step does not fit: .*lower it, or"):
        measure(lambda: runner, GPU, CacheConfig(), 16 * GIB, [3])


def test_weights_that_do_not_fit_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRunner(monkeypatch)
    check_weights(GPU, CacheConfig(), 60 * GIB, quantised=False)
    with pytest.raises(ConfigError, match=r"weights 61\.00, .*; 1\.00 GiB are missing; use .*--tensor-parallel-size 2"):
        check_weights(GPU, CacheConfig(), 61 * GIB, quantised=False)
