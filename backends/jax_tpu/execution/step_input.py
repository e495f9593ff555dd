"""The inputs of generation and pooling programs: one int32 array packed on the host, split inside the program.

A pooling program gets whole prompts, concatenated. Mixers see both kinds of input through the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.replay import JaxReplay
from pagoda.backends.jax_tpu.execution.tiles import tiled_shape
from pagoda.backends.jax_tpu.model.slots import DraftStack, KvStack, LatentStack, Stack, StateStack, TailStack
from pagoda.common.config.groups.nested.pooler import PoolingKind
from pagoda.common.engine.lora.adapter import NO_ADAPTER
from pagoda.common.engine.pooling.values import PoolPlan
from pagoda.common.engine.steps.contract import GUESSED, PREVIOUS, Int32
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.latent_attention import LatentLayout
from pagoda.kernels_pallas.ragged_paged_attention import PagedKvLayout
from pagoda.kernels_pallas.ragged_paged_attention.plan import RaggedBatch
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Which kernels a program uses, and the layout of its KV cache."""

    page_size: int  # tokens
    cache_dtype: str
    use_kernel: bool = False  # False: the jnp references
    chip: ChipInfo = CHIPS["v6e"]
    interpret: bool = False
    batch_invariant: bool = False  # attention computes a token in the same way alone and as a part of a prompt

    def kv_layout(self, kv_heads: int, head_dim: int, value_dim: int) -> PagedKvLayout:
        """Return the cache layout for `kv_heads` heads on one device."""
        return PagedKvLayout(kv_heads, head_dim, self.cache_dtype, self.page_size, value_dim)

    def latent_layout(self, rank: int, rope_dim: int) -> LatentLayout:
        """Return the cache layout of latents."""
        return LatentLayout(rank, rope_dim, self.cache_dtype, self.page_size)

    def block(self, stack: Stack, tensor: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of one layer's block of a cache array, on one of `tensor` devices."""
        match stack:
            case KvStack():
                kv = self.kv_layout(stack.slots // tensor, stack.head_dim, stack.value_dim)
                return jax.ShapeDtypeStruct(kv.shape(1, 1)[2:], kv.word_dtype)
            case LatentStack():
                latents = self.latent_layout(stack.rank, stack.rope_dim)
                return jax.ShapeDtypeStruct(latents.shape(1, 1)[2:], latents.word_dtype)
            case TailStack():
                shape: tuple[int, ...] = tiled_shape(stack.slots // tensor * stack.rows * stack.width)
            case DraftStack():
                shape = tiled_shape(stack.slots // tensor * stack.drafts * stack.width)
            case StateStack():
                shape = (stack.heads // tensor, stack.key_dim, stack.value_dim)
            case _:
                assert_never(stack)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32))

    def token_bytes(self, stack: Stack, tensor: int) -> int:
        """Return the bytes of a token in one layer's block of a cache that grows with the tokens, on one device."""
        block = self.block(stack, tensor)
        return block.size * block.dtype.itemsize // self.page_size

    @property
    def scaled(self) -> bool:
        """True if K and V are divided by a scale before they are stored (8-bit caches)."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def options(self) -> dict[str, Any]:
        """Return the static arguments of every kernel."""
        return {"use_kernel": self.use_kernel, "interpret": self.interpret, "chip": self.chip}


# Generation.


def packed_size(shape: StepShape) -> int:
    """Return the length of a step's packed array."""
    drafts = shape.seqs if shape.width > 1 else 0
    optional = drafts + sum(shape.seqs for each in (shape.adapted, shape.guesses, shape.replays) if each)
    return shape.tokens + 3 * shape.seqs + 1 + 2 + optional + shape.groups * shape.seqs * shape.pages


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the device. Sequences beyond `counts[1]` and tokens beyond `query_start[-1]` are padding."""

    token_ids: jax.Array  # int32 [T]; PREVIOUS, GUESSED - j: the row's sampled token, its guess j, of the history
    query_start: jax.Array  # int32 [S+1]: first token of each sequence
    kv_len: jax.Array  # int32 [S]: tokens of the sequence after this step
    rows: jax.Array  # int32 [S]: row of the history
    counts: jax.Array  # int32 [2]: decode sequences, all sequences
    num_drafts: jax.Array  # int32 [S], or [0] in steps without drafts
    page_tables: jax.Array  # int32 [G, S * P], see `page_table`
    kernel: KernelChoice
    shape: StepShape
    repeat: jax.Array | int = 0  # of the repeats of a segment's layers, the current one
    adapter_slots: jax.Array | None = None  # int32 [S], or NO_ADAPTER; None: no sequence has an adapter
    adapter_mask: jax.Array | None = None  # bool [T, A], see `slot_mask`
    guess_counts: jax.Array | None = None  # int32 [S]: guesses after each sequence; None: no drafter model
    last_drafts: jax.Array | None = None  # int32 [S]: drafts of each row's last step; None: nothing is run again
    replay: JaxReplay | None = None  # None: recurrent state includes all tokens before the step
    scattered: bool = False  # between mixers and feed-forward blocks each device has T / tensor of the tokens
    pieces: int = 1  # of a scattered step, in which its tokens are exchanged; each device has a part of each piece

    @classmethod
    def unpack(cls, packed: jax.Array, shape: StepShape, kernel: KernelChoice) -> StepInput:
        """Split int32 [packed_size(shape)] in the order of `pack_step`."""
        drafts = shape.seqs if shape.width > 1 else 0
        adapters = shape.seqs if shape.adapted else 0
        guesses = shape.seqs if shape.guesses else 0
        replays = shape.seqs if shape.replays else 0
        sizes = (shape.tokens, shape.seqs + 1, shape.seqs, shape.seqs, 2, drafts, adapters, guesses, replays)
        token_ids, query_start, kv_len, rows, counts, num_drafts, slots, guess_counts, last_drafts, tables = jnp.split(
            packed, np.cumsum(sizes)
        )
        tables = tables.reshape(shape.groups, shape.seqs * shape.pages)
        adapter_slots = slots if shape.adapted else None
        return cls(
            token_ids,
            query_start,
            kv_len,
            rows,
            counts,
            num_drafts,
            tables,
            kernel,
            shape,
            adapter_slots=adapter_slots,
            guess_counts=guess_counts if shape.guesses else None,
            last_drafts=last_drafts if shape.replays else None,
        )

    def with_adapters(self, slots: int, rank: int) -> StepInput:
        """Return the step with the mask of its tokens' adapters, of `slots` slots of a rank, if a sequence has one."""
        if self.adapter_slots is None:
            return self
        return replace(self, adapter_mask=slot_mask(self.adapter_slots[self.seq_ids], rank, slots))

    @property
    def sampled_slots(self) -> jax.Array | None:
        """Return the slots of adapters of the tokens `sampled`; None: no sequence has an adapter."""
        return None if self.adapter_slots is None else jnp.repeat(self.adapter_slots, self.shape.width)

    def shifted(self, rejected: jax.Array) -> StepInput:
        """Return the step with exact lengths of the sequences whose newest token is PREVIOUS, and with its replay.

        `rejected` int32 [rows+1]: drafts that the previous step of each row rejected, which `kv_len` includes.
        """
        newest = self.token_ids[jnp.minimum(self.query_start[:-1], self.token_ids.shape[0] - 1)]
        in_flight = (newest == PREVIOUS) & (jnp.arange(len(self.kv_len)) < self.counts[1])
        step = replace(self, kv_len=self.kv_len - jnp.where(in_flight, rejected[self.rows], 0))
        if self.last_drafts is None:
            return step
        lag = jnp.where(self.last_drafts > 0, self.last_drafts - rejected[self.rows], 0)
        num_drafts = self.num_drafts if self.shape.width > 1 else None
        replay = JaxReplay.of(
            lag=lag,
            num_drafts=num_drafts,
            query_start=self.query_start,
            num_seqs=self.counts[1],
            seq_ids=self.seq_ids,
            most=self.shape.replays,
        )
        return replace(step, replay=replay)

    @property
    def sampled(self) -> jax.Array:
        """Return the tokens after which sequences sample, int32 [S * width]; rows without a token repeat another."""
        last = self.query_start[1:] - 1
        if self.shape.width > 1:
            after = jnp.minimum(jnp.arange(self.shape.width), self.num_drafts[:, None])
            last = ((last - self.num_drafts)[:, None] + after).reshape(-1)
        return jnp.maximum(last, 0)

    @property
    def seq_ids(self) -> jax.Array:
        """Return the sequence of each token, int32 [T]; padding tokens map to the last."""
        before = jnp.arange(self.token_ids.shape[0])[:, None] >= self.query_start[None, 1:]
        return jnp.minimum(before.sum(1), self.kv_len.shape[0] - 1)

    @property
    def positions(self) -> jax.Array:
        """Return each token's position in its sequence, int32 [T]; 0 for padding."""
        seq_ids = self.seq_ids
        offsets = self.kv_len[seq_ids] - self.query_start[seq_ids + 1]
        tokens = jnp.arange(self.token_ids.shape[0])
        return jnp.where(tokens < self.query_start[-1], tokens + offsets, 0)

    @property
    def token_types(self) -> None:
        """Return None: all token types are 0."""

    @property
    def max_context(self) -> int:
        """Return the tokens of the longest sequence that the block tables can hold."""
        return self.shape.pages * self.kernel.page_size

    def page_table(self, cache_index: jax.Array) -> jax.Array:
        """Return the block table of a cache's group, int32 [S, P].

        Tables are kept flat, the rows of a group one after the other, which is the order of scalar memory: a kernel
        that flattens the result reads them as they are, where an array of rows would be rearranged in every layer.
        """
        return self.page_tables[cache_index[0]].reshape(self.shape.seqs, self.shape.pages)

    def ragged(self, cache_index: jax.Array) -> RaggedBatch:
        """Return the sequences with their blocks of a cache."""
        return RaggedBatch(
            query_start=self.query_start,
            kv_len=self.kv_len,
            page_table=self.page_table(cache_index),
            counts=self.counts,
        )

    def kernel_batch(self, cache_index: jax.Array, cache: jax.Array) -> dict[str, Any]:
        """Return the kernels' arguments that describe the sequences."""
        return {
            "layer": self.cache_layer(cache_index, cache),
            "query_start": self.query_start,
            "kv_len": self.kv_len,
            "page_table": self.page_table(cache_index),
            "counts": self.counts,
            "decode_only": self.shape.decode_only,
        }

    def cache_layer(self, cache_index: jax.Array, cache: jax.Array) -> jax.Array:
        """Return the layer's index in its stacked cache."""
        return cache_index[1]

    @property
    def decode_only(self) -> bool:
        """True if all sequences have one token."""
        return self.shape.decode_only

    def states(self, cache_index: jax.Array) -> RecurrentBatch:
        """Return the sequences with the blocks of their recurrent state."""
        is_first = self.kv_len == jnp.diff(self.query_start)
        blocks = self.page_tables[cache_index[0], :: self.shape.pages]
        return RecurrentBatch(query_start=self.query_start, blocks=blocks, is_first=is_first, counts=self.counts)

    def resolve_ids(self, history: jax.Array) -> jax.Array:
        """Return token ids int32 [T] with PREVIOUS and guesses replaced from the history [rows+1, length]."""
        rows = self.rows[self.seq_ids]
        token_ids = resolve_guesses(self.token_ids, rows, history, self.shape.guesses)
        return jnp.where(token_ids == PREVIOUS, history[rows, self.positions], token_ids)


def resolve_guesses(token_ids: jax.Array, rows: jax.Array, history: jax.Array, guesses: int) -> jax.Array:
    """Return token ids int32 [n] with guess j of the row in place of GUESSED - j. rows int32 [n]: of the history.

    `guesses`: columns of the history that have them, in front of the last one (see `StepProgramSet.history`).
    """
    if not guesses:
        return token_ids
    first = history.shape[1] - 1 - guesses
    guessed = history[rows, first + jnp.clip(GUESSED - token_ids, 0, guesses - 1)]
    return jnp.where(token_ids <= GUESSED, guessed, token_ids)


def slot_mask(slots: jax.Array, rank: int, count: int) -> jax.Array:
    """Return bool [T, count * rank]: which ranks of `count` slots are those of the slots int32 [T]; of -1 none."""
    return slots[:, None] == jnp.arange(count * rank) // rank


def pack_step(
    shape: StepShape,
    token_ids: Int32,
    query_start: Int32,
    kv_len: Int32,
    rows: Int32,
    counts: tuple[int, int],
    page_tables: tuple[Int32, ...],
    empty_row: int,
    num_drafts: Int32 | None = None,
    adapter_slots: Int32 | None = None,
    num_guesses: Int32 | None = None,
    last_drafts: Int32 | None = None,
) -> Int32:
    """Pack a step: int32 [packed_size(shape)]. Padding sequences have no tokens, row `empty_row`, the null block."""
    packed = np.zeros(packed_size(shape), np.int32)
    seqs = len(rows)
    start = shape.tokens
    packed[: len(token_ids)] = token_ids
    packed[start : start + seqs + 1] = query_start
    packed[start + seqs + 1 : start + shape.seqs + 1] = query_start[-1]
    start += shape.seqs + 1
    packed[start : start + seqs] = kv_len
    start += shape.seqs
    packed[start : start + shape.seqs] = empty_row
    packed[start : start + seqs] = rows
    start += shape.seqs
    packed[start : start + 2] = counts
    start += 2
    if shape.width > 1:
        packed[start : start + seqs] = 0 if num_drafts is None else num_drafts
        start += shape.seqs
    if shape.adapted:
        packed[start : start + shape.seqs] = NO_ADAPTER
        packed[start : start + seqs] = NO_ADAPTER if adapter_slots is None else adapter_slots
        start += shape.seqs
    if shape.guesses:
        packed[start : start + seqs] = 0 if num_guesses is None else num_guesses
        start += shape.seqs
    if shape.replays:
        packed[start : start + seqs] = 0 if last_drafts is None else last_drafts
        start += shape.seqs
    tables = packed[start:].reshape(shape.groups, shape.seqs, shape.pages)
    for table, pages in zip(tables, page_tables):
        table[:seqs, : pages.shape[1]] = pages
    return packed


# Pooling.

MIN_POOL_TOKENS: Final = 64
"""Tokens of the smallest program; all sizes are multiples of it."""
POOL_TILE: Final = 256
"""Tile size of bidirectional attention, in queries and in keys."""


@dataclass(frozen=True, slots=True, order=True)
class PoolShape:
    """The padded shape of a step."""

    tokens: int  # T
    seqs: int  # S
    pages: int  # of the longest prompt, for causal layers
    of_tokens: bool  # one output per token instead of per prompt

    @property
    def size(self) -> int:
        """Return the length of the packed array."""
        return 4 * self.tokens + self.seqs + 1

    @property
    def tile(self) -> int:
        """Return the attention tile size in tokens; it divides T."""
        return POOL_TILE if self.tokens % POOL_TILE == 0 else MIN_POOL_TOKENS


@dataclass(frozen=True, slots=True)
class PoolInput:
    """One step on the device. Each padding token counts as a prompt of one token."""

    token_ids: jax.Array  # int32 [T]
    starts: jax.Array  # int32 [T]: first token of each token's prompt
    ends: jax.Array  # int32 [T]: end (exclusive) of each token's prompt
    token_types: jax.Array  # int32 [T]
    query_start: jax.Array  # int32 [S+1]: first token of each prompt; last entry: number of real tokens
    page_tables: jax.Array  # int32 [S, pages]: of the scratch cache of one layer
    kernel: KernelChoice
    shape: PoolShape
    repeat: jax.Array | int = 0  # of the repeats of a segment's layers, the current one
    adapter_mask: None = None  # pooling models have no adapters
    replay: None = None  # they have no drafts
    scattered: bool = False  # as of StepInput
    pieces: int = 1

    @classmethod
    def unpack(cls, packed: jax.Array, shape: PoolShape, kernel: KernelChoice) -> PoolInput:
        """Split int32 [shape.size] in the order of `pack_pool`."""
        ids, starts, ends, types, query_start = jnp.split(packed, np.cumsum([shape.tokens] * 4))
        pages = -(-jnp.diff(query_start) // kernel.page_size)
        page_tables = (1 + jnp.cumsum(pages) - pages)[:, None] + jnp.arange(shape.pages)
        return cls(ids, starts, ends, types, query_start, page_tables, kernel, shape)

    def scratch(self, stack: Stack, depth: int, tensor: int) -> jax.Array:
        """Return a cache array of `depth` layers: a block of state per prompt; or pages for T tokens, one partial page
        per prompt, and the null block.
        """
        block = self.kernel.block(stack, tensor)
        blocks = self.shape.seqs
        if isinstance(stack, KvStack | LatentStack):
            blocks += 1 + -(-self.shape.tokens // self.kernel.page_size)
        return jnp.zeros((depth, blocks, *block.shape), block.dtype)

    @property
    def positions(self) -> jax.Array:
        """Return each token's position in its prompt, int32 [T]."""
        return jnp.arange(self.shape.tokens, dtype=jnp.int32) - self.starts

    def kernel_batch(self, cache_index: jax.Array, cache: jax.Array) -> dict[str, Any]:
        """Return the kernels' arguments that describe the prompts."""
        return {
            "layer": self.cache_layer(cache_index, cache),
            "query_start": self.query_start,
            "kv_len": jnp.diff(self.query_start),
            "page_table": self.page_tables,
            "counts": self.counts,
        }

    @property
    def max_context(self) -> int:
        """Return the tokens of the longest prompt that the scratch cache can hold."""
        return self.shape.pages * self.kernel.page_size

    def ragged(self, cache_index: jax.Array) -> RaggedBatch:
        """Return the prompts with their blocks of a scratch cache."""
        return RaggedBatch(self.query_start, jnp.diff(self.query_start), self.page_tables, self.counts)

    @property
    def counts(self) -> jax.Array:
        """Return int32 [2]: decode sequences, of which there are none, and all prompts."""
        prompts = (jnp.diff(self.query_start) > 0).sum(dtype=jnp.int32)
        return jnp.stack([jnp.zeros((), jnp.int32), prompts])

    def cache_layer(self, cache_index: jax.Array, cache: jax.Array) -> jax.Array:
        """Return the layer's index in a scratch cache, which may have one layer for all."""
        return jnp.minimum(cache_index[1], cache.shape[0] - 1)

    @property
    def decode_only(self) -> bool:
        """False: prompts have several tokens."""
        return False

    @property
    def seq_ids(self) -> jax.Array:
        """Return the prompt of each token, int32 [T]; padding tokens map to the last."""
        before = jnp.arange(self.shape.tokens)[:, None] >= self.query_start[None, 1:]
        return jnp.minimum(before.sum(1), self.shape.seqs - 1)

    def states(self, cache_index: jax.Array) -> RecurrentBatch:
        """Return the prompts, each with a block of its own in the scratch cache."""
        blocks = jnp.arange(self.shape.seqs, dtype=jnp.int32)
        return RecurrentBatch(self.query_start, blocks, jnp.ones(self.shape.seqs, bool), self.counts)

    def pool(self, hidden: jax.Array, kind: PoolingKind) -> jax.Array:
        """Pool hidden states [T, D] -> float32 [S, D]; unpooled float32 [T, D] for outputs per token."""
        begins = self.query_start[:-1]
        ends = self.query_start[1:]
        if self.shape.of_tokens:
            return hidden.astype(jnp.float32)
        if kind != "mean":
            return hidden[begins if kind == "first" else jnp.maximum(ends - 1, 0)].astype(jnp.float32)
        token = jnp.arange(len(hidden))[None]
        inside = (token >= begins[:, None]) & (token < ends[:, None])
        weights = inside / jnp.maximum(ends - begins, 1)[:, None]
        return jnp.matmul(weights.astype(jnp.float32), hidden.astype(jnp.float32), precision="highest")


def pack_pool(shape: PoolShape, plan: PoolPlan) -> Int32:
    """Pack a plan into int32 [shape.size]."""
    real = plan.num_tokens
    lengths = np.diff(plan.query_start)
    tokens = np.zeros((4, shape.tokens), np.int32)
    tokens[0, :real] = plan.token_ids
    tokens[1] = np.arange(shape.tokens)
    tokens[2] = tokens[1] + 1
    tokens[1, :real] = np.repeat(plan.query_start[:-1], lengths)
    tokens[2, :real] = np.repeat(plan.query_start[1:], lengths)
    if plan.token_types is not None:
        tokens[3, :real] = plan.token_types
    query_start = np.full(shape.seqs + 1, real, np.int32)
    query_start[: plan.num_seqs] = plan.query_start[:-1]
    return np.concatenate([tokens.ravel(), query_start])
