"""Gumbel-max in two launches: the best of each block of the vocabulary, then the best block of each row.

A block is small enough that one row of 128k tokens occupies every multiprocessor. Noise is computed where it is used:
twenty integer operations, two logarithms and a division per token; greedy rows skip it.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import divided, power_of_two
from pagoda.common.engine.sampling import rules as sampling

BLOCK = 1024
WARPS = 4
TOKENS = 256
"""Tokens per program of `store_last` and `store_history`."""

MIX_1 = tl.constexpr(sampling.MIX_1)
MIX_2 = tl.constexpr(sampling.MIX_2)
TOKEN_STRIDE = tl.constexpr(sampling.TOKEN_STRIDE)
LARGEST_UNIFORM = tl.constexpr(sampling.LARGEST_UNIFORM)


def gumbel_max(logits, keys, temperature, floor):
    rows, vocab = logits.shape
    splits = divided(vocab, BLOCK)
    values = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _BEST_OF_BLOCK[(rows, splits)](
        logits=logits,
        keys=keys,
        temperature=temperature,
        floor=floor,
        values=values,
        ids=ids,
        VOCAB=vocab,
        SPLITS=splits,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _BEST_OF_ROW[(rows,)](
        values=values, ids=ids, tokens=tokens, VOCAB=vocab, SPLITS=splits, PADDED=power_of_two(splits), num_warps=WARPS
    )
    return tokens


def store_last(tokens, rows, last):
    count = len(tokens)
    _WRITE_LAST[(divided(count, TOKENS),)](
        tokens=tokens, rows=rows, last=last, count=count, BLOCK=TOKENS, num_warps=WARPS
    )


def store_history(tokens, rows, positions, history):
    count = len(tokens)
    _WRITE_HISTORY[(divided(count, TOKENS),)](
        tokens=tokens,
        rows=rows,
        positions=positions,
        history=history,
        count=count,
        LENGTH=history.shape[1],
        BLOCK=TOKENS,
        num_warps=WARPS,
    )


@triton.jit
def mix(x):
    """lowbias32 of uint32, whose right shifts are logical."""
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 16)


@triton.jit
def gumbel(key, ids):
    """Return float32 noise of token ids int32 under a row's key int32."""
    bits = mix(key.to(tl.uint32, bitcast=True) ^ (ids.to(tl.uint32) * TOKEN_STRIDE))
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = 1.0 - tl.minimum(v, LARGEST_UNIFORM)
    exponential = tl.where(u == 1.0, v, tl.div_rn(-tl.log(u) * v, tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(exponential)


# Both are rows of one packed array, whose alignment depends on the batch size and must not cause a recompile.
@triton.jit(do_not_specialize_on_alignment=["keys", "temperature"])
def best_of_block(
    logits, keys, temperature, floor, values, ids, VOCAB: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the largest value of a block of a row, with noise, and its token."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    hot = tl.load(temperature + row)
    if hot > 0:
        noisy = tl.div_rn(x, hot) + gumbel(tl.load(keys + row), token)
        x = tl.where(x >= tl.load(floor + row), noisy, float("-inf"))
    x = tl.where(token < VOCAB, x, float("-inf"))
    best = tl.max(x, 0)
    tl.store(values + row * SPLITS + split, best)
    tl.store(ids + row * SPLITS + split, tl.min(tl.where(x == best, token, VOCAB), 0))


_BEST_OF_BLOCK: Final = BoundKernel(best_of_block)


@triton.jit
def best_of_row(values, ids, tokens, VOCAB: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr):
    """Write the token of a row, from its blocks."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED)
    x = tl.load(values + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    token = tl.load(ids + row * SPLITS + split, mask=split < SPLITS, other=VOCAB)
    best = tl.min(tl.where(x == tl.max(x, 0), token, VOCAB), 0)
    tl.store(tokens + row, tl.minimum(best, VOCAB - 1))  # NaN equals nothing, but the token must be valid


_BEST_OF_ROW: Final = BoundKernel(best_of_row)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def write_last(tokens, rows, last, count, BLOCK: tl.constexpr):
    """Write the tokens to last [rows]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = index < count
    tl.store(last + tl.load(rows + index, mask=here, other=0), tl.load(tokens + index, mask=here), mask=here)


_WRITE_LAST: Final = BoundKernel(write_last)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "positions"])
def write_history(tokens, rows, positions, history, count, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the tokens to history [rows, LENGTH]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = index < count
    token = tl.load(tokens + index, mask=here)
    row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
    tl.store(history + row * LENGTH + tl.load(positions + index, mask=here, other=0), token, mask=here)


_WRITE_HISTORY: Final = BoundKernel(write_history)
