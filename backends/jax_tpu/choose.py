"""Edited logits -> tokens, on the device and without a sort: top-k, top-p and min-p are one threshold per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pagoda.backends.jax_tpu.noise import gumbel
from pagoda.backends.jax_tpu.sharding import partition
from pagoda.backends.jax_tpu.step_input import KernelChoice
from pagoda.common.engine.sampling_rows import Kind
from pagoda.kernels_pallas.top_k_top_p import top_k_top_p


@dataclass(frozen=True, slots=True)
class Rules:
    """Per sequence, cut from what `Chosen.pack` makes. `rows`, `positions`: where in the history the token goes."""

    rows: jax.Array
    positions: jax.Array
    keys: jax.Array  # uint32
    temperature: jax.Array
    top_k: jax.Array  # 0 keeps all
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def unpack(cls, packed: jax.Array) -> Rules:
        """The columns of int32 [7, R]."""
        real = jax.lax.bitcast_convert_type(packed, jnp.float32)
        keys = jax.lax.bitcast_convert_type(packed[2], jnp.uint32)
        return cls(packed[0], packed[1], keys, real[3], packed[4], real[5], real[6])


def choose(
    kind: Kind,
    shown: bool,
    kernel: KernelChoice,
    mesh: Mesh,
    logits: jax.Array,
    history: jax.Array,
    packed: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Logits float32 [R, V], history int32 [rows+1, length] -> tokens int32 [R] and the history with them.

    `shown`: also the logits [R, V] that the tokens were drawn from, after temperature and filters. The devices of
    a shard hold its rows of the logits; history and packed are whole everywhere.
    """
    rules = Rules.unpack(packed)
    tokens, drawn = jnp.argmax(logits, -1).astype(jnp.int32), logits
    if kind != "greedy":
        greedy = rules.temperature <= 0
        scaled = logits / jnp.where(greedy, 1.0, rules.temperature)[:, None]
        if kind == "filtered":
            floor = lowest_kept(kernel, mesh, logits, rules)
            scaled = jnp.where(logits >= floor[:, None], scaled, -jnp.inf)
        noisy = scaled + gumbel(rules.keys, jnp.arange(logits.shape[1], dtype=jnp.uint32))
        tokens = jnp.where(greedy, tokens, jnp.argmax(noisy, -1).astype(jnp.int32))
        drawn = jnp.where(greedy[:, None], logits, scaled)
    return tokens, history.at[rules.rows, rules.positions].set(tokens), drawn if shown else None


def lowest_kept(kernel: KernelChoice, mesh: Mesh, logits: jax.Array, rules: Rules) -> jax.Array:
    """float32 [R]: the smallest of the logits [R, V] inside top-k, top-p and min-p; greedy rows have no limits."""
    random = rules.temperature > 0
    arrays = (
        logits,
        jnp.where(random, rules.temperature, 1.0),
        jnp.where(random, rules.top_k, 0),
        jnp.where(random, rules.top_p, 1.0),
        jnp.where(random, rules.min_p, 0.0),
    )
    # XLA cannot spread a kernel over a mesh by itself: every device does the rows of its shard.
    found: Callable[..., jax.Array] = partial(top_k_top_p, **kernel.options)
    specs = (partition("R."), *[partition("R")] * 4)
    return jax.shard_map(found, mesh=mesh, in_specs=specs, out_specs=partition("R"), check_vma=False)(*arrays)
