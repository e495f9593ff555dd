"""What the rest of the backend asks a kind of mixer for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from torch import Tensor

from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.ops import MixerStep
from pagoda.common.models.rope import Rope

RotaryTables = Mapping[Rope | None, Tensor | None]
"""See `rotary_tables`."""

SpecT = TypeVar("SpecT")

PROJECTIONS: Final[Mapping[str, str]] = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "out"}
"""`CudaMixerOps.fused` of the projections that most kinds have."""

CONVOLUTIONS: Final[Mapping[str, str]] = {"q_conv": "conv", "k_conv": "conv", "v_conv": "conv"}
"""The same of the convolutions of their channels."""


def _nothing(spec: object, build: CudaBuildContext, prefix: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class CudaMixerOps(Generic[SpecT]):
    """A kind of mixer: how a rank stores its parameters, and its two steps."""

    kind: type[SpecT]

    paged: Callable[[SpecT, RotaryTables, CudaBuildContext, str, tuple[int, ...]], MixerStep]
    """(spec, tables, build, prefix of its parameters, numbers of its caches) -> the mixer over the paged caches.

    Its other inputs: a CudaStepBatch and the caches by number.
    """

    packed: Callable[[SpecT, RotaryTables, CudaBuildContext, str, int | None], MixerStep]
    """(spec, tables, build, prefix, number of its cache if several layers read it) -> the mixer within each prompt.

    Its other inputs: PackedPrompts and the keys and values that layers share.
    """

    fused: Mapping[str, str]
    """Last part of a canonical parameter's name -> that of its fused tensor; biases follow their matrices."""

    matrices: frozenset[str]
    """Last parts of the names of its tensors that may be packed."""

    small_matrices: frozenset[str] = frozenset()
    """The same of those that stay packed where a checkpoint holds them so."""

    key_heads: Callable[[SpecT], int] = lambda spec: 1
    """Heads that an axis "K" of the parameters consists of."""

    only_reader: Callable[[SpecT, CudaBuildContext, str], str | None] = _nothing
    """(spec, build, prefix) -> the linear map that alone reads the mixer's input, which may then be rounded."""

    fixed_shapes: Callable[[SpecT], bool] = lambda spec: False
    """Whether the inputs of a step have shapes that depend on its number of tokens alone."""
