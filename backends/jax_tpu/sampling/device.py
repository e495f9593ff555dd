"""Edited logits -> tokens, on the device and without a sort: top-k, top-p and min-p are one threshold per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.parallel.sharding import partition
from pagoda.common.engine.sampling import MIX_1, MIX_2, TOKEN_STRIDE, LogprobsMode
from pagoda.common.engine.sampling_state import Kind
from pagoda.common.engine.step import Float32, Int32, TokenLogprobs
from pagoda.kernels_pallas.top_k_top_p import top_k_top_p

# What requests do to logits before temperature: penalties, bias and bans, on the device.
#
# Each edit is a program of one shape per number of rows; `common.engine.logit_edits` packs what they read.


def penalise(logits: jax.Array, history: jax.Array, packed: jax.Array) -> jax.Array:
    """Logits [R, V] with penalties; a row after another, so that only rows that asked for it cost time.

    packed: of `penalties`; a number of R or more: that sequence is not here.
    """
    places = jnp.arange(history.shape[1])
    real = jax.lax.bitcast_convert_type(packed, jnp.float32)

    def one(column: jax.Array, logits: jax.Array) -> jax.Array:
        index, row, prompt, known = (packed[field, column] for field in range(4))
        repetition, frequency, presence = (real[field, column] for field in range(4, 7))
        tokens, values = history[row], logits[index]
        empty = jnp.zeros(logits.shape[1], jnp.int32)
        seen = empty.at[tokens].add((places < known).astype(jnp.int32)) > 0
        generated = empty.at[tokens].add(((places >= prompt) & (places < known)).astype(jnp.int32))
        values = jnp.where(seen, jnp.where(values > 0, values / repetition, values * repetition), values)
        values = values - (frequency * generated + presence * (generated > 0))
        return logits.at[index].set(values, mode="drop")

    return jax.lax.fori_loop(0, packed[7, 0], one, logits)


def adjust(logits: jax.Array, packed: jax.Array) -> jax.Array:
    """Logits [R, V] with values added. packed: of `additions`."""
    values = jax.lax.bitcast_convert_type(packed[2], jnp.float32)
    return logits.at[packed[0], packed[1]].add(values, mode="drop")


def ban_words(logits: jax.Array, history: jax.Array, words: jax.Array, heads: jax.Array) -> jax.Array:
    """Logits [R, V] without the last token of every word whose tokens before it were just generated.

    words, heads: of `banned_words`.
    """
    same = history[heads[1], heads[2]] == heads[3]
    matched = jnp.ones(words.shape[1], jnp.bool_).at[heads[0]].min(same, mode="drop")
    return logits.at[words[0], words[1]].add(jnp.where(matched, -jnp.inf, 0.0), mode="drop")


def mask(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Logits [R, V], -inf where a bit is 0. bits: of `allowed_bits`."""
    tokens = jnp.arange(logits.shape[1])
    allowed = bits[:, tokens // 32] >> (tokens % 32).astype(jnp.uint32) & 1
    return jnp.where(allowed == 1, logits, -jnp.inf)


# Log-probabilities (or the logits themselves) of the chosen token, its rank, and the best few.

BEST: Final = 20
"""How many of the best the device finds; a request for more has its logits sorted on the host."""


def logprobs(mode: LogprobsMode, logits: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [n, V], chosen int32 [n] -> ids int32 [n, 1+BEST], values float32 [n, 1+BEST], ranks int32 [n]."""
    values = logits if mode.endswith("logits") else jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(values, chosen[:, None], 1)
    ranks = (values > own).sum(-1).astype(jnp.int32) + 1
    best, ids = jax.lax.top_k(values, min(BEST, logits.shape[1]))
    return jnp.concatenate([chosen[:, None], ids], 1), jnp.concatenate([own, best], 1), ranks


def sorted_logprobs(mode: LogprobsMode, logits: Float32, chosen: Int32, best: int) -> TokenLogprobs:
    """The same on the host for any `best` (-1: all). logits float32 [n, V], chosen int32 [n]."""
    top = logits.max(-1, keepdims=True)
    total = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    values = logits if mode.endswith("logits") else logits - total
    own = np.take_along_axis(values, chosen[:, None], 1)
    ids = np.argsort(-values, axis=-1, kind="stable")[:, : logits.shape[1] if best < 0 else best]
    return TokenLogprobs(
        np.concatenate([chosen[:, None], ids], 1).astype(np.int32),
        np.concatenate([own, np.take_along_axis(values, ids, 1)], 1).astype(np.float32),
        ((values > own).sum(-1) + 1).astype(np.int32),
    )


# The design's sampling noise in jnp: the same integers as `common.engine.sampling`, tested for equality.


def mix(x: jax.Array) -> jax.Array:
    """lowbias32 of uint32 values."""
    x = (x ^ (x >> 16)) * np.uint32(MIX_1)
    x = (x ^ (x >> 15)) * np.uint32(MIX_2)
    return x ^ (x >> 16)


def gumbel(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """float32 [R, n]: noise of tokens uint32 [n] under row keys uint32 [R]."""
    bits = mix(keys[:, None] ^ (token_ids * np.uint32(TOKEN_STRIDE)))
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


@dataclass(frozen=True, slots=True)
class JaxSamplingRules:
    """Per sequence, as `SampledRows.pack` makes them. `rows`, `positions`: where in the history the token goes."""

    rows: jax.Array
    positions: jax.Array
    keys: jax.Array  # uint32
    temperature: jax.Array
    top_k: jax.Array  # 0 keeps all
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def unpack(cls, packed: jax.Array) -> JaxSamplingRules:
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
    rules = JaxSamplingRules.unpack(packed)
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


def lowest_kept(kernel: KernelChoice, mesh: Mesh, logits: jax.Array, rules: JaxSamplingRules) -> jax.Array:
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
