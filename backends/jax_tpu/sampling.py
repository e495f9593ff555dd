"""Sampling on the device: logits edits, token sampling without a sort, and logprobs.

Each function is compiled once per number of rows. `common.engine.sampling_state` packs the inputs of the edits,
`SampledRows.pack` the sampling rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, resolve_guesses
from pagoda.backends.jax_tpu.parallel import partition
from pagoda.common.engine.sampling import MIX_1, MIX_2, TOKEN_STRIDE, LogprobsMode
from pagoda.common.engine.sampling_state import Kind
from pagoda.common.engine.step import Float32, Int32, TokenLogprobs
from pagoda.kernels_pallas.top_k_top_p import top_k_top_p

MAX_LOGPROBS: Final = 20
"""Top logprobs computed on the device; for more, the logits are sorted on the host."""


def penalise(logits: jax.Array, history: jax.Array, packed: jax.Array) -> jax.Array:
    """Apply repetition, frequency and presence penalties to logits [R, V], one row after another.

    packed int32 [8, n]: of `sampling_state.penalties`. Only its rows cost time; row indices of R or more are ignored.
    """
    positions = jnp.arange(history.shape[1])
    floats = jax.lax.bitcast_convert_type(packed, jnp.float32)

    def penalise_row(column: jax.Array, logits: jax.Array) -> jax.Array:
        index, row, prompt, known = (packed[field, column] for field in range(4))
        repetition, frequency, presence = (floats[field, column] for field in range(4, 7))
        tokens, values = history[row], logits[index]
        zeros = jnp.zeros(logits.shape[1], jnp.int32)
        seen = zeros.at[tokens].add((positions < known).astype(jnp.int32)) > 0
        generated = zeros.at[tokens].add(((positions >= prompt) & (positions < known)).astype(jnp.int32))
        values = jnp.where(seen, jnp.where(values > 0, values / repetition, values * repetition), values)
        values = values - (frequency * generated + presence * (generated > 0))
        return logits.at[index].set(values, mode="drop")

    return jax.lax.fori_loop(0, packed[7, 0], penalise_row, logits)


def adjust(logits: jax.Array, packed: jax.Array) -> jax.Array:
    """Add values to logits [R, V]. packed int32 [3, n]: of `sampling_state.additions`."""
    values = jax.lax.bitcast_convert_type(packed[2], jnp.float32)
    return logits.at[packed[0], packed[1]].add(values, mode="drop")


def adjust_all(logits: jax.Array, values: jax.Array, rows: jax.Array) -> jax.Array:
    """Add values float32 [V], zeros after the vocabulary, to the logits [R, V] of some rows. rows bool [R]."""
    return logits + jnp.where(rows[:, None], values, 0.0)


def ban_words(logits: jax.Array, history: jax.Array, words: jax.Array, heads: jax.Array) -> jax.Array:
    """Set logits [R, V] to -inf for the last token of every banned word whose other tokens were just generated.

    words, heads: of `sampling_state.banned_words`.
    """
    same = history[heads[1], heads[2]] == heads[3]
    matched = jnp.ones(words.shape[1], jnp.bool_).at[heads[0]].min(same, mode="drop")
    return logits.at[words[0], words[1]].add(jnp.where(matched, -jnp.inf, 0.0), mode="drop")


def mask(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Set logits [R, V] to -inf where a bit is 0. bits uint32 [R, V/32]: of `logit_edits.allowed_bits`."""
    tokens = jnp.arange(logits.shape[1])
    allowed = bits[:, tokens // 32] >> (tokens % 32).astype(jnp.uint32) & 1
    return jnp.where(allowed == 1, logits, -jnp.inf)


# Drafts. The history of an engine with drafts ends with a column: drafts that the row's previous step rejected, by
# which positions planned ahead of its result are too large.


def shift_by_row(history: jax.Array, shift_rows: jax.Array) -> jax.Array:
    """Return by how much positions are too large, int32 [R]. shift_rows [R]: of `SampledRows.pack_with_drafts`."""
    return history[shift_rows, -1]


def shift_penalties(packed: jax.Array, shift: jax.Array) -> jax.Array:
    """Return the packed argument of `penalise` with exact numbers of known tokens. shift [R]: of `shift_by_row`."""
    return packed.at[3].add(-shift[packed[0]])


def shift_heads(words: jax.Array, heads: jax.Array, shift: jax.Array) -> jax.Array:
    """Return the heads of `ban_words` at their exact positions. shift [R]: of `shift_by_row`."""
    return heads.at[2].add(-shift[words[0][heads[0]]])


def shifted_rules(packed: jax.Array, history: jax.Array, guesses: int) -> jax.Array:
    """Return the sampling parameters int32 [9, R] with exact positions, complete noise keys and known drafts.

    `guesses`: of each row in the history, see `resolve_guesses`.
    """
    shift = shift_by_row(history, packed[7])
    counters = jax.lax.bitcast_convert_type(packed[2] - shift, jnp.uint32)
    keys = jax.lax.bitcast_convert_type(mix(counters), jnp.int32)
    drafts = resolve_guesses(packed[8], packed[0], history, guesses)
    return packed.at[1].add(-shift).at[2].set(keys).at[8].set(drafts)


def record_drafts(guesses: int, history: jax.Array, packed: jax.Array) -> jax.Array:
    """Return the history with the drafts of a step, which edits of later rows of logits read. packed: [9, R]."""
    rules = shifted_rules(packed, history, guesses)
    drafts = rules[8]
    rows = jnp.where(drafts >= 0, rules[0], history.shape[0])
    return history.at[rows, rules[1]].set(drafts, mode="drop")


def accept_drafts(width: int, tokens: jax.Array, history: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tokens int32 [R], -1 after a sequence's first that is not the draft there, and the history.

    The history gets the numbers of rejected drafts. `width`: rows of logits per sequence. packed: [9, R].
    """
    sampled, drafts = tokens.reshape(-1, width), packed[8].reshape(-1, width)
    accepted = jnp.cumprod((sampled == drafts)[:, :-1], axis=1).sum(1)
    rejected = (drafts >= 0).sum(1) - accepted
    history = history.at[packed[0, ::width], -1].set(rejected.astype(jnp.int32))
    return jnp.where(jnp.arange(width) <= accepted[:, None], sampled, -1).reshape(-1), history


@dataclass(frozen=True, slots=True)
class JaxSamplingRules:
    """Per-row sampling parameters [R], from `SampledRows.pack`."""

    rows: jax.Array  # int32: history row that receives the sampled token
    positions: jax.Array  # int32: its position in that row
    keys: jax.Array  # uint32
    temperature: jax.Array  # float32; 0: greedy
    top_k: jax.Array  # int32; 0: no limit
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32

    @classmethod
    def unpack(cls, packed: jax.Array) -> JaxSamplingRules:
        """Split int32 [7, R]."""
        floats = jax.lax.bitcast_convert_type(packed, jnp.float32)
        keys = jax.lax.bitcast_convert_type(packed[2], jnp.uint32)
        return cls(packed[0], packed[1], keys, floats[3], packed[4], floats[5], floats[6])


def sample(
    kind: Kind,
    return_logits: bool,
    kernel: KernelChoice,
    mesh: Mesh,
    logits: jax.Array,
    history: jax.Array,
    packed: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Sample from logits float32 [R, V]: return tokens int32 [R] and the history [rows+1, length] including them.

    `return_logits`: also return the processed logits [R, V], after temperature and filters. Logits are sharded by rows;
    history and packed are replicated.
    """
    rules = JaxSamplingRules.unpack(packed)
    tokens, processed = jnp.argmax(logits, -1).astype(jnp.int32), logits
    if kind != "greedy":
        greedy = rules.temperature <= 0
        scaled = logits / jnp.where(greedy, 1.0, rules.temperature)[:, None]
        if kind == "filtered":
            threshold = keep_threshold(kernel, mesh, logits, rules)
            scaled = jnp.where(logits >= threshold[:, None], scaled, -jnp.inf)
        noisy = scaled + gumbel(rules.keys, jnp.arange(logits.shape[1], dtype=jnp.uint32))
        tokens = jnp.where(greedy, tokens, jnp.argmax(noisy, -1).astype(jnp.int32))
        processed = jnp.where(greedy[:, None], logits, scaled)
    return tokens, history.at[rules.rows, rules.positions].set(tokens), processed if return_logits else None


def sample_drafts(
    width: int,
    guesses: int,
    kind: Kind,
    return_logits: bool,
    kernel: KernelChoice,
    mesh: Mesh,
    logits: jax.Array,
    history: jax.Array,
    packed: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """As `sample`, for an engine with drafts: packed [9, R], tokens [R] of `accept_drafts`."""
    rules = shifted_rules(packed, history, guesses)
    tokens, history, processed = sample(kind, return_logits, kernel, mesh, logits, history, rules)
    return *accept_drafts(width, tokens, history, rules), processed


def keep_threshold(kernel: KernelChoice, mesh: Mesh, logits: jax.Array, rules: JaxSamplingRules) -> jax.Array:
    """Return float32 [R]: the smallest logit inside top-k, top-p and min-p; greedy rows have no limits."""
    random = rules.temperature > 0
    arrays = (
        logits,
        jnp.where(random, rules.temperature, 1.0),
        jnp.where(random, rules.top_k, 0),
        jnp.where(random, rules.top_p, 1.0),
        jnp.where(random, rules.min_p, 0.0),
    )
    # XLA cannot shard a kernel over a mesh by itself: every device computes the rows of its shard.
    function: Callable[..., jax.Array] = partial(top_k_top_p, **kernel.options)
    specs = (partition("R."), *[partition("R")] * 4)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=partition("R"), check_vma=False)(*arrays)


def gumbel(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return Gumbel noise float32 [R, n] for tokens uint32 [n] under row keys uint32 [R].

    Bit-identical to `common.engine.sampling`.
    """
    bits = mix(keys[:, None] ^ (token_ids * np.uint32(TOKEN_STRIDE)))
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def mix(x: jax.Array) -> jax.Array:
    """Hash uint32 values with lowbias32."""
    x = (x ^ (x >> 16)) * np.uint32(MIX_1)
    x = (x ^ (x >> 15)) * np.uint32(MIX_2)
    return x ^ (x >> 16)


def logprobs(mode: LogprobsMode, logits: jax.Array, sampled: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return logprobs (or logits, by `mode`) of the sampled and the top tokens, and the sampled tokens' ranks.

    Logits [n, V], sampled int32 [n] -> ids int32 and values float32 [n, 1+MAX_LOGPROBS], ranks int32 [n].
    """
    values = logits if mode.endswith("logits") else jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(values, sampled[:, None], 1)
    ranks = (values > own).sum(-1).astype(jnp.int32) + 1
    top, ids = jax.lax.top_k(values, min(MAX_LOGPROBS, logits.shape[1]))
    return jnp.concatenate([sampled[:, None], ids], 1), jnp.concatenate([own, top], 1), ranks


def sorted_logprobs(mode: LogprobsMode, logits: Float32, sampled: Int32, num_logprobs: int) -> TokenLogprobs:
    """`logprobs` on the host, for any `num_logprobs` (-1: all). logits float32 [n, V], sampled int32 [n]."""
    top = logits.max(-1, keepdims=True)
    log_sum = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    values = logits if mode.endswith("logits") else logits - log_sum
    own = np.take_along_axis(values, sampled[:, None], 1)
    ids = np.argsort(-values, axis=-1, kind="stable")[:, : logits.shape[1] if num_logprobs < 0 else num_logprobs]
    return TokenLogprobs(
        np.concatenate([sampled[:, None], ids], 1).astype(np.int32),
        np.concatenate([own, np.take_along_axis(values, ids, 1)], 1).astype(np.float32),
        ((values > own).sum(-1) + 1).astype(np.int32),
    )
