"""What the kernels of chunked prefills share."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

PER_STEP: Final = ("tables", "query_start", "kv_lens", "chunks")
"""Arguments whose alignment varies from step to step: parts of one array of inputs."""


@triton.jit
def chunk_rows(chunks, query_start, CHUNK: tl.constexpr):
    """Return (rows [CHUNK] of the tokens of chunk `program_id(0)`, which of them are real)."""
    chunk = chunks + 2 * tl.program_id(0)
    sequence = tl.load(chunk)
    offset = tl.load(chunk + 1) + tl.arange(0, CHUNK)
    begin = tl.load(query_start + sequence)
    return (begin + offset).to(tl.int64), offset < tl.load(query_start + sequence + 1) - begin


@triton.jit
def decay_between(decay, CHUNK: tl.constexpr):
    """Return exp of the log decay after each token (column) up to each later one (row); 1 elsewhere.

    A sum per pair: the difference of two sums from the chunk's start would lose the digits of a small one.
    """
    later = tl.arange(0, CHUNK)[:, None] > tl.arange(0, CHUNK)[None, :]
    return tl.exp(tl.cumsum(tl.where(later, decay[:, None], 0.0), 0))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def silu(x):
    """Return x * sigmoid(x), float32."""
    return x * tl.sigmoid(x)
