"""Steps' arrays on their way to a device that is slow: none is lost, none overwritten."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.execution.runner import STAGING_BUFFERS, Staging
from pagoda.backends.torch_cuda.execution.stream import CpuStream


class SlowStream(CpuStream):
    """Copies and steps happen as late as the order allows: when the host waits for one of them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queue: deque[Callable[[], None]] = deque()
        self.waited = 0

    def make_transfer(self) -> LateTransfer:
        return LateTransfer(self)

    def drain(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def synchronize(self) -> None:
        self.drain()


class LateTransfer:
    """Implements HostToDevice over the queue of a SlowStream."""

    def __init__(self, stream: SlowStream) -> None:
        self.stream, self.copied = stream, True

    def wait_for_copy(self) -> None:
        while not self.copied:
            self.stream.waited += 1
            self.stream.queue.popleft()()

    def copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.copied = False

        def late() -> None:
            device.copy_(host)
            self.copied = True

        self.stream.queue.append(late)

    def mark_read(self) -> None: ...


def test_what_is_in_flight_is_not_overwritten() -> None:
    stream, seen = SlowStream(), []
    staging = Staging(stream)
    for step in range(20):
        array = staging.take(100 + step)
        array[:] = step
        sent = staging.send()
        stream.queue.append(lambda sent=sent: seen.append((len(sent), set(sent.tolist()))))
        staging.mark_read()
    assert stream.waited >= 20 - STAGING_BUFFERS, "the host was far ahead of the device"
    stream.drain()
    assert seen == [(100 + step, {step}) for step in range(20)]


def test_a_larger_step_gets_larger_buffers() -> None:
    staging = Staging(CpuStream(CPU), count=2)
    for size in (10, 1 << 15, 10, (1 << 16) + 1, 20):
        array = staging.take(size)
        array[:] = np.arange(size)
        assert staging.send().tolist() == list(range(size))
        staging.mark_read()
