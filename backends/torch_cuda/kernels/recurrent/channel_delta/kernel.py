"""The kernels of the gated delta rule with a decay per channel.

The convolution is the gated delta rule's. `log_decays` computes the decays of all tokens. `step` updates the states of
sequences with one token. In a prefill, `products` computes the decayed products within all chunks, of the keys for the
triangular system, which `invert` inverts and `prepare` applies, and of the queries; `scan` then passes the state from
chunk to chunk. States, decays and sums are float32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip, arguments_of, row_stride
from pagoda.backends.torch_cuda.kernels.recurrent.chunks import PER_STEP, chunk_rows, softplus
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta import kernel as delta
from pagoda.backends.torch_cuda.kernels.recurrent.gated_delta.kernel import DeltaWeights
from pagoda.backends.torch_cuda.kernels.recurrent.state_step import CHUNK, StateStep
from pagoda.common.models.mixers import KimiDelta

inverse_of = delta.inverse_of
ELEMENTS: Final = 1024
"""Channels of a program of `log_decays`."""
VALUES: Final = 32
"""Value channels of a program of `step` and `scan`."""


@triton.jit
def log_decays(
    decay, decay_rate, decay_offset, out,
    W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Program (token, BLOCK channels): -exp(decay_rate) softplus(decay + decay_offset).

    With a BOUND: BOUND sigmoid(exp(decay_rate) (decay + decay_offset)).
    """
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < W
    at = tl.program_id(0).to(tl.int64) * W + lane
    x = tl.load(decay + at, inside, 0.0).to(tl.float32) + tl.load(decay_offset + lane, inside, 0.0)
    rate = tl.exp(tl.load(decay_rate + lane // K, inside, 0.0))
    log_decay = -rate * softplus(x) if BOUND is None else BOUND * tl.sigmoid(rate * x)
    tl.store(out + at, log_decay, inside)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def step(
    qkv, beta, decays, states, tables, kv_lens, out, beta_stride, table_stride,
    HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (head and block of its value channels, sequence): the rule for one token, in place."""
    BLOCKS: tl.constexpr = (K + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    token = tl.program_id(1)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, K_WIDTH)
    kept = value < K
    row = token.to(tl.int64)
    to = out + (row * HEADS + head) * K + value
    kv_len = tl.load(kv_lens + token)
    if kv_len == 0:
        tl.store(to, tl.zeros([BLOCK_V], out.dtype.element_ty), kept)
        return
    at = qkv + (row * 3 * HEADS + head) * K
    q = tl.load(at + channel, channel < K, 0.0).to(tl.float32)
    k = tl.load(at + HEADS * K + channel, channel < K, 0.0).to(tl.float32)
    v = tl.load(at + 2 * HEADS * K + value, kept, 0.0).to(tl.float32)
    by = tl.sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    decay = tl.load(decays + (row * HEADS + head) * K + channel, channel < K, 0.0)
    block = tl.load(tables + row * table_stride).to(tl.int64)
    place = states + block * E + TAIL + head * (K * K) + channel[:, None] * K + value[None, :]
    mask = (channel < K)[:, None] & kept[None, :]
    state = tl.load(place, mask & (kv_len > 1), 0.0) * tl.exp(decay)[:, None]
    written = by * (v - tl.sum(k[:, None] * state, 0))
    state += k[:, None] * written[None, :]
    tl.store(place, state, mask)
    tl.store(to, tl.sum(q[:, None] * state, 0).to(out.dtype.element_ty), kept)


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def products(
    qkv, beta, decays, query_start, chunks, out, beta_stride,
    HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, CHUNK: tl.constexpr, SOLVED: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): the products of each query with the keys up to it, the decays in between applied.

    Or, not QUERIES, of each key times its beta with the keys before it. Across blocks of SOLVED tokens both sides decay
    to the later block's start; within one, the keys decay token by token. So no decay is the quotient of two others.
    """
    head = tl.program_id(1)
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    channel = tl.arange(0, K_WIDTH)
    place = tl.arange(0, CHUNK)
    of_key = channel < K
    mask = real[:, None] & of_key[None, :]
    KIND: tl.constexpr = qkv.dtype.element_ty
    keys = qkv + (HEADS + head) * K + channel[None, :]
    k = tl.load(keys + rows[:, None] * (3 * HEADS * K), mask, 0.0)
    left = k.to(tl.float32)
    if QUERIES:
        left = tl.load(keys + rows[:, None] * (3 * HEADS * K) - HEADS * K, mask, 0.0).to(tl.float32)
    at = decays + head * K + channel[None, :]
    decay = tl.load(at + rows[:, None] * (HEADS * K), mask, 0.0)
    next_real = tl.sum(real.to(tl.int32), 0) > place + 1
    after = tl.load(at + (rows + 1)[:, None] * (HEADS * K), next_real[:, None] & of_key[None, :], 0.0)
    near = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(SOLVED, CHUNK, SOLVED):
        mine = (place >= start) & (place < start + SOLVED)
        since = tl.exp(tl.cumsum(tl.where(mine[:, None], decay, 0.0), 0))
        until = tl.exp(tl.cumsum(tl.where((place + 1 < start)[:, None], after, 0.0), 0, reverse=True))
        rights = tl.where((place < start)[:, None], k.to(tl.float32) * until, 0.0)
        lefts = tl.where(mine[:, None], left * since, 0.0)
        near = tl.dot(lefts.to(KIND), tl.trans(rights.to(KIND)), near, input_precision="ieee")
    local = place % SOLVED
    between = tl.zeros([CHUNK, K_WIDTH], tl.float32) + 1.0
    count = tl.sum(real.to(tl.int32), 0)
    for index in range(0, SOLVED):
        column = SOLVED - 1 - index
        other = rows - local + column
        here = (place - local + column < count)[:, None] & of_key[None, :]
        later = (place - local + column + 1 < count) & (local > column)
        passed = tl.load(at + (other + 1)[:, None] * (HEADS * K), later[:, None] & of_key[None, :], 0.0)
        between *= tl.exp(passed)
        key = tl.load(keys + other[:, None] * (3 * HEADS * K), here, 0.0).to(tl.float32)
        product = tl.where(local >= column, tl.sum(left * key * between, 1), 0.0)
        near += tl.where(place[None, :] == (place - local + column)[:, None], product[:, None], 0.0)
    if not QUERIES:
        by = tl.sigmoid(tl.load(beta + rows * beta_stride + head, real, 0.0).to(tl.float32))
        near = tl.where(place[:, None] > place[None, :], near * by[:, None], 0.0)
    to = out + (rows * HEADS + head)[:, None] * CHUNK + place[None, :]
    tl.store(to, near.to(out.dtype.element_ty), real[:, None])


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def invert(
    systems, query_start, chunks,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SOLVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): replace the chunk's triangular system by the inverse of one plus it."""
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    at = systems + (rows * HEADS + tl.program_id(1))[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    system = tl.load(at, real[:, None], 0.0)
    tl.store(at, inverse_of(system, CHUNK, SOLVED, PRECISION), real[:, None])


@triton.jit(do_not_specialize_on_alignment=["query_start", "chunks"])
def prepare(
    qkv, beta, decays, query_start, chunks, systems, of_values, of_state, beta_stride,
    HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head): what does not depend on the state; see `gated_delta.prepare`."""
    head = tl.program_id(1)
    rows, real = chunk_rows(chunks, query_start, CHUNK)
    channel = tl.arange(0, K_WIDTH)
    mask = real[:, None] & (channel < K)[None, :]
    by = tl.sigmoid(tl.load(beta + rows * beta_stride + head, real, 0.0).to(tl.float32))
    at = (rows * HEADS + head)[:, None]
    inverse = tl.load(systems + at * CHUNK + tl.arange(0, CHUNK)[None, :], real[:, None], 0.0)
    inverse *= tl.where(real, by, 0.0)[None, :]
    KIND: tl.constexpr = of_values.dtype.element_ty
    token = qkv + rows[:, None] * (3 * HEADS * K) + head * K + channel[None, :]
    v = tl.load(token + 2 * HEADS * K, mask, 0.0)
    u = tl.dot(inverse.to(KIND), v, input_precision="ieee")
    tl.store(of_values + at * K + channel[None, :], u.to(KIND), mask)
    decay = tl.load(decays + at * K + channel[None, :], mask, 0.0)
    k = tl.load(token + HEADS * K, mask, 0.0).to(tl.float32) * tl.exp(tl.cumsum(decay, 0))
    w = tl.dot(inverse.to(KIND), k.to(KIND), input_precision="ieee")
    tl.store(of_state + at * K + channel[None, :], w.to(KIND), mask)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=PER_STEP)
def scan(
    qkv, decays, states, tables, query_start, kv_lens, of_values, of_state, scores, out, table_stride,
    HEADS: tl.constexpr, K: tl.constexpr, K_WIDTH: tl.constexpr, E: tl.constexpr, TAIL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Program (head and block of its value channels, sequence): the state from chunk to chunk, and the heads.

    KEEP: replace the states.
    """
    BLOCKS: tl.constexpr = (K + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    sequence = tl.program_id(1)
    begin = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - begin
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, K_WIDTH)
    block = tl.load(tables + sequence.to(tl.int64) * table_stride).to(tl.int64)
    place = states + block * E + TAIL + head * (K * K) + channel[:, None] * K + value[None, :]
    kept = (channel < K)[:, None] & (value < K)[None, :]
    state = tl.load(place, kept & (tl.load(kv_lens + sequence) > count), 0.0)
    for first in range(0, count, CHUNK):
        offset = first + tl.arange(0, CHUNK)
        real = offset < count
        rows = (begin + offset).to(tl.int64)
        mask = real[:, None] & (channel < K)[None, :]
        inside = real[:, None] & (value < K)[None, :]
        at = (rows * HEADS + head)[:, None]
        KIND: tl.constexpr = qkv.dtype.element_ty
        stored = state.to(KIND)
        w = tl.load(of_state + at * K + channel[None, :], mask, 0.0)
        u = tl.load(of_values + at * K + value[None, :], inside, 0.0).to(tl.float32)
        written = (u - tl.dot(w, stored, input_precision="ieee")).to(KIND)
        decay = tl.load(decays + at * K + channel[None, :], mask, 0.0)
        token = qkv + rows[:, None] * (3 * HEADS * K) + head * K + channel[None, :]
        q = tl.load(token, mask, 0.0).to(tl.float32) * tl.exp(tl.cumsum(decay, 0))
        far = tl.dot(q.to(KIND), stored, input_precision="ieee")
        near = tl.load(scores + at * CHUNK + tl.arange(0, CHUNK)[None, :], real[:, None], 0.0)
        heads = tl.dot(near, written, far, input_precision="ieee")
        tl.store(out + at * K + value[None, :], heads.to(out.dtype.element_ty), inside)
        later = ((offset + 1 < count) & (offset + 1 < first + CHUNK))[:, None] & (channel < K)[None, :]
        after = tl.load(decays + (at + HEADS) * K + channel[None, :], later, 0.0)
        k = tl.load(token + HEADS * K, mask, 0.0).to(tl.float32) * tl.exp(tl.cumsum(after, 0, reverse=True))
        state *= tl.exp(tl.sum(decay, 0))[:, None]
        state = tl.dot(tl.trans(k.to(KIND)), written, state, input_precision="ieee")
    if KEEP:
        tl.store(place, state, kept)


def constants_of(kernel: Any, spec: KimiDelta, **others: Any) -> dict[str, Any]:
    """Return those of the constants that a kernel has, by name; E and KEEP, which follow from the step, in `others`."""
    every = {
        "HEADS": spec.heads,
        "KEY_HEADS": spec.heads,
        "W": spec.width,
        "K": spec.head_dim,
        "K_WIDTH": padded(spec.head_dim),
        "V": spec.head_dim,
        "V_WIDTH": padded(spec.head_dim),
        "C": 3 * spec.width,
        "TAIL": spec.tail_elements,
        "TAPS": spec.taps,
        "CHUNK": CHUNK,
        "SOLVED": delta.SOLVED,
        "BLOCK": ELEMENTS,
        "BLOCK_V": VALUES,
        "BOUND": spec.decay_bound,
        **others,
    }
    return arguments_of(kernel, every)


_LOG_DECAYS: Final = BoundKernel(log_decays)
_STEP: Final = BoundKernel(step)
_PRODUCTS: Final = BoundKernel(products)
_INVERT: Final = BoundKernel(invert)
_PREPARE: Final = BoundKernel(prepare)
_SCAN: Final = BoundKernel(scan)


def launch(
    qkv: Tensor, beta: Tensor, decay: Tensor, batch: StateStep, spec: KimiDelta, weights: DeltaWeights, chip: Chip
) -> Tensor:
    """Return the heads [T, N*H]; replace the states."""
    tokens = len(qkv)
    heads = spec.heads
    width = spec.width
    like = {"dtype": qkv.dtype, "device": qkv.device}
    mixed = torch.empty(tokens, 3 * width, **like)
    out = torch.empty(tokens, width, **like)
    decays = torch.empty(tokens, width, dtype=torch.float32, device=qkv.device)
    _LOG_DECAYS[(tokens, triton.cdiv(width, ELEMENTS))](
        decay=decay,
        decay_rate=weights.decay_rate,
        decay_offset=weights.decay_offset,
        out=decays,
        **constants_of(log_decays, spec),
    )
    first = batch.num_decodes
    kept = {"E": batch.states.stride(0), "KEEP": batch.keeps_states}
    table_stride = batch.tables.stride(0)
    beta_stride = row_stride(beta)
    channels = delta.convolution_arguments(qkv, batch, weights.conv, mixed, spec.head_dim)
    parts = heads * -(-spec.head_dim // VALUES)
    if first:
        delta.CONVOLVE[(first, 3 * heads)](
            **channels, chunks=None, **constants_of(delta.convolve, spec, **kept, BLOCK_T=1), num_warps=1
        )
        _STEP[(parts, first)](
            qkv=mixed,
            beta=beta,
            decays=decays,
            states=batch.states,
            tables=batch.tables,
            kv_lens=batch.kv_lens,
            out=out,
            beta_stride=beta_stride,
            table_stride=table_stride,
            **constants_of(step, spec, **kept),
        )
    if batch.chunks is None:
        return out
    delta.CONVOLVE[(len(batch.chunks) * (CHUNK // delta.CONVOLVED), 3 * heads)](
        **channels,
        chunks=batch.chunks,
        **constants_of(delta.convolve, spec, **kept, BLOCK_T=delta.CONVOLVED),
        num_warps=delta.CONVOLVE_WARPS,
    )
    grid = (len(batch.chunks), heads)
    spans = {"query_start": batch.query_start, "chunks": batch.chunks}
    systems = torch.empty(tokens, heads, CHUNK, dtype=torch.float32, device=qkv.device)
    scores = torch.empty(tokens, heads, CHUNK, **like)
    of_values = torch.empty(tokens, width, **like)
    of_state = torch.empty(tokens, width, **like)
    for to, queries in ((systems, False), (scores, True)):
        _PRODUCTS[grid](
            qkv=mixed,
            beta=beta,
            decays=decays,
            **spans,
            out=to,
            beta_stride=beta_stride,
            **constants_of(products, spec, QUERIES=queries),
            num_warps=PRODUCT_WARPS,
        )
    precision = "ieee" if qkv.dtype == torch.float32 else "tf32x3"
    _INVERT[grid](
        systems=systems, **spans, **constants_of(invert, spec, PRECISION=precision), num_warps=delta.SOLVE_WARPS
    )
    _PREPARE[grid](
        qkv=mixed,
        beta=beta,
        decays=decays,
        **spans,
        systems=systems,
        of_values=of_values,
        of_state=of_state,
        beta_stride=beta_stride,
        **constants_of(prepare, spec),
        num_warps=delta.PREPARE_WARPS,
    )
    _SCAN[(parts, len(batch.kv_lens) - first)](
        qkv=mixed,
        decays=decays,
        **batch.prefill_arguments(),
        of_values=of_values,
        of_state=of_state,
        scores=scores,
        out=out,
        table_stride=table_stride,
        **constants_of(scan, spec, **kept),
        num_warps=SCAN_WARPS,
        num_stages=SCAN_STAGES,
    )
    return out


PRODUCT_WARPS: Final = 8
SCAN_WARPS: Final = 8
SCAN_STAGES: Final = 1
