"""Edits of a few rows' logits, in position. Sizes of requests set grids and masks, never specialisations."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel

BLOCK = 1024
WARPS = 4
IN_PROMPT = tl.constexpr(1 << 30)
"""The bit of a token's count that marks it as part of the prompt."""


def penalise(logits, history, packed):
    """Count every known token of a row, then update its logits."""
    length = history.shape[1]
    vocab = logits.shape[1]
    count = packed.shape[1]
    counts = torch.zeros((count, vocab), dtype=torch.int32, device=logits.device)
    _COUNT_TOKENS[(count, triton.cdiv(length, BLOCK))](
        history=history,
        packed=packed,
        counts=counts,
        count=count,
        LENGTH=length,
        VOCAB=vocab,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _APPLY_PENALTIES[(count, triton.cdiv(vocab, BLOCK))](
        logits=logits, packed=packed, counts=counts, count=count, VOCAB=vocab, BLOCK=BLOCK, num_warps=WARPS
    )


def add(logits, packed):
    rows, vocab = logits.shape
    count = packed.shape[1]
    _ADD_VALUES[(triton.cdiv(count, BLOCK),)](
        logits=logits, packed=packed, rows=rows, count=count, VOCAB=vocab, BLOCK=BLOCK, num_warps=WARPS
    )


def ban_words(logits, history, words, heads):
    """One program per word."""
    rows, vocab = logits.shape
    count = words.shape[1]
    tokens = heads.shape[1]
    _BAN_WORD[(count,)](
        logits=logits,
        history=history,
        words=words,
        heads=heads,
        rows=rows,
        count=count,
        VOCAB=vocab,
        LENGTH=history.shape[1],
        HEADS=tokens,
        BLOCK=triton.next_power_of_2(tokens),
        num_warps=WARPS,
    )


def mask(logits, sequences, bits):
    vocab = logits.shape[1]
    _MASK_BLOCK[(len(sequences), triton.cdiv(vocab, BLOCK))](
        logits=logits, sequences=sequences, bits=bits, VOCAB=vocab, WORDS=bits.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )


@triton.jit(do_not_specialize=["count"])
def count_tokens(history, packed, counts, count, LENGTH: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Count how often each token of a block of history was generated; mark those in the prompt."""
    column = tl.program_id(0)
    block = tl.program_id(1)
    prompt = tl.load(packed + 2 * count + column)
    known = tl.load(packed + 3 * count + column)
    if block * BLOCK < known:
        position = block * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(packed + count + column).to(tl.int64)
        token = tl.load(history + row * LENGTH + position, mask=position < known, other=VOCAB)
        here = token < VOCAB  # not a prompt embedding
        mine = counts + column.to(tl.int64) * VOCAB + token
        tl.atomic_or(mine, tl.full((BLOCK,), IN_PROMPT, tl.int32), mask=here & (position < prompt))
        tl.atomic_add(mine, tl.full((BLOCK,), 1, tl.int32), mask=here & (position >= prompt))


_COUNT_TOKENS: Final = BoundKernel(count_tokens)


@triton.jit(do_not_specialize=["count"])
def apply_penalties(logits, packed, counts, count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Penalise the seen tokens of a block of a row."""
    column = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = token < VOCAB
    logits += tl.load(packed + column).to(tl.int64) * VOCAB
    repetition = tl.load(packed + 4 * count + column).to(tl.float32, bitcast=True)
    frequency = tl.load(packed + 5 * count + column).to(tl.float32, bitcast=True)
    presence = tl.load(packed + 6 * count + column).to(tl.float32, bitcast=True)
    seen = tl.load(counts + column.to(tl.int64) * VOCAB + token, mask=here, other=0)
    generated = seen & (IN_PROMPT - 1)
    x = tl.load(logits + token, mask=here & (seen > 0), other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= frequency * generated.to(tl.float32) + tl.where(generated > 0, presence, 0.0)
    tl.store(logits + token, x, mask=here & (seen > 0))


_APPLY_PENALTIES: Final = BoundKernel(apply_penalties)


@triton.jit(do_not_specialize=["rows", "count"])
def add_values(logits, packed, rows, count, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(packed + entry, mask=entry < count, other=rows)
    here = (entry < count) & (row < rows)
    token = tl.load(packed + count + entry, mask=here, other=0)
    value = tl.load(packed + 2 * count + entry, mask=here, other=0).to(tl.float32, bitcast=True)
    tl.atomic_add(logits + row.to(tl.int64) * VOCAB + token, value, mask=here)


_ADD_VALUES: Final = BoundKernel(add_values)


@triton.jit(do_not_specialize=["rows", "count"])
def ban_word(
    logits,
    history,
    words,
    heads,
    rows,
    count,
    VOCAB: tl.constexpr,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    word = tl.program_id(0)
    row = tl.load(words + word)
    if row < rows:
        at = tl.arange(0, BLOCK)
        mine = tl.load(heads + at, mask=at < HEADS, other=-1) == word
        source = tl.load(heads + HEADS + at, mask=mine, other=0).to(tl.int64)
        position = tl.load(heads + 2 * HEADS + at, mask=mine, other=0)
        token = tl.load(heads + 3 * HEADS + at, mask=mine, other=0)
        actual = tl.load(history + source * LENGTH + position, mask=mine, other=0)
        wrong = tl.sum((mine & (actual != token)).to(tl.int32), 0)
        last = tl.load(words + count + word)
        tl.store(logits + row.to(tl.int64) * VOCAB + last, float("-inf"), mask=wrong == 0)


_BAN_WORD: Final = BoundKernel(ban_word)


@triton.jit
def mask_block(logits, sequences, bits, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + number * WORDS + token // 32, mask=token < VOCAB, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    row = tl.load(sequences + number).to(tl.int64)
    tl.store(logits + row * VOCAB + token, float("-inf"), mask=forbidden & (token < VOCAB))


_MASK_BLOCK: Final = BoundKernel(mask_block)
