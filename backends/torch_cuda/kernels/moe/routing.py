"""Which experts a token goes to, and which rows of a grouped product an expert gets."""

import torch
import triton
import triton.language as tl

_CHUNK = 1024


@triton.jit
def route_kernel(
    logits,
    weights,
    chosen,
    experts,
    logits_stride,
    TOP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """weights float32 [T, TOP] and chosen int32 [T, TOP], best first, of equals the lower expert; a program a token."""
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(logits + token * logits_stride + columns, columns < experts, float("-inf")).to(tl.float32)
    grown = tl.exp(x - tl.max(x, axis=0))
    left = tl.where(columns < experts, grown / tl.sum(grown, axis=0), -1.0)
    places = tl.arange(0, BLOCK_TOP)
    best = tl.zeros([BLOCK_TOP], tl.float32)
    which = tl.zeros([BLOCK_TOP], tl.int32)
    for place in tl.static_range(TOP):
        most = tl.max(left, axis=0)
        at = tl.min(tl.where(left == most, columns, experts - 1), axis=0)  # NaN picks the last
        best = tl.where(places == place, most, best)
        which = tl.where(places == place, at, which)
        left = tl.where(columns == at, -1.0, left)
    if RENORMALISE:
        best /= tl.sum(best, axis=0)
    tl.store(weights + token * TOP + places, best, places < TOP)
    tl.store(chosen + token * TOP + places, which, places < TOP)


@triton.jit(do_not_specialize=["pairs"])
def align_kernel(
    chosen,
    order,
    tile_experts,
    ends,
    pairs,
    experts,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Counting sort of pairs (token, place) by expert, every expert from a new tile on; a program an expert.

    order [tiles * TILE]: the pair of each row, `pairs` in rows that nobody has, in the order of the pairs;
    tile_experts [tiles]; ends [experts]: tiles up to and with an expert's, so the last is their number.
    """
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        found = tl.load(chosen + at, at < pairs, BLOCK - 1)
        counts += tl.histogram(found, BLOCK)
    tiles = tl.where(numbers < experts, (counts + TILE - 1) // TILE, 0)
    begin = tl.sum(tl.where(numbers < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(numbers == expert, tiles, 0), axis=0)
    tl.store(ends + expert, begin + own)
    row = begin * TILE
    for first in range(0, pairs, CHUNK):
        at = first + tl.arange(0, CHUNK)
        mine = (tl.load(chosen + at, at < pairs, BLOCK - 1) == expert).to(tl.int32)
        tl.store(order + row + tl.cumsum(mine, axis=0) - 1, at, mine != 0)
        row += tl.sum(mine, axis=0)
    rest = tl.arange(0, TILE)
    tl.store(order + row + rest, tl.full([TILE], pairs, tl.int32), row + rest < (begin + own) * TILE)
    for tile in range(begin, begin + own):
        tl.store(tile_experts + tile, expert)


def route(logits, router):
    """Weights float32 [T, k] and experts int32 [T, k] from logits [T, E]."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, router.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, router.top_k, dtype=torch.int32, device=logits.device)
    route_kernel[(tokens,)](
        logits,
        weights,
        chosen,
        experts,
        logits.stride(0),
        TOP=router.top_k,
        RENORMALISE=router.renormalise,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_TOP=triton.next_power_of_2(router.top_k),
        num_warps=1,
    )
    return weights, chosen


def align(chosen, experts, tile):
    """(order, tile_experts, ends) of align_kernel for chosen int32 [T, k], sized for the worst case."""
    pairs, device = chosen.numel(), chosen.device
    tiles = most_tiles(pairs, experts, tile)
    order = torch.empty(tiles * tile, dtype=torch.int32, device=device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    align_kernel[(experts,)](
        chosen,
        order,
        tile_experts,
        ends,
        pairs,
        experts,
        TILE=tile,
        BLOCK=triton.next_power_of_2(experts + 1),
        CHUNK=_CHUNK,
    )
    return order, tile_experts, ends


def most_tiles(pairs, experts, tile):
    """Tiles that pairs fill at most, however they are spread: each expert with a pair may leave one unfinished."""
    busy = min(experts, pairs)
    return busy + (pairs - busy) // tile
