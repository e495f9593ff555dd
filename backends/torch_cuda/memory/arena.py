"""Memory for weights and KV cache that sleep mode can release and restore at the same addresses.

Captured CUDA graphs reference tensors by address, so the addresses must survive a sleep. `Storage` is torch's own
memory or an `Arena`; an arena maps physical memory into a reserved range of addresses: `CudaPages` by CUDA's virtual
memory management, `HostPages` by mmap.
"""

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

ALIGNMENT: Final = 512
"""Bytes: alignment of every tensor, as in torch's own allocator."""

CHUNK_BYTES: Final = 256 << 20
"""Host memory pinned at a time; torch rounds each chunk up to a power of two."""

_CPU_ADDRESSES: Final = 1 << 40


class Storage:
    """Allocates tensors that live as long as the engine. `sleep_mode`: the memory can be released and restored."""

    def __init__(self, device: Device, *, sleep_mode: bool = False) -> None:
        self._device = device.torch
        self._arena = _make_arena(device) if sleep_mode else None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated outside torch's own memory."""
        return 0 if self._arena is None else self._arena.num_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor."""
        if self._arena is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._arena.empty(shape, dtype)

    def sleep(self, keep: bool) -> None:
        """Release the memory; with `keep`, save its contents on the host. Raise MemoryError if the host has no room."""
        assert self._arena is not None, "the storage must be created with sleep_mode"
        self._arena.sleep(keep)

    def wake_up(self) -> None:
        """Restore the memory. Raise MemoryError."""
        assert self._arena is not None, "the storage must be created with sleep_mode"
        self._arena.wake_up()

    def close(self) -> None:
        """Release the memory for good. Idempotent."""
        if self._arena is not None:
            self._arena.close()


def _make_arena(device: Device) -> Arena:
    """Return an arena with as many addresses as the device has memory."""
    if not device.is_gpu:
        return Arena(HostPages(_CPU_ADDRESSES))
    total = torch.cuda.get_device_properties(device.torch).total_memory
    return Arena(CudaPages(device.torch, total, CudaDriver(device.torch.index)))


class Pages(Protocol):
    """A range of addresses with memory behind the mapped parts."""

    size: int
    granularity: int  # of addresses and sizes, in bytes
    pinned: bool  # copies to the host go through pinned memory

    def map(self, begin: int, size: int) -> None:
        """Map memory into part of the range. Raise MemoryError."""
        ...

    def unmap(self, begin: int, size: int) -> None:
        """Release the memory of a part that was mapped by one call."""
        ...

    def view(self, begin: int, size: int) -> Tensor:
        """Return uint8 [size] over part of the range."""
        ...

    def close(self) -> None:
        """Release the addresses; nothing may be mapped."""
        ...


class Arena:
    """A bump allocator whose memory sleeps and wakes up as a whole."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._used = 0
        self._mapped: list[tuple[int, int]] = []
        self._saved: list[Tensor] = []
        self.asleep = False

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, alignment included."""
        return self._used

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor. Raise MemoryError."""
        size = prod(shape) * dtype.itemsize
        begin = _round_up(self._used, ALIGNMENT)
        self._map_up_to(begin + size)
        self._used = begin + size
        return self._pages.view(begin, size).view(dtype).view(shape)

    def sleep(self, keep: bool) -> None:
        """Release the memory, which must be idle; with `keep`, save its contents on the host.

        Raise MemoryError, and stay awake, if the host has no room.
        """
        if self.asleep:
            return
        self._saved = [self._to_host(*chunk) for chunk in self._chunks()] if keep else []
        for begin, size in self._mapped:
            self._pages.unmap(begin, size)
        self.asleep = True

    def wake_up(self) -> None:
        """Map memory at the same addresses and restore saved contents. Raise MemoryError, and stay asleep."""
        if not self.asleep:
            return
        mapped: list[tuple[int, int]] = []
        try:
            for extent in self._mapped:
                self._pages.map(*extent)
                mapped.append(extent)
        except MemoryError:
            for extent in mapped:
                self._pages.unmap(*extent)
            raise
        for (begin, size), saved in zip(self._chunks(), self._saved):
            self._pages.view(begin, size).copy_(saved)
        self._saved = []
        self.asleep = False

    def close(self) -> None:
        """Release memory and addresses; the tensors become invalid. Idempotent."""
        self.sleep(keep=False)
        self._mapped = []
        self._saved = []
        self._used = 0
        self._pages.close()

    def _map_up_to(self, end: int) -> None:
        """Map physical memory up to `end`."""
        mapped = sum(size for _, size in self._mapped)
        if end > self._pages.size:
            raise MemoryError(f"{end} bytes are more than the {self._pages.size} of the device")
        if end > mapped:
            extent = mapped, _round_up(end - mapped, self._pages.granularity)
            self._pages.map(*extent)
            self._mapped.append(extent)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self._used, CHUNK_BYTES):
            yield begin, min(CHUNK_BYTES, self._used - begin)

    def _to_host(self, begin: int, size: int) -> Tensor:
        try:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pages.pinned)
        except RuntimeError as error:
            raise MemoryError(f"no room in host memory: {str(error).splitlines()[0]}") from None
        return host.copy_(self._pages.view(begin, size))


class CudaPages:
    """Implements Pages with CUDA's virtual memory management."""

    pinned = True

    def __init__(self, device: torch.device, size: int, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver
        self.granularity = driver.granularity()
        self.size = _round_up(size, self.granularity)
        self._base = driver.reserve(self.size)
        self._handles: dict[int, int] = {}

    def map(self, begin: int, size: int) -> None:
        handle = self._driver.create(size)
        try:
            self._driver.map(self._base + begin, size, handle)
        except BaseException:
            self._driver.release(handle)
            raise
        self._handles[begin] = handle

    def unmap(self, begin: int, size: int) -> None:
        self._driver.unmap(self._base + begin, size)
        self._driver.release(self._handles.pop(begin))

    def view(self, begin: int, size: int) -> Tensor:
        """Return the view; it keeps this object alive."""
        return torch.as_tensor(_CudaArray(self, self._base + begin, size), device=self._device)

    def close(self) -> None:
        if self.size:
            self._driver.free(self._base, self.size)
            self.size = 0


class _CudaArray:
    """Device memory as a `__cuda_array_interface__`."""

    def __init__(self, owner: CudaPages, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


_MAP_NORESERVE: Final = 0x4000
"""Linux's flag to reserve more addresses than there is memory; in Python's mmap from 3.13 on."""


class HostPages:
    """Implements Pages with host memory, for a CPU in place of a GPU."""

    pinned = False
    granularity = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.size = _round_up(size, self.granularity)
        self._memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def map(self, begin: int, size: int) -> None:
        """Do nothing: the system allocates pages on first write."""

    def unmap(self, begin: int, size: int) -> None:
        """Release the pages; they read as zero afterwards."""
        self._memory.madvise(mmap.MADV_DONTNEED, begin, size)

    def view(self, begin: int, size: int) -> Tensor:
        return self._bytes[begin : begin + size]

    def close(self) -> None:
        """Do nothing: the memory is released with its last tensor."""


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# Source: NVIDIA, CUDA Driver API, "Virtual Memory Management"; structures as in cuda.h.

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
    """Virtual memory calls for one device, in a process where torch has initialized CUDA. Sizes are in bytes.

    `library`: libcuda by default.
    """

    def __init__(self, device: int, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._location = Location(_ON_DEVICE, device)
        self._prop = AllocationProp(type=_PINNED, location=self._location)

    def granularity(self) -> int:
        """Return the granularity of addresses and sizes."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._prop), c_int(_MINIMUM))
        return size.value

    def reserve(self, size: int) -> int:
        """Reserve `size` addresses, without memory; return the first."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def free(self, address: int, size: int) -> None:
        """Release reserved addresses."""
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def create(self, size: int) -> int:
        """Allocate device memory; return its handle. Raise MemoryError."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._prop), c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Free memory that is not mapped."""
        self._call("cuMemRelease", c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Map memory to addresses, readable and writable by this device."""
        self._call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
        access = AccessDesc(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Unmap memory that the device no longer uses."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the device is out of memory")
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")
