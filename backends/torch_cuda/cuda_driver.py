"""CUDA's virtual memory management: addresses and the memory behind them, each had and given back on its own.

Source: NVIDIA, CUDA Driver API, "Virtual Memory Management"; the structures are those of its cuda.h. Calls need a
process in which torch has begun to use CUDA.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Final

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
