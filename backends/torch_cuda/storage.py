"""Where weights and KV cache lie: in memory that can be given back for a while, or in torch's own."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.arena import Arena, CudaPages, HostPages
from pagoda.backends.torch_cuda.cuda_driver import CudaDriver
from pagoda.backends.torch_cuda.device import Device

_CPU_ADDRESSES: Final = 1 << 40


class Storage:
    """Memory for tensors that stay. `sleeps`: it can be given back and had again at the same addresses."""

    def __init__(self, device: Device, *, sleeps: bool = False) -> None:
        self._device = device.torch
        self._arena = make_arena(device) if sleeps else None

    @property
    def num_bytes(self) -> int:
        """Bytes beside torch's own memory."""
        return 0 if self._arena is None else self._arena.num_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor, not filled."""
        if self._arena is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._arena.empty(shape, dtype)

    def sleep(self, keep: bool) -> None:
        """Give it back; with `keep`, what it holds is on the host meanwhile. Raises MemoryError when it has no room."""
        assert self._arena is not None, "what sleeps was made so"
        self._arena.sleep(keep)

    def wake_up(self) -> None:
        """Have it again. Raises MemoryError."""
        assert self._arena is not None, "what sleeps was made so"
        self._arena.wake_up()

    def close(self) -> None:
        """For good. Idempotent."""
        if self._arena is not None:
            self._arena.close()


def make_arena(device: Device) -> Arena:
    """As many addresses as the device has memory."""
    if not device.is_gpu:
        return Arena(HostPages(_CPU_ADDRESSES))
    total = torch.cuda.get_device_properties(device.torch).total_memory
    return Arena(CudaPages(device.torch, total, CudaDriver(device.torch.index)))
