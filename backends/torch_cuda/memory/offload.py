"""Layers whose weights stay in host memory and are copied to the device ahead of use, in every step.

Two buffers on the device take turns: while a layer computes from one, the next but one layer's weights arrive in the
other's place as soon as that is free. Their addresses are fixed, and on a GPU the stream of copies is forked from the
stream of steps and joined to it by events, so that a step can be captured in a CUDA graph, copies included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import Device
from pagoda.backends.torch_cuda.memory.arena import ALIGNMENT
from pagoda.backends.torch_cuda.model.parameters import Empty, Matrix, RankParams
from pagoda.common.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

BUFFERS: Final = 2
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class HostLayers:
    """Layers whose weights shall be on the host: number -> names of its parameters, and their bytes by number."""

    layers: Mapping[int, tuple[str, ...]]
    sizes: Mapping[int, int]

    @property
    def saved(self) -> int:
        """Bytes of device memory that the model needs less."""
        return sum(self.sizes.values()) - BUFFERS * max(self.sizes.values(), default=0)


def choose_layers(params: RankParams, gib: float) -> HostLayers:
    """As many layers as `gib` hold, evenly spread, so that copies and computation overlap; none for 0.

    `params`: with or without memory. Raises ConfigError when three layers are too many: two are on the device anyway.
    """
    if not gib:
        return HostLayers({}, {})
    names: dict[int, tuple[str, ...]] = {}
    sizes: dict[int, int] = {}
    for name, matrix in params.held.items():
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
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
    """The host's memory for layers, and the copies of them that a step needs. `empty`: memory on the device.

    Raises ConfigError when the host has no room.
    """

    def __init__(self, on_host: HostLayers, device: Device, empty: Empty) -> None:
        self._layers, self._chosen = on_host.layers, tuple(on_host.layers)
        on_gpu = device.is_gpu
        try:
            self._host = [
                torch.empty(on_host.sizes[layer], dtype=torch.uint8, pin_memory=on_gpu) for layer in self._chosen
            ]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError("--cpu-offload-gb", f"no room in host memory: {reason}; use less") from None
        self._used = [0] * len(self._chosen)
        largest = max(on_host.sizes.values())
        self._buffers = [empty((largest,), torch.uint8) for _ in range(BUFFERS)]
        self._order = _StreamOrder(device.torch) if on_gpu else _BlockingCopies()

    def places(self) -> dict[str, Empty]:
        """Where the parameters on the host are to be allocated and loaded: name -> memory for its tensors."""
        return {
            name: partial(self._allocate, number)
            for number, layer in enumerate(self._chosen)
            for name in self._layers[layer]
        }

    def staged(self, params: RankParams) -> RankParams:
        """The parameters as a step finds them, those on the host in the buffer that they are copied to."""
        held: dict[str, Matrix] = dict(params.held)
        for number, layer in enumerate(self._chosen):
            for name in self._layers[layer]:
                held[name] = self._staged(number, held[name])
        return RankParams(held)

    def around(self, layers: Sequence[Callable[P, R]]) -> tuple[Callable[P, R], ...]:
        """The same layers with the copies that they need started ahead and waited for."""
        return tuple(self._around(index, layer) for index, layer in enumerate(layers))

    def _around(self, index: int, layer: Callable[P, R]) -> Callable[P, R]:
        number = self._chosen.index(index) if index in self._chosen else None

        def step(*arguments: P.args, **keywords: P.kwargs) -> R:
            if index == 0:
                self._begin()
            if number is None:
                return layer(*arguments, **keywords)
            self._order.wait(number % BUFFERS)
            found = layer(*arguments, **keywords)
            self._follow(number)
            return found

        return step

    def _begin(self) -> None:
        """The first weights set out."""
        self._order.begin()
        for number in range(BUFFERS):
            self._copy(number)

    def _follow(self, number: int) -> None:
        """Nothing that needs these weights is started any more: others set out for their buffer."""
        if number + BUFFERS < len(self._chosen):
            self._order.free(number % BUFFERS)
            self._copy(number + BUFFERS)

    def _copy(self, number: int) -> None:
        host = self._host[number]
        self._order.copy(number % BUFFERS, host, self._buffers[number % BUFFERS][: len(host)])

    def _allocate(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, size = self._used[number], prod(shape) * dtype.itemsize
        self._used[number] = begin + _aligned(size)
        return self._host[number][begin : begin + size].view(dtype).view(shape)

    def _staged(self, number: int, matrix: Matrix) -> Matrix:
        if isinstance(matrix, Tensor):
            return self._view(number, matrix)
        return replace(matrix, data=self._view(number, matrix.data), scale=self._view(number, matrix.scale))

    def _view(self, number: int, tensor: Tensor) -> Tensor:
        begin = tensor.data_ptr() - self._host[number].data_ptr()
        buffer = self._buffers[number % BUFFERS]
        return buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _BlockingCopies:
    """A CPU's copies: over on return."""

    def begin(self) -> None:
        """Nothing is under way."""

    def copy(self, buffer: int, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def wait(self, buffer: int) -> None:
        """It is there."""

    def free(self, buffer: int) -> None:
        """It is."""


class _StreamOrder:
    """A GPU's copies, on a stream beside that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, torch.cuda.Stream(device)
        self._begun = torch.cuda.Event()
        self._arrived = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._freed = [torch.cuda.Event() for _ in range(BUFFERS)]

    def begin(self) -> None:
        """After everything that the steps before do with the buffers."""
        self._begun.record(torch.cuda.current_stream(self._device))
        self._copies.wait_event(self._begun)

    def copy(self, buffer: int, host: Tensor, device: Tensor) -> None:
        with torch.cuda.stream(self._copies):
            device.copy_(host, non_blocking=True)
        self._arrived[buffer].record(self._copies)

    def wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[buffer])

    def free(self, buffer: int) -> None:
        self._freed[buffer].record(torch.cuda.current_stream(self._device))
        self._copies.wait_event(self._freed[buffer])


def _parts(matrix: Matrix) -> tuple[Tensor, ...]:
    return (matrix,) if isinstance(matrix, Tensor) else (matrix.data, matrix.scale)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
