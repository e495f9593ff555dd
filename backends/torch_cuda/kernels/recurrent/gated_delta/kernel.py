"""The kernels of the gated delta rule.

`convolve` makes q, k and v of both kinds of step, q and k divided by their norms. `step` updates the states of
sequences with one token. A prefill goes by chunks (arXiv 2412.06464, section 3.3): within one the rule is a unit lower
triangular system, which `solve` inverts and `prepare` applies, for all chunks at once, beside `score`. `scan` then
passes the state from chunk to chunk. States and sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, arguments_of, row_stride
from pagoda.backends.torch_cuda.kernels.recurrent.causal_convolution.kernel import convolved
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP, chunk_rows, decay_between, silu, softplus
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.common.models.mixers import GatedDelta

SOLVED: Final = 16
"""Rows of the diagonal blocks that are inverted row by row."""
CONVOLVED: Final = 16
"""Tokens of a program of `convolve`."""
STEP_VALUES: Final = 32
"""Value channels of a program of `step`."""
SCAN_VALUES: Final = 32
"""Value channels of a program of `scan`."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A rank's small parameters of a layer."""

    conv: Tensor  # [C, 1, taps]
    decay_rate: Tensor  # [N] log of the negative factor
    decay_offset: Tensor  # [N]


@triton.jit
def _head(
    x, x_stride, begin, first, count, conv, tail, has_tail, channel, out, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, C: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Write the convolved channels of a head; NORM: divided by their norm, times scale."""
    if first == 0:
        mixed = convolved(
            x, None, x_stride, begin, first, count, conv, None, tail, has_tail, channel, WIDTH, PADDED, TAPS, BLOCK_T,
            KEEP,
        )  # fmt: skip
    else:
        mixed = convolved(
            x, None, x_stride, begin, first, count, conv, None, tail, has_tail, channel, WIDTH, PADDED, TAPS, BLOCK_T,
            False,
        )  # fmt: skip
    mixed = silu(mixed)
    if NORM:
        mixed *= (tl.rsqrt(tl.sum(mixed * mixed, 1) + 1e-6) * scale)[:, None]
    lane = tl.arange(0, PADDED)
    offset = first + tl.arange(0, BLOCK_T)
    to = out + (begin + offset).to(tl.int64)[:, None] * C + channel + lane[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), (offset < count)[:, None] & (lane < WIDTH)[None, :])


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def convolve(
    x, conv, states, tables, query_start, kv_lens, chunks, out, x_stride, table_stride, scale,
    KEY_HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_T tokens of a chunk, head of q, k or v); without `chunks`, (sequence of one token, head).

    KEEP: the program of a sequence's first tokens also replaces its tail, the last inputs, which no other one reads.
    """
    head = tl.program_id(1)
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
    kv_len = tl.load(kv_lens + sequence)
    if (kv_len == 0) | (first >= count):
        return
    tail = states + tl.load(tables + sequence.to(tl.int64) * table_stride).to(tl.int64) * E
    has_tail = kv_len > count
    if head < 2 * KEY_HEADS:
        factor = tl.where(head < KEY_HEADS, scale, 1.0)
        _head(x, x_stride, begin, first, count, conv, tail, has_tail, head * K, out, factor,
              K, K_WIDTH, TAPS, BLOCK_T, C, True, KEEP)  # fmt: skip
    else:
        channel = 2 * KEY_HEADS * K + (head - 2 * KEY_HEADS) * V
        _head(x, x_stride, begin, first, count, conv, tail, has_tail, channel, out, 1.0,
              V, V_WIDTH, TAPS, BLOCK_T, C, False, KEEP)  # fmt: skip


@triton.jit
def _gates(scalars, decay_rate, decay_offset, rows, real, head, HEADS: tl.constexpr):
    """Return beta and the log decay of tokens `rows` [n], both 0 where not `real`, float32."""
    at = scalars + rows * (2 * HEADS) + head
    beta = tl.sigmoid(tl.load(at, real, 0.0).to(tl.float32))
    x = tl.load(at + HEADS, real, 0.0).to(tl.float32) + tl.load(decay_offset + head).to(tl.float32)
    decay = -tl.exp(tl.load(decay_rate + head).to(tl.float32)) * softplus(x)
    return tl.where(real, beta, 0.0), tl.where(real, decay, 0.0)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "kv_lens"])
def step(
    qkv, scalars, decay_rate, decay_offset, states, tables, kv_lens, out, table_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """Program (head and block of its value channels, sequence): the rule for one token, in place."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    token = tl.program_id(1)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    kept = value < V
    to = out + token.to(tl.int64) * (HEADS * V) + head * V + value
    kv_len = tl.load(kv_lens + token)
    if kv_len == 0:
        tl.store(to, tl.zeros([BLOCK_V], out.dtype.element_ty), kept)
        return
    channel = tl.arange(0, K_WIDTH)
    row = qkv + token.to(tl.int64) * C
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(row + key_head * K + channel, channel < K, 0.0).to(tl.float32)
    k = tl.load(row + (KEY_HEADS + key_head) * K + channel, channel < K, 0.0).to(tl.float32)
    v = tl.load(row + 2 * KEY_HEADS * K + head * V + value, kept, 0.0).to(tl.float32)
    one = tl.arange(0, 1)
    betas, decays = _gates(scalars, decay_rate, decay_offset, token.to(tl.int64) + one, one < 1, head, HEADS)
    beta = tl.sum(betas, 0)
    decay = tl.sum(decays, 0)
    block = tl.load(tables + token.to(tl.int64) * table_stride).to(tl.int64)
    at = states + block * E + TAIL + head * (K * V) + channel[:, None] * V + value[None, :]
    mask = (channel < K)[:, None] & kept[None, :]
    state = tl.load(at, mask & (kv_len > 1), 0.0) * tl.exp(decay)
    if BETA_SCALE != 1.0:
        beta *= BETA_SCALE
    written = beta * (v - tl.sum(k[:, None] * state, 0))
    state += k[:, None] * written[None, :]
    tl.store(at, state, mask)
    tl.store(to, tl.sum(q[:, None] * state, 0).to(out.dtype.element_ty), kept)


@triton.jit
def inverse_of(system, CHUNK: tl.constexpr, SOLVED: tl.constexpr, PRECISION: tl.constexpr):
    """Return (1 + system)^-1 of a strictly lower triangular matrix, float32 [CHUNK, CHUNK].

    Diagonal blocks D of SOLVED rows are inverted row by row, all at once; with the rest E below them, X = D^-1 E has
    X^4 = 0, so that (D + E)^-1 = (1 - X) (1 + X^2) D^-1.
    """
    tl.static_assert(CHUNK == 4 * SOLVED)
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    diagonal = row // SOLVED == column // SOLVED
    solved = tl.where(diagonal, -system, 0.0)
    for index in range(1, SOLVED):
        mine = diagonal & (row % SOLVED == index)
        factors = tl.sum(tl.where(mine, solved, 0.0), 0)
        update = tl.sum(factors[:, None] * solved, 0)
        solved += tl.where(mine, update[None, :], 0.0)
    identity = tl.where(row == column, 1.0, 0.0)
    solved += identity
    x = tl.dot(solved, tl.where(diagonal, 0.0, system), input_precision=PRECISION)
    squared = identity + tl.dot(x, x, input_precision=PRECISION)
    return tl.dot(tl.dot(identity - x, squared, input_precision=PRECISION), solved, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def solve(
    qkv, scalars, decay_rate, decay_offset, query_start, chunks, inverses,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, C: tl.constexpr,
    CHUNK: tl.constexpr, SOLVED: tl.constexpr, PRECISION: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): the inverse of the chunk's triangular system, a row [CHUNK] per token and head."""
    head = tl.program_id(1)
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    channel = tl.arange(0, K_WIDTH)
    key_head = KEY_HEADS + head // (HEADS // KEY_HEADS)
    mask = real[:, None] & (channel < K)[None, :]
    k = tl.load(qkv + rows[:, None] * C + key_head * K + channel[None, :], mask, 0.0)
    beta, decay = _gates(scalars, decay_rate, decay_offset, rows, real, head, HEADS)
    if BETA_SCALE != 1.0:
        beta *= BETA_SCALE
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    system = tl.dot(k, tl.trans(k), input_precision="ieee") * decay_between(decay, CHUNK) * beta[:, None]
    inverse = inverse_of(tl.where(row > column, system, 0.0), CHUNK, SOLVED, PRECISION)
    tl.store(inverses + (rows * HEADS + head)[:, None] * CHUNK + column, inverse, real[:, None])


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def prepare(
    qkv, scalars, decay_rate, decay_offset, query_start, chunks, inverses, of_values, of_state,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, V: tl.constexpr,
    V_WIDTH: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): what does not depend on the state. Token i of a chunk adds k_i u_i to the state, where

    u = of_values - of_state (state before the chunk).
    """
    head = tl.program_id(1)
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    channel = tl.arange(0, K_WIDTH)
    value = tl.arange(0, V_WIDTH)
    mask = real[:, None] & (channel < K)[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    beta, decay = _gates(scalars, decay_rate, decay_offset, rows, real, head, HEADS)
    if BETA_SCALE != 1.0:
        beta *= BETA_SCALE
    at = rows * HEADS + head
    KIND: tl.constexpr = of_values.dtype.element_ty
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.load(inverses + at[:, None] * CHUNK + column, real[:, None], 0.0) * beta[None, :]
    inside = real[:, None] & (value < V)[None, :]
    v = tl.load(qkv + rows[:, None] * C + 2 * KEY_HEADS * K + head * V + value[None, :], inside, 0.0)
    u = tl.dot(inverse.to(v.dtype), v, input_precision="ieee")
    tl.store(of_values + at[:, None] * V + value[None, :], u.to(KIND), inside)
    k = tl.load(qkv + rows[:, None] * C + (KEY_HEADS + key_head) * K + channel[None, :], mask, 0.0)
    weights = inverse * tl.exp(tl.cumsum(decay, 0))[None, :]
    w = tl.dot(weights.to(k.dtype), k, input_precision="ieee")
    tl.store(of_state + at[:, None] * K + channel[None, :], w.to(KIND), mask)


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def score(
    qkv, scalars, decay_rate, decay_offset, query_start, chunks, scores,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, C: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): the products of each query with the keys up to it, decayed."""
    head = tl.program_id(1)
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    channel = tl.arange(0, K_WIDTH)
    mask = real[:, None] & (channel < K)[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(qkv + rows[:, None] * C + key_head * K + channel[None, :], mask, 0.0)
    k = tl.load(qkv + rows[:, None] * C + (KEY_HEADS + key_head) * K + channel[None, :], mask, 0.0)
    _, decay = _gates(scalars, decay_rate, decay_offset, rows, real, head, HEADS)
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    near = tl.dot(q, tl.trans(k), input_precision="ieee") * decay_between(decay, CHUNK)
    at = scores + (rows * HEADS + head)[:, None] * CHUNK + column
    tl.store(at, tl.where(row >= column, near, 0.0).to(scores.dtype.element_ty), real[:, None])


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "query_start", "kv_lens"])
def scan(
    qkv, scalars, decay_rate, decay_offset, states, tables, query_start, kv_lens, of_values, of_state, scores, out,
    table_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,
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
    block = tl.load(tables + sequence.to(tl.int64) * table_stride).to(tl.int64)
    at = states + block * E + TAIL + head * (K * V) + channel[:, None] * V + value[None, :]
    kept = (channel < K)[:, None] & (value < V)[None, :]
    state = tl.load(at, kept & (tl.load(kv_lens + sequence) > count), 0.0)
    key_head = head // (HEADS // KEY_HEADS)
    for first in range(0, count, CHUNK):
        offset = first + tl.arange(0, CHUNK)
        real = offset < count
        rows = (begin + offset).to(tl.int64)
        mask = real[:, None] & (channel < K)[None, :]
        q = tl.load(qkv + rows[:, None] * C + key_head * K + channel[None, :], mask, 0.0)
        k = tl.load(qkv + rows[:, None] * C + (KEY_HEADS + key_head) * K + channel[None, :], mask, 0.0)
        _, decay = _gates(scalars, decay_rate, decay_offset, rows, real, head, HEADS)
        later = (offset + 1 < count) & (offset + 1 < first + CHUNK)
        _, after = _gates(scalars, decay_rate, decay_offset, rows + 1, later, head, HEADS)
        since_start = tl.exp(tl.cumsum(decay, 0))
        to_end = tl.exp(tl.cumsum(after, 0, reverse=True))
        token = rows * HEADS + head
        w = tl.load(of_state + token[:, None] * K + channel[None, :], mask, 0.0)
        inside = real[:, None] & (value < V)[None, :]
        u = tl.load(of_values + token[:, None] * V + value[None, :], inside, 0.0).to(tl.float32)
        near = tl.load(scores + token[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], real[:, None], 0.0)
        stored = state.to(k.dtype)
        written = (u - tl.dot(w, stored, input_precision="ieee")).to(k.dtype)
        far = tl.dot((q.to(tl.float32) * since_start[:, None]).to(k.dtype), stored, input_precision="ieee")
        heads = tl.dot(near, written, far, input_precision="ieee")
        tl.store(out + token[:, None] * V + value[None, :], heads.to(out.dtype.element_ty), inside)
        keys = (k.to(tl.float32) * to_end[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(keys), written, state * tl.exp(tl.sum(decay, 0)), input_precision="ieee")
    if KEEP:
        tl.store(at, state, kept)


def shape_constants(spec: GatedDelta, row: int, *, keep: bool = True) -> dict[str, Any]:
    """Return the constants that several kernels have, by name.

    `row`: elements from one block of states to the next. `keep`: replace the states.
    """
    return {
        "HEADS": spec.value_heads,
        "KEY_HEADS": spec.key_heads,
        "K": spec.key_dim,
        "K_WIDTH": padded(spec.key_dim),
        "V": spec.value_dim,
        "V_WIDTH": padded(spec.value_dim),
        "C": spec.channels,
        "E": row,
        "KEEP": keep,
        "TAIL": spec.tail_elements,
        "TAPS": spec.taps,
        "CHUNK": CHUNK,
        "SOLVED": SOLVED,
        "BETA_SCALE": spec.beta_scale,
    }


def constants_of(kernel: Any, shapes: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return those of the constants that a kernel has."""
    return arguments_of(kernel, shapes | others)


def precision(dtype: torch.dtype) -> str:
    """Return how float32 matrices are multiplied: as exactly as the type of the model needs."""
    return "ieee" if dtype == torch.float32 else "tf32x3"


def convolution_arguments(
    x: Tensor, batch: StateStep, conv: Tensor, out: Tensor, key_dim: int
) -> dict[str, Tensor | int | float]:
    """Return the arguments of `convolve`, except for the chunks."""
    return {
        "x": x,
        "conv": conv,
        "states": batch.states,
        "tables": batch.tables,
        "query_start": batch.query_start,
        "kv_lens": batch.kv_lens,
        "out": out,
        "x_stride": row_stride(x),
        "table_stride": batch.tables.stride(0),
        "scale": key_dim**-0.5,
    }


CONVOLVE: Final = BoundKernel(convolve)
_STEP: Final = BoundKernel(step)
_SOLVE: Final = BoundKernel(solve)
_PREPARE: Final = BoundKernel(prepare)
_SCORE: Final = BoundKernel(score)
_SCAN: Final = BoundKernel(scan)


def launch(
    qkv: Tensor,
    scalars: Tensor,
    batch: StateStep,
    spec: GatedDelta,
    weights: DeltaWeights,
    chip: Chip,
) -> Tensor:
    """Return the heads [T, N*V]; replace the states."""
    tables = batch.tables
    query_start = batch.query_start
    chunks = batch.chunks
    num_decodes = batch.num_decodes
    tokens = len(qkv)
    heads = spec.value_heads
    dim = spec.value_dim
    shapes = shape_constants(spec, batch.states.stride(0), keep=batch.keeps_states)
    parts = 2 * spec.key_heads + spec.value_heads
    mixed = torch.empty(tokens, spec.channels, dtype=qkv.dtype, device=qkv.device)
    out = torch.empty(tokens, heads * dim, dtype=qkv.dtype, device=qkv.device)
    gates = {"scalars": scalars, "decay_rate": weights.decay_rate, "decay_offset": weights.decay_offset}
    channels = convolution_arguments(qkv, batch, weights.conv, mixed, spec.key_dim)
    if num_decodes:
        CONVOLVE[(num_decodes, parts)](
            **channels, chunks=None, **constants_of(convolve, shapes, BLOCK_T=1), num_warps=1
        )
        _STEP[(heads * -(-dim // STEP_VALUES), num_decodes)](
            qkv=mixed,
            **gates,
            states=batch.states,
            tables=tables,
            kv_lens=batch.kv_lens,
            out=out,
            table_stride=tables.stride(0),
            **constants_of(step, shapes, BLOCK_V=STEP_VALUES),
        )
    if chunks is None:
        return out
    CONVOLVE[(len(chunks) * (CHUNK // CONVOLVED), parts)](
        **channels, chunks=chunks, **constants_of(convolve, shapes, BLOCK_T=CONVOLVED), num_warps=CONVOLVE_WARPS
    )
    kept = {"dtype": qkv.dtype, "device": qkv.device}
    of_values = torch.empty(tokens, heads, dim, **kept)
    of_state = torch.empty(tokens, heads, spec.key_dim, **kept)
    scores = torch.empty(tokens, heads, CHUNK, **kept)
    inverses = torch.empty(tokens, heads, CHUNK, dtype=torch.float32, device=qkv.device)
    _SOLVE[(len(chunks), heads)](
        qkv=mixed,
        **gates,
        query_start=query_start,
        chunks=chunks,
        inverses=inverses,
        **constants_of(solve, shapes, PRECISION=precision(qkv.dtype)),
        num_warps=SOLVE_WARPS,
    )
    _PREPARE[(len(chunks), heads)](
        qkv=mixed,
        **gates,
        query_start=query_start,
        chunks=chunks,
        inverses=inverses,
        of_values=of_values,
        of_state=of_state,
        **constants_of(prepare, shapes),
        num_warps=PREPARE_WARPS,
    )
    _SCORE[(len(chunks), heads)](
        qkv=mixed,
        **gates,
        query_start=query_start,
        chunks=chunks,
        scores=scores,
        **constants_of(score, shapes),
        num_warps=PREPARE_WARPS,
    )
    later = len(batch.kv_lens) - num_decodes
    _SCAN[(heads * -(-dim // SCAN_VALUES), later)](
        qkv=mixed,
        **gates,
        **batch.prefill_arguments(),
        of_values=of_values,
        of_state=of_state,
        scores=scores,
        out=out,
        table_stride=tables.stride(0),
        **constants_of(scan, shapes, BLOCK_V=SCAN_VALUES),
        num_warps=scan_warps(chip),
        num_stages=scan_stages(mixed.dtype),
    )
    return out


CONVOLVE_WARPS: Final = 4
SOLVE_WARPS: Final = 8
PREPARE_WARPS: Final = 8


def scan_warps(chip: Chip) -> int:
    """Return the warps of `scan` with which no register spills."""
    return 4 if chip.capability >= (10, 0) else 8


def scan_stages(dtype: torch.dtype) -> int:
    """Return the stages of `scan` with which its buffers fit every chip: two of float32 need 161 KiB, of 99 on some."""
    return 1 if dtype == torch.float32 else 2
