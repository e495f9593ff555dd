import ctypes

import pytest
import torch

from pagoda.backends.torch_cuda.memory import arena as arenas
from pagoda.backends.torch_cuda.memory.arena import (
    ALIGNMENT,
    AccessDesc,
    AllocationFlags,
    AllocationProp,
    Arena,
    CudaDriver,
    CudaPages,
    HostPages,
    Location,
)

GRANULE = 1 << 12


class FakeCuda:
    """libcuda's virtual memory calls over ordinary memory. Strict: what CUDA would refuse is an error here."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.calls: list[str] = []
        self.ranges: dict[int, ctypes.Array] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}

    def __getattr__(self, name: str):
        self.calls.append(name.removeprefix("cuMem"))
        return getattr(self, f"_{name}")

    def _cuMemGetAllocationGranularity(self, size, prop, flag) -> int:
        assert (prop._obj.type, prop._obj.location.type, prop._obj.location.id, flag.value) == (1, 1, 3, 0)
        size._obj.value = GRANULE
        return 0

    def _cuMemAddressReserve(self, address, size, alignment, hint, flags) -> int:
        assert size.value % GRANULE == 0
        assert (alignment.value, hint.value, flags.value) == (0, 0, 0)
        memory = (ctypes.c_ubyte * size.value)()
        address._obj.value = ctypes.addressof(memory)
        self.ranges[address._obj.value] = memory
        return 0

    def _cuMemAddressFree(self, address, size) -> int:
        assert not self.mapped
        assert ctypes.sizeof(self.ranges.pop(address.value)) == size.value
        return 0

    def _cuMemCreate(self, handle, size, prop, flags) -> int:
        assert size.value % GRANULE == 0
        assert (prop._obj.requested_handle_types, prop._obj.win32_handle_meta_data, flags.value) == (0, None, 0)
        if sum(self.handles.values()) + size.value > self.room:
            return 2
        handle._obj.value = 1 + len(self.calls)
        self.handles[handle._obj.value] = size.value
        return 0

    def _cuMemRelease(self, handle) -> int:
        assert handle.value not in [mapped for mapped, _ in self.mapped.values()], "unmap comes first"
        del self.handles[handle.value]
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags) -> int:
        assert self.handles[handle.value] == size.value
        assert (offset.value, flags.value) == (0, 0)
        assert address.value not in self.mapped
        self.mapped[address.value] = handle.value, size.value
        return 0

    def _cuMemSetAccess(self, address, size, descriptions, count) -> int:
        assert self.mapped[address.value][1] == size.value
        access = descriptions._obj
        assert (access.location.type, access.location.id, access.flags, count.value) == (1, 3, 3, 1)
        return 0

    def _cuMemUnmap(self, address, size) -> int:
        assert self.mapped.pop(address.value)[1] == size.value
        ctypes.memset(address.value, 0xFF, size.value)
        return 0


class FakeCudaPages(CudaPages):
    """Views over the fake's memory: torch takes CUDA's own addresses only."""

    pinned = False

    def view(self, begin: int, size: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(self._base + begin), dtype=torch.uint8)


def _pages(kind: str, fake: FakeCuda | None = None):
    if kind == "host":
        return HostPages(1 << 20)
    return FakeCudaPages(torch.device("cuda", 3), 1 << 20, CudaDriver(3, fake or FakeCuda()))


@pytest.fixture(params=["host", "cuda"])
def arena(request) -> Arena:
    return Arena(_pages(request.param))


def _filled(arena: Arena) -> list[torch.Tensor]:
    shapes = [((3, 5), torch.float32), ((1,), torch.float16), ((4, 2000), torch.bfloat16), ((7,), torch.uint8)]
    tensors = [arena.empty(shape, dtype) for shape, dtype in shapes]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 100 + number)
    return tensors


def test_structures_are_as_large_as_cuda_h_has_them() -> None:
    assert [ctypes.sizeof(kind) for kind in (Location, AllocationFlags, AllocationProp, AccessDesc)] == [8, 8, 32, 12]
    fields = ("type", "requested_handle_types", "location", "win32_handle_meta_data", "alloc_flags")
    assert [getattr(AllocationProp, name).offset for name in fields] == [0, 4, 8, 16, 24]
    flags = ("compression_type", "gpu_direct_rdma_capable", "usage", "reserved")
    assert [getattr(AllocationFlags, name).offset for name in flags] == [0, 1, 2, 4]


def test_tensors_keep_address_and_values_over_a_sleep(arena: Arena, monkeypatch) -> None:
    monkeypatch.setattr(arenas, "CHUNK_BYTES", 3000)
    tensors = _filled(arena)
    before, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    assert all((address - addresses[0]) % ALIGNMENT == 0 for address in addresses)
    for _ in range(2):
        arena.sleep(keep=True)
        assert arena.asleep
        arena.wake_up()
        assert not arena.asleep
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert all(torch.equal(tensor, saved) for tensor, saved in zip(tensors, before))


def test_sleep_without_keep_drops_the_values(arena: Arena) -> None:
    tensors = _filled(arena)
    before = [tensor.clone() for tensor in tensors]
    arena.sleep(keep=False)
    arena.wake_up()
    assert not any(torch.equal(tensor, saved) for tensor, saved in zip(tensors, before))
    tensors[0].fill_(2.0)
    assert float(tensors[0].sum()) == 30.0


def test_memory_is_mapped_in_whole_granules_and_goes_back_in_order() -> None:
    fake = FakeCuda()
    arena = Arena(_pages("cuda", fake))
    assert fake.calls == ["GetAllocationGranularity", "AddressReserve"]
    fake.calls.clear()
    arena.empty((10,), torch.uint8)
    arena.empty((GRANULE,), torch.uint8)
    arena.empty((100,), torch.uint8)
    assert fake.calls == ["Create", "Map", "SetAccess"] * 2, "the third tensor fits behind the second"
    assert sum(fake.handles.values()) == 2 * GRANULE
    fake.calls.clear()
    arena.sleep(keep=False)
    assert fake.calls == ["Unmap", "Release"] * 2
    assert not fake.handles
    fake.calls.clear()
    arena.wake_up()
    assert fake.calls == ["Create", "Map", "SetAccess"] * 2
    arena.close()
    arena.close()
    assert not fake.handles
    assert not fake.ranges


def test_wake_up_without_memory_fails_and_can_be_retried() -> None:
    fake = FakeCuda()
    arena = Arena(_pages("cuda", fake))
    first, second = arena.empty((GRANULE,), torch.uint8).fill_(1), arena.empty((GRANULE,), torch.uint8).fill_(2)
    arena.sleep(keep=True)
    fake.room = GRANULE
    with pytest.raises(MemoryError, match="out of memory"):
        arena.wake_up()
    assert arena.asleep
    assert not fake.handles
    fake.room = 2 * GRANULE
    arena.wake_up()
    assert (int(first.sum()), int(second.sum())) == (GRANULE, 2 * GRANULE)


def test_out_of_memory_and_other_failures_raise() -> None:
    with pytest.raises(MemoryError, match="more than"):
        Arena(_pages("host")).empty((1 << 21,), torch.uint8)
    fake = FakeCuda()
    arena = Arena(_pages("cuda", fake))
    fake._cuMemMap = lambda *_: 719
    with pytest.raises(RuntimeError, match="cuMemMap failed with CUDA error 719"):
        arena.empty((1,), torch.uint8)
    assert not fake.handles


def test_addresses_cost_no_memory() -> None:
    assert HostPages(1 << 42).view((1 << 42) - 8, 8).shape == (8,)


def test_without_room_on_the_host_it_stays_awake(arena: Arena, monkeypatch) -> None:
    tensors = _filled(arena)
    before = [tensor.clone() for tensor in tensors]

    def full(*_, **__) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nlong advice")

    with monkeypatch.context() as broken:
        broken.setattr(torch, "empty", full)
        with pytest.raises(MemoryError, match=r"^no room in host memory: CUDA error: out of memory$"):
            arena.sleep(keep=True)
    assert not arena.asleep
    assert all(torch.equal(tensor, saved) for tensor, saved in zip(tensors, before))
