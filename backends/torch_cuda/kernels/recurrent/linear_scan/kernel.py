"""The kernels of linear recurrences with a decay per head.

`step` updates the states of sequences with one token. A prefill goes by chunks (SSD, arXiv 2405.21060, section 6):
`score` computes the products within all chunks at once; `scan` passes the state from chunk to chunk. States and sums
are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, arguments_of, row_stride
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP, chunk_rows, decay_between, softplus
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep

STEP_VALUES: Final = 32
"""Value channels of a program of `step`."""
SCAN_STATE: Final = 4096
"""Elements of the state that a program of `scan` keeps in registers."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """A rank's heads, and where their q, k and v lie among the C channels of a token."""

    heads: int
    groups: int  # of consecutive heads, which read the same q and k
    key_dim: int
    value_dim: int
    channels: int
    q_at: int
    k_at: int
    v_at: int
    tail: int  # elements of a sequence's state before its first head's [key_dim, value_dim]

    @property
    def elements(self) -> int:
        """Elements of the state of a sequence."""
        return self.tail + self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class DecayWeights:
    """A rank's small parameters of a layer, float32 [N]."""

    rate: Tensor
    offset: Tensor | None = None  # None: the decay is constant
    skip: Tensor | None = None
    limit: tuple[float, float] = (0.0, math.inf)


@triton.jit
def _sizes(scalars, rate, offset, rows, real, head, low, high, stride):
    """Return the sizes and log decays of tokens `rows` [n], both 0 where not `real`, float32."""
    factor = tl.load(rate + head).to(tl.float32)
    if scalars is None:
        size = tl.where(real, 1.0, 0.0)
        decay = -factor * size
    else:
        x = tl.load(scalars + rows * stride + head, real, 0.0).to(tl.float32) + tl.load(offset + head).to(tl.float32)
        size = tl.where(real, tl.minimum(tl.maximum(softplus(x), low), high), 0.0)
        decay = -tl.exp(factor) * size
    return size, decay


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def step(
    qkv, scalars, rate, offset, skip, states, tables, kv_lens, out, low, high, qkv_stride, scalar_stride, table_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, V: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (head and block of its value channels, sequence): the recurrence for one token, in place."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    token = tl.program_id(1)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, K_WIDTH)
    kept = value < V
    to = out + token.to(tl.int64) * (HEADS * V) + head * V + value
    if tl.load(kv_lens + token) == 0:
        tl.store(to, tl.zeros([BLOCK_V], out.dtype.element_ty), kept)
        return
    is_new = tl.load(kv_lens + token) == 1
    row = qkv + token.to(tl.int64) * qkv_stride
    group = head // (HEADS // GROUPS)
    q = tl.load(row + Q_AT + group * K + channel, channel < K, 0.0).to(tl.float32)
    k = tl.load(row + K_AT + group * K + channel, channel < K, 0.0).to(tl.float32)
    v = tl.load(row + V_AT + head * V + value, kept, 0.0).to(tl.float32)
    size, decay = _sizes(scalars, rate, offset, token.to(tl.int64), True, head, low, high, scalar_stride)
    block = tl.load(tables + token.to(tl.int64) * table_stride).to(tl.int64)
    at = states + block * E + TAIL + head * (K * V) + channel[:, None] * V + value[None, :]
    mask = (channel < K)[:, None] & kept[None, :]
    state = tl.load(at, mask & (not is_new), 0.0)
    state = tl.exp(decay) * state + k[:, None] * (size * v)[None, :]
    tl.store(at, state, mask)
    heads = tl.sum(q[:, None] * state, 0)
    if skip is not None:
        heads += tl.load(skip + head).to(tl.float32) * v
    tl.store(to, heads.to(out.dtype.element_ty), kept)


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def score(
    qkv, scalars, rate, offset, query_start, chunks, scores, low, high, qkv_stride, scalar_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): the products of each query with the keys up to it, times their sizes, decayed."""
    head = tl.program_id(1)
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    channel = tl.arange(0, K_WIDTH)
    mask = real[:, None] & (channel < K)[None, :]
    at = qkv + rows[:, None] * qkv_stride + head // (HEADS // GROUPS) * K + channel[None, :]
    q = tl.load(at + Q_AT, mask, 0.0)
    k = tl.load(at + K_AT, mask, 0.0)
    size, decay = _sizes(scalars, rate, offset, rows, real, head, low, high, scalar_stride)
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    near = tl.dot(q, tl.trans(k), input_precision="ieee") * decay_between(decay, CHUNK) * size[None, :]
    to = scores + (rows * HEADS + head)[:, None] * CHUNK + column
    tl.store(to, tl.where(row >= column, near, 0.0).to(scores.dtype.element_ty), real[:, None])


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def scan(
    qkv, scalars, rate, offset, skip, states, tables, query_start, kv_lens, scores, out, low, high,
    qkv_stride, scalar_stride, table_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, V: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Program (head and block of its value channels, sequence): the state from chunk to chunk, and the heads.

    KEEP: replace the states.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    sequence = tl.program_id(1)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, K_WIDTH)
    group = head // (HEADS // GROUPS)
    block = tl.load(tables + sequence.to(tl.int64) * table_stride).to(tl.int64)
    at = states + block * E + TAIL + head * (K * V) + channel[:, None] * V + value[None, :]
    kept = (channel < K)[:, None] & (value < V)[None, :]
    state = tl.load(at, kept & (tl.load(kv_lens + sequence) > count), 0.0)
    for first in range(0, count, CHUNK):
        offset_in = first + tl.arange(0, CHUNK)
        real = offset_in < count
        rows = (begin + offset_in).to(tl.int64)
        mask = real[:, None] & (channel < K)[None, :]
        inside = real[:, None] & (value < V)[None, :]
        of_token = qkv + rows[:, None] * qkv_stride
        q = tl.load(of_token + Q_AT + group * K + channel[None, :], mask, 0.0)
        k = tl.load(of_token + K_AT + group * K + channel[None, :], mask, 0.0)
        v = tl.load(of_token + V_AT + head * V + value[None, :], inside, 0.0)
        near = tl.load(
            scores + (rows * HEADS + head)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], real[:, None], 0.0
        )
        size, decay = _sizes(scalars, rate, offset, rows, real, head, low, high, scalar_stride)
        later = (offset_in + 1 < count) & (offset_in + 1 < first + CHUNK)
        _, after = _sizes(scalars, rate, offset, rows + 1, later, head, low, high, scalar_stride)
        since_start = tl.exp(tl.cumsum(decay, 0))
        to_end = size * tl.exp(tl.cumsum(after, 0, reverse=True))
        far = tl.dot(q, state.to(q.dtype), input_precision="ieee") * since_start[:, None]
        heads = tl.dot(near, v, far, input_precision="ieee")
        if skip is not None:
            heads += tl.load(skip + head).to(tl.float32) * v.to(tl.float32)
        to = out + rows[:, None] * (HEADS * V) + head * V + value[None, :]
        tl.store(to, heads.to(out.dtype.element_ty), inside)
        written = (v.to(tl.float32) * to_end[:, None]).to(v.dtype)
        state = tl.dot(tl.trans(k), written, state * tl.exp(tl.sum(decay, 0)), input_precision="ieee")
    if KEEP:
        tl.store(at, state, kept)


def constants_of(kernel: Any, shape: ScanShape, **others: Any) -> dict[str, Any]:
    """Return those of the constants that a kernel has, by name; E, KEEP and BLOCK_V are in `others`."""
    every = {
        "HEADS": shape.heads,
        "GROUPS": shape.groups,
        "K": shape.key_dim,
        "K_WIDTH": padded(shape.key_dim),
        "V": shape.value_dim,
        "Q_AT": shape.q_at,
        "K_AT": shape.k_at,
        "V_AT": shape.v_at,
        "TAIL": shape.tail,
        "CHUNK": CHUNK,
        **others,
    }
    return arguments_of(kernel, every)


_STEP: Final = BoundKernel(step)
_SCORE: Final = BoundKernel(score)
_SCAN: Final = BoundKernel(scan)


def launch(
    qkv: Tensor, scalars: Tensor | None, batch: StateStep, shape: ScanShape, weights: DecayWeights, chip: Chip
) -> Tensor:
    """Return the heads [T, N*V]; replace the states."""
    tokens = len(qkv)
    heads = shape.heads
    dim = shape.value_dim
    out = torch.empty(tokens, heads * dim, dtype=qkv.dtype, device=qkv.device)
    low, high = weights.limit
    table_stride = batch.tables.stride(0)
    every = {
        "qkv": qkv,
        "scalars": scalars,
        "rate": weights.rate,
        "offset": weights.offset,
        "low": low,
        "high": high,
        "qkv_stride": row_stride(qkv),
        "scalar_stride": heads if scalars is None else row_stride(scalars),
    }
    decodes = batch.num_decodes
    if decodes:
        _STEP[(heads * -(-dim // STEP_VALUES), decodes)](
            **every,
            skip=weights.skip,
            states=batch.states,
            tables=batch.tables,
            kv_lens=batch.kv_lens,
            out=out,
            table_stride=table_stride,
            **constants_of(step, shape, E=batch.states.stride(0), BLOCK_V=STEP_VALUES),
            num_warps=STEP_WARPS,
        )
    if batch.chunks is None:
        return out
    scores = torch.empty(tokens, heads, CHUNK, dtype=qkv.dtype, device=qkv.device)
    _SCORE[(len(batch.chunks), heads)](
        **every,
        query_start=batch.query_start,
        chunks=batch.chunks,
        scores=scores,
        **constants_of(score, shape),
        num_warps=SCORE_WARPS,
    )
    values = scan_values(shape)
    _SCAN[(heads * -(-dim // values), len(batch.kv_lens) - decodes)](
        **every,
        skip=weights.skip,
        **batch.prefill_arguments(),
        scores=scores,
        out=out,
        table_stride=table_stride,
        **constants_of(scan, shape, E=batch.states.stride(0), KEEP=batch.keeps_states, BLOCK_V=values),
        num_warps=SCAN_WARPS,
        num_stages=scan_stages(qkv.dtype, keep=batch.keeps_states),
    )
    return out


def scan_values(shape: ScanShape) -> int:
    """Return the value channels of a program of `scan`."""
    return max(min(SCAN_STATE // padded(shape.key_dim), padded(shape.value_dim)), 16)


def scan_stages(dtype: torch.dtype, *, keep: bool) -> int:
    """Return the stages of `scan` with which its buffers fit every chip: two of float32 need 105 KiB, of 99 on some.

    A call that does not replace the states has the drafts of a step, which are one chunk of each sequence unless there
    are more than CHUNK: a second stage has nothing to load for one chunk, and spills registers on sm_80.
    """
    return 1 if dtype == torch.float32 or not keep else 2


STEP_WARPS: Final = 4
SCORE_WARPS: Final = 8
SCAN_WARPS: Final = 8


def mamba2_shape(heads: int, head_dim: int, groups: int, state_dim: int, taps: int) -> ScanShape:
    """Return the shape of Mamba-2: v, b and c, convolved; the state begins with the convolution's tail."""
    width = heads * head_dim
    states = groups * state_dim
    channels = width + 2 * states
    return ScanShape(
        heads,
        groups,
        state_dim,
        head_dim,
        channels,
        q_at=width + states,
        k_at=width,
        v_at=0,
        tail=channels * (taps - 1),
    )


def lightning_shape(heads: int, head_dim: int) -> ScanShape:
    """Return the shape of lightning attention: q, k and v."""
    width = heads * head_dim
    return ScanShape(heads, heads, head_dim, head_dim, 3 * width, q_at=0, k_at=width, v_at=2 * width, tail=0)
