"""Calibration of the scales of an 8-bit KV cache.

One sequence of random tokens runs through the model with a cache of the activations' type; the largest K and V of each
layer, times a margin, map to the largest 8-bit value. Larger values saturate. Each rank calibrates its own heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, GroupBatch
from pagoda.backends.torch_cuda.kernels.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache, allocate
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.common.engine.kv_cache.spec import KvLayout

TOKENS: Final = 512
MARGIN: Final = 1.25


@torch.inference_mode()
def calibrate_kv_scales(
    decoder: CudaDecoder, caches: Mapping[int, CudaLayerCache], layout: KvLayout, *, max_len: int, tile: int
) -> None:
    """Set `k_scale` and `v_scale` of every layer's cache, in place, from one step of at most `max_len` tokens."""
    build, tokens = decoder.build, min(TOKENS, max_len)
    pages, groups = -(-tokens // layout.block_size), len(layout.groups)
    blocks = 1 + np.arange(groups * pages, dtype=np.int32).reshape(groups, pages)
    device = build.device.torch

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    plain = allocate(layout, 1 + groups * pages, decoder.embed.table.dtype, build.shard, zeros)
    ids = np.random.default_rng(0).integers(decoder.spec.vocab, size=tokens, dtype=np.int32)
    decoder.hidden(_one_sequence(ids, blocks, layout.block_size, tile, device), plain)
    for layer, cache in caches.items():
        first, end = int(blocks[cache.group][0]), int(blocks[cache.group][-1]) + 1
        for scale, observed in ((cache.k_scale, plain[layer].keys), (cache.v_scale, plain[layer].values)):
            assert scale is not None, "only an 8-bit cache has scales"
            largest = torch.finfo(cache.keys.dtype).max
            peak = observed[first:end].float().abs().max()
            scale.copy_((peak * (MARGIN / largest)).clamp(min=torch.finfo(torch.float32).tiny))


def _one_sequence(
    ids: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32], block_size: int, tile: int, device: torch.device
) -> CudaStepBatch:
    """Return a prefill of ids [T] into the blocks [groups, W] of each group, from their first slot on."""
    length = np.array([len(ids)], np.int32)
    every = torch.arange(len(ids), dtype=torch.int32, device=device)

    def to_device(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return CudaStepBatch(
        token_ids=to_device(ids),
        positions=every,
        query_start=to_device(np.append(np.zeros(1, np.int32), length)),
        kv_lens=to_device(length),
        groups=tuple(GroupBatch(to_device(row[None]), every + int(row[0]) * block_size) for row in blocks),
        num_decodes=0,
        tiles=to_device(make_tiles(length, 0, tile)),
        splits=1,
        tile=tile,
    )
