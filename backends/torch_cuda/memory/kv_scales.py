"""Scales of an 8-bit KV cache, found by looking at what a model stores.

One sequence of random tokens goes through the model with a cache in the activations' numbers; the largest K and V of
each layer, with some room above, are mapped to the largest 8-bit number. Larger ones, should they come, are cut.
Every rank finds the scales of its own heads.
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
ROOM: Final = 1.25
"""How much larger than the largest number seen a number may be."""


@torch.inference_mode()
def find_scales(
    decoder: CudaDecoder, caches: Mapping[int, CudaLayerCache], layout: KvLayout, *, max_len: int, tile: int
) -> None:
    """Set `k_scale` and `v_scale` of every layer's cache, in place.

    Runs one step of at most `max_len` tokens. `tile`: query tokens of a tile that suit every layer.
    """
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
        first, behind = int(blocks[cache.group][0]), int(blocks[cache.group][-1]) + 1
        for scale, seen in ((cache.k_scale, plain[layer].keys), (cache.v_scale, plain[layer].values)):
            assert scale is not None, "the cache has 8 bits"
            largest = torch.finfo(cache.keys.dtype).max
            scale.copy_(
                (seen[first:behind].float().abs().max() * (ROOM / largest)).clamp(min=torch.finfo(torch.float32).tiny)
            )


def _one_sequence(
    ids: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32], block_size: int, tile: int, device: torch.device
) -> CudaStepBatch:
    """A prefill of ids [T] into the blocks [groups, W] of each group, from their first slot on."""
    length = np.array([len(ids)], np.int32)
    every = torch.arange(len(ids), dtype=torch.int32, device=device)

    def sent(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return CudaStepBatch(
        token_ids=sent(ids),
        positions=every,
        query_start=sent(np.append(np.zeros(1, np.int32), length)),
        kv_lens=sent(length),
        groups=tuple(GroupBatch(sent(row[None]), every + int(row[0]) * block_size) for row in blocks),
        num_decodes=0,
        tiles=sent(make_tiles(length, 0, tile)),
        splits=1,
        tile=tile,
    )
