"""Tensors whose memory can be given back and had again at the same addresses, which captured CUDA graphs hold."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.cuda_driver import CudaDriver

ALIGNMENT: Final = 512
"""Of every tensor, in bytes: what torch's own allocator gives."""

PIECE: Final = 256 << 20
"""Bytes of host memory that are pinned at a time; torch rounds them up to a power of two."""


_NO_RESERVE: Final = 0x4000
"""Linux's MAP_NORESERVE, which Python names from 3.13 on: more addresses than there is memory."""


class Pages(Protocol):
    """A range of addresses with memory behind the parts that are mapped. `granularity`: of both, in bytes."""

    size: int
    granularity: int
    pinned: bool
    """Whether copies to the host go through pinned memory."""

    def map(self, begin: int, size: int) -> None:
        """Put memory behind part of the range. Raises MemoryError."""
        ...

    def unmap(self, begin: int, size: int) -> None:
        """Give the memory behind a part that was mapped in one piece back."""
        ...

    def view(self, begin: int, size: int) -> Tensor:
        """uint8 [size] over part of the range."""
        ...

    def close(self) -> None:
        """Give the addresses back; nothing is mapped."""
        ...


class Arena:
    """Gives tensors out, one behind the other, for good; all sleep and wake up together."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._used = 0
        self._mapped: list[tuple[int, int]] = []
        self._saved: list[Tensor] = []
        self.asleep = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors given out, with what lies between them."""
        return self._used

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor, not filled. Raises MemoryError."""
        size = prod(shape) * dtype.itemsize
        begin = _round_up(self._used, ALIGNMENT)
        self._reach(begin + size)
        self._used = begin + size
        return self._pages.view(begin, size).view(dtype).view(shape)

    def sleep(self, keep: bool) -> None:
        """Give the memory back; with `keep`, what it holds is on the host meanwhile. Nothing may be using it.

        Raises MemoryError, and stays awake, when the host has no room.
        """
        if self.asleep:
            return
        self._saved = [self._to_host(*piece) for piece in self._pieces()] if keep else []
        for begin, size in self._mapped:
            self._pages.unmap(begin, size)
        self.asleep = True

    def wake_up(self) -> None:
        """Have memory at the same addresses again, holding what was kept. Raises MemoryError, and stays asleep."""
        if not self.asleep:
            return
        back: list[tuple[int, int]] = []
        try:
            for extent in self._mapped:
                self._pages.map(*extent)
                back.append(extent)
        except MemoryError:
            for extent in back:
                self._pages.unmap(*extent)
            raise
        for (begin, size), saved in zip(self._pieces(), self._saved):
            self._pages.view(begin, size).copy_(saved)
        self._saved, self.asleep = [], False

    def close(self) -> None:
        """Give everything back, for good; the tensors must not be used any more. Idempotent."""
        self.sleep(keep=False)
        self._mapped, self._saved, self._used = [], [], 0
        self._pages.close()

    def _reach(self, end: int) -> None:
        """Have memory up to there."""
        have = sum(size for _, size in self._mapped)
        if end > self._pages.size:
            raise MemoryError(f"{end} bytes are more than the {self._pages.size} of the device")
        if end > have:
            extent = have, _round_up(end - have, self._pages.granularity)
            self._pages.map(*extent)
            self._mapped.append(extent)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self._used, PIECE):
            yield begin, min(PIECE, self._used - begin)

    def _to_host(self, begin: int, size: int) -> Tensor:
        try:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pages.pinned)
        except RuntimeError as error:
            raise MemoryError(f"no room in host memory: {str(error).splitlines()[0]}") from None
        return host.copy_(self._pages.view(begin, size))


class CudaPages:
    """Implements Pages by the CUDA driver's virtual memory. `size`: bytes of addresses, which cost nothing."""

    pinned = True

    def __init__(self, device: torch.device, size: int, driver: CudaDriver) -> None:
        self._device, self._driver = device, driver
        self.granularity = driver.granularity()
        self.size = _round_up(size, self.granularity)
        self._base = driver.reserve(self.size)
        self._handles: dict[int, int] = {}

    def map(self, begin: int, size: int) -> None:
        """New memory. Raises MemoryError."""
        handle = self._driver.create(size)
        try:
            self._driver.map(self._base + begin, size, handle)
        except BaseException:
            self._driver.release(handle)
            raise
        self._handles[begin] = handle

    def unmap(self, begin: int, size: int) -> None:
        """To the device."""
        self._driver.unmap(self._base + begin, size)
        self._driver.release(self._handles.pop(begin))

    def view(self, begin: int, size: int) -> Tensor:
        """Keeps this object alive."""
        return torch.as_tensor(_Bytes(self, self._base + begin, size), device=self._device)

    def close(self) -> None:
        """Idempotent."""
        if self.size:
            self._driver.free(self._base, self.size)
            self.size = 0


class _Bytes:
    """Device memory as torch and others understand it."""

    def __init__(self, owner: CudaPages, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class HostPages:
    """Implements Pages by the host's own memory, for a CPU in place of a GPU."""

    pinned = False
    granularity = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.size = _round_up(size, self.granularity)
        self._memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def map(self, begin: int, size: int) -> None:
        """The system gives memory when it is written."""

    def unmap(self, begin: int, size: int) -> None:
        """To the system; read again, it is zero."""
        self._memory.madvise(mmap.MADV_DONTNEED, begin, size)

    def view(self, begin: int, size: int) -> Tensor:
        """Part of it."""
        return self._bytes[begin : begin + size]

    def close(self) -> None:
        """The memory goes with its last tensor."""


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
