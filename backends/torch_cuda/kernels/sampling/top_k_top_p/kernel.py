"""A row's threshold in two launches: a summary by groups that reads the logits once, then a search in few of them.

`summarise` runs on the whole chip: for each group of 32 logits, one cache line, the largest (its peak) and the mass.
`search_row`, a program per row, first searches among the peaks: if n peaks reach a value, at least n logits do, so the
threshold is at least the peak it stops at. Groups whose peak is below are irrelevant: the others are listed, usually
some dozens, and only they are read repeatedly until the threshold is exact.

The search keeps a bracket of two logits: `low` leaves enough (tokens for top-k, mass for top-p), logits above `high` do
not. A pass measures what two guesses between them leave, and which logits are next to each, so that `low` and `high`
are always logits of the row and ties cost nothing. The first guesses trisect the bracket, later ones are on both sides
of where an exponential tail would have the target, so that both ends move; every fourth pass halves the bracket as
ordered integers, which bounds the number of passes. Eight is usual where most of a flat row is kept.

Rows without limits return at once, on the device: one captured graph serves greedy and random rows.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundKernel
from pagoda.backends.torch_cuda.kernels.frame.launch import divided

GROUP = 32
SUMMARY = 128
"""Groups per program of `summarise`."""
TILE = 128
"""Groups per iteration of a pass."""
LISTED = 1024
"""Groups per iteration of the listing."""
SUMMARY_WARPS = 4
ROW_WARPS = 16
RULES = ["temperature", "top_k", "top_p", "min_p"]
"""Rows of one packed array, whose alignment depends on the batch size and must not cause a recompile."""

MAX_PASSES = tl.constexpr(4 * 33)
"""Bound of a search: every fourth pass halves at most 2^32 values."""
AROUND = tl.constexpr(1 / 16)
"""Distance of the guesses from the estimate, as a fraction of the bracket."""
NOTHING = tl.constexpr(87.0)
"""exp(-87) is about the smallest float32 weight: smaller ones add nothing to a mass."""


def launch(logits, temperature, top_k, top_p, min_p):
    rows, vocab = logits.shape
    groups = divided(vocab, GROUP)
    peaks = torch.empty((rows, groups), dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(peaks)
    listed = torch.empty((rows, groups), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sizes = {"VOCAB": vocab, "GROUPS": groups, "GROUP": GROUP}
    _SUMMARISE[(rows, divided(groups, SUMMARY))](
        logits=logits, **rules, peaks=peaks, masses=masses, **sizes, BLOCK=SUMMARY, num_warps=SUMMARY_WARPS
    )
    _SEARCH_ROW[(rows,)](
        logits=logits,
        **rules,
        peaks=peaks,
        masses=masses,
        listed=listed,
        out=out,
        **sizes,
        BLOCK=TILE,
        LISTING=LISTED,
        num_warps=ROW_WARPS,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=RULES)
def summarise(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    masses,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each group's largest logit and its sum of exp((logit - largest) / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    hot = tl.load(temperature + row)
    limited = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
    if limited & (hot > 0):
        group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
        peak = tl.max(x, 1)
        zero = tl.where(peak > float("-inf"), peak, 0.0)  # a group may be all -inf
        weight = tl.exp((x - zero[:, None]) / hot)
        here = group < GROUPS
        tl.store(peaks + row * GROUPS + group, peak, mask=here)
        tl.store(masses + row * GROUPS + group, tl.sum(weight, 1), mask=here)


_SUMMARISE: Final = BoundKernel(summarise)


@triton.jit(do_not_specialize_on_alignment=RULES)
def search_row(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    masses,
    listed,
    out,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTING: tl.constexpr,
):
    """Write the threshold of one row."""
    row = tl.program_id(0).to(tl.int64)
    hot = tl.load(temperature + row)
    share = tl.load(min_p + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    few = (hot > 0) & (k > 0)
    nucleus = (hot > 0) & (p < 1)
    relative = (hot > 0) & (share > 0)
    floor = tl.full((), float("-inf"), tl.float32)
    if few | nucleus | relative:
        peaks += row * GROUPS
        masses += row * GROUPS
        best = total_or_best(peaks, masses, floor, 0.0, False, GROUPS, LISTING)
        least = tl.where(relative, best + hot * tl.log(tl.minimum(share, 1.0)), float("-inf"))
        if few | nucleus:
            logits += row * VOCAB
            listed += row * GROUPS
            cold = 1 / hot
            nothing = best - NOTHING * hot
            total = total_or_best(peaks, masses, best, cold, True, GROUPS, LISTING)
            by_mass = k <= 0
            target = tl.where(by_mass, p * total, tl.minimum(k, VOCAB).to(tl.float32))
            # The best logit alone weighs 1.
            low = tl.where(by_mass & (target <= 1), best, float("-inf"))
            lines: tl.constexpr = (GROUPS + GROUP - 1) // GROUP
            some = left_by(peaks, listed, lines, low, by_mass, best, cold, GROUPS, GROUP, BLOCK, False)
            low = search(peaks, listed, lines, low, some, target, by_mass, best, cold, GROUPS, GROUP, BLOCK, False)
            # Of what min-p leaves, top-p may keep less than of all: its groups are listed from there on.
            low = tl.where(by_mass, tl.where(relative, least, tl.maximum(low, nothing)), low)
            count = list_groups(peaks, listed, low, GROUPS, LISTING)
            tl.debug_barrier()  # the list is read by other threads than those that wrote it
            floor = tl.maximum(low, least)
            if few | (nucleus & (relative == 0)):
                mass = left_by(logits, listed, count, low, by_mass, best, cold, VOCAB, GROUP, BLOCK, True)
                floor = search(logits, listed, count, low, mass, target, by_mass, best, cold, VOCAB, GROUP, BLOCK, True)
            floor = tl.maximum(floor, least)
            if nucleus & (few | relative):
                mass = left_by(logits, listed, count, floor, True, best, cold, VOCAB, GROUP, BLOCK, True)
                target = p * mass
                low = tl.where(target <= 1, best, tl.maximum(floor, nothing))
                floor = search(logits, listed, count, low, mass, target, True, best, cold, VOCAB, GROUP, BLOCK, True)
        else:
            floor = least
    tl.store(out + row, floor)


_SEARCH_ROW: Final = BoundKernel(search_row)


@triton.jit
def total_or_best(peaks, masses, best, cold, TOTAL: tl.constexpr, GROUPS: tl.constexpr, LISTING: tl.constexpr):
    """Return the row's best logit, or its mass in units of the best logit's weight."""
    acc = tl.zeros((LISTING,), tl.float32) if TOTAL else tl.full((LISTING,), float("-inf"), tl.float32)
    for start in range(0, GROUPS, LISTING):
        group = start + tl.arange(0, LISTING)
        peak = tl.load(peaks + group, mask=group < GROUPS, other=float("-inf"))
        if TOTAL:
            acc += tl.load(masses + group, mask=group < GROUPS, other=0.0) * tl.exp((peak - best) * cold)
        else:
            acc = tl.maximum(acc, peak)
    return tl.sum(acc, 0) if TOTAL else tl.max(acc, 0)


@triton.jit
def list_groups(peaks, listed, low, GROUPS: tl.constexpr, LISTING: tl.constexpr):
    """List the groups with a logit of at least `low`, in order; return their number."""
    count = 0
    for start in range(0, GROUPS, LISTING):
        group = start + tl.arange(0, LISTING)
        peak = tl.load(peaks + group, mask=group < GROUPS, other=float("-inf"))
        keep = ((peak >= low) & (group < GROUPS)).to(tl.int32)
        tl.store(listed + count + tl.cumsum(keep, 0) - 1, group, mask=keep > 0)
        count += tl.sum(keep, 0)
    return count


@triton.jit
def search(
    values,
    listed,
    groups,
    low,
    mass,
    target,
    by_mass,
    best,
    cold,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Return the largest threshold that leaves `target`, or one between it and the next smaller value.

    low: leaves `mass`; if that is not enough, it is returned.
    """
    high = best
    over = tl.full((), 0.0, tl.float32)
    passes = 0
    # Dropping the smallest value kept removes at least this.
    unit = tl.where(by_mass, tl.exp((low - best) * cold), 1.0)
    while (passes < MAX_PASSES) & (low < high) & (mass - unit >= target):
        s, t = guesses(low, mass, high, over, target, passes)
        more, above_s, below_s, less, above_t, below_t = measure(
            values, listed, groups, s, t, by_mass, best, cold, COUNT, GROUP, BLOCK, LISTED
        )
        s_leaves = more >= target
        t_leaves = less >= target
        low = tl.where(t_leaves, above_t, tl.where(s_leaves, above_s, low))
        mass = tl.where(t_leaves, less, tl.where(s_leaves, more, mass))
        high = tl.where(t_leaves, high, tl.where(s_leaves, below_t, below_s))
        over = tl.where(t_leaves, over, tl.where(s_leaves, less, more))
        unit = tl.where(by_mass, tl.exp((low - best) * cold), 1.0)
        passes += 1
    return low


@triton.jit
def guesses(low, mass, high, over, target, passes):
    """Return two thresholds in (low, high], the smaller first."""
    width = high - low
    top = tl.maximum(over, 1.0)
    share = tl.log(mass / target) / tl.log(
        mass / top
    )  # fraction of the bracket at which an exponential tail leaves `target`
    middle = halfway(low, high)
    halves = (low == float("-inf")) | (passes % 4 == 3)
    s = tl.where(passes < 3, low + width / 3, low + width * (share - AROUND))
    t = tl.where(passes < 3, low + width * (2 / 3), low + width * (share + AROUND))
    s = tl.where(halves, middle, s)
    t = tl.where(halves, halfway(middle, high), t)
    t = tl.minimum(t, high)
    t = tl.where(t > low, t, high)
    return tl.where((s > low) & (s < t), s, t), t


@triton.jit
def halfway(low, high):
    """Return the mean of two float32 as ordered integers."""
    a = ordered(low.to(tl.int32, bitcast=True))
    b = ordered(high.to(tl.int32, bitcast=True))
    return ordered((a & b) + ((a ^ b) >> 1)).to(tl.float32, bitcast=True)  # without overflow


@triton.jit
def ordered(bits):
    """Map float32 bits to int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def measure(
    values,
    listed,
    groups,
    s,
    t,
    by_mass,
    best,
    cold,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Return, for two thresholds s <= t, what each leaves, the smallest value it keeps and the largest it does not.

    One pass over the (listed) groups of COUNT values.
    """
    more = tl.zeros((BLOCK, GROUP), tl.float32)
    less = tl.zeros((BLOCK, GROUP), tl.float32)
    above_s = tl.full((BLOCK, GROUP), float("inf"), tl.float32)
    above_t = tl.full((BLOCK, GROUP), float("inf"), tl.float32)
    below_s = tl.full((BLOCK, GROUP), float("-inf"), tl.float32)
    below_t = tl.full((BLOCK, GROUP), float("-inf"), tl.float32)
    for start in range(0, groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        here = group < groups
        if LISTED:
            group = tl.load(listed + group, mask=here, other=0)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(values + at, mask=here[:, None] & (at < COUNT), other=float("-inf"))
        weight = tl.where(by_mass, tl.exp((x - best) * cold), 1.0)
        more += tl.where(x >= s, weight, 0.0)
        less += tl.where(x >= t, weight, 0.0)
        above_s = tl.minimum(above_s, tl.where(x >= s, x, float("inf")))
        above_t = tl.minimum(above_t, tl.where(x >= t, x, float("inf")))
        below_s = tl.maximum(below_s, tl.where(x >= s, float("-inf"), x))
        below_t = tl.maximum(below_t, tl.where(x >= t, float("-inf"), x))
    return tl.sum(more), tl.min(above_s), tl.max(below_s), tl.sum(less), tl.min(above_t), tl.max(below_t)


@triton.jit
def left_by(
    values,
    listed,
    groups,
    t,
    by_mass,
    best,
    cold,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Return what the threshold t leaves."""
    mass, _, _, _, _, _ = measure(values, listed, groups, t, t, by_mass, best, cold, COUNT, GROUP, BLOCK, LISTED)
    return tl.minimum(mass, COUNT)  # padding of the last tile counts if t is -inf
