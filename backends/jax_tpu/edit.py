"""What requests do to logits before temperature: penalties, bias and bans, on the device.

Each edit is a program of one shape per number of rows. Lists that outgrow it go in several calls.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp

ENTRIES: Final = 256
"""(sequence, token, value) triples per call of `adjust`."""

WORDS: Final = 128
"""Banned words of several tokens per call of `ban_words`."""

HEADS: Final = 1024
"""Tokens before the last of those words, all together. A longer word is known by its last so many tokens."""


def penalise(logits: jax.Array, history: jax.Array, packed: jax.Array) -> jax.Array:
    """Logits [R, V] with penalties; a row after another, so that only rows that asked for it cost time.

    packed int32 [8, n], one column per penalised sequence: its number here (R: it is not here), its row of the history,
    prompt length, tokens known, then repetition, frequency and presence penalty as float bits; packed[7, 0]: how many
    columns.
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
    """Logits [R, V] with values added. packed int32 [3, ENTRIES]: sequence (beyond R: padding), token, float bits."""
    values = jax.lax.bitcast_convert_type(packed[2], jnp.float32)
    return logits.at[packed[0], packed[1]].add(values, mode="drop")


def ban_words(logits: jax.Array, history: jax.Array, words: jax.Array, heads: jax.Array) -> jax.Array:
    """Logits [R, V] without the last token of every word whose tokens before it were just generated.

    words int32 [2, WORDS]: sequence (beyond R: padding), last token. heads int32 [4, HEADS], one column per token
    before: its word (beyond WORDS: padding), the row and position of the history it is compared with, and the token.
    """
    same = history[heads[1], heads[2]] == heads[3]
    matched = jnp.ones(words.shape[1], jnp.bool_).at[heads[0]].min(same, mode="drop")
    return logits.at[words[0], words[1]].add(jnp.where(matched, -jnp.inf, 0.0), mode="drop")


def mask(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Logits [R, V], -inf where a bit is 0. bits uint32 [R, ceil(V/32)], token t being bit t % 32 of word t // 32."""
    tokens = jnp.arange(logits.shape[1])
    allowed = bits[:, tokens // 32] >> (tokens % 32).astype(jnp.uint32) & 1
    return jnp.where(allowed == 1, logits, -jnp.inf)
