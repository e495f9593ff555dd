"""The order of things on a device: where steps run, how arrays come and go, how a step is captured.

On a GPU steps run on one stream and inputs arrive on another, so that those of the next step are copied while one
runs. On a CPU everything is done at once, and a captured step is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device

Run = Callable[[], None]


class HostToDevice(Protocol):
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


class DeviceToHost(Protocol):
    """A tensor on its way to the host."""

    def array(self) -> npt.NDArray[Any]:
        """Wait for it."""
        ...


class DeviceStream(Protocol):
    """One device's order. Everything that touches the device happens within `running`."""

    device: Device
    captures: int

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is started in here runs on the device in the order in which it is started."""
        ...

    def arrival(self) -> HostToDevice:
        """For a pair of buffers."""
        ...

    def fetch(self, tensor: Tensor) -> DeviceToHost:
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


# A CPU's order: everything is over when the call returns, and a captured step is the function itself.


@dataclass(frozen=True, slots=True)
class _Here:
    """A copy that is on the host already."""

    tensor: Tensor

    def array(self) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array


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

    def arrival(self) -> HostToDevice:
        """At once."""
        return _AtOnce()

    def fetch(self, tensor: Tensor) -> DeviceToHost:
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
