"""From the public arguments to `pallas_call` and back: rows into tiles, scalars into SMEM, one call per variant."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.ragged_paged_attention.arguments import Knobs, RaggedBatch
from pagoda.kernels_pallas.ragged_paged_attention.attend import SUBLANES, Stage, State
from pagoda.kernels_pallas.ragged_paged_attention.kernel import LOG2E, AttentionKernelBody
from pagoda.kernels_pallas.ragged_paged_attention.layout import LANES, PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import KernelPlan, Scalars, Static, choose
from pagoda.kernels_pallas.ragged_paged_attention.transfers import Transfers

MAX_TABLE = 128 * 1024  # int32 entries of the page table: half of SMEM


def kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    layout: PagedKvLayout,
    decode_only: bool,
    interpret: Any,
    chip: ChipInfo,
) -> tuple[jax.Array, jax.Array]:
    """As `api.ragged_paged_attention`: q [T, N, H], k and v [T, K, H], cache -> (out [T, N, H], cache)."""
    if batch.page_table.size > MAX_TABLE:
        raise ValueError(
            f"a page table of {batch.page_table.shape} exceeds the {MAX_TABLE} entries that scalar memory holds; "
            f"fewer sequences, a shorter context or a page larger than {layout.page_size} tokens would fit"
        )
    if q.shape[0] == 0:
        return q, cache
    batch = batch.cleaned()
    rows = lane_rows(scaled_queries(q, knobs, layout), layout)
    words = layout.pack(_divided(k, knobs.k_scale), _divided(v, knobs.v_scale)).swapaxes(0, 1)
    shared: dict[str, Any] = {"layout": layout, "interpret": interpret, "chip": chip, "out_dtype": q.dtype}
    decode_rows = rows[: batch.max_seqs]
    out, cache = variant(decode_rows, words, cache, layer, batch, knobs, decode=True, **shared)
    token = jnp.arange(q.shape[0])[:, None, None, None]
    out = jnp.pad(out, [(0, q.shape[0] - out.shape[0])] + [(0, 0)] * 3)
    out = jnp.where(token < batch.counts[0], out, 0)
    if not decode_only:
        mixed, cache = variant(rows, words, cache, layer, batch, knobs, decode=False, **shared)
        real = (token >= batch.counts[0]) & (token < batch.query_start[-1])
        out = jnp.where(real, mixed, out)
    return from_lane_rows(out, q.shape, layout), cache


def _divided(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x if scale is None else x.astype(jnp.float32) / scale


def scaled_queries(q: jax.Array, knobs: Knobs, layout: PagedKvLayout) -> jax.Array:
    """q with every factor of the logits in it, so that the kernel's logits are in base 2 (or the argument of tanh)."""
    factor = knobs.scale if knobs.k_scale is None else knobs.scale * knobs.k_scale
    factor = factor * LOG2E if knobs.softcap is None else factor / knobs.softcap
    return (q.astype(jnp.float32) * factor).astype(layout.compute_dtype)


def lane_rows(q: jax.Array, layout: PagedKvLayout) -> jax.Array:
    """q [T, N, H] -> [T, lane heads, rows, W]: the rows that share a matmul, each zero outside its own lanes."""
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
    """The inverse of `lane_rows`: each row's own lanes, [T, N, H] = shape."""
    tokens, heads, width = shape
    group = heads // layout.kv_heads
    out = out.reshape(tokens, layout.lane_heads, layout.heads_per_row, group, layout.heads_per_row, layout.slot_width)
    own = jnp.arange(layout.heads_per_row)
    out = out[:, :, own, :, own]  # [heads per row, T, lane heads, group, slot]
    out = out.transpose(1, 2, 0, 3, 4).reshape(tokens, -1, group, layout.slot_width)
    return out[:, : layout.kv_heads, :, :width].reshape(shape)


def variant(
    rows: jax.Array,
    words: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    knobs: Knobs,
    *,
    decode: bool,
    layout: PagedKvLayout,
    interpret: Any,
    chip: ChipInfo,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """One pallas_call over rows [T, lane heads, rows, W] (decode: [S, ...]): (their outputs, cache)."""
    count, heads, group, width = rows.shape
    max_pages = batch.page_table.shape[1]
    blocks = choose(chip, layout, group, max_pages, count, decode=decode)
    tiles = -(-count // blocks.queries)
    rows = jnp.pad(rows, [(0, tiles * blocks.queries - count)] + [(0, 0)] * 3)
    tiled = to_decode_tiles(rows, tiles) if decode else to_mixed_tiles(rows, tiles)
    static = Static(
        decode=decode,
        layout=layout,
        blocks=blocks,
        rows=tiled.shape[3],
        max_pages=max_pages,
        windowed=knobs.window is not None,
        softcapped=knobs.softcap is not None,
        sunk=knobs.sinks is not None,
        scaled=knobs.v_scale is not None,
    )
    scalars, live = scalar_arguments(layer, batch, knobs, blocks.queries, tiles, decode=decode)
    sinks = None if knobs.sinks is None else sink_rows(knobs.sinks, static, group)
    out, cache = call(static, scalars, live, tiled, sinks, words, cache, interpret=interpret, out_dtype=out_dtype)
    out = out[:, :, :, :group].transpose(0, 2, 1, 3, 4) if decode else _untile(out, blocks.queries)
    return out.reshape(-1, heads, group, width)[:count], cache


def to_decode_tiles(rows: jax.Array, tiles: int) -> jax.Array:
    """[tiles * n, heads, rows, W] -> [tiles, heads, n, M, W], rows padded to a sublane tile."""
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 8), (0, 0)))
    return rows.reshape(tiles, -1, *rows.shape[1:]).transpose(0, 2, 1, 3, 4)


def to_mixed_tiles(rows: jax.Array, tiles: int) -> jax.Array:
    """[tiles * n, heads, rows, W] -> [tiles, heads, 1, rows * n, W]: the rows of one query head lie together."""
    _, heads, group, width = rows.shape
    rows = rows.reshape(tiles, -1, heads, group, width).transpose(0, 2, 3, 1, 4)
    return rows.reshape(tiles, heads, 1, -1, width)


def _untile(out: jax.Array, queries: int) -> jax.Array:
    """[tiles, heads, 1, W, rows * n] -> [tiles, n, heads, rows, W]."""
    tiles, heads, _, width, rows = out.shape
    return out.reshape(tiles, heads, width, rows // queries, queries).transpose(0, 4, 1, 3, 2)


def sink_rows(sinks: jax.Array, static: Static, group: int) -> jax.Array:
    """sinks [N] in base 2, as the running maximum lies: [lane heads, M, 128] or [lane heads, 8, M] float32."""
    layout = static.layout
    sinks = jnp.pad(sinks * LOG2E, (0, layout.lane_heads * group - sinks.shape[0]))
    sinks = sinks.reshape(layout.lane_heads, group)
    if static.decode:
        sinks = jnp.pad(sinks, ((0, 0), (0, static.rows - group)))
        return jnp.broadcast_to(sinks[:, :, None], (*sinks.shape, LANES))
    sinks = jnp.repeat(sinks, static.blocks.queries, axis=1)
    return jnp.broadcast_to(sinks[:, None], (sinks.shape[0], SUBLANES, sinks.shape[1]))


def scalar_arguments(
    layer: jax.Array, batch: RaggedBatch, knobs: Knobs, queries: int, tiles: int, *, decode: bool
) -> tuple[Scalars, jax.Array]:
    """The scalar-prefetch arrays, and how many tiles have work."""
    decodes, seqs = batch.counts[0], batch.counts[1]
    if decode:
        first_tile, live = jnp.int32(0), pl.cdiv(decodes, queries)
        first_seq = jnp.zeros(1, jnp.int32)
    else:
        first_tile = batch.query_start[decodes] // queries
        live = jnp.where(seqs > decodes, pl.cdiv(batch.query_start[-1], queries) - first_tile, 0)
        starts = (first_tile + jnp.arange(tiles + 1, dtype=jnp.int32)) * queries
        first_seq = jnp.searchsorted(batch.query_start[1:], starts, side="right").astype(jnp.int32)
        first_seq = jnp.clip(first_seq, decodes, seqs)
    window = jnp.int32(0) if knobs.window is None else knobs.window
    step = jnp.stack([layer, decodes, seqs, first_tile, live, window]).astype(jnp.int32)
    softcap = jnp.float32(0) if knobs.softcap is None else knobs.softcap * LOG2E
    v_scale = jnp.float32(1) if knobs.v_scale is None else knobs.v_scale
    numbers = jnp.stack([softcap, v_scale])
    pages = batch.page_table.reshape(-1)
    return Scalars(step, numbers, batch.query_start, batch.kv_len, pages, first_seq), live


def call(
    static: Static,
    scalars: Scalars,
    live: jax.Array,
    q: jax.Array,
    sinks: jax.Array | None,
    words: jax.Array,
    cache: jax.Array,
    *,
    interpret: Any,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """The pallas_call. q [tiles, lane heads, n, M, W]; a mixed call starts at the tile that holds its first token."""
    prefetch = tuple(vars(scalars).values())
    _, heads, _, _, width = q.shape
    shapes = state_shapes(static, heads, width)
    out_shape = q.shape if static.decode else (*q.shape[:3], *q.shape[:2:-1])
    tile, out_tile = (
        pl.BlockSpec((1, *shape[1:]), lambda i, step, *_: (step[3] + i, 0, 0, 0, 0)) for shape in (q.shape, out_shape)
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    inputs, specs = [q], [tile]
    if sinks is not None:
        inputs.append(sinks)
        specs.append(pl.BlockSpec(sinks.shape, lambda i, *_: (0, 0, 0)))
    inputs += [words, cache]

    def body(*refs: Any) -> None:
        smem, rest = Scalars(*refs[: len(prefetch)]), list(refs[len(prefetch) :])
        q_ref = rest.pop(0)
        sink_ref = rest.pop(0) if static.sunk else None
        # `pages` is the aliased output: reads and writes go through one ref.
        new, _, out, pages, kv, *rest = rest
        *buffers, slot, fetched, written = rest
        if static.decode:
            state, stages = State(*buffers), None
        else:
            top, acc, logits, peak = buffers
            state, stages = State(top, acc), (Stage(logits.at[0], peak.at[0]), Stage(logits.at[1], peak.at[1]))
        plan = KernelPlan(static, smem)
        moves = Transfers(plan, new, pages, kv, fetched, written)
        AttentionKernelBody(plan, q_ref, sink_ref, out, moves, state, stages, slot).run()

    out, cache = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(out_shape, out_dtype), jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(live,),
            in_specs=[*specs, anywhere, anywhere],
            out_specs=[out_tile, anywhere],
            scratch_shapes=[
                pltpu.VMEM((2, static.blocks.pages, *cache.shape[2:]), cache.dtype),
                *(pltpu.VMEM(shape, jnp.float32) for shape in shapes),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={len(prefetch) + len(inputs) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_bytes(static, q, out_dtype),
        ),
        cost_estimate=cost(static, q, cache),
        interpret=interpret,
        name=f"ragged_paged_attention_{'decode' if static.decode else 'mixed'}",
    )(*prefetch, *inputs)
    return out, cache


def state_shapes(static: Static, heads: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the arrays of `attend.State`, then of the two `attend.Stage`, which decode has not."""
    rows, tokens = static.rows, static.blocks.tokens
    if static.decode:
        return (heads, rows, LANES), (heads, rows, width), (heads, rows, LANES)
    return (heads, SUBLANES, rows), (heads, width + SUBLANES, rows), (2, tokens, rows), (2, SUBLANES, rows)


def vmem_bytes(static: Static, q: jax.Array, out_dtype: Any) -> int:
    """A limit with room for what the compiler keeps beside the declared buffers."""
    heads, sub, rows, width = q.shape[1:]
    tile = heads * sub * rows * width
    kv = 2 * static.blocks.pages * static.layout.bytes_per_page
    state = sum(4 * math.prod(shape) for shape in state_shapes(static, heads, width))
    moving = 2 * tile * (q.dtype.itemsize + jnp.dtype(out_dtype).itemsize) + (
        2 * heads * rows * LANES * 4 if static.sunk else 0
    )
    return kv + state + moving + (16 << 20)


def cost(static: Static, q: jax.Array, cache: jax.Array) -> pl.CostEstimate:
    """What XLA's scheduler is told: half of the page table in use."""
    rows = q.size // q.shape[-1]
    context = static.max_pages * static.layout.page_size // 2
    page_bytes = static.layout.bytes_per_page
    visits = q.shape[0] * q.shape[2]
    return pl.CostEstimate(
        flops=4 * rows * context * q.shape[-1],
        bytes_accessed=2 * q.size * q.dtype.itemsize + visits * static.max_pages * page_bytes // 2,
        transcendentals=rows * context,
    )
