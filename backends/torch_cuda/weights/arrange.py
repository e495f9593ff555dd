"""Where a rank stores the canonical parameters: its tensors, fused and sharded, and the slices that each holds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where a canonical parameter is stored: `tensor[into] = parameter[cut]`, one slice per axis."""

    tensor: str
    into: tuple[slice, ...]
    cut: tuple[slice, ...]
    cut_inputs: bool = False  # the last axis has a part of the parameter's alone


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The tensors of a rank."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by tensor
    placements: dict[str, TensorSlice | None] = field(default_factory=dict)  # by canonical parameter; None: not here
    matrices: set[str] = field(default_factory=set)  # tensors that may be packed: [out, in], experts [E, out, in]
    small_matrices: set[str] = field(default_factory=set)  # tensors that are packed only if the checkpoint has them so
    float32: set[str] = field(default_factory=set)  # tensors that are kept in float32
    filled: dict[str, int] = field(default_factory=dict)  # vocabulary tensors: rows without padding
