"""What the decoder is assembled from: a backend's functions on rows, over its parameters by name.

Axis letters: T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pagoda.common.models.mixers import Mixer
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import Activation, Mlp, Moe

Linear = Callable[[Tensor], Tensor]
"""[T, in] -> [T, out]."""

Stream = tuple[Tensor | None, Tensor]
"""(residual stream [T, D], None for zero; update [T, D] to be added to it): the sum is fused into the next norm."""

NormStep = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(update [T, D], residual [T, D] or None) -> (their sum normalised, their sum)."""

RoundingNorm = Callable[[Tensor, Tensor | None], tuple[Any, Tensor]]
"""As NormStep, but the normalised sum may be rows that the backend has rounded for the one linear map that reads it."""

MixerStep = Callable[..., Tensor]
"""(x [T, D], the mixers' other inputs) -> [T, D]."""

LayerStep = Callable[..., Stream]
"""(stream, the mixers' other inputs) -> stream."""

Routed = Callable[[Tensor, Tensor], Tensor]
"""(x, input of the router, both [T, D]) -> the output of a mixture's routed experts [T, D]."""


class DecoderOps(Protocol):
    """A backend's functions, over parameters of a rank under the names of their canonical or fused tensors."""

    @property
    def table_dtype(self) -> torch.dtype:
        """Dtype of the embedding table."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        ...

    def has(self, name: str) -> bool:
        """Return whether the model has a parameter."""
        ...

    def get(self, name: str) -> Tensor | None:
        """Return a small parameter, or None if the model has none of the name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a small parameter that the model has."""
        ...

    def linear(self, name: str) -> Linear:
        """Return the linear map `name`."""
        ...

    def norm(self, spec: Norm | None, name: str) -> NormStep:
        """Return the norm `name`; without a spec, the sum alone."""
        ...

    def rounding_norm(self, spec: Norm | None, name: str, reader: str | None) -> RoundingNorm:
        """Return the norm `name`, which may round its result for the linear map `reader`, its only one."""
        ...

    def split_norm(self, spec: Norm, name: str, channels: int) -> Linear:
        """Return the plain norm `name` of x [T, n], of whose `channels` each rank has a part."""
        ...

    def activation(self, name: Activation) -> Linear:
        """Return the activation of x [T, n]."""
        ...

    def rows(self, name: str, token_ids: Tensor) -> Tensor:
        """Return the rows [T, n] of an embedding table, those of `embed` with what the tokens' adapters add."""
        ...

    def add(self, residual: Tensor | None, update: Tensor) -> Tensor:
        """Return their sum [T, D]."""
        ...

    def add_both(self, residual: Tensor | None, first: Tensor, second: Tensor) -> Stream:
        """Return the stream of a residual stream and two updates."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return the sigmoid of x [T, n]."""
        ...

    def summed(self, name: str) -> Linear:
        """Return the linear map `name`, of whose inputs each rank has a part, with results summed over the ranks."""
        ...

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class BlockMakers:
    """How a backend makes the blocks of a layer. All take the prefix of the block's parameters."""

    mixer: Callable[[Mixer, str, tuple[int, ...]], MixerStep]  # the last: numbers of its caches
    mlp: Callable[[Mlp, str, Linear, Linear], Linear]  # of its two products; not for learned activations
    routed: Callable[[Moe, str, Tensor | None], Routed]
    # A rank's part of the routed experts' output. The last: factors on the experts' weights [E], or None.
    only_reader: Callable[[Mixer, str], str | None]  # the linear map that alone reads the mixer's input, if any
