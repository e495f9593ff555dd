"""What requests do to logits before temperature: penalties, bias and bans, on the device.

Each edit is a program of one shape per number of rows; `common.engine.logit_edits` packs what they read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
