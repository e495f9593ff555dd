"""The compiled kernels as operators on tensors, for the decoder and the sampler."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from pagoda.backends.reference.model.numerics import Numerics
from pagoda.common.engine.steps.contract import Int32

_AVAILABLE: Final = importlib.util.find_spec("llvmlite") is not None
if TYPE_CHECKING or _AVAILABLE:
    from pagoda.backends.cpu_kernels import draws, rows
    from pagoda.backends.cpu_kernels.attention import paired_attention, tile_attention
    from pagoda.backends.cpu_kernels.attention.paged import Shape
    from pagoda.backends.cpu_kernels.attention.vector_attention import decode_kernel, prefill_kernel
    from pagoda.backends.cpu_kernels.emission.emit import LANES
    from pagoda.backends.cpu_kernels.emission.jit import Kernel, allocate
    from pagoda.backends.cpu_kernels.products import choice
    from pagoda.backends.cpu_kernels.products import paired_products as products
    from pagoda.backends.reference.programs.program import RecordedSteps, RunLayers

if TYPE_CHECKING:
    from pagoda.backends.reference.execution import Prefixes

logger = logging.getLogger(__name__)

_GRAIN: Final = 1 << 15
"""Numbers per thread at least; waking a thread costs some microseconds."""


def operators(numerics: Numerics) -> Operators | None:
    """Return the kernels for the activations' dtype; None without llvmlite, or with --batch-invariant."""
    if not _AVAILABLE:
        logger.info(
            "llvmlite is not installed: products, attention and norms run as torch operators; pip install 'pagoda[cpu]'"
        )
        return None
    if numerics.batch_invariant or numerics.compute not in (torch.float32, torch.bfloat16):
        return None
    return Operators(numerics.compute)


def packed_product(weight: Tensor, bias: Tensor | None, result: torch.dtype) -> products.PackedProduct | None:
    """Return the layer of a bfloat16 weight [out, in] for bfloat16 inputs; None without a kernel for it."""
    if not _AVAILABLE or weight.dtype != torch.bfloat16:
        return None
    return products.PackedProduct(weight, bias, result) if choice.serves(weight.shape[1]) else None


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """The tokens of n rows that may decide a draw, among the first `searched` of the vocabulary."""

    searched: int
    tokens: Tensor
    """int32 [n, m]"""

    counts: Tensor
    """Number of tokens of each row, int64 [n]; above m: there were more than are kept."""

    floors: Tensor
    """The logits over temperature of all other tokens are below this, float32 [n]."""

    totals: Tensor
    """Logsumexp of the logits over temperature, float32 [n]; only `RowSearch.best` writes it."""


def row_search(vocab: int) -> RowSearch | None:
    """Return the search in rows of logits; None without llvmlite."""
    return RowSearch(vocab) if _AVAILABLE else None


class RowSearch:
    """Finds the tokens that may decide a draw. All arguments are of the rows [n] of logits float32 [R, V]."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._searched = vocab // LANES * LANES
        self._candidates = draws.candidates_kernel(self._searched)
        self._best = draws.best_kernel(self._searched)

    def candidates(self, logits: Tensor, rows: Tensor, temperature: Tensor, keys: Tensor) -> FoundTokens:
        """Return, ascending, the tokens that can win with their noise. keys: int32, of the noise."""
        return self._run(self._candidates, draws.MOST_CANDIDATES, logits, rows, temperature, keys.contiguous())

    def best(self, logits: Tensor, rows: Tensor, temperature: Tensor, least: Tensor) -> FoundTokens:
        """Return the best tokens, ascending: `least` int64 to four times as many, if that is possible."""
        return self._run(self._best, draws.MOST_BEST, logits, rows, temperature, least)

    def _run(
        self, kernel: Kernel, most: int, logits: Tensor, rows: Tensor, temperature: Tensor, last: Tensor
    ) -> FoundTokens:
        count = len(rows)
        factor = temperature.reciprocal()
        tokens = torch.empty(count, draws.room(most), dtype=torch.int32)
        counts = torch.empty(count, dtype=torch.int64)
        floors, totals = torch.empty(2, count)
        written = tokens, counts, floors, *((totals,) if kernel is self._best else ())
        pointers = [array.data_ptr() for array in (rows, factor, *written, last)]
        kernel((logits.data_ptr(), logits.stride(0), *pointers), count, _threads(count * self._vocab))
        return FoundTokens(self._searched, tokens[:, :most], counts, floors, totals)


def _threads(numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), numbers // _GRAIN))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators on tensors of one dtype. A method returns None where there is no kernel for a shape."""

    dtype: torch.dtype

    def programs(self, run: RunLayers, max_len: int) -> RecordedSteps:
        """Return the programs of small steps. `run`: computes all layers."""
        return RecordedSteps(run, max_len)

    @property
    def bfloat16(self) -> bool:
        """Whether numbers are bfloat16; else float32."""
        return self.dtype == torch.bfloat16

    def multiplies(self, width: int) -> bool:
        """Whether there are products of inputs of that width, which do not depend on what else is in the step."""
        return self.bfloat16 and choice.serves(width)

    def norm(self, weight: Tensor, eps: float, *, unit_offset: bool) -> Callable[[Tensor], Tensor] | None:
        """Return RMSNorm of x [T, D]; weight [D]."""
        width = weight.shape[-1]
        if weight.ndim != 1 or weight.dtype != self.dtype or width % LANES:
            return None
        weight = weight.contiguous()
        kernel = rows.norm_kernel(width, eps, self.bfloat16, unit_offset)

        def norm(x: Tensor) -> Tensor:
            x = x if x.stride(-1) == 1 else x.contiguous()
            out = allocate(*x.shape, dtype=x.dtype)
            count = x.shape[0]
            arguments = count, x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr()
            kernel(arguments, rows.tasks_of(count), _threads(count * width))
            return out

        return norm

    def head_norm(
        self, shape: HeadShape, eps: float, of_queries: Tensor, of_keys: Tensor, *, unit_offset: bool
    ) -> Callable[[Tensor], Tensor] | None:
        """Return RMSNorm of each head of queries and keys [T, N + K, H]; weights [H]."""
        width = shape.head_dim
        total = shape.heads + shape.kv_heads
        if width % LANES or any(
            weight.shape != (width,) or weight.dtype != self.dtype for weight in (of_queries, of_keys)
        ):
            return None
        kernel = rows.head_norm_kernel(shape.heads, shape.kv_heads, width, eps, self.bfloat16, unit_offset)
        of_queries = of_queries.contiguous()
        of_keys = of_keys.contiguous()

        def norm(heads: Tensor) -> Tensor:
            count = heads.shape[0]
            out = allocate(count, total, width, dtype=heads.dtype)
            read = heads.data_ptr(), heads.stride(0), of_queries.data_ptr()
            kernel((count, *read, out.data_ptr(), of_keys.data_ptr()), rows.tasks_of(count), _threads(out.numel()))
            return out

        return norm

    def gate(self, width: int, activation: str) -> Callable[[Tensor], Tensor] | None:
        """Return act(gate) * up of gate and up side by side [T, 2F]."""
        if activation not in rows.GATES or width % LANES:
            return None
        kernel = rows.gate_kernel(width, activation, self.bfloat16)

        def gate(both: Tensor) -> Tensor:
            count = both.shape[0]
            out = allocate(count, width, dtype=both.dtype)
            arguments = count, both.data_ptr(), both.stride(0), out.data_ptr()
            kernel(arguments, rows.tasks_of(count), _threads(2 * count * width))
            return out

        return gate

    def gated(self, inner: Callable[[Tensor], Tensor], activation: str) -> Callable[[Tensor], Tensor] | None:
        """Return act(gate) * up [T, F] of the results [T, 2F] of a layer, in one kernel with its product."""
        if activation not in rows.GATES or not isinstance(inner, products.PackedProduct):
            return None
        return inner.gated(activation)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of x and y [T, D]."""
        if x.shape != y.shape or not (x.is_contiguous() and y.is_contiguous()) or x.shape[1] % LANES:
            return x + y
        out = allocate(*x.shape, dtype=x.dtype)
        count, width = x.shape
        arguments = count, x.data_ptr(), y.data_ptr(), out.data_ptr()
        rows.sum_kernel(width, self.bfloat16)(arguments, rows.tasks_of(count), _threads(count * width))
        return out

    def cache_writer(self, shape: HeadShape, rotary: int) -> CacheWriter | None:
        """Return RoPE of `rotary` channels with the write into the cache."""
        if shape.head_dim % LANES or shape.value_dim % LANES or rotary % (2 * LANES):
            return None
        kernel = rows.cache_kernel(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, rotary, self.bfloat16)
        return CacheWriter(kernel, shape)

    def attends(self, shape: HeadShape) -> bool:
        """Whether there is attention of heads of that shape."""
        return self._attention_shape(shape, LANES).supported

    def attention(self, shape: HeadShape, block_size: int) -> PagedAttend:
        """Return attention over a cache with blocks of that size."""
        return _paged_attend(self._attention_shape(shape, block_size))

    def _attention_shape(self, shape: HeadShape, block_size: int) -> Shape:
        return Shape(
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            kv_heads=shape.kv_heads,
            group=shape.heads // shape.kv_heads,
            block_size=block_size,
            scale=shape.scale,
            bfloat16=self.bfloat16,
        )


class CacheWriter:
    """RoPE of queries in place, of keys into the cache; values into the cache."""

    def __init__(self, kernel: Kernel, shape: HeadShape) -> None:
        self._kernel = kernel
        self._shape = shape

    def __call__(
        self,
        heads: Tensor,
        values: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        write_slots: Tensor,
        cache: tuple[Tensor, ...],
    ) -> None:
        """Heads [T, N + K, H], values [T, K, V]; tables: cos and sin [positions, rotary]; the cache's K and V."""
        count = heads.shape[0]
        keys, cached_values = cache
        cos, sin = (0, 0) if tables is None else (table.data_ptr() for table in tables)
        arguments = (
            count,
            heads.data_ptr(),
            heads.stride(0),
            values.data_ptr(),
            values.stride(0),
            cos,
            sin,
            positions.data_ptr(),
            write_slots.data_ptr(),
            keys.data_ptr(),
            cached_values.data_ptr(),
            keys.shape[1],
        )
        self._kernel(arguments, rows.tasks_of(count), _threads(count * self._shape.heads * self._shape.head_dim))


class PagedAttend:
    """Attention of a step's sequences: those with one token first, then prompts."""

    def __init__(self, shape: Shape) -> None:
        paired = paired_attention.supported(shape)
        tiled = tile_attention.supported(shape)
        self._shape = shape = tile_attention.of_many_rows(shape) if tiled else shape
        self._decodes_paired = paired_attention.decodes(shape)
        self._decode = paired_attention.decode_kernel(shape) if self._decodes_paired else decode_kernel(shape)
        if self._decodes_paired:  # These kernels are compiled here, so that no request waits for them.
            prefix_kernel = tile_attention.prefix_kernel if tiled else paired_attention.prefix_kernel
            self._prefix = prefix_kernel(shape), paired_attention.decode_kernel(shape, resumes=True)
        if tiled:
            self._prefill = tile_attention.prompt_kernel(shape)
        else:
            self._prefill = paired_attention.prompt_kernel(shape) if paired else prefill_kernel(shape)
        self.tile_tokens = shape.tile_tokens

    def __call__(
        self,
        queries: Tensor,
        cache: tuple[Tensor, ...],
        table: Int32,
        context: Int32,
        decodes: int,
        tiles: Int32,
        window: int | None,
        prefixes: Callable[[int, int], Prefixes | None] | None = None,
    ) -> Tensor:
        """Queries [T, N, H] -> [T, N*V]. `decodes`: sequences with one token; `tiles`: see StepBatch.

        `prefixes`: `ViewBatch.prefixes`.
        """
        shape = self._shape
        keys, values = cache
        width = shape.kv_heads * shape.group * shape.value_dim
        out = allocate(queries.shape[0], width, dtype=queries.dtype)
        positions = np.ascontiguousarray(context, np.int32)
        threads = torch.get_num_threads() if queries.shape[0] > 1 else 1
        arrays = queries.data_ptr(), queries.stride(0), keys.data_ptr(), values.data_ptr(), keys.shape[1]
        read = *arrays, table.ctypes.data, table.shape[1]
        written = window or 0, out.data_ptr(), width
        shared = prefixes(decodes, self.tile_tokens) if prefixes is not None and self._decodes_paired else None
        if shared is not None:
            states = self._prefix_states(read, shared, threads)
            more = shared.begins.ctypes.data, shared.states.ctypes.data, states.data_ptr()
            arguments = *read, positions.ctypes.data, *written, *more
            self._prefix[1](arguments, decodes * shape.kv_heads, threads)
        elif decodes:
            self._decode((*read, positions.ctypes.data, *written), decodes * shape.kv_heads, threads)
        if len(tiles):
            self._prefill((*read, tiles.ctypes.data, *written), len(tiles) * shape.kv_heads, threads)
        return out

    def _prefix_states(self, read: tuple[int, ...], shared: Prefixes, threads: int) -> Tensor:
        """Return the states after shared prefixes [members, N, V + 32]."""
        shape = self._shape
        width = shape.value_dim + 2 * LANES
        states = allocate(len(shared.members), shape.kv_heads * shape.group, width, dtype=torch.float32)
        row = states.stride(0)
        arguments = *read, shared.tiles.ctypes.data, 0, states.data_ptr(), row, shared.members.ctypes.data
        self._prefix[0](arguments, len(shared.tiles) * shape.kv_heads, threads)
        return states


@cache
def _paged_attend(shape: Shape) -> PagedAttend:
    return PagedAttend(shape)
