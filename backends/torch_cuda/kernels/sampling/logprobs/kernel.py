"""One pass over the logits in blocks, then a launch that joins a row's blocks; the best few come from torch.topk."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel

BLOCK = 4096
WARPS = 8
JOIN_WARPS = 1


def launch(logits, targets, best, normalise):
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(peaks)
    better = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    own = torch.empty((rows, 1), dtype=torch.float32, device=logits.device)
    top = torch.empty_like(own)
    mass = torch.empty_like(own)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _BLOCKS[(rows, splits)](
            logits=logits,
            targets=targets,
            peaks=peaks,
            masses=masses,
            better=better,
            VOCAB=vocab,
            SPLITS=splits,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        _JOIN[(rows,)](
            logits=logits,
            targets=targets,
            peaks=peaks,
            masses=masses,
            better=better,
            own=own,
            top=top,
            mass=mass,
            ranks=ranks,
            VOCAB=vocab,
            SPLITS=splits,
            PADDED=triton.next_power_of_2(splits),
            num_warps=JOIN_WARPS,
        )
    values, ids = logits.topk(best, dim=-1)
    ids = torch.cat([targets[:, None], ids.to(torch.int32)], 1)
    values = torch.cat([own, values], 1)
    # In this order for accuracy: logits may be far larger than their differences.
    return ids, (values - top) - mass.log() if normalise else values, ranks


@triton.jit
def blocks(logits, targets, peaks, masses, better, VOCAB: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block's largest logit, its sum of exp(logit - largest), and how many logits exceed the target's."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    logits += row * VOCAB
    x = tl.load(logits + token, mask=token < VOCAB, other=float("-inf"))
    own = tl.load(logits + tl.load(targets + row))
    peak = tl.max(x, 0)
    zero = tl.where(peak > float("-inf"), peak, 0.0)  # a block may be all -inf
    at = row * SPLITS + split
    tl.store(peaks + at, peak)
    tl.store(masses + at, tl.sum(tl.exp(x - zero), 0))
    tl.store(better + at, tl.sum((x > own).to(tl.int32), 0))


_BLOCKS: Final = BoundKernel(blocks)


@triton.jit
def join(
    logits,
    targets,
    peaks,
    masses,
    better,
    own,
    top,
    mass,
    ranks,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write a row's target logit, largest logit, sum of exp(logit - largest), and the target's rank."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED)
    here = split < SPLITS
    at = row * SPLITS + split
    peak = tl.load(peaks + at, mask=here, other=float("-inf"))
    best = tl.max(peak, 0)
    tl.store(top + row, best)
    tl.store(mass + row, tl.sum(tl.load(masses + at, mask=here, other=0.0) * tl.exp(peak - best), 0))
    tl.store(own + row, tl.load(logits + row * VOCAB + tl.load(targets + row)))
    tl.store(ranks + row, 1 + tl.sum(tl.load(better + at, mask=here, other=0), 0))


_JOIN: Final = BoundKernel(join)
