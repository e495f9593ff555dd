"""Sampling on the device: logits edits, token sampling without a sort, and logprobs.

Each function is compiled once per number of rows. `common.engine.sampling.state` packs the inputs of the edits,
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
import numpy.typing as npt
from jax.sharding import Mesh

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, resolve_guesses
from pagoda.backends.jax_tpu.model.slots import LANES
from pagoda.backends.jax_tpu.parallel import partition
from pagoda.common.engine.sampling.rules import LARGEST_UNIFORM, MIX_1, MIX_2, TOKEN_STRIDE, LogprobsMode
from pagoda.common.engine.sampling.state import Kind
from pagoda.common.engine.steps.contract import Float32, Int32, TokenLogprobs
from pagoda.kernels_pallas.top_k_top_p import top_k_top_p

MAX_LOGPROBS: Final = 20
"""Top logprobs computed on the device; for more, the logits are sorted on the host."""


# Penalties. How often each row of the engine has each token: uint8 [2 * n, V], the low bytes of n rows, then their high
# bytes, whose highest bit says that the prompt has the token. The last row is padding.

PROMPT_BIT: Final = 128
MAX_COUNT: Final = 2**15 - 1
"""Occurrences of a token among a row's generated tokens beyond which no more are counted."""


def counts_of(token_ids: Int32, num_prompt: int, vocab: int) -> npt.NDArray[np.uint8]:
    """Return the counts uint8 [2, V] of a row that starts with these tokens, on the host, without placeholders."""
    prompt, generated = (ids[ids < vocab] for ids in (token_ids[:num_prompt], token_ids[num_prompt:]))
    numbers = np.minimum(np.bincount(generated, minlength=vocab), MAX_COUNT)
    counts = np.stack([numbers & 255, numbers >> 8]).astype(np.uint8)
    counts[1, prompt] |= PROMPT_BIT
    return counts


def set_counts(counts: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """Replace the counts of a row by values uint8 [2, V]."""
    high = counts.shape[0] // 2 + row
    return counts.at[row].set(values[0]).at[high].set(values[1])


def count_tokens(width: int, counts: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Add sampled tokens int32 [R] to the counts of their rows int32 [R], in place.

    `width`: consecutive entries that are the same row's. Negative tokens are counted in the padding row.
    """
    n = counts.shape[0] // 2
    rows = jnp.where(tokens < 0, n - 1, rows).reshape(-1, width)
    ids = jnp.maximum(tokens, 0).reshape(-1, width)
    for column in range(width):
        row = rows[:, column]
        token = ids[:, column]
        low = counts[row, token]
        high = counts[n + row, token]
        full = (low == 255) & (high % PROMPT_BIT == PROMPT_BIT - 1)
        counts = counts.at[row, token].set(jnp.where(full, low, low + 1))
        counts = counts.at[n + row, token].set(jnp.where((low == 255) & ~full, high + 1, high))
    return counts


def penalise(logits: jax.Array, counts: jax.Array, packed: jax.Array, ahead: jax.Array | None = None) -> jax.Array:
    """Apply repetition, frequency and presence penalties to logits [R, V].

    packed int32 [4, R]: row of `counts`, negative for none, then the penalties as bits of float32. ahead int32 [k, R]:
    tokens that follow those counted, negative for none.

    The rows are chosen by a product with a matrix of zeros and ones, which is exact: reading single rows of an array
    in tiles of several rows would transfer a few hundred bytes at a time.
    """
    repetition, frequency, presence = jax.lax.bitcast_convert_type(packed[1:4], jnp.float32)[:, :, None]
    chosen = (packed[0][:, None] == jnp.arange(counts.shape[0] // 2)).astype(jnp.bfloat16)
    weights = jnp.concatenate([chosen, 256 * chosen], 1)
    numbers = jax.lax.dot(weights, counts.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    in_prompt = numbers > MAX_COUNT
    generated = jnp.where(in_prompt, numbers - (MAX_COUNT + 1), numbers)
    if ahead is not None:
        tokens = jnp.arange(logits.shape[1])
        for ids in ahead:
            generated = generated + (ids[:, None] == tokens)
    seen = in_prompt | (generated > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    return jnp.where(seen, repeated, logits) - (frequency * generated + presence * (generated > 0))


def tokens_ahead(history: jax.Array, rows: jax.Array, known: jax.Array, after: jax.Array, most: int) -> jax.Array:
    """Return the newest tokens int32 [most, R] of each row, -1 beyond the `after` newest of its `known` ones."""
    at = jnp.arange(most)[:, None]
    return jnp.where(at < after, history[rows, jnp.maximum(known - 1 - at, 0)], -1)


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


def mask(logits: jax.Array, bits: jax.Array, rows: jax.Array) -> jax.Array:
    """Set logits [R, V] of rows int32 [m] to -inf where a bit is 0; rows of R or more are ignored.

    bits uint8 [m, V/8]: of `logit_edits.allowed_bits`, by bytes. They are spread over tokens where tokens are the
    slower axis, which moves nothing between lanes, and then over the rows, by a product that is exact.
    """
    count, columns = bits.shape
    lanes = jnp.pad(bits, ((0, -count % LANES), (0, 0))).T
    spread = jnp.broadcast_to(lanes[:, None], (columns, 8, lanes.shape[1])) >> jnp.arange(8, dtype=jnp.uint8)[:, None]
    banned = (1 - (spread & 1)).astype(jnp.bfloat16).reshape(8 * columns, -1)
    chosen = (jnp.arange(logits.shape[0])[:, None] == rows).astype(jnp.bfloat16)
    chosen = jnp.pad(chosen, ((0, 0), (0, -count % LANES)))
    product = jax.lax.dot_general(chosen, banned, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jnp.where(product[:, : logits.shape[1]] > 0, -jnp.inf, logits)


# Drafts. The history of an engine with drafts ends with a column: drafts that the row's previous step rejected, by
# which positions planned ahead of its result are too large.


def shift_by_row(history: jax.Array, shift_rows: jax.Array) -> jax.Array:
    """Return by how much positions are too large, int32 [R]. shift_rows [R]: of `SampledRows.pack_with_drafts`."""
    return history[shift_rows, -1]


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
    sampled = tokens.reshape(-1, width)
    drafts = packed[8].reshape(-1, width)
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
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    processed = logits
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

    Bit-identical to `common.engine.sampling.rules`.
    """
    bits = mix(keys[:, None] ^ (token_ids * np.uint32(TOKEN_STRIDE)))
    v = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    u = 1.0 - jnp.minimum(v, LARGEST_UNIFORM)
    exponential = jnp.where(u == 1.0, v, -jnp.log(u) * v / jnp.where(u == 1.0, 1.0, 1.0 - u))
    return -jnp.log(exponential)


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
