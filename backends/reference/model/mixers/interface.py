"""What the rest of the backend asks a kind of mixer for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagoda.backends.reference.programs.operators import Operators
from pagoda.backends.reference.weights.arrange import NamedWeights
from pagoda.backends.torch_decoder.ops import MixerStep

SpecT = TypeVar("SpecT")
ParamsT = TypeVar("ParamsT")


@dataclass(frozen=True, slots=True)
class MixerBuild:
    """How mixers over the paged cache are built."""

    batch_invariant: bool = False
    native: Operators | None = None


@dataclass(frozen=True, slots=True)
class MixerOps(Generic[SpecT, ParamsT]):
    """A kind of mixer: its parameters, and its two steps.

    `load`: (weights, prefix of their names, spec) -> parameters. `paged`: (spec, parameters, numbers of its caches,
    build) -> the mixer over the paged caches, of x [T, D], a StepBatch, the caches by number and the rotations.
    `packed`: (spec, parameters, number of its cache if several layers read it) -> the mixer within each prompt, of
    x [T, D], PackedPrompts, the rotations and the keys and values that layers share.
    """

    kind: type[SpecT]
    load: Callable[[NamedWeights, str, SpecT], ParamsT]
    paged: Callable[[SpecT, ParamsT, tuple[int, ...], MixerBuild], MixerStep]
    packed: Callable[[SpecT, ParamsT, int | None], MixerStep]
