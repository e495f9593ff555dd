"""Weight offloading: layers whose weights stay in host memory and are prefetched to the device in every step.

Two device buffers alternate: while a layer computes from one, the weights of the next offloaded layer arrive in the
other. Their addresses are fixed, and on a GPU the copy stream is forked from the step stream and joined by events, so
that a CUDA graph captures a step with its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device, on_wsl
from pagoda.backends.torch_cuda.memory.arena import ALIGNMENT
from pagoda.backends.torch_cuda.model.parameters import Empty, Matrix, RankParams
from pagoda.common.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

BUFFERS: Final = 2
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class HostLayers:
    """Layers whose weights are offloaded to host memory."""

    layers: Mapping[int, tuple[str, ...]]  # layer index -> names of its parameters
    sizes: Mapping[int, int]  # layer index -> bytes

    @property
    def saved(self) -> int:
        """Bytes of device memory saved."""
        return sum(self.sizes.values()) - BUFFERS * max(self.sizes.values(), default=0)


def choose_layers(params: RankParams, gib: float, shared: Collection[int] = ()) -> HostLayers:
    """Return as many layers as fit in `gib`, evenly spaced so that copies overlap computation; none for 0.

    `params` may be on the meta device. `shared`: layers whose input block others use, which stays on the device. Raise
    ConfigError if fewer than three fit: two are on the device anyway.
    """
    if not gib:
        return HostLayers({}, {})
    names: dict[int, tuple[str, ...]] = {}
    sizes: dict[int, int] = {}
    for name, matrix in params.by_name.items():
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            if layer in shared and name.startswith((f"layers.{layer}.block.", f"layers.{layer}.mixers.0.")):
                continue
            names[layer] = (*names.get(layer, ()), name)
            sizes[layer] = sizes.get(layer, 0) + sum(_aligned(part.nbytes) for part in _parts(matrix))
    for count in range(len(names), BUFFERS, -1):
        chosen = [layer for layer in sorted(names) if (layer + 1) * count // len(names) > layer * count // len(names)]
        if sum(sizes[layer] for layer in chosen) <= gib * GIB:
            return HostLayers({layer: names[layer] for layer in chosen}, {layer: sizes[layer] for layer in chosen})
    least = (BUFFERS + 1) * max(sizes.values())
    raise ConfigError(
        "--cpu-offload-gb",
        f"{gib:g} GiB are less than three layers, of which the weights of {BUFFERS} are on the GPU at any time; "
        f"use {least / GIB:.3g} or more, or 0",
    )


class Offload:
    """Host memory for offloaded layers, and their copies during a step."""

    def __init__(self, on_host: HostLayers, device: Device, empty: Empty) -> None:
        """`empty`: allocates on the device. Raise ConfigError if the host has no room."""
        self._layers = on_host.layers
        self._chosen = tuple(on_host.layers)
        on_gpu = device.is_gpu
        pins = device.is_gpu and not on_wsl()
        try:
            self._host = [
                torch.empty(on_host.sizes[layer], dtype=torch.uint8, pin_memory=pins) for layer in self._chosen
            ]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError("--cpu-offload-gb", f"no room in host memory: {reason}; use a smaller value") from None
        self._used = [0] * len(self._chosen)
        largest = max(on_host.sizes.values())
        self._buffers = [empty((largest,), torch.uint8) for _ in range(BUFFERS)]
        self._copies = _StreamCopies(device.torch) if on_gpu else _BlockingCopies()

    def allocators(self) -> dict[str, Empty]:
        """Return, for each offloaded parameter by name, the allocator of its tensors in host memory."""
        return {
            name: partial(self._allocate, number)
            for number, layer in enumerate(self._chosen)
            for name in self._layers[layer]
        }

    def staged(self, params: RankParams) -> RankParams:
        """Return the parameters with the offloaded ones in the device buffers that they are copied to."""
        staged: dict[str, Matrix] = dict(params.by_name)
        for number, layer in enumerate(self._chosen):
            for name in self._layers[layer]:
                staged[name] = self._staged(number, staged[name])
        return RankParams(staged)

    def wrap(self, layers: Sequence[Callable[P, R]]) -> tuple[Callable[P, R], ...]:
        """Return the layers wrapped so that each step starts and awaits the copies it needs."""
        return tuple(self._wrap(index, layer) for index, layer in enumerate(layers))

    def _wrap(self, index: int, layer: Callable[P, R]) -> Callable[P, R]:
        number = self._chosen.index(index) if index in self._chosen else None

        def step(*arguments: P.args, **keywords: P.kwargs) -> R:
            if index == 0:
                self._begin()
            if number is None:
                return layer(*arguments, **keywords)
            self._copies.wait(number % BUFFERS)
            result = layer(*arguments, **keywords)
            self._prefetch_after(number)
            return result

        return step

    def _begin(self) -> None:
        self._copies.begin()
        for number in range(BUFFERS):
            self._copy(number)

    def _prefetch_after(self, number: int) -> None:
        if number + BUFFERS < len(self._chosen):
            self._copies.free(number % BUFFERS)
            self._copy(number + BUFFERS)

    def _copy(self, number: int) -> None:
        host = self._host[number]
        self._copies.copy(number % BUFFERS, host, self._buffers[number % BUFFERS][: len(host)])

    def _allocate(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin = self._used[number]
        size = prod(shape) * dtype.itemsize
        self._used[number] = begin + _aligned(size)
        return self._host[number][begin : begin + size].view(dtype).view(shape)

    def _staged(self, number: int, matrix: Matrix) -> Matrix:
        if isinstance(matrix, Tensor):
            return self._view(number, matrix)
        return matrix.mapped(partial(self._view, number))

    def _view(self, number: int, tensor: Tensor) -> Tensor:
        begin = tensor.data_ptr() - self._host[number].data_ptr()
        buffer = self._buffers[number % BUFFERS]
        return buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _BlockingCopies:
    def begin(self) -> None:
        pass

    def copy(self, buffer: int, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def wait(self, buffer: int) -> None:
        pass

    def free(self, buffer: int) -> None:
        pass


class _StreamCopies:
    """Copies on a CUDA stream beside the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._freed = [torch.cuda.Event() for _ in range(BUFFERS)]

    def begin(self) -> None:
        """Make copies wait for the previous step."""
        self._begun.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._begun)

    def copy(self, buffer: int, host: Tensor, device: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
        self._copied[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        """Make the step stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def free(self, buffer: int) -> None:
        """Allow the next copy into the buffer once the steps so far are done."""
        self._freed[buffer].record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._freed[buffer])


def _parts(matrix: Matrix) -> tuple[Tensor, ...]:
    return (matrix,) if isinstance(matrix, Tensor) else (*matrix.tensors.values(),)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
