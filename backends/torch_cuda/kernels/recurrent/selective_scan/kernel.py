"""The kernels of the selective scan.

`step` updates the states of sequences with one token. In a prefill only the tokens of a chunk go one by one:
`chunk_states` computes what each chunk adds to the state, for all chunks at once, `pass_states` passes the state from
chunk to chunk, `outputs` goes through all chunks again from the states before them. States and sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import arguments_of, row_stride
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP, silu, softplus
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep

CHANNELS: Final = 32
"""Channels of a program, one warp."""


@dataclass(frozen=True, slots=True)
class SelectiveWeights:
    """A rank's small parameters of a layer, float32."""

    rate: Tensor  # [C, K] log of the negative factor
    offset: Tensor  # [C]
    skip: Tensor  # [C]


@dataclass(frozen=True, slots=True)
class Selection:
    """What the tokens choose."""

    size: Tensor  # [T, C] before softplus
    b: Tensor  # [T, K], any row stride, the same as c's
    c: Tensor  # [T, K]


@triton.jit
def _write(state, v, size, b, row, lane, inside, channel, kept, rate, offset, bc_stride, C: tl.constexpr):
    """Return (the state [BLOCK_C, WIDTH] after token `row`, its v [BLOCK_C], its size [BLOCK_C])."""
    x = tl.load(v + row * C + lane, inside, 0.0).to(tl.float32)
    by = softplus(tl.load(size + row * C + lane, inside, 0.0).to(tl.float32) + offset)
    keys = tl.load(b + row * bc_stride + channel, kept, 0.0).to(tl.float32)
    return tl.exp(rate * by[:, None]) * state + (by * x)[:, None] * keys[None, :], x, by


@triton.jit
def _read(state, x, gate, c, skip, out, row, lane, inside, channel, kept, gate_stride, bc_stride, C: tl.constexpr):
    """Write the gated outputs of token `row`."""
    queries = tl.load(c + row * bc_stride + channel, kept, 0.0).to(tl.float32)
    by = tl.load(gate + row * gate_stride + lane, inside, 0.0).to(tl.float32)
    y = (tl.sum(state * queries[None, :], 1) + skip * x) * silu(by)
    tl.store(out + row * C + lane, y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def step(
    v, size, b, c, gate, rate, offset, skip, states, tables, kv_lens, out, bc_stride, gate_stride, table_stride,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (sequence, BLOCK_C channels): the recurrence for one token, in place."""
    token = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = tl.arange(0, WIDTH)
    inside = lane < C
    row = token.to(tl.int64)
    kept = channel < K
    kv_len = tl.load(kv_lens + token)
    if kv_len == 0:
        tl.store(out + row * C + lane, tl.zeros([BLOCK_C], out.dtype.element_ty), inside)
        return
    mask = inside[:, None] & kept[None, :]
    at = lane[:, None] * K + channel[None, :]
    block = tl.load(tables + row * table_stride).to(tl.int64)
    state = tl.load(states + block * E + TAIL + at, mask & (kv_len > 1), 0.0)
    rates = -tl.exp(tl.load(rate + at, mask, 0.0))
    offsets = tl.load(offset + lane, inside, 0.0)
    state, x, _ = _write(state, v, size, b, row, lane, inside, channel, kept, rates, offsets, bc_stride, C)
    tl.store(states + block * E + TAIL + at, state, mask)
    skips = tl.load(skip + lane, inside, 0.0)
    _read(state, x, gate, c, skips, out, row, lane, inside, channel, kept, gate_stride, bc_stride, C)


@triton.jit
def _chunk(chunks, query_start, CHUNK: tl.constexpr):
    """Return (the first row of chunk `program_id(0)`, its tokens, its place among the chunks' states).

    A place is of no other chunk, and follows that of the chunk before in the sequence.
    """
    chunk = chunks + 2 * tl.program_id(0)
    sequence = tl.load(chunk)
    first = tl.load(chunk + 1)
    begin = tl.load(query_start + sequence) + first
    count = tl.minimum(tl.load(query_start + sequence + 1) - begin, CHUNK)
    return begin.to(tl.int64), count, (begin // CHUNK + sequence).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def chunk_states(
    v, size, b, rate, offset, query_start, chunks, kept_states, totals, bc_stride,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, BLOCK_C channels): the state after the chunk from a state of zeros, and the sum of its sizes."""
    lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = tl.arange(0, WIDTH)
    inside = lane < C
    kept = channel < K
    begin, count, place = _chunk(chunks, query_start, CHUNK)
    if count <= 0:
        return  # The place may be that of another chunk.
    mask = inside[:, None] & kept[None, :]
    at = lane[:, None] * K + channel[None, :]
    rates = -tl.exp(tl.load(rate + at, mask, 0.0))
    offsets = tl.load(offset + lane, inside, 0.0)
    state = tl.zeros([BLOCK_C, WIDTH], tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    for index in range(0, count):
        state, _, by = _write(
            state, v, size, b, begin + index, lane, inside, channel, kept, rates, offsets, bc_stride, C
        )  # fmt: skip
        total += by
    tl.store(kept_states + place * (C * K) + at, state, mask)
    tl.store(totals + place * C + lane, total, inside)


@triton.jit(do_not_specialize=["table_stride", "first_sequence"], do_not_specialize_on_alignment=PER_STEP)
def pass_states(
    rate, states, tables, query_start, kv_lens, kept_states, totals, table_stride, first_sequence,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr, BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, BLOCK_C channels): replace what each chunk adds by the state before it.

    KEEP: replace the states, too.
    """
    sequence = tl.program_id(0) + first_sequence
    lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = tl.arange(0, WIDTH)
    inside = lane < C
    mask = inside[:, None] & (channel < K)[None, :]
    at = lane[:, None] * K + channel[None, :]
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    block = tl.load(tables + sequence.to(tl.int64) * table_stride).to(tl.int64)
    state = tl.load(states + block * E + TAIL + at, mask & (tl.load(kv_lens + sequence) > count), 0.0)
    rates = -tl.exp(tl.load(rate + at, mask, 0.0))
    for first in range(0, count, CHUNK):
        place = ((begin + first) // CHUNK + sequence).to(tl.int64)
        here = kept_states + place * (C * K) + at
        added = tl.load(here, mask, 0.0)
        total = tl.load(totals + place * C + lane, inside, 0.0)
        tl.store(here, state, mask)
        state = tl.exp(rates * total[:, None]) * state + added
    if KEEP:
        tl.store(states + block * E + TAIL + at, state, mask)


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def outputs(
    v, size, b, c, gate, rate, offset, skip, query_start, chunks, kept_states, out, bc_stride, gate_stride,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, BLOCK_C channels): the outputs of the chunk from the state before it."""
    lane = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = tl.arange(0, WIDTH)
    inside = lane < C
    kept = channel < K
    begin, count, place = _chunk(chunks, query_start, CHUNK)
    mask = inside[:, None] & kept[None, :]
    at = lane[:, None] * K + channel[None, :]
    rates = -tl.exp(tl.load(rate + at, mask, 0.0))
    offsets = tl.load(offset + lane, inside, 0.0)
    skips = tl.load(skip + lane, inside, 0.0)
    state = tl.load(kept_states + place * (C * K) + at, mask, 0.0)
    for index in range(0, count):
        row = begin + index
        state, x, _ = _write(state, v, size, b, row, lane, inside, channel, kept, rates, offsets, bc_stride, C)
        _read(state, x, gate, c, skips, out, row, lane, inside, channel, kept, gate_stride, bc_stride, C)


def constants_of(kernel: Any, channels: int, states: int, elements: int, **others: Any) -> dict[str, Any]:
    """Return those of the constants that a kernel has, by name; `elements`: of a state."""
    every = {
        "C": channels,
        "K": states,
        "WIDTH": triton.next_power_of_2(states),
        "TAIL": elements - channels * states,
        "BLOCK_C": CHANNELS,
        "CHUNK": CHUNK,
        **others,
    }
    return arguments_of(kernel, every)


_STEP: Final = BoundKernel(step)
_CHUNK_STATES: Final = BoundKernel(chunk_states)
_PASS_STATES: Final = BoundKernel(pass_states)
_OUTPUTS: Final = BoundKernel(outputs)


def launch(v: Tensor, gate: Tensor, chosen: Selection, batch: StateStep, weights: SelectiveWeights) -> Tensor:
    """Return the gated outputs [T, C]; replace the states."""
    channels, states = weights.rate.shape
    out = torch.empty_like(v)
    elements = batch.states.shape[1]
    parts = triton.cdiv(channels, CHANNELS)
    table_stride = batch.tables.stride(0)
    first = batch.num_decodes
    written = {
        "v": v,
        "size": chosen.size,
        "b": chosen.b,
        "rate": weights.rate,
        "offset": weights.offset,
        "bc_stride": row_stride(chosen.b),
    }
    read = {"c": chosen.c, "gate": gate, "skip": weights.skip, "out": out, "gate_stride": row_stride(gate)}
    if first:
        _STEP[(first, parts)](
            **written,
            **read,
            states=batch.states,
            tables=batch.tables,
            kv_lens=batch.kv_lens,
            table_stride=table_stride,
            **constants_of(step, channels, states, elements, E=batch.states.stride(0)),
            num_warps=1,
        )
    if batch.chunks is None:
        return out
    places = len(v) // CHUNK + len(batch.kv_lens)
    like = {"dtype": torch.float32, "device": v.device}
    kept = torch.empty(places, channels, states, **like)
    totals = torch.empty(places, channels, **like)
    spans = {"query_start": batch.query_start, "chunks": batch.chunks}
    _CHUNK_STATES[(len(batch.chunks), parts)](
        **written,
        **spans,
        kept_states=kept,
        totals=totals,
        **constants_of(chunk_states, channels, states, elements),
        num_warps=1,
    )
    _PASS_STATES[(len(batch.kv_lens) - first, parts)](
        rate=weights.rate,
        states=batch.states,
        tables=batch.tables,
        query_start=batch.query_start,
        kv_lens=batch.kv_lens,
        kept_states=kept,
        totals=totals,
        table_stride=table_stride,
        first_sequence=first,
        **constants_of(pass_states, channels, states, elements, E=batch.states.stride(0), KEEP=batch.keeps_states),
        num_warps=1,
    )
    _OUTPUTS[(len(batch.chunks), parts)](
        **written,
        **read,
        **spans,
        kept_states=kept,
        **constants_of(outputs, channels, states, elements),
        num_warps=1,
    )
    return out
