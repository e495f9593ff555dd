"""A CPU's order: everything is over when the call returns, and a captured step is the function itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.stream import Arrival, Departure, Run


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
