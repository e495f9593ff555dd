"""The torch_cuda decoder on CPU tensors: several sequences a step, scattered blocks, padding, memory full of NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, GroupBatch
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import BLOCK as BLOCK_OF_ROUND
from pagoda.backends.torch_cuda.kernels.attention.latent_prefill import ExpansionRound, plan_rounds
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles
from pagoda.backends.torch_cuda.kernels.attention.work_list import cut_evenly
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK as CHUNK_OF_STATE
from pagoda.backends.torch_cuda.memory import cache
from pagoda.backends.torch_cuda.memory.offload import Offload, choose_layers
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.model.parameters import Pack
from pagoda.backends.torch_cuda.parallel.tensor_parallel import SINGLE_RANK, Comm, RankShard
from pagoda.backends.torch_cuda.weights.load import Loader
from pagoda.common.backend import Weight
from pagoda.common.engine.kv_cache.spec import KvGroup, kv_layout
from pagoda.common.models.mixers.caches import LatentCache
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.quantization.schemes import Scheme

BLOCK = 4
TILE = 3
CHUNK = 6
SINGLE = 9
"""Tokens at the end of the first sequence that come one by one, the last of them after the other has ended."""
PADDING = 2
"""Sequences of no one in a step of decodes, tokens of no one in any other."""


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory that must not be read: all bits set, which is NaN in every kind of float."""
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
    """Logits [T, V] of sequences that go through the same steps."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Iterable[Weight],
        max_len: int,
        comm: Comm = SINGLE_RANK,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        pack: Pack | None = None,
        device: Device = CPU,
        offload: float = 0.0,
        schemes: Mapping[str, Scheme] | None = None,
    ) -> None:
        self.shard, self.dtype = RankShard(comm.rank, comm.size), cache_dtype or dtype
        shapes = Loader(spec, self.shard, dtype, _nowhere, pack, schemes=schemes).params
        self.on_host = choose_layers(shapes, offload, spec.shared_blocks.values())
        self.offload = Offload(self.on_host, device, poisoned) if offload else None
        allocators = self.offload.allocators() if self.offload else {}
        self.loader = Loader(spec, self.shard, dtype, poisoned, pack, allocators, schemes)
        self.loader.fill(weights)
        self.decoder = CudaDecoder(spec, self.loader.params, device, max_len, comm, offload=self.offload)
        self.layout = kv_layout(spec, BLOCK)

    def logits(self, token_ids: list[int]) -> Tensor:
        """One row per token, of a sequence that another one accompanies."""
        return self.both(token_ids, token_ids[::-1])[0]

    def both(self, first: list[int], other: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of two sequences.

        Half of the first is one chunk, most of the rest another, the last tokens come one by one. The other is cut
        into smaller chunks, so that steps are prefill, then mixed, then decode.
        """
        width, groups = -(-max(len(first), len(other)) // BLOCK), len(self.layout.groups)
        count = 2 * width * groups
        caches = cache.allocate(self.layout, (1 + count,) * len(self.layout.pools), self.dtype, self.shard, poisoned)
        pages = 1 + np.random.default_rng(0).permutation(count).reshape(2, groups, width)
        half = len(first) // 2
        most = max(half, len(first) - SINGLE)
        ends = sorted({half, most, *range(most + 1, len(first) + 1)})
        other_ends = [*range(CHUNK, len(other), CHUNK), len(other)]
        assert len(other_ends) <= len(ends), "the first sequence is under way to the end"
        found: list[Tensor] = []
        other_found: list[Tensor] = []
        for begin, end, span in zip_longest([0, *ends[:-1]], ends, zip([0, *other_ends], other_ends)):
            chunks = [Chunk(first, begin, end, pages[0])]
            if span is not None:
                chunks.append(Chunk(other, *span, pages[1]))
            rows = self.decoder.logits(self.decoder.hidden(self.batch(chunks), caches))
            found.append(rows[: end - begin])
            if span is not None:
                other_found.append(rows[end - begin :][: chunks[1].length])
        return torch.cat(found), torch.cat(other_found)

    def batch(self, chunks: list[Chunk]) -> CudaStepBatch:
        """Chunks of one token first."""
        lengths = np.array([chunk.length for chunk in chunks])
        decodes = int((lengths == 1).argmin()) if (lengths != 1).any() else len(chunks)
        more_tokens, more_seqs = PADDING, PADDING if decodes == len(chunks) else 0
        tokens = [token for chunk in chunks for token in chunk.token_ids[chunk.begin : chunk.end]]
        positions = np.concatenate([np.arange(chunk.begin, chunk.end) for chunk in chunks])
        starts = np.concatenate([[0], np.cumsum(lengths), np.cumsum([1] * more_seqs) + lengths.sum()])
        kv_lens = [chunk.end for chunk in chunks] + [0] * more_seqs
        tiles = make_tiles(lengths.astype(np.int32), decodes, TILE)
        return CudaStepBatch(
            token_ids=_int32(tokens, more_tokens),
            positions=_int32(positions, more_tokens),
            query_start=_int32(starts),
            kv_lens=_int32(kv_lens),
            groups=tuple(
                self._group(number, chunks, more_tokens, more_seqs) for number in range(len(self.layout.groups))
            ),
            num_decodes=decodes + more_seqs,
            tiles=torch.from_numpy(tiles) if len(tiles) else None,
            work=cut_evenly(torch.tensor(kv_lens[: decodes + more_seqs], dtype=torch.int32), 2),
            tile=TILE,
            chunks=torch.from_numpy(make_tiles(lengths.astype(np.int32), decodes, CHUNK_OF_STATE))
            if len(tiles)
            else None,
            rounds=self._rounds(np.array(kv_lens, np.int32), decodes + more_seqs),
        )

    def _rounds(self, kv_lens: np.ndarray, first: int) -> tuple[ExpansionRound, ...]:
        """Of a block of tokens each, so that long sequences need several."""
        if not any(isinstance(group.spec, LatentCache) for group in self.layout.groups):
            return ()
        rounds = plan_rounds(kv_lens, first, BLOCK_OF_ROUND)
        return tuple(ExpansionRound(*map(torch.from_numpy, each)) for each in rounds)

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
