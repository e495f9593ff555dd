"""Grouped-query attention on a rank: over the paged cache, within prompts, and to selected blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pagoda.backends.torch_cuda.model.mixers.attention.block_sparse import CudaBlockAttention
from pagoda.backends.torch_cuda.model.mixers.attention.packed import CudaPackedAttention
from pagoda.backends.torch_cuda.model.mixers.attention.paged import CudaAttention
from pagoda.backends.torch_cuda.model.mixers.interface import PROJECTIONS, CudaMixerOps, RotaryTables
from pagoda.backends.torch_cuda.model.parts import CudaBuildContext
from pagoda.backends.torch_decoder.ops import MixerStep
from pagoda.common.models.mixers import Attention, Mixer


def _paged(
    spec: Attention, tables: RotaryTables, build: CudaBuildContext, prefix: str, numbers: tuple[int, ...]
) -> MixerStep:
    if spec.blocks is not None:
        return CudaBlockAttention(spec, tables, build, prefix, numbers)
    return CudaAttention(spec, tables[spec.rope], build, prefix, numbers[0])


def _only_reader(spec: Attention, build: CudaBuildContext, prefix: str) -> str | None:
    others = spec.blocks is not None or spec.output_gate or build.params.get(f"{prefix}.adapter") is not None
    return None if others else f"{prefix}.qkv"


def attentions(mixers: Iterable[Mixer]) -> tuple[Attention, ...]:
    """Return the distinct attention mixers, which keep or read K and V."""
    return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, Attention)))


ATTENTION: Final = CudaMixerOps(
    Attention,
    _paged,
    CudaPackedAttention,
    fused={**PROJECTIONS, **dict.fromkeys(("q_adapter", "k_adapter", "v_adapter"), "adapter")},
    matrices=frozenset({"qkv", "gate", "out"}),
    small_matrices=frozenset({"blocks.q", "blocks.k"}),
    key_heads=lambda spec: spec.kv_heads,
    only_reader=_only_reader,
    fixed_shapes=lambda spec: spec.blocks is None,
)
