"""One program per (token, some heads of q, of k or of v).

The channels of a head are three parts: two halves that are rotated together, and the remainder, which is copied.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame import fp8_convert as float8
from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import divided, power_of_two, row_stride

ELEMENTS = 1024
"""Elements per program."""
WARPS = 4


@triton.jit
def load_part(rows, channels, inside, END: tl.constexpr):
    """Return float32 [heads, channels] of a part that ends before channel END."""
    mask = inside[:, None] & (channels < END)[None, :]
    return tl.load(rows[:, None] + channels[None, :], mask, 0.0).to(tl.float32)


@triton.jit
def weighted(x, weight_ptr, channels, KIND: tl.constexpr, UNIT_OFFSET: tl.constexpr, END: tl.constexpr):
    """Return a part times its weights, rounded to KIND as the norm rounds."""
    weight = tl.load(weight_ptr + channels, channels < END, 0.0).to(tl.float32)[None, :]
    if UNIT_OFFSET:
        x *= 1.0 + weight
    else:
        x = x.to(KIND).to(tl.float32) * weight
    return x.to(KIND).to(tl.float32)


@triton.jit
def store_part(rows, channels, inside, x, inverse, NATIVE: tl.constexpr, KIND: tl.constexpr, END: tl.constexpr):
    """Store a part rounded to KIND, or as float8 if `rows` points at bytes."""
    mask = inside[:, None] & (channels < END)[None, :]
    x = x.to(KIND)
    if rows.dtype.element_ty == tl.uint8:
        tl.store(rows[:, None] + channels[None, :], float8.encode(x.to(tl.float32) * inverse, NATIVE), mask)
    else:
        tl.store(rows[:, None] + channels[None, :], x, mask)


@triton.jit
def move(
    from_rows,
    to_rows,
    inside,
    cos_sin_row_ptr,
    weight_ptr,
    eps,
    inverse,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Copy heads between rows, normalised and rotated. cos_sin_row_ptr: cos [HALF], then sin [HALF]."""
    KIND: tl.constexpr = from_rows.dtype.element_ty
    first = tl.arange(0, HALF_BLOCK)
    second = HALF + first
    remainder = 2 * HALF + tl.arange(0, REST_BLOCK)
    a = load_part(from_rows, first, inside, HALF)
    b = load_part(from_rows, second, inside, 2 * HALF)
    if 2 * HALF < HEAD_DIM:
        c = load_part(from_rows, remainder, inside, HEAD_DIM)
    if NORM:
        squares = tl.sum(a * a + b * b, axis=1)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(c * c, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = weighted(a * factor, weight_ptr, first, KIND, UNIT_OFFSET, HALF)
        b = weighted(b * factor, weight_ptr, second, KIND, UNIT_OFFSET, 2 * HALF)
        if 2 * HALF < HEAD_DIM:
            c = weighted(c * factor, weight_ptr, remainder, KIND, UNIT_OFFSET, HEAD_DIM)
    if ROTATE:
        cos = tl.load(cos_sin_row_ptr + first, first < HALF, 0.0)[None, :]
        sin = tl.load(cos_sin_row_ptr + second, first < HALF, 0.0)[None, :]
        a, b = a * cos - b * sin, b * cos + a * sin
    store_part(to_rows, first, inside, a, inverse, NATIVE, KIND, HALF)
    store_part(to_rows, second, inside, b, inverse, NATIVE, KIND, 2 * HALF)
    if 2 * HALF < HEAD_DIM:
        store_part(to_rows, remainder, inside, c, inverse, NATIVE, KIND, HEAD_DIM)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    qkv_stride,
    keys_ptr,
    values_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    v_weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_eps,
    k_eps,
    v_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V_HALF: tl.constexpr,
    V_HALF_BLOCK: tl.constexpr,
    V_REST_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_UNIT_OFFSET: tl.constexpr,
    K_UNIT_OFFSET: tl.constexpr,
    V_START: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Values are the heads of qkv from channel V_START on, normalised if v_weight_ptr is not None.

    q [T, HEADS, HEAD_DIM]; keys [P, KV_HEADS, PAGE, HEAD_DIM] and values [P, KV_HEADS, PAGE, VALUE_DIM], as uint8 where
    they are float8.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    lane = tl.arange(0, HEADS_BLOCK)
    from_ptr = qkv_ptr + token * qkv_stride
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_sin_row_ptr = cos_sin_ptr + position * 2 * HALF
    if part < Q_PARTS:
        head = part * HEADS_BLOCK + lane
        move(
            from_ptr + head * HEAD_DIM,
            q_ptr + (token * HEADS + head) * HEAD_DIM,
            head < HEADS,
            cos_sin_row_ptr,
            q_weight_ptr,
            q_eps,
            1.0,
            HEAD_DIM,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
            ROTATE,
            Q_NORM,
            Q_UNIT_OFFSET,
            NATIVE,
        )
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        head = ((part - Q_PARTS) % KV_PARTS) * HEADS_BLOCK + lane
        to_rows = (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE
        if part < Q_PARTS + KV_PARTS:
            move(
                from_ptr + (HEADS + head) * HEAD_DIM,
                keys_ptr + to_rows * HEAD_DIM,
                head < KV_HEADS,
                cos_sin_row_ptr,
                k_weight_ptr,
                k_eps,
                1.0 / tl.load(k_scale_ptr) if SCALED else 1.0,
                HEAD_DIM,
                HALF,
                HALF_BLOCK,
                REST_BLOCK,
                ROTATE,
                K_NORM,
                K_UNIT_OFFSET,
                NATIVE,
            )
        else:
            move(
                from_ptr + V_START + head * VALUE_DIM,
                values_ptr + to_rows * VALUE_DIM,
                head < KV_HEADS,
                cos_sin_row_ptr,
                v_weight_ptr,
                v_eps,
                1.0 / tl.load(v_scale_ptr) if SCALED else 1.0,
                VALUE_DIM,
                V_HALF,
                V_HALF_BLOCK,
                V_REST_BLOCK,
                False,
                v_weight_ptr is not None,
                False,
                NATIVE,
            )


_ROPE_CACHE_KERNEL: Final = BoundKernel(rope_cache_kernel)


@cache
def constants(heads, kv_heads, head_dim, value_dim, page, rotated):
    """Return the constants that follow from the shapes; `rotated` channels of a head, 0: none."""
    half = (rotated or head_dim) // 2
    value_half = half if value_dim == head_dim else value_dim // 2
    block = max(1, ELEMENTS // power_of_two(head_dim))
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": page,
        "HALF": half,
        "HEADS_BLOCK": min(block, power_of_two(max(heads, kv_heads))),
        "HALF_BLOCK": power_of_two(half),
        "REST_BLOCK": power_of_two(max(head_dim - 2 * half, 1)),
        "VALUE_DIM": value_dim,
        "V_HALF": value_half,
        "V_HALF_BLOCK": power_of_two(max(value_half, 1)),
        "V_REST_BLOCK": power_of_two(max(value_dim - 2 * value_half, 1)),
        "ROTATE": rotated > 0,
    }


class RopeCacheLaunch:
    """Launches over one cache with the weights of one layer."""

    def __init__(
        self, keys, values, heads, kv_heads, cos_sin, q_norm, k_norm, v_norm, k_scale, v_scale,
        values_are_keys, chip,
    ):  # fmt: skip
        head_dim = keys.shape[3]
        value_dim = values.shape[3]
        page = keys.shape[2]
        self._heads = heads, head_dim
        if keys.dtype == torch.float8_e4m3fn:
            keys = keys.view(torch.uint8)
            values = values.view(torch.uint8)
        shapes = constants(heads, kv_heads, head_dim, value_dim, page, 0 if cos_sin is None else 2 * cos_sin.shape[2])
        self._parts = divided(heads, shapes["HEADS_BLOCK"]) + 2 * divided(kv_heads, shapes["HEADS_BLOCK"])
        self._launch = _ROPE_CACHE_KERNEL.fixed(
            keys_ptr=keys,
            values_ptr=values,
            cos_sin_ptr=keys if cos_sin is None else cos_sin,
            q_weight_ptr=keys if q_norm is None else q_norm.weight,
            k_weight_ptr=keys if k_norm is None else k_norm.weight,
            v_weight_ptr=None if v_norm is None else v_norm.weight,
            k_scale_ptr=keys if k_scale is None else k_scale,
            v_scale_ptr=keys if v_scale is None else v_scale,
            q_eps=0.0 if q_norm is None else q_norm.eps,
            k_eps=0.0 if k_norm is None else k_norm.eps,
            v_eps=None if v_norm is None else v_norm.eps,
            **shapes,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            Q_UNIT_OFFSET=q_norm is not None and q_norm.unit_offset,
            K_UNIT_OFFSET=k_norm is not None and k_norm.unit_offset,
            V_START=(heads if values_are_keys else heads + kv_heads) * head_dim,
            SCALED=k_scale is not None,
            NATIVE=float8.native(chip, keys),
            num_warps=WARPS,
        )

    def __call__(self, qkv, positions, slots):
        tokens = qkv.shape[0]
        q = qkv.new_empty((tokens, *self._heads))
        if tokens:
            self._launch(
                (tokens, self._parts),
                qkv_ptr=qkv,
                positions_ptr=positions,
                slots_ptr=slots,
                q_ptr=q,
                qkv_stride=row_stride(qkv),
            )
        return q


def rope_queries(x, positions, heads, cos_sin, q_norm):
    """Launch the programs of q alone; K and V, and what belongs to them, are never touched."""
    head_dim = x.shape[1] // heads
    q = torch.empty(len(x), heads, head_dim, dtype=x.dtype, device=x.device)
    if not len(x):
        return q
    shapes = constants(heads, 1, head_dim, head_dim, 1, 0 if cos_sin is None else 2 * cos_sin.shape[2])
    _ROPE_CACHE_KERNEL[(len(x), divided(heads, shapes["HEADS_BLOCK"]))](
        qkv_ptr=x,
        positions_ptr=positions,
        slots_ptr=positions,
        q_ptr=q,
        qkv_stride=row_stride(x),
        keys_ptr=q,
        values_ptr=q,
        cos_sin_ptr=positions if cos_sin is None else cos_sin,
        q_weight_ptr=x if q_norm is None else q_norm.weight,
        k_weight_ptr=x,
        v_weight_ptr=None,
        k_scale_ptr=positions,
        v_scale_ptr=positions,
        q_eps=0.0 if q_norm is None else q_norm.eps,
        k_eps=0.0,
        v_eps=None,
        **shapes,
        Q_NORM=q_norm is not None,
        K_NORM=False,
        Q_UNIT_OFFSET=q_norm is not None and q_norm.unit_offset,
        K_UNIT_OFFSET=False,
        V_START=0,
        SCALED=False,
        NATIVE=False,
        num_warps=WARPS,
    )
    return q
