"""A ring of pinned buffers through which each step's array reaches the device, none written while it is in flight."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.stream import Arrival, Stream
from pagoda.common.engine.step import Int32

SLOTS: Final = 3
"""The engine keeps two steps in flight and fills a third."""

_LEAST: Final = 1 << 14


class _Slot:
    """A buffer on the host, its twin on the device and the order between their users."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.host = self.device = torch.zeros(0, dtype=torch.int32)


class Staging:
    """`take` a buffer, fill it, `send` it, start the step that reads it, say `was_read`."""

    def __init__(self, stream: Stream, slots: int = SLOTS) -> None:
        self._stream = stream
        self._slots = [_Slot(stream.arrival()) for _ in range(slots)]
        self._size = 0

    def take(self, size: int) -> Int32:
        """Int32 [size] to be filled, with anything in it. Waits when the device has yet to copy what was in it."""
        self._slots.append(self._slots.pop(0))
        slot, self._size = self._slots[-1], size
        slot.arrival.wait_for_copy()
        if size > len(slot.host):
            self._grow(slot, size)
        found: Int32 = slot.host[:size].numpy()
        return found

    def send(self) -> Tensor:
        """What was taken and filled, on the device for the steps started from now on."""
        slot = self._slots[-1]
        device = slot.device[: self._size]
        slot.arrival.copy(slot.host[: self._size], device)
        return device

    def was_read(self) -> None:
        """No step started from now on reads what was sent."""
        self._slots[-1].arrival.was_read()

    def _grow(self, slot: _Slot, size: int) -> None:
        """To the next power of two, so that it happens a few times in an engine's life."""
        self._stream.synchronize()
        length = max(_LEAST, 1 << (size - 1).bit_length())
        slot.host = self._stream.host(length)
        slot.device = torch.empty(length, dtype=torch.int32, device=self._stream.device.torch)
