"""Norms, and the parameters of norms and linear layers: what mixers, feed-forward blocks and poolers are built from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last axis, computed in float32."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    unit_offset: bool = False  # The factor is 1 + weight.
    bias: bool = False  # LayerNorm also adds a bias.
    scale: bool = True  # The result is multiplied by a weight.

    @property
    def is_plain(self) -> bool:
        """Whether it is an RMSNorm with weights alone, of whose channels tensor-parallel ranks may have a part each."""
        return self == Norm(self.eps)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    axes: str  # One axis letter per dimension (see `spec`), `.` for none.
    groups: int = 1  # Groups of heads along axis 0, by which checkpoints interleave fused parameters.
    float32: bool = False  # The parameter stays in float32, whatever the dtype of the model's weights.
    scale: float = 1.0  # Factor of the checkpoint's values.

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def norm_params(name: str, norm: Norm | None, width: int, axis: str = "D") -> Iterator[Param]:
    """Yield the weight and bias of a norm over `width` channels; nothing without a norm or a weight."""
    if norm is None or not norm.scale:
        return
    yield Param(name, (width,), axis)
    if norm.bias:
        yield Param(f"{name}_bias", (width,), axis)


def adapter_params(
    name: str, rank: int | None, columns: int, rows: tuple[tuple[str, int, str], ...]
) -> Iterator[Param]:
    """Yield `{name}_adapter` [rank, columns], and for each output (its name, rows and axis) `{output}_adapter_out`.

    Nothing without a rank: the layers have no low-rank adapter.
    """
    if rank is None:
        return
    yield Param(f"{name}_adapter", (rank, columns), ".D")
    for output, count, axis in rows:
        yield Param(f"{output}_adapter_out", (count, rank), f"{axis}.")


def linear_params(
    name: str, rows: int, columns: int, axes: str, bias: bool = False, groups: int = 1
) -> Iterator[Param]:
    """Yield the weight [rows, columns] and the bias [rows] of a linear layer."""
    yield Param(name, (rows, columns), axes, groups)
    if bias:
        yield Param(f"{name}_bias", (rows,), axes[0], groups)


def conv_params(name: str, channels: int, taps: int, axis: str, bias: bool) -> Iterator[Param]:
    """Yield the parameters of a convolution of each channel by itself."""
    yield Param(name, (channels, 1, taps), f"{axis}..")
    if bias:
        yield Param(f"{name}_bias", (channels,), axis)
