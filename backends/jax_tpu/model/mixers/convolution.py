"""The causal convolution of each channel over its sequence, where its parameters lie, and the norm of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.replay import StateRun
from pagoda.backends.jax_tpu.execution.tiles import read_tiles, write_tiles
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement


def convolve(x: jax.Array, taps: jax.Array, tails: jax.Array, run: StateRun) -> tuple[jax.Array, jax.Array]:
    """Return the causal convolution of every channel over its sequence, [T, K, C], and the tails after the step.

    x float32 [T, K, C]; taps [K, C, n], the last one for the token itself; tails: the stack of tiles that have the last
    n - 1 inputs of a sequence [n - 1, K, C] in each block.
    """
    batch = run.batch
    seq_ids = run.seq_ids
    tokens, slots, channels = x.shape
    rows = taps.shape[2] - 1
    before = read_tiles(tails, run.layer, batch.blocks, (rows, slots, channels))
    before = jnp.where(batch.is_first[:, None, None, None], 0, before)
    offset = jnp.arange(tokens) - batch.query_start[seq_ids]
    out = x * taps[:, :, rows]
    for back in range(1, rows + 1):
        shifted = jnp.pad(x, ((back, 0), (0, 0), (0, 0)))[:tokens]
        old = before[seq_ids, jnp.clip(rows - back + offset, 0, rows - 1)]
        out = out + jnp.where((offset >= back)[:, None, None], shifted, old) * taps[:, :, rows - back]
    if batch.drops_states:
        return out, tails
    lengths = jnp.diff(batch.query_start)
    index = lengths[:, None] - rows + jnp.arange(rows)  # of a tail's inputs among the sequence's tokens
    new = x[jnp.clip(batch.query_start[:-1, None] + index, 0, tokens - 1)]
    kept = jnp.take_along_axis(before, jnp.clip(rows + index, 0, rows - 1)[:, :, None, None], axis=1)
    after = jnp.where((index >= 0)[:, :, None, None], new, kept)
    real = jnp.arange(batch.max_seqs) < batch.counts[1]
    target = jnp.where(real, batch.blocks, tails.shape[1])  # out of bounds: dropped
    return out, write_tiles(tails, run.layer, target, after)


def l2_norm(x: jax.Array) -> jax.Array:
    """Return x [..., H] divided by its L2 norm."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def taps_placements(name: str, start: int, arrange: Callable[[Array], Array]) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of a convolution of each channel. `start`: its first channel in a slot."""
    yield name, Placement(("taps",), (0, start), lambda taps: arrange(taps[:, 0]))
    yield f"{name}_bias", Placement(("taps_bias",), (0, start), arrange)
