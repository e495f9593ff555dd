"""The plan of a call: checked arguments, block sizes, static configuration, scalars, and the tokens of each tile.

Block sizes come from tuning.json (tools/tpu_tuning.py), else from a formula. There are two sizes for KV: pages per
fetch, many because of the DMA latency, and tokens per pass of the arithmetic, few because of the registers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.layout import PagedKvLayout, PageLayout, next_power_of_two

Scalar: TypeAlias = float | int | jax.Array

Settings: TypeAlias = Mapping[str, int]
"""Block sizes by name: queries, fetch and tokens (both in tokens), heads. See `AttentionBlockSizes`."""

LoadPass: TypeAlias = Callable[[Any, Any, int, Any, Any, int], tuple[jax.Array, jax.Array]]
"""See `attend.load`."""

FETCH_BYTES = 4 << 20
MIXED_ROWS = 1024
DECODE_ROWS_PER_TILE = 8
INVARIANT_ROWS = 256
"""Query rows of a tile with --batch-invariant: few, since in a decode all but one token's are of other sequences."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """The sequences of a step. All int32; entries beyond `counts` are undefined."""

    query_start: jax.Array  # [S + 1]: first token of each sequence in q, k, v
    kv_len: jax.Array  # [S]: tokens of each sequence after this step
    page_table: jax.Array  # [S, max_pages]
    counts: jax.Array  # [2]: decode sequences (which come first), all sequences

    @property
    def max_seqs(self) -> int:
        """Return S, which is static."""
        return self.kv_len.shape[0]

    def tokens(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Return the sequence and position of each of `count` tokens, int32; undefined for padding. Of `cleaned`."""
        token = jnp.arange(count, dtype=jnp.int32)
        seq = jnp.clip(jnp.searchsorted(self.query_start[1:], token, side="right"), 0, self.max_seqs - 1)
        return seq, self.kv_len[seq] - self.query_start[seq + 1] + token

    def cleaned(self) -> RaggedBatch:
        """Return the batch with empty sequences (no tokens, no cache) beyond `counts`."""
        real = jnp.arange(self.max_seqs) < self.counts[1]
        ends = jnp.where(real, self.query_start[1:], self.query_start[self.counts[1]])
        starts = jnp.concatenate([self.query_start[:1], ends])
        return RaggedBatch(starts, jnp.where(real, self.kv_len, 0), self.page_table, self.counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """Numeric options of attention. Values are traced; only which of them are None is static."""

    scale: jax.Array  # multiplies q k
    softcap: jax.Array | None  # logits become softcap * tanh(logits / softcap)
    window: jax.Array | None  # sliding window: a token attends to itself and the window - 1 tokens before it
    sinks: jax.Array | None  # float32 [N]: an extra logit per head in the softmax's denominator
    slopes: jax.Array | None  # float32 [N], ALiBi: logits -= slope * distance of query and key, after the softcap
    k_scale: jax.Array | None  # K = stored value * k_scale
    v_scale: jax.Array | None  # V = stored value * v_scale


def make_knobs(
    scale: Scalar,
    *,
    softcap: Scalar | None = None,
    window: Scalar | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    k_scale: Scalar | None = None,
    v_scale: Scalar | None = None,
) -> Knobs:
    """Convert to arrays: float32, the window int32. An option that is not given is off."""

    def float32(x: Scalar | jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.asarray(x, jnp.float32)

    return Knobs(
        scale=jnp.asarray(scale, jnp.float32),
        softcap=float32(softcap),
        window=None if window is None else jnp.asarray(window, jnp.int32),
        sinks=float32(sinks),
        slopes=float32(slopes),
        k_scale=float32(k_scale),
        v_scale=float32(v_scale),
    )


@dataclass(frozen=True)
class StaticRules:
    """Options of attention that are compiled in."""

    chunk: int | None = None  # a token sees those from the last multiple of it on
    lookback: int = 0  # and as many before, a multiple of `chunk`
    alibi_root: bool = False  # ALiBi takes the root of the distance


NO_RULES: Final = StaticRules()


def divided(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Divide K or V by its scale before it is stored."""
    return x if scale is None else x.astype(jnp.float32) / scale


def check(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    layout: PagedKvLayout,
    batch: RaggedBatch,
) -> None:
    """Raise ValueError naming the argument whose static shape or dtype is invalid."""
    tokens, heads, width = q.shape
    for name, new, dim in (("k", k, layout.head_dim), ("v", v, layout.value_dim)):
        if new is not None:
            check_shape(name, new.shape, (tokens, layout.kv_heads, dim))
    check_shape("head dim of q", (width,), (layout.head_dim,))
    if heads % layout.kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {layout.kv_heads} KV heads")
    check_cache(cache, layout.shape(*cache.shape[:2]), layout, batch)


def check_cache(cache: jax.Array, shape: tuple[int, ...], layout: PageLayout, batch: RaggedBatch) -> None:
    """Raise ValueError naming the argument whose static shape or dtype is invalid."""
    check_shape("cache", cache.shape, shape)
    if cache.dtype != layout.word_dtype:
        raise ValueError(f"cache is {cache.dtype}, its layout needs {layout.word_dtype}")
    check_shape("query_start", batch.query_start.shape, (batch.max_seqs + 1,))
    check_shape("page_table", batch.page_table.shape, (batch.max_seqs, batch.page_table.shape[-1]))
    check_shape("counts", batch.counts.shape, (2,))
    for name, x in vars(batch).items():
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, not {x.dtype}")


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}, expected {expected}")


@dataclass(frozen=True)
class AttentionBlockSizes:
    """Block sizes of the kernel."""

    queries: int  # tokens of a mixed tile, sequences of a decode tile
    pages: int  # per fetch
    tokens: int  # per pass, a power of two
    heads: int  # unrolled in the inner loop: lane heads (decode), (pass, lane head) pairs (mixed)


def choose_block_sizes(
    chip: ChipInfo,
    layout: PageLayout,
    group_rows: int,
    max_pages: int,
    max_tokens: int,
    *,
    decode: bool,
    batch_invariant: bool = False,
) -> AttentionBlockSizes:
    """Return block sizes of a core for `group_rows` query rows per lane head, bounded by `max_pages` and `max_tokens`.

    `batch_invariant`: passes begin at multiples of their size, also where a window begins at any page.
    """
    entry = block_entry(chip, layout, group_rows, decode=decode).settings
    layout = core_layout(chip, layout)
    return fit_blocks(entry, layout, group_rows, max_pages, max_tokens, decode=decode, batch_invariant=batch_invariant)


def core_layout(chip: ChipInfo, layout: PageLayout) -> PageLayout:
    """Return the layout of the heads of one TensorCore: half of the device's if it has two cores, where that divides.

    Halves share neither pages' rows nor semaphores, so that each core fetches, writes and attends on its own.
    """
    return (layout.halved() if chip.cores == 2 else None) or layout


def fit_blocks(
    settings: Settings,
    layout: PageLayout,
    group_rows: int,
    max_pages: int,
    max_tokens: int,
    *,
    decode: bool,
    batch_invariant: bool = False,
) -> AttentionBlockSizes:
    """Return the block sizes for `settings` and a core's layout, within the bounds of `choose_block_sizes`."""
    entry = dict(settings)
    if batch_invariant:
        entry["tokens"] = min(entry["tokens"], layout.page_size)
        entry["queries"] = min(entry["queries"], max(16, INVARIANT_ROWS // next_power_of_two(group_rows)))
    fetch = max(1, min(max_pages, FETCH_BYTES // layout.bytes_per_page, -(-entry["fetch"] // layout.page_size)))
    if not decode and layout.lane_heads == 1:
        fetch = max(2, 32 // layout.page_size, fetch)  # at least two passes per fetch
        tokens = pass_tokens(min(entry["tokens"], fetch * layout.page_size // 2), fetch, layout)
    else:
        tokens = pass_tokens(entry["tokens"], fetch, layout)
    heads = min(entry["heads"], layout.lane_heads)
    if decode:
        while layout.lane_heads % heads or (layout.packing == 4 and heads % 2):
            heads -= 1
    else:
        heads = max(2, heads - heads % 2)
    queries = min(entry["queries"], max(16, next_power_of_two(max_tokens))) if not decode else entry["queries"]
    return AttentionBlockSizes(queries, fetch, tokens, heads)


def pass_tokens(wanted: int, pages: int, layout: PageLayout) -> int:
    """Return the largest pass of at most `wanted` tokens that evenly divides a page's section or a fetch's `pages`."""
    page_size = layout.page_size
    if wanted < page_size:
        section = page_size // layout.sections
        return next(size for size in range(wanted, 0, -1) if section % size == 0 and size % 8 == 0)
    return page_size * next(n for n in range(min(wanted // page_size, pages), 0, -1) if pages % n == 0)


class BlockSource(Enum):
    """Where block sizes come from."""

    TUNED = "tuned"  # by the schedule of these heads
    WIDTH = "tuned for other heads of the same width"
    FORMULA = "formula"


@dataclass(frozen=True)
class BlockEntry:
    """Block sizes before they are fitted to a call's bounds, and their source."""

    settings: Settings
    source: BlockSource


def block_entry(chip: ChipInfo, layout: PageLayout, group_rows: int, *, decode: bool) -> BlockEntry:
    """Return the entry of tuning.json for these heads, else that for their width, else the formula."""
    formula = block_formula(core_layout(chip, layout), group_rows, decode=decode)
    table = _table()
    keys = {
        BlockSource.TUNED: tuning_key(chip, layout, group_rows, decode=decode),
        BlockSource.WIDTH: _width_key(chip, layout, decode=decode),
    }
    for source, key in keys.items():
        if (entry := table.get(key)) is not None:
            return BlockEntry({**formula, **entry}, source)
    return BlockEntry(formula, BlockSource.FORMULA)


def tuning_key(chip: ChipInfo, layout: PageLayout, group_rows: int, *, decode: bool) -> str:
    """Return the key of tuning.json: chip, variant, stored type, and lane heads of a core x rows of each x width.

    Head shapes that give the same matrices share a key: 32 heads on 8 of 64 are 4 lane heads of 8 rows and 128 lanes.
    """
    layout = core_layout(chip, layout)
    values = "" if layout.value_width == layout.width else f"v{layout.value_width}"
    sizes = f"{layout.lane_heads}x{group_rows}x{layout.width}{values}"
    return f"{chip.name}/{'decode' if decode else 'mixed'}/{layout.dtype}/{sizes}"


def _width_key(chip: ChipInfo, layout: PageLayout, *, decode: bool) -> str:
    return f"{chip.name}/{'decode' if decode else 'mixed'}/{layout.dtype}/w{layout.width}"


def block_formula(layout: PageLayout, group_rows: int, *, decode: bool) -> Settings:
    """Return block sizes for heads of a core that have not been tuned."""
    if decode:
        return {"queries": DECODE_ROWS_PER_TILE, "fetch": 2048, "tokens": 512, "heads": 8}
    rows = MIXED_ROWS if layout.lane_heads > 3 else 2 * MIXED_ROWS  # few heads: large passes hide the group's end
    queries = max(16, 1 << (rows // group_rows).bit_length() - 1)
    return {"queries": queries, "fetch": 1024, "tokens": 256, "heads": 4}


@cache
def _table() -> dict[str, dict[str, int]]:
    text = resources.files(__package__).joinpath("tuning.json").read_text()
    return json.loads(text)["blocks"]


def div(a: Any, n: int) -> Any:
    """Return a // n for a >= 0. Python's operator inspects the running chip, which fails in ahead-of-time compiling."""
    return (
        jax.lax.shift_right_logical(a, jnp.int32(n.bit_length() - 1))
        if n & (n - 1) == 0
        else jax.lax.div(a, jnp.int32(n))
    )


def rem(a: jax.Array, n: int) -> jax.Array:
    """Return a % n for a >= 0 and a power of two n."""
    return a & (n - 1)


def ceil_div(a: Any, n: int) -> Any:
    """Return ceil(a / n) for a >= 0."""
    return div(a + (n - 1), n)


@dataclass(frozen=True)
class Static:
    """The static configuration of one compiled variant."""

    decode: bool
    layout: PageLayout  # of one core
    cores: int  # that divide the lane heads
    load: LoadPass  # of K and V of one pass
    quarters: bool  # `load` is `attend.load_float8`
    writes: bool  # the call has new K and V
    blocks: AttentionBlockSizes
    alternates: bool  # mixed: the halves of a pair alternate chain by chain
    rows: int  # M: rows of one matmul, queries x heads of a lane head, padded
    max_pages: int
    windowed: bool
    softcapped: bool
    has_sinks: bool
    has_slopes: bool
    scaled: bool  # has a v_scale
    rules: StaticRules

    @property
    def block_tokens(self) -> int:
        """Return the tokens of one fetch."""
        return self.blocks.pages * self.layout.page_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scalars:
    """Scalar-prefetch arguments: arrays, and in the kernel the same names of refs in SMEM."""

    step: Any  # int32 [6]: the numbers of the properties below
    numbers: Any  # float32 [2]: softcap in base 2, v_scale
    query_start: Any
    kv_len: Any
    pages: Any  # the page table, flattened
    first_seq: Any  # int32 [tiles + 1]: first sequence of each mixed tile

    @staticmethod
    def pack_step(*, layer: Any, decodes: Any, seqs: Any, first_tile: Any, tiles: Any, window: Any) -> jax.Array:
        """Return `step`."""
        return jnp.stack([layer, decodes, seqs, first_tile, tiles, window]).astype(jnp.int32)

    @property
    def layer(self) -> Any:
        """Return the layer of the cache."""
        return self.step[0]

    @property
    def decodes(self) -> Any:
        """Return the number of decode sequences."""
        return self.step[1]

    @property
    def seqs(self) -> Any:
        """Return the number of all sequences."""
        return self.step[2]

    @property
    def first_tile(self) -> Any:
        """Return the tile at which the call begins."""
        return self.step[3]

    @property
    def tiles(self) -> Any:
        """Return the number of tiles of the call."""
        return self.step[4]

    @property
    def window(self) -> Any:
        """Return the sliding window, in tokens; 0 without one."""
        return self.step[5]


@dataclass(frozen=True)
class TileSpan:
    """The part of one sequence in one tile."""

    low: Any  # first token
    high: Any  # end of its tokens
    position: Any  # of token `low`
    kv_end: Any  # end of the positions attended to
    page_low: Any  # first page needed
    blocks: Any  # number of fetches


@dataclass(frozen=True)
class KernelPlan:
    """Maps tiles to sequences, and sequences to their tokens and pages."""

    static: Static
    scalars: Scalars

    @property
    def tile(self) -> Any:
        """Return the running tile."""
        return pl.program_id(self.static.cores - 1)

    @property
    def core_rows(self) -> Any:
        """Return the rows of the running core in pages and in new K and V."""
        rows = self.static.layout.rows_per_token
        return slice(None) if self.static.cores == 1 else pl.ds(pl.program_id(0) * rows, rows)

    def sequences(self, tile: Any) -> tuple[Any, Any]:
        """Return the sequences [first, end) of a tile."""
        s = self.scalars
        n = self.static.blocks.queries
        if self.static.decode:
            return tile * n, jnp.minimum((tile + 1) * n, s.decodes)
        token = jnp.minimum((s.first_tile + tile + 1) * n, s.query_start[s.seqs]) - 1
        last = s.first_seq[tile + 1]  # the next tile may begin with the last sequence of this one
        shared = jnp.logical_and(last < s.seqs, s.query_start[jnp.minimum(last, s.seqs - 1)] <= token)
        return s.first_seq[tile], jnp.where(shared, last + 1, last)

    def span(self, tile: Any, seq: Any) -> TileSpan:
        """Return the part of `seq` in a tile."""
        s = self.scalars
        layout = self.static.layout
        kv_len = s.kv_len[seq]
        if self.static.decode:
            low = seq
            high = seq + 1
            position = kv_len - 1
            kv_end = kv_len
        else:
            n = self.static.blocks.queries
            begin = s.query_start[seq]
            end = s.query_start[seq + 1]
            low = jnp.maximum(begin, (s.first_tile + tile) * n)
            high = jnp.minimum(end, (s.first_tile + tile + 1) * n)
            position = kv_len - end + low
            kv_end = kv_len - end + high
        first = jnp.maximum(position - s.window + 1, 0) if self.static.windowed else jnp.int32(0)
        if self.static.rules.chunk is not None:
            first = jnp.maximum(self.chunk_start(position) - self.static.rules.lookback, 0)
        page_low = div(first, layout.page_size)
        pages = ceil_div(kv_end, layout.page_size) - page_low
        return TileSpan(low, high, position, kv_end, page_low, ceil_div(pages, self.static.blocks.pages))

    def chunk_start(self, position: Any) -> Any:
        """Return the first position of the chunk of the token at `position`."""
        chunk = self.static.rules.chunk
        assert chunk is not None, "tokens attend in chunks"
        return div(position, chunk) * chunk

    def page(self, seq: Any, index: Any) -> Any:
        """Return the page id at `index` in the page table of `seq`."""
        return self.scalars.pages[seq * self.static.max_pages + index]

    def first_token(self, tile: Any) -> Any:
        """Return the first token of a mixed tile."""
        return (self.scalars.first_tile + tile) * self.static.blocks.queries
