"""Run the kernel: arrange rows into tiles and scalars for SMEM, one `pallas_call` per variant, and arrange back."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.attend import BYTES, SUBLANES, Stage, State, load_float8
from pagoda.kernels_pallas.ragged_paged_attention.attend import load as load_words
from pagoda.kernels_pallas.ragged_paged_attention.kernel import LOG2E, AttentionKernelBody
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES, PagedKvLayout, PageLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import (
    NO_RULES,
    KernelPlan,
    Knobs,
    LoadPass,
    RaggedBatch,
    Scalars,
    Static,
    StaticRules,
    choose_block_sizes,
    core_layout,
    divided,
)
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

MAX_TABLE = 128 * 1024  # int32 entries of the page table: half of SMEM


def attention_kernel(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    layout: PagedKvLayout,
    decode_only: bool,
    rules: StaticRules,
    batch_invariant: bool = False,
    interpret: Any,
    chip: ChipInfo,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel. Arguments as `ragged_paged_attention`."""
    check_table(batch, layout)
    shape = *q.shape[:2], layout.value_dim
    if q.shape[0] == 0:
        return q.reshape(shape), cache
    rows = lane_rows(scaled_queries(q, knobs, layout), layout)
    words = None
    if k is not None and v is not None:
        words = layout.pack(divided(k, knobs.k_scale), divided(v, knobs.v_scale)).swapaxes(0, 1)
    out, cache = both_variants(
        rows,
        words,
        cache,
        layer,
        batch.cleaned(),
        knobs,
        layout=layout,
        load=load_words,
        decode_only=decode_only,
        rules=rules,
        batch_invariant=batch_invariant,
        interpret=interpret,
        chip=chip,
        out_dtype=q.dtype,
    )
    return from_lane_rows(out, shape, layout), cache


def check_table(batch: RaggedBatch, layout: PageLayout) -> None:
    """Raise ValueError if the page table exceeds scalar memory."""
    if batch.page_table.size > MAX_TABLE:
        raise ValueError(
            f"a page table of {batch.page_table.shape} exceeds the {MAX_TABLE} entries that fit scalar memory; use "
            f"fewer sequences, a shorter context or pages larger than {layout.page_size} tokens"
        )


def both_variants(
    rows: jax.Array,
    words: jax.Array | None,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    decode_only: bool,
    mixed_writes: bool = True,
    batch_invariant: bool = False,
    **shared: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run the decode variant, and the mixed one unless `decode_only`, on rows [T, lane heads, rows, W].

    `mixed_writes`: False if the cache has the words of sequences of several tokens already. `batch_invariant`: the
    mixed variant alone; there are no decode sequences.
    Return outputs [T, lane heads, rows, V], zero for padding, and the cache. `shared`: see `variant`.
    """
    tokens = rows.shape[0]
    if batch_invariant:
        out, cache = variant(
            rows, words, cache, layer, batch, knobs, decode=False, batch_invariant=batch_invariant, **shared
        )
        return jnp.where(jnp.arange(tokens)[:, None, None, None] < batch.query_start[-1], out, 0), cache
    out, cache = variant(rows[: batch.max_seqs], words, cache, layer, batch, knobs, decode=True, **shared)
    token = jnp.arange(tokens)[:, None, None, None]
    out = jnp.pad(out, [(0, tokens - out.shape[0])] + [(0, 0)] * 3)
    out = jnp.where(token < batch.counts[0], out, 0)
    if not decode_only:
        mixed_words = words if mixed_writes else None
        mixed, cache = variant(rows, mixed_words, cache, layer, batch, knobs, decode=False, **shared)
        real = (token >= batch.counts[0]) & (token < batch.query_start[-1])
        out = jnp.where(real, mixed, out)
    return out, cache


def scaled_queries(q: jax.Array, knobs: Knobs, layout: PageLayout) -> jax.Array:
    """Multiply q by all factors of the logits, so that the kernel's logits are in base 2 (or the argument of tanh)."""
    factor = knobs.scale if knobs.k_scale is None else knobs.scale * knobs.k_scale
    factor = factor * LOG2E if knobs.softcap is None else factor / knobs.softcap
    return (q.astype(jnp.float32) * factor).astype(layout.compute_dtype)


def lane_rows(q: jax.Array, layout: PagedKvLayout) -> jax.Array:
    """Arrange q [T, N, H] -> [T, lane heads, rows, W]: the rows that share a matmul, each zero outside its lanes."""
    tokens, heads, _ = q.shape
    group = heads // layout.kv_heads
    q = q.reshape(tokens, layout.kv_heads, group, layout.head_dim)
    slots = layout.lane_heads * layout.heads_per_row
    q = jnp.pad(q, ((0, 0), (0, slots - layout.kv_heads), (0, 0), (0, layout.slot_width - layout.head_dim)))
    if layout.heads_per_row == 1:
        return q
    q = q.reshape(tokens, layout.lane_heads, layout.heads_per_row, group, 1, layout.slot_width)
    own = jnp.eye(layout.heads_per_row, dtype=bool)[:, None, :, None]
    return jnp.where(own, q, 0).reshape(tokens, layout.lane_heads, layout.heads_per_row * group, layout.width)


def from_lane_rows(out: jax.Array, shape: tuple[int, ...], layout: PagedKvLayout) -> jax.Array:
    """Invert `lane_rows` for results: take each row's lanes of V, -> [T, N, V] = shape."""
    tokens, heads, width = shape
    group = heads // layout.kv_heads
    slot_width = layout.value_width // layout.heads_per_row
    out = out.reshape(tokens, layout.lane_heads, layout.heads_per_row, group, layout.heads_per_row, slot_width)
    own = jnp.arange(layout.heads_per_row)
    out = out[:, :, own, :, own]  # [heads per row, T, lane heads, group, slot]
    out = out.transpose(1, 2, 0, 3, 4).reshape(tokens, -1, group, slot_width)
    return out[:, : layout.kv_heads, :, :width].reshape(shape)


def variant(
    rows: jax.Array,
    words: jax.Array | None,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    decode: bool,
    batch_invariant: bool = False,
    layout: PageLayout,
    interpret: Any,
    chip: ChipInfo,
    out_dtype: Any,
    load: LoadPass = load_words,
    rules: StaticRules = NO_RULES,
) -> tuple[jax.Array, jax.Array]:
    """Run one pallas_call over rows [T, lane heads, rows, W] (decode: [S, ...]); return their outputs and the cache.

    `words` [R, T, 128]: the new K and V, None if none are written.
    """
    count, heads, group, _ = rows.shape
    max_pages = batch.page_table.shape[1]
    blocks = choose_block_sizes(chip, layout, group, max_pages, count, decode=decode, batch_invariant=batch_invariant)
    quarters = decode and load is load_words and "float8" in layout.dtype and blocks.tokens % (BYTES * SUBLANES) == 0
    tiles = -(-count // blocks.queries)
    rows = jnp.pad(rows, [(0, tiles * blocks.queries - count)] + [(0, 0)] * 3)
    tiled = padded_rows(rows) if decode else to_columns(rows, tiles)
    core = core_layout(chip, layout)
    static = Static(
        decode=decode,
        layout=core,
        cores=layout.lane_heads // core.lane_heads,
        load=load_float8 if quarters else load,
        quarters=quarters,
        writes=words is not None,
        blocks=blocks,
        alternates=chip.matrix_width > LANES,
        rows=tiled.shape[2] if decode else group * blocks.queries,
        max_pages=max_pages,
        windowed=knobs.window is not None,
        softcapped=knobs.softcap is not None,
        has_sinks=knobs.sinks is not None,
        has_slopes=knobs.slopes is not None,
        scaled=knobs.v_scale is not None,
        rules=rules,
    )
    scalars, num_tiles = scalar_arguments(layer, batch, knobs, blocks.queries, tiles, decode=decode)
    out, cache = call(
        static,
        scalars,
        num_tiles,
        tiled,
        words,
        cache,
        sinks=None if knobs.sinks is None else head_rows(knobs.sinks, static, heads, group),
        slopes=None if knobs.slopes is None else head_rows(knobs.slopes, static, heads, group),
        interpret=interpret,
        out_dtype=out_dtype,
    )
    out = out[:, :, :group] if decode else _from_columns(out, group)
    return out.reshape(-1, heads, group, layout.value_width)[:count], cache


def padded_rows(rows: jax.Array) -> jax.Array:
    """Pad the rows of [T, heads, rows, W] to a sublane tile: [T, heads, M, W]."""
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % SUBLANES), (0, 0)))


def to_decode_tiles(rows: jax.Array, tiles: int) -> jax.Array:
    """Arrange [tiles * n, heads, rows, W] -> [tiles, heads, n, M, W], rows padded to a sublane tile."""
    rows = padded_rows(rows)
    return rows.reshape(tiles, -1, *rows.shape[1:]).transpose(0, 2, 1, 3, 4)


def to_mixed_tiles(rows: jax.Array, tiles: int) -> jax.Array:
    """Arrange [tiles * n, heads, rows, W] -> [tiles, heads, 1, rows * n, W], the rows of a query head adjacent."""
    _, heads, group, width = rows.shape
    rows = rows.reshape(tiles, -1, heads, group, width).transpose(0, 2, 3, 1, 4)
    return rows.reshape(tiles, heads, 1, -1, width)


def to_columns(rows: jax.Array, tiles: int) -> jax.Array:
    """Arrange [tiles * n, heads, rows, W] so that tokens are columns: [heads, rows, W, tiles * n].

    XLA computes projections in this order, so that nothing is moved. Tiles that do not divide the lanes are put apart:
    [tiles, heads, 1, W, rows * n].
    """
    count, heads, group, width = rows.shape
    queries = count // tiles
    if queries % LANES == 0:
        return rows.transpose(1, 2, 3, 0)
    rows = rows.reshape(tiles, queries, heads, group, width).transpose(0, 2, 4, 3, 1)
    return rows.reshape(tiles, heads, 1, width, group * queries)


def _from_columns(out: jax.Array, group: int) -> jax.Array:
    """Invert `to_columns`: -> [tiles * n, heads, rows, V]."""
    if out.ndim == 4:
        return out.transpose(3, 0, 1, 2)
    tiles, heads, _, width, rows = out.shape
    out = out.reshape(tiles, heads, width, group, rows // group).transpose(0, 4, 1, 3, 2)
    return out.reshape(-1, heads, group, width)


def head_rows(terms: jax.Array, static: Static, heads: int, group: int) -> jax.Array:
    """Arrange a number per head [N], times log2(e), like the running maximum: [lane heads, M, 128 or 8, M]."""
    terms = jnp.pad(terms * LOG2E, (0, heads * group - terms.shape[0])).reshape(heads, group)
    if static.decode:
        terms = jnp.pad(terms, ((0, 0), (0, static.rows - group)))
        return jnp.broadcast_to(terms[:, :, None], (*terms.shape, LANES))
    terms = jnp.repeat(terms, static.blocks.queries, axis=1)
    return jnp.broadcast_to(terms[:, None], (terms.shape[0], SUBLANES, terms.shape[1]))


def scalar_arguments(
    layer: jax.Array, batch: RaggedBatch, knobs: Knobs, queries: int, tiles: int, *, decode: bool
) -> tuple[Scalars, jax.Array]:
    """Return the scalar-prefetch arrays and the number of tiles with real queries."""
    decodes = batch.counts[0]
    seqs = batch.counts[1]
    if decode:
        first_tile = jnp.int32(0)
        num_tiles = pl.cdiv(decodes, queries)
        first_seq = jnp.zeros(1, jnp.int32)
    else:
        first_tile = batch.query_start[decodes] // queries
        num_tiles = jnp.where(seqs > decodes, pl.cdiv(batch.query_start[-1], queries) - first_tile, 0)
        starts = (first_tile + jnp.arange(tiles + 1, dtype=jnp.int32)) * queries
        first_seq = jnp.searchsorted(batch.query_start[1:], starts, side="right").astype(jnp.int32)
        first_seq = jnp.clip(first_seq, decodes, seqs)
    window = jnp.int32(0) if knobs.window is None else knobs.window
    step = Scalars.pack_step(
        layer=layer, decodes=decodes, seqs=seqs, first_tile=first_tile, tiles=num_tiles, window=window
    )
    softcap = jnp.float32(0) if knobs.softcap is None else knobs.softcap * LOG2E
    v_scale = jnp.float32(1) if knobs.v_scale is None else knobs.v_scale
    scalars = Scalars(
        step=step,
        numbers=jnp.stack([softcap, v_scale]),
        query_start=batch.query_start,
        kv_len=batch.kv_len,
        pages=batch.page_table.reshape(-1),
        first_seq=first_seq,
    )
    return scalars, num_tiles


def call(
    static: Static,
    scalars: Scalars,
    num_tiles: jax.Array,
    q: jax.Array,
    words: jax.Array | None,
    cache: jax.Array,
    *,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    interpret: Any,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run the pallas_call on q [T, lane heads, M, W], or of the mixed variant on what `to_columns` returns.

    A mixed call starts at the tile of its first token. `sinks` and `slopes`: from `head_rows`.
    """
    heads = static.layout.lane_heads  # of one core
    width = static.layout.value_width
    channels = q.ndim - (1 if static.decode else 2)  # the axis of W
    out_shape = (*q.shape[:channels], width, *q.shape[channels + 1 :])
    halved = static.cores > 1  # Mosaic gives the halves of a leading parallel dimension to the two cores
    grid: tuple[Any, ...] = (static.cores, num_tiles) if halved else (num_tiles,)
    order: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "arbitrary") if halved else ("arbitrary",)

    def at_core(*indices: Any) -> tuple[Any, ...]:
        return indices[0] if halved else 0, 0, 0

    tile, out_tile = (_tile_spec(static, shape) for shape in (q.shape, out_shape))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def term_spec(term: jax.Array | None) -> pl.BlockSpec | None:
        return None if term is None else pl.BlockSpec((heads, *term.shape[1:]), at_core)

    if words is None:  # The kernel takes a ref that no copy reads.
        words = jnp.zeros((static.layout.rows_per_token, SUBLANES, LANES), cache.dtype)

    def body(
        smem: Scalars,
        q: Any,
        sinks: Any,
        slopes: Any,
        new: Any,
        _: Any,
        out: Any,
        pages: Any,  # the aliased output: reads and writes go through one ref
        kv: Any,
        state: State,
        stages: Stage | None,
        slot: Any,
        fetched: Any,
        written: Any,
    ) -> None:
        plan = KernelPlan(static, smem)
        transfers = Transfers(plan=plan, new=new, cache=pages, kv=kv, fetched=fetched, written=written)
        AttentionKernelBody(
            plan=plan,
            q=q,
            sinks=sinks,
            slopes=slopes,
            out=out,
            transfers=transfers,
            state=state,
            stages=None if stages is None else (stages.half(0), stages.half(1)),
            slot=slot,
        ).run()

    inputs = (scalars, q, sinks, slopes, words)
    scratch: list[Any] = [
        pltpu.VMEM((2, static.blocks.pages, cache.shape[2] // static.cores, *cache.shape[3:]), cache.dtype),
        *state_buffers(static),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
    ]

    out, cache = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(out_shape, out_dtype), jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[tile, term_spec(sinks), term_spec(slopes), anywhere, anywhere],
            out_specs=[out_tile, anywhere],
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(jax.tree.leaves(inputs)): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order,
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_bytes(static, q, out_dtype),
        ),
        cost_estimate=cost(static, q, cache),
        interpret=interpret,
        name=f"ragged_paged_attention_{'decode' if static.decode else 'mixed'}",
    )(*inputs, cache)
    return out, cache


def _tile_spec(static: Static, shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return one core's block of a tile of q or of the output: [n, heads, M, W], if mixed [heads, parts, W, n].

    The M columns of the mixed variant are in one part, or in one per row of `to_columns`.
    """
    heads = static.layout.lane_heads
    halved = static.cores > 1

    def at_tile(*indices: Any) -> tuple[Any, Any]:
        *core, tile, scalars = indices
        return core[0] if halved else 0, scalars.first_tile + tile

    def by_sequences(*indices: Any) -> tuple[Any, ...]:
        core, tile = at_tile(*indices)
        return tile, core, 0, 0

    def by_columns(*indices: Any) -> tuple[Any, ...]:
        core, tile = at_tile(*indices)
        return core, 0, 0, tile

    def by_tiles(*indices: Any) -> tuple[Any, ...]:
        core, tile = at_tile(*indices)
        return tile, core, 0, 0, 0

    if static.decode:
        return pl.BlockSpec((static.blocks.queries, heads, *shape[2:]), by_sequences)
    if len(shape) == 4:
        return pl.BlockSpec((heads, *shape[1:3], static.blocks.queries), by_columns)
    return pl.BlockSpec((None, heads, *shape[2:]), by_tiles)


def state_buffers(static: Static) -> tuple[State, Stage | None]:
    """Return the VMEM of a core's running softmax and, for the mixed variant, of two stages: [2, ...] each."""
    rows = static.rows
    heads = static.layout.lane_heads
    width = static.layout.value_width

    def buffer(*shape: int) -> Any:
        return pltpu.VMEM(shape, jnp.float32)

    if static.decode:
        state = State(top=buffer(heads, rows, LANES), acc=buffer(heads, rows, width), total=buffer(heads, rows, LANES))
        return state, None
    stages = Stage(logits=buffer(2, static.blocks.tokens, rows), peak=buffer(2, SUBLANES, rows))
    return State(top=buffer(heads, SUBLANES, rows), acc=buffer(heads, width + SUBLANES, rows)), stages


def vmem_bytes(static: Static, q: jax.Array, out_dtype: Any) -> int:
    """Return the VMEM limit: all declared buffers, and space for the compiler."""
    layout = static.layout
    heads = static.layout.lane_heads
    rows = static.rows
    tile = heads * rows * (static.blocks.queries if static.decode else 1)
    kv = 2 * static.blocks.pages * layout.bytes_per_page
    state = sum(4 * math.prod(buffer.shape) for buffer in jax.tree.leaves(state_buffers(static)))
    tiles = 2 * tile * (layout.width * q.dtype.itemsize + layout.value_width * jnp.dtype(out_dtype).itemsize)
    terms = 2 * heads * rows * LANES * 4 * (static.has_sinks + static.has_slopes)
    return kv + state + tiles + terms + (16 << 20)


def cost(static: Static, q: jax.Array, cache: jax.Array) -> pl.CostEstimate:
    """Return the cost estimate for XLA's scheduler, with half of the page table in use."""
    layout = static.layout
    rows = q.size // layout.width
    context = static.max_pages * layout.page_size // 2
    visits = rows // (layout.lane_heads * static.rows)
    return pl.CostEstimate(
        flops=2 * rows * context * (layout.width + layout.value_width),
        bytes_accessed=2 * q.size * q.dtype.itemsize + visits * static.max_pages * layout.bytes_per_page // 2,
        transcendentals=rows * context,
    )
