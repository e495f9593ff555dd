"""The kernel of causal convolutions over recurrent states. Sums are float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import row_stride
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP, silu
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep

CONVOLVED: Final = 16
"""Tokens of a program."""
CHANNELS: Final = 128
"""Channels of a program."""


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """A rank's parameters of a convolution."""

    conv: Tensor  # [C, 1, taps]
    bias: Tensor | None = None  # [C]


@triton.jit
def convolved(
    x, factor, x_stride, begin, first, count, conv, bias, tail, has_tail, channel, width,
    PADDED: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Return the convolution of at most `width` channels from `channel` on, float32 [BLOCK_T, PADDED].

    Of tokens `first`.. of a sequence with `count`, whose rows of x and factor, which x is multiplied by, start at
    `begin`. UPDATE: replace the tail.
    """
    lane = tl.arange(0, PADDED)
    inside = lane < width
    lane += channel
    offset = first + tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, PADDED], tl.float32)
    for tap in tl.static_range(TAPS):
        at = offset - (TAPS - 1) + tap
        source = (begin + at).to(tl.int64)[:, None] * x_stride + lane[None, :]
        mask = ((at >= 0) & (offset < count))[:, None] & inside[None, :]
        value = tl.load(x + source, mask, 0.0).to(tl.float32)
        if factor is not None:
            value *= tl.load(factor + source, mask, 0.0).to(tl.float32)
        old = tail + lane[None, :] * (TAPS - 1) + (at + TAPS - 1)[:, None]
        value += tl.load(old, ((at < 0) & (offset < count) & has_tail)[:, None] & inside[None, :], 0.0)
        total += value * tl.load(conv + lane * TAPS + tap, inside, 0.0).to(tl.float32)[None, :]
    if UPDATE:
        tl.debug_barrier()  # every thread has read the tail
        for index in tl.static_range(TAPS - 1):  # a later one is read before it is written
            at = count - (TAPS - 1) + index
            source = (begin + at).to(tl.int64) * x_stride + lane
            value = tl.load(x + source, inside & (at >= 0), 0.0).to(tl.float32)
            if factor is not None:
                value *= tl.load(factor + source, inside & (at >= 0), 0.0).to(tl.float32)
            value += tl.load(tail + lane * (TAPS - 1) + at + TAPS - 1, inside & (at < 0) & has_tail, 0.0)
            tl.store(tail + lane * (TAPS - 1) + index, value, inside)
    if bias is not None:
        total += tl.load(bias + lane, inside, 0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def convolve(
    x, factor, gate, conv, bias, states, tables, query_start, kv_lens, chunks, out, x_stride, table_stride,
    C: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_T tokens of a chunk, BLOCK_C channels); without `chunks`, (sequence of one token, BLOCK_C).

    KEEP: the program of a sequence's first tokens also replaces its tail, which no other one reads.
    """
    channel = tl.program_id(1) * BLOCK_C
    if chunks is None:
        sequence = tl.program_id(0)
        first = 0
        begin = tl.program_id(0)
        count = 1
    else:
        PARTS: tl.constexpr = CHUNK // BLOCK_T
        chunk = chunks + 2 * (tl.program_id(0) // PARTS)
        sequence = tl.load(chunk)
        first = tl.load(chunk + 1) + tl.program_id(0) % PARTS * BLOCK_T
        begin = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - begin
    lane = channel + tl.arange(0, BLOCK_C)
    offset = first + tl.arange(0, BLOCK_T)
    rows = (begin + offset).to(tl.int64)[:, None]
    mask = (offset < count)[:, None] & (lane < C)[None, :]
    to = out + rows * C + lane[None, :]
    kv_len = tl.load(kv_lens + sequence)
    if kv_len == 0:
        tl.store(to, tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty), mask)
        return
    if first >= count:
        return
    tail = states + tl.load(tables + sequence.to(tl.int64) * table_stride).to(tl.int64) * E
    has_tail = kv_len > count
    if first == 0:
        mixed = convolved(
            x, factor, x_stride, begin, first, count, conv, bias, tail, has_tail, channel, C - channel, BLOCK_C, TAPS,
            BLOCK_T, KEEP,
        )  # fmt: skip
    else:
        mixed = convolved(
            x, factor, x_stride, begin, first, count, conv, bias, tail, has_tail, channel, C - channel, BLOCK_C, TAPS,
            BLOCK_T, False,
        )  # fmt: skip
    if gate is None:
        mixed = silu(mixed)
    else:
        mixed *= tl.load(gate + rows * x_stride + lane[None, :], mask, 0.0).to(tl.float32)
    tl.store(to, mixed.to(out.dtype.element_ty), mask)


_CONVOLVE: Final = BoundKernel(convolve)


def causal_convolution(
    x: Tensor, step: StateStep, weights: ConvolutionWeights, gates: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the convolved channels [T, C]; replace the tails."""
    channels, _, taps = weights.conv.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    factor, gate = (None, None) if gates is None else gates
    parts = triton.cdiv(channels, CHANNELS)
    kept = {"C": channels, "E": step.states.stride(0), "TAPS": taps, "BLOCK_C": CHANNELS, "CHUNK": CHUNK}

    def launch(programs: int, chunks: Tensor | None, tokens: int, warps: int) -> None:
        _CONVOLVE[(programs, parts)](
            x=x,
            factor=factor,
            gate=gate,
            conv=weights.conv,
            bias=weights.bias,
            states=step.states,
            tables=step.tables,
            query_start=step.query_start,
            kv_lens=step.kv_lens,
            chunks=chunks,
            out=out,
            x_stride=row_stride(x),
            table_stride=step.tables.stride(0),
            **kept,
            KEEP=step.keeps_states,
            BLOCK_T=tokens,
            num_warps=warps,
        )

    if step.num_decodes:
        launch(step.num_decodes, None, 1, 1)
    if step.chunks is not None:
        launch(len(step.chunks) * (CHUNK // CONVOLVED), step.chunks, CONVOLVED, WARPS)
    return out


WARPS: Final = 4
