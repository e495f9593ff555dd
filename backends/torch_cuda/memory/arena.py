"""Tensors whose memory can be given back and had again at the same addresses, which captured CUDA graphs hold."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from math import prod
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device

# CUDA's virtual memory management: addresses and the memory behind them, each had and given back on its own.
#
# Source: NVIDIA, CUDA Driver API, "Virtual Memory Management"; the structures are those of its cuda.h. Calls need a
# process in which torch has begun to use CUDA.

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("alloc_flags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class CudaDriver:
    """The calls for one device. `library`: libcuda, or what answers like it. Every size is in bytes."""

    def __init__(self, device: int, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._location = Location(_ON_DEVICE, device)
        self._prop = AllocationProp(type=_PINNED, location=self._location)

    def granularity(self) -> int:
        """Addresses and sizes below are multiples of this."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._prop), c_int(_MINIMUM))
        return size.value

    def reserve(self, size: int) -> int:
        """The first of so many addresses that nobody else gets; no memory is behind them."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def free(self, address: int, size: int) -> None:
        """Give reserved addresses back."""
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def create(self, size: int) -> int:
        """A handle of device memory. Raises MemoryError."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._prop), c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Give memory back, once it is nowhere mapped."""
        self._call("cuMemRelease", c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Put memory behind addresses, for this device to read and write."""
        self._call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
        access = AccessDesc(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind addresses away, which the device must not use any more."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the device is out of memory")
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")


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


# Where weights and KV cache lie: in memory that can be given back for a while, or in torch's own.

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
