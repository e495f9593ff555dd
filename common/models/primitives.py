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
    unit_offset: bool = False  # multiply by (1 + weight)
    bias: bool = False  # LayerNorm only


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    axes: str  # one axis letter per dimension (see `spec`), `.` for none
    groups: int = 1  # groups of heads along axis 0, by which checkpoints interleave fused parameters

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def norm_params(name: str, norm: Norm | None, width: int, axis: str = "D") -> Iterator[Param]:
    """Yield the weight and bias of a norm over `width` channels; nothing without a norm."""
    if norm is None:
        return
    yield Param(name, (width,), axis)
    if norm.bias:
        yield Param(f"{name}_bias", (width,), axis)


def linear_params(
    name: str, rows: int, columns: int, axes: str, bias: bool = False, groups: int = 1
) -> Iterator[Param]:
    """Yield the weight [rows, columns] and the bias [rows] of a linear layer."""
    yield Param(name, (rows, columns), axes, groups)
    if bias:
        yield Param(f"{name}_bias", (rows,), axes[0], groups)
