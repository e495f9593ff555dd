"""The torch_cuda decoder on CPU tensors: several sequences a step, scattered blocks, padding, memory full of NaN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda import cache
from pagoda.backends.torch_cuda.batch import Batch, GroupBatch
from pagoda.backends.torch_cuda.comm import ALONE, Comm
from pagoda.backends.torch_cuda.decoder import Decoder
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.kernels.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.parameters import Pack
from pagoda.backends.torch_cuda.sharding import Shard
from pagoda.backends.torch_cuda.weights import Loader
from pagoda.common.backend import Weight
from pagoda.common.engine.kv_spec import KvGroup, kv_layout
from pagoda.common.models.spec import ModelSpec

BLOCK = 4
TILE = 3
CHUNK = 6
SINGLE = 9
"""Tokens at the end that come one by one, the last of them after the other sequence has ended."""
PADDING = 2
"""Sequences of no one in a step of decodes, tokens of no one in any other."""


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that nobody may read before it is written: all bits set, which is NaN in every kind of float."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)


@dataclass(frozen=True)
class Chunk:
    """Tokens [begin, end) of a sequence, and its pages in each group."""

    token_ids: list[int]
    begin: int
    end: int
    pages: np.ndarray  # [groups, W]

    @property
    def length(self) -> int:
        return self.end - self.begin


class TorchCudaModel:
    """Logits [T, V] of one sequence that another one accompanies."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[Weight],
        max_len: int,
        comm: Comm = ALONE,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        pack: Pack | None = None,
        device: Device = CPU,
        offload: float = 0.0,
    ) -> None:
        self.shard, self.dtype = Shard(comm.rank, comm.size), cache_dtype or dtype
        shapes = Loader(spec, self.shard, dtype, _nowhere, pack).params
        self.on_host = choose_layers(shapes, offload)
        self.offload = Offload(self.on_host, device, poisoned) if offload else None
        elsewhere = self.offload.places() if self.offload else {}
        self.loader = Loader(spec, self.shard, dtype, poisoned, pack, elsewhere)
        self.loader.fill(weights)
        self.decoder = Decoder(spec, self.loader.params, device, max_len, comm, self.offload)
        self.layout = kv_layout(spec, BLOCK)

    def logits(self, token_ids: list[int]) -> Tensor:
        """One row per token: half of the sequence as one chunk, most of the rest as another, the last token by token.

        Another sequence is prefilled beside it chunk by chunk, so that steps are prefill, then mixed, then decode.
        """
        width, groups = -(-len(token_ids) // BLOCK), len(self.layout.groups)
        count = 2 * width * groups
        caches = cache.allocate(self.layout, 1 + count, self.dtype, self.shard, poisoned)
        pages = 1 + np.random.default_rng(0).permutation(count).reshape(2, groups, width)
        other, found = token_ids[::-1], []
        begin, half, otherwise = 0, len(token_ids) // 2, 0
        most = max(half, len(token_ids) - SINGLE)
        for end in sorted({half, most, *range(most + 1, len(token_ids) + 1)}):
            chunks = [Chunk(token_ids, begin, end, pages[0])]
            if otherwise < len(other):
                chunks.append(Chunk(other, otherwise, min(otherwise + CHUNK, len(other)), pages[1]))
                otherwise = chunks[-1].end
            hidden = self.decoder.hidden(self.batch(chunks), caches)
            found.append(self.decoder.logits(hidden[: end - begin]))
            begin = end
        return torch.cat(found)

    def batch(self, chunks: list[Chunk]) -> Batch:
        """Chunks of one token first."""
        lengths = np.array([chunk.length for chunk in chunks])
        decodes = int((lengths == 1).argmin()) if (lengths != 1).any() else len(chunks)
        more_tokens, more_seqs = PADDING, PADDING if decodes == len(chunks) else 0
        tokens = [token for chunk in chunks for token in chunk.token_ids[chunk.begin : chunk.end]]
        positions = np.concatenate([np.arange(chunk.begin, chunk.end) for chunk in chunks])
        starts = np.concatenate([[0], np.cumsum(lengths), np.cumsum([1] * more_seqs) + lengths.sum()])
        kv_lens = [chunk.end for chunk in chunks] + [0] * more_seqs
        tiles = make_tiles(lengths.astype(np.int32), decodes, TILE)
        return Batch(
            token_ids=_int32(tokens, more_tokens),
            positions=_int32(positions, more_tokens),
            query_start=_int32(starts),
            kv_lens=_int32(kv_lens),
            groups=tuple(
                self._group(number, chunks, more_tokens, more_seqs) for number in range(len(self.layout.groups))
            ),
            num_decodes=decodes + more_seqs,
            tiles=torch.from_numpy(tiles) if len(tiles) else None,
            splits=2,
            tile=TILE,
        )

    def _group(self, number: int, chunks: list[Chunk], more_tokens: int, more_seqs: int) -> GroupBatch:
        slots: list[int] = []
        for chunk in chunks:
            positions = np.arange(chunk.begin, chunk.end)
            slots += (chunk.pages[number][positions // BLOCK] * BLOCK + positions % BLOCK).tolist()
        tables = np.zeros((len(chunks) + more_seqs, chunks[0].pages.shape[1]), np.int32)
        for row, chunk in enumerate(chunks):
            first, end = _first_page(self.layout.groups[number], chunk), -(-chunk.end // BLOCK)
            tables[row, first:end] = chunk.pages[number][first:end]
        return GroupBatch(torch.from_numpy(tables), _int32(slots, more_tokens))


def _first_page(group: KvGroup, chunk: Chunk) -> int:
    """The first page that any layer of the group sees; what lies before has been given back."""
    if None in group.seen:
        return 0
    return max(chunk.begin - max(window for window in group.seen if window) + 1, 0) // BLOCK


def _nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(values: Iterable[int], padding: int = 0) -> Tensor:
    return torch.tensor([*values, *[0] * padding], dtype=torch.int32)
