"""The order of things on a device: where steps run, how arrays come and go, how a step is captured.

On a GPU steps run on one stream and inputs arrive on another, so that those of the next step are copied while one
runs. On a CPU everything is done at once, and a captured step is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device

Run = Callable[[], None]

_WARM_UPS = 2
"""Runs before a capture: Triton compiles, cuBLAS takes its workspace."""


class Arrival(Protocol):
    """The order between a pair of buffers' writers and readers, one pair used again and again."""

    def wait_for_copy(self) -> None:
        """The host waits until the last copy is over, and may write the host's buffer again."""
        ...

    def copy(self, host: Tensor, device: Tensor) -> None:
        """Copy once the steps that read the device's buffer are over; steps started from now on see the copy."""
        ...

    def was_read(self) -> None:
        """The steps started until now are the last that read this copy."""
        ...


class Departure(Protocol):
    """A tensor on its way to the host."""

    def array(self) -> npt.NDArray[Any]:
        """Wait for it."""
        ...


class Stream(Protocol):
    """One device's order. Everything that touches the device happens within `running`."""

    device: Device
    captures: int

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is started in here runs on the device in the order in which it is started."""
        ...

    def arrival(self) -> Arrival:
        """For a pair of buffers."""
        ...

    def fetch(self, tensor: Tensor) -> Departure:
        """Copy to the host what the tensor holds after the steps started until now. Returns at once."""
        ...

    def pool(self) -> Any:
        """Memory that captured steps share, as only one runs at a time; it goes back with the last of them."""
        ...

    def capture(self, run: Run, pool: Any) -> Run:
        """What does again, with whatever the same tensors hold then, what `run` does now. Runs it, too."""
        ...

    def host(self, size: int) -> Tensor:
        """Int32 [size] in memory of the host that the device can copy from."""
        ...

    def synchronize(self) -> None:
        """Wait for everything."""
        ...

    def close(self) -> None:
        """Memory that nobody uses any more goes back to the system."""
        ...


def make_stream(device: Device) -> Stream:
    """The order of a device."""
    return GpuStream(device) if device.is_gpu else CpuStream(device)


@dataclass(frozen=True, slots=True)
class _Here:
    """A copy that is on the host already."""

    tensor: Tensor

    def array(self) -> npt.NDArray[Any]:
        return _numpy(self.tensor)


class _AtOnce:
    """Copies that are over when they have begun."""

    def wait_for_copy(self) -> None:
        """Nothing to wait for."""

    def copy(self, host: Tensor, device: Tensor) -> None:
        """Over on return."""
        device.copy_(host)

    def was_read(self) -> None:
        """Steps are over when they have begun."""


class CpuStream:
    """Implements Stream: everything is done when the call returns."""

    def __init__(self, device: Device) -> None:
        self.device, self.captures = device, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Without gradients."""
        with torch.inference_mode():
            yield

    def arrival(self) -> Arrival:
        """At once."""
        return _AtOnce()

    def fetch(self, tensor: Tensor) -> Departure:
        """A copy."""
        return _Here(tensor.clone())

    def pool(self) -> Any:
        """Any memory."""
        return None

    def capture(self, run: Run, pool: Any) -> Run:
        """The function itself, which has to live with what its tensors hold when it is called again."""
        self.captures += 1
        run()
        return run

    def host(self, size: int) -> Tensor:
        """Any memory."""
        return torch.zeros(size, dtype=torch.int32)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing is kept back."""


class _ByEvents:
    """Implements Arrival on two streams."""

    def __init__(self, steps: torch.cuda.Stream, copies: torch.cuda.Stream) -> None:
        self._steps, self._copies = steps, copies
        self._copied, self._read = torch.cuda.Event(), torch.cuda.Event()

    def wait_for_copy(self) -> None:
        """Returns at once before the first copy."""
        self._copied.synchronize()

    def copy(self, host: Tensor, device: Tensor) -> None:
        """On the stream of copies, between the readers of before and those of after."""
        self._copies.wait_event(self._read)
        with torch.cuda.stream(self._copies):
            device.copy_(host, non_blocking=True)
        self._copied.record(self._copies)
        self._steps.wait_event(self._copied)

    def was_read(self) -> None:
        """Marks the place in the stream of steps."""
        self._read.record(self._steps)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A copy into pinned memory that is over when the event is."""

    tensor: Tensor
    arrived: torch.cuda.Event

    def array(self) -> npt.NDArray[Any]:
        self.arrived.synchronize()
        return _numpy(self.tensor)


class GpuStream:
    """Implements Stream by CUDA's streams, events and graphs."""

    def __init__(self, device: Device) -> None:
        self.device, self.captures = device, 0
        self._steps, self._copies = torch.cuda.Stream(device.torch), torch.cuda.Stream(device.torch)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On the stream of steps, without gradients."""
        with torch.inference_mode(), torch.cuda.stream(self._steps):
            yield

    def arrival(self) -> Arrival:
        """By events."""
        return _ByEvents(self._steps, self._copies)

    def fetch(self, tensor: Tensor) -> Departure:
        """Into pinned memory, which torch keeps for the next."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._steps)
        return _OnItsWay(host, arrived)

    def pool(self) -> Any:
        """A pool of torch's, for graphs alone."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Run, pool: Any) -> Run:
        """A CUDA graph, after runs on the same stream, which is none of CUDA's default one."""
        self.captures += 1
        for _ in range(_WARM_UPS):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, self._steps, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def host(self, size: int) -> Tensor:
        """Pinned."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def synchronize(self) -> None:
        """The whole device."""
        torch.cuda.synchronize(self.device.torch)

    def close(self) -> None:
        """After the last step is over."""
        self.synchronize()
        torch.cuda.empty_cache()


def _numpy(tensor: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.asarray(tensor)
    return array
