"""The programs of a generating or pooling engine, by key, and how each is lowered. Needs shapes only, no weights.

The forward pass is one program; penalties, sampling and logprobs are small programs on its logits, so that rarely used
features do not multiply the number of large programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu import sampling
from pagoda.backends.jax_tpu.drafters.drafter import JaxDrafter
from pagoda.backends.jax_tpu.execution.step_input import (
    MIN_POOL_TOKENS,
    KernelChoice,
    PoolInput,
    PoolShape,
    packed_size,
)
from pagoda.backends.jax_tpu.model.model import DraftInputs, Leaves, Model, StepModel
from pagoda.backends.jax_tpu.model.slots import padded
from pagoda.backends.jax_tpu.parallel import DATA, named_sharding, partition, replicated
from pagoda.backends.jax_tpu.sampling import logprobs, sample, sample_drafts
from pagoda.backends.jax_tpu.weights.adapters import slot_shapes, write_slot
from pagoda.common.config.engine import Limits
from pagoda.common.engine.sampling import logit_edits
from pagoda.common.engine.sampling import state as sampling_state
from pagoda.common.engine.sampling.rules import LogprobsMode
from pagoda.common.engine.sampling.state import KINDS, Kind
from pagoda.common.engine.steps.shapes import ShapeLadder, StepShape, StepShapes

SCORE_TOKENS: Final = 64
"""Prompt tokens per call of the `ScorePrompt` program."""

_VMEM_LIMIT: Final = "xla_tpu_scoped_vmem_limit_kib"
_STATED_OPTION: Final = re.compile(r"(?:^|\s)--?(?:no)?(xla_\w+)")
_TALL_TILES: Final = "xla_tpu_control_large_2nd_minor_layout_for_x16"
_OVERLAP: Final = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}

LogitsFunction = Literal["penalise", "adjust", "adjust_all", "ban_words", "mask", "copy", "logprobs"]
LOGITS_FUNCTIONS: Final = get_args(LogitsFunction)
MASKED_ROWS: Final = 8, 64
"""Rows of a `mask` program, besides all rows of logits."""


@dataclass(frozen=True, slots=True)
class Forward:
    """(leaves, caches, history, packed step) -> (caches, hidden [T, D], logits [S * width, V]); donates the caches.

    With a drafter model there is a fourth result, its `DraftInputs`.
    """

    shape: StepShape


@dataclass(frozen=True, slots=True)
class ForwardEmbeds:
    """`Forward` with a fifth argument: embeddings [T, D] for the tokens marked EMBEDDED.

    Compiled with --enable-prompt-embeds only, and not for decode-only shapes.
    """

    shape: StepShape


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafter model after `Forward` and `Sample`; donates caches and history.

    (leaves, leaves of the drafter, caches, history, packed step, DraftInputs, tokens [S * width]) -> (caches, history,
    guesses [S, K]).
    """

    shape: StepShape


@dataclass(frozen=True, slots=True)
class Sample:
    """(logits [R, V], history, rules [7, R]) -> (tokens [R], history, processed logits); the history is donated.

    R is `seqs` times the number of shards, here and below. Of an engine with drafts the rules are [9, R], and the
    tokens are -1 after a sequence's first rejected draft.
    """

    seqs: int  # rows of logits
    kind: Kind
    width: int = 1  # rows of logits per sequence


@dataclass(frozen=True, slots=True)
class LogitsProgram:
    """One logits edit, a copy or the logprobs of logits [R, V]; edits donate them.

    Edits that read the history have another argument if the engine has drafts: `SampledRows.pack_with_drafts`[7].
    """

    name: LogitsFunction
    seqs: int
    rows: int = 0  # of a mask: how many rows of logits have one at most, of all shards


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """(leaves, hidden [T, D], token indices [SCORE_TOKENS]) -> logits [SCORE_TOKENS, V].

    `adapted`: with a fourth argument, the slots of the tokens' adapters [SCORE_TOKENS].
    """

    tokens: int
    adapted: bool = False


@dataclass(frozen=True, slots=True)
class WriteAdapter:
    """(adapter arrays, their parts of one slot, slot) -> adapter arrays; the arrays are donated."""


@dataclass(frozen=True, slots=True)
class SetHistoryRow:
    """(history, row, tokens [length]) -> history with that row replaced; the history is donated."""


@dataclass(frozen=True, slots=True)
class SetCounts:
    """(counts, row, counts uint8 [2, V] of that row) -> counts; the counts are donated."""


@dataclass(frozen=True, slots=True)
class CountTokens:
    """(counts, rules, tokens [R]) -> counts with the tokens that `Sample` returned; the counts are donated."""

    seqs: int
    width: int = 1


@dataclass(frozen=True, slots=True)
class RecordDrafts:
    """(history, rules [9, R]) -> history with the drafts of a step; the history is donated."""

    seqs: int


@dataclass(frozen=True, slots=True)
class CopyStates:
    """(caches, pairs [shards, 2, count]) -> caches with blocks of recurrent state copied; the caches are donated.

    Pairs are sources and destinations; all sources are read before a destination is written. Compiled for each pool of
    recurrent state, for `FEW_COPIES` and for as many as a step may need.
    """

    pool: int
    count: int


FEW_COPIES: Final = 8

Key = (
    Forward
    | ForwardEmbeds
    | Draft
    | Sample
    | LogitsProgram
    | ScorePrompt
    | SetHistoryRow
    | SetCounts
    | CountTokens
    | RecordDrafts
    | CopyStates
    | WriteAdapter
)


def compiler_options(kernel: KernelChoice, *, overlaps: bool = False) -> dict[str, str] | None:
    """Return the XLA options of a program; None off the TPU. They are the same for serving and ahead of time.

    XLA gives the windows of one operation an eighth to a quarter of VMEM; half (in KiB) allows larger tiles, which
    raises the matrix units of a v6e from 65-80 % to 92 % of peak. Three quarters leave too little for what XLA keeps in
    VMEM between operations (benchmarks/LOG.md). Where XLA prefers tiles of 16 rows, it would copy all weights in every
    step: those of arguments have 8. An option set in LIBTPU_INIT_ARGS takes precedence.

    `overlaps`: its tokens are exchanged in pieces. XLA then sends a piece while it multiplies another one, and sums
    on the sparse cores.
    """
    if not kernel.use_kernel or kernel.interpret:
        return None
    options = {_VMEM_LIMIT: str(kernel.chip.vmem_bytes // 2 // 1024)}
    options |= {_TALL_TILES: "false"} if kernel.chip.tall_tiles else {}
    options |= _OVERLAP if overlaps else {}
    stated = set(_STATED_OPTION.findall(os.environ.get("LIBTPU_INIT_ARGS", "")))
    return {name: value for name, value in options.items() if name not in stated}


@dataclass(frozen=True, slots=True)
class StepProgramSet:
    """The programs of one generating model with these shapes."""

    model: StepModel
    shapes: StepShapes
    num_blocks: tuple[int, ...]  # KV cache blocks of each pool, per shard
    rows: int  # request rows per shard
    mode: LogprobsMode = "raw_logprobs"
    embeds: bool = False  # steps may take embeddings in place of tokens
    drafter: JaxDrafter | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits."""
        return {
            "logprobs_mode": self.mode,
            "num_blocks": self.num_blocks[0] if len(self.num_blocks) == 1 else list(self.num_blocks),
            "max_drafts": self.shapes.width - 1,
            **({"batch_invariant": True} if self.model.kernel.batch_invariant else {}),
        }

    @property
    def history(self) -> jax.ShapeDtypeStruct:
        """int32 [shards*rows+1, max_len+1]: token ids by row and position; the last row is padding.

        An engine with drafts has another column: how many drafts the row's previous step rejected. In front of it are
        the newest guesses of the row, if a drafter model makes them.
        """
        columns = self.model.max_len + len(self.shapes.widths) + self.shapes.guesses
        return self._array((self.model.shards * self.rows + 1, columns), jnp.int32)

    @property
    def counts(self) -> jax.ShapeDtypeStruct:
        """uint8 [shards * 2 * (rows + 1), V]: how often each row has each token, see `sampling.penalise`."""
        vocab = padded(self.model.spec.vocab, self.model.tensor)
        return self._array((self.model.shards * 2 * (self.rows + 1), vocab), jnp.uint8, "R.")

    @property
    def state_bytes(self) -> int:
        """Return the bytes of history and counts on one device."""
        arrays = self.history, self.counts
        return sum(prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in arrays)

    @property
    def copy_counts(self) -> tuple[int, int]:
        """Return the sizes of `CopyStates`: a row takes one snapshot in a step, and starts from one, at most."""
        return FEW_COPIES, FEW_COPIES + 2 * self.rows

    def __iter__(self) -> Iterator[Key]:
        """Yield the key of every program, the largest first."""
        shapes = sorted(self.shapes, reverse=True)
        yield from map(Forward, shapes)
        yield from map(Draft, shapes if self.drafter is not None else ())
        yield from (ForwardEmbeds(shape) for shape in shapes if self.embeds and not shape.decode_only)
        yield from (ScorePrompt(*kind) for kind in sorted({(shape.tokens, shape.adapted) for shape in shapes}))
        if self.shapes.adapters:
            yield WriteAdapter()
        yield from (SetHistoryRow(), SetCounts())
        for pool in self.model.state_pools:
            yield from (CopyStates(pool, count) for count in self.copy_counts)
        rows = {width: [seqs * width for seqs in self.shapes.seqs] for width in self.shapes.widths}
        for width, sizes in rows.items():
            yield from (Sample(size, kind, width) for size in sizes for kind in KINDS)
            yield from (CountTokens(size, width) for size in sizes)
            yield from (RecordDrafts(size) for size in sizes if width > 1)
        for size in sorted({size for sizes in rows.values() for size in sizes}):
            yield from (LogitsProgram(name, size) for name in LOGITS_FUNCTIONS if name != "mask")
            yield from (LogitsProgram("mask", size, count) for count in self.masked_rows(size))
        yield LogitsProgram("logprobs", SCORE_TOKENS)

    def masked_rows(self, seqs: int) -> tuple[int, ...]:
        """Return the sizes of the `mask` programs of `seqs` rows of logits per shard."""
        rows = seqs * self.model.shards
        return (*(size for size in MASKED_ROWS if size < rows), rows)

    def lower(self, key: Key) -> jax.stages.Lowered:
        """Trace and lower a program. Not thread-safe."""
        function, donated, arguments = self._program(key)
        return _lower(self.model, function, arguments, self._out_shardings(key), donated, overlaps=self._overlaps(key))

    def _overlaps(self, key: Key) -> bool:
        match key:
            case Forward(shape) | ForwardEmbeds(shape):
                return self.model.pieces(shape.tokens, adapted=shape.adapted) > 1
            case _:
                return False

    def _out_shardings(self, key: Key) -> Any:
        """Logits and hidden states stay with their shard; what the host reads is replicated."""
        logits = named_sharding(self.model.mesh, "R.")
        everywhere = replicated(self.model.mesh)
        caches = tuple(cache.sharding for cache in self.model.caches(self.num_blocks))
        match key:
            case Forward() | ForwardEmbeds():
                by_shard = named_sharding(self.model.mesh, "R")
                left = () if self.drafter is None else (DraftInputs(by_shard, by_shard, logits),)
                return caches, logits, logits, *left
            case Draft():
                return caches, everywhere, everywhere
            case CopyStates():
                return caches
            case WriteAdapter():
                return tuple(array.sharding for array in self._adapter_arrays())
            case Sample():
                return everywhere, everywhere, logits
            case SetHistoryRow() | RecordDrafts() | LogitsProgram("logprobs", _):
                return everywhere
            case ScorePrompt() | LogitsProgram() | SetCounts() | CountTokens():
                return logits

    def signature(self, key: Key) -> str:
        """Return logprobs mode, kernel choice, and the shapes, dtypes and shardings of all arguments."""
        return repr([self.mode, self.model.kernel, *_shapes(self._program(key)[2])])

    def _program(self, key: Key) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """Return the function, the indices of its donated arguments, and the shapes of all arguments."""
        model = self.model
        array = self._array
        history = self.history
        shards = self.model.shards
        drafts = self.shapes.width > 1
        match key:
            case Forward(shape):
                packed = array((shards, packed_size(shape)), jnp.int32, "R.")
                arguments = (model.leaves, model.caches(self.num_blocks), history, packed)
                captured = () if self.drafter is None else self.drafter.captured
                return partial(model.forward, shape, drafts=drafts, captured=captured), (1,), arguments
            case Draft(shape):
                return self._draft_program(shape)
            case ForwardEmbeds(shape):
                function, donated, arguments = self._program(Forward(shape))
                embeds = array((shards * shape.tokens, model.spec.hidden_width), model.dtype, "R.")
                return function, donated, (*arguments, embeds)
            case ScorePrompt(tokens, adapted):
                hidden = array((shards * tokens, model.spec.width), model.dtype, "R.")
                numbers = (array((shards * SCORE_TOKENS,), jnp.int32, "R"),) * (2 if adapted else 1)
                return model.score, (), (model.leaves, hidden, *numbers)
            case WriteAdapter():
                assert isinstance(model, Model), "no other has adapters"
                slot = array((), jnp.int32)
                return partial(write_slot, model), (0,), (self._adapter_arrays(), slot_shapes(model), slot)
            case SetHistoryRow():
                row = array(history.shape[1:], jnp.int32)
                return _set_history_row, (0,), (history, array((), jnp.int32), row)
            case SetCounts():
                values = array((2, self.counts.shape[1]), jnp.uint8)
                function = _per_shard(model, partial(_set_counts, self.rows), ("R.", "", ""), "R.")
                return function, (0,), (self.counts, array((), jnp.int32), values)
            case CountTokens(seqs, width):
                function = _per_shard(model, partial(_count_tokens, self.rows, width), ("R.", "", ""), "R.")
                return function, (0,), (self.counts, self._rules(seqs), array((shards * seqs,), jnp.int32))
            case CopyStates(pool, count):
                pairs = array((shards, 2, count), jnp.int32, "R..")
                return partial(model.copy_states, pool), (0,), (model.caches(self.num_blocks), pairs)
            case RecordDrafts(seqs):
                return partial(sampling.record_drafts, self.shapes.guesses), (0,), (history, self._rules(seqs))
            case Sample(seqs, kind, width):
                run: Callable[..., Any] = partial(sample_drafts, width, self.shapes.guesses) if drafts else sample
                return_logits = self.mode.startswith("processed")
                function = partial(run, kind, return_logits, model.kernel, model.mesh)
                return function, (1,), (self._logits(seqs), history, self._rules(seqs))
            case LogitsProgram():
                return self._logits_program(key)

    def _draft_program(self, shape: StepShape) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        drafter = self.drafter
        model = self.model
        array = self._array
        shards = self.model.shards
        assert drafter is not None, "the engine has one"
        packed = array((shards, packed_size(shape)), jnp.int32, "R.")
        inputs = DraftInputs(
            array((shards * shape.tokens,), jnp.int32, "R"),
            array((shards * shape.seqs,), jnp.int32, "R"),
            array((shards * shape.tokens, drafter.source_width), model.dtype, "R."),
        )
        tokens = array((shards * shape.seqs * shape.width,), jnp.int32)
        arguments = (model.leaves, drafter.leaves, model.caches(self.num_blocks), self.history, packed, inputs, tokens)
        return partial(drafter.draft, shape), (2, 3), arguments

    def _logits_program(self, key: LogitsProgram) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        array = self._array
        logits = self._logits(key.seqs)
        history = self.history
        rows, vocab = logits.shape
        drafts = self.shapes.width - 1
        shift_rows = (array((rows,), jnp.int32),) if drafts else ()
        match key.name:
            case "penalise":
                packed = array((6 if drafts else 4, rows), jnp.int32, ".R")
                before = (history,) * bool(drafts)
                axes = "R.", "R.", ".R", *("" for _ in before), *("R" for _ in shift_rows)
                function = _per_shard(self.model, partial(_penalise, self.rows, drafts), axes, "R.")
                return function, (0,), (logits, self.counts, packed, *before, *shift_rows)
            case "adjust":
                return sampling.adjust, (0,), (logits, array((3, sampling_state.MAX_ADDITIONS), jnp.int32))
            case "adjust_all":
                return sampling.adjust_all, (0,), (logits, array((vocab,), jnp.float32), array((rows,), jnp.bool_))
            case "ban_words":
                words = array((2, sampling_state.MAX_WORDS), jnp.int32)
                heads = array((4, logit_edits.MAX_WORD_HEADS), jnp.int32)
                return _ban_words, (0,), (logits, history, words, heads, *shift_rows)
            case "mask":
                masked = array((key.rows, -(-vocab // 8)), jnp.uint8), array((key.rows,), jnp.int32)
                return _per_shard(self.model, _mask, ("R.", "", ""), "R."), (0,), (logits, *masked)
            case "copy":
                return jnp.copy, (), (logits,)
            case "logprobs":
                function = _per_shard(self.model, partial(logprobs, self.mode), ("R.", "R"), ("R.", "R.", "R"))
                return function, (), (logits, array((rows,), jnp.int32))

    def _adapter_arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        assert isinstance(self.model, Model), "no other has adapters"
        return tuple(self.model.leaves[index] for index in self.model.adapter_leaves)

    def _rules(self, seqs: int) -> jax.ShapeDtypeStruct:
        fields = sampling_state.SAMPLING_FIELDS + (2 if self.shapes.width > 1 else 0)
        return self._array((fields, self.model.shards * seqs), jnp.int32)

    def _logits(self, seqs: int) -> jax.ShapeDtypeStruct:
        rows = self.model.shards * seqs
        return self._array((rows, padded(self.model.spec.vocab, self.model.tensor)), jnp.float32, "R.")

    def _array(self, shape: tuple[int, ...], dtype: Any, axes: str = "") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=named_sharding(self.model.mesh, axes))


def _own_rows(rows: jax.Array, count: int) -> jax.Array:
    """Return the indices of rows of the engine among a shard's `count`, which is the padding row's, for all others."""
    own = rows - jax.lax.axis_index(DATA) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def _set_counts(rows: int, counts: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    return sampling.set_counts(counts, _own_rows(row, rows), values)


def _count_tokens(rows: int, width: int, counts: jax.Array, rules: jax.Array, tokens: jax.Array) -> jax.Array:
    return sampling.count_tokens(width, counts, _own_rows(rules[0], rows), tokens)


def _penalise(
    rows: int, drafts: int, logits: jax.Array, counts: jax.Array, packed: jax.Array, *of_drafts: jax.Array
) -> jax.Array:
    """Apply `sampling.penalise` to a shard's rows [S, V]; `packed` also has tokens known and drafts among them."""
    own = jnp.where(packed[0] < 0, -1, _own_rows(packed[0], rows))
    ahead = None
    if drafts:
        history, shift_rows = of_drafts
        known = packed[4] - sampling.shift_by_row(history, shift_rows)
        ahead = sampling.tokens_ahead(history, packed[0], known, packed[5], drafts)
    return sampling.penalise(logits, counts, packed.at[0].set(own), ahead)


def _mask(logits: jax.Array, bits: jax.Array, rows: jax.Array) -> jax.Array:
    return sampling.mask(logits, bits, rows - jax.lax.axis_index(DATA) * logits.shape[0])


def _ban_words(
    logits: jax.Array, history: jax.Array, words: jax.Array, heads: jax.Array, *shift_rows: jax.Array
) -> jax.Array:
    for rows_of_all in shift_rows:
        heads = sampling.shift_heads(words, heads, sampling.shift_by_row(history, rows_of_all))
    return sampling.ban_words(logits, history, words, heads)


def _set_history_row(history: jax.Array, row: jax.Array, tokens: jax.Array) -> jax.Array:
    return history.at[row].set(tokens)


@dataclass(frozen=True, slots=True)
class PoolProgramSet:
    """The programs of a pooling model: one per bucket of tokens, with outputs per prompt or per token.

    (leaves, packed batch) -> pooled outputs float32 [S or T, n], keyed by padded shape.
    """

    model: Model
    limits: Limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits. There is no persistent KV cache."""
        return {"num_blocks": 0}

    def __iter__(self) -> Iterator[PoolShape]:
        """Yield every shape, the largest first."""
        assert self.model.spec.pooler is not None, "the model pools"
        per_prompt = () if self.model.spec.pooler.kind == "all" else (False,)
        for tokens in reversed(token_ladder(self.limits).sizes):
            yield from (self.shape_for(tokens, of_tokens) for of_tokens in (True, *per_prompt))

    def shape_for(self, tokens: int, of_tokens: bool) -> PoolShape:
        """Return the smallest shape that fits `tokens`. `of_tokens`: one output per token instead of per prompt."""
        size = token_ladder(self.limits).bucket_for(tokens)
        pages = -(-min(self.limits.max_model_len, size) // self.limits.block_size)
        return PoolShape(size, min(self.limits.max_num_seqs, size), pages, of_tokens)

    def lower(self, key: PoolShape) -> jax.stages.Lowered:
        """Trace and lower a program. Not thread-safe."""
        arguments = self.model.leaves, self._packed(key)
        return _lower(self.model, partial(self._pool, key), arguments, replicated(self.model.mesh))

    def signature(self, key: PoolShape) -> str:
        """Return the kernel choice and the shapes, dtypes and shardings of all arguments."""
        return repr([self.model.kernel, *_shapes((self.model.leaves, self._packed(key)))])

    def _packed(self, key: PoolShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((key.size,), jnp.dtype(jnp.int32), sharding=replicated(self.model.mesh))

    def _pool(self, key: PoolShape, leaves: Leaves, packed: jax.Array) -> jax.Array:
        def run(leaves: Leaves, packed: jax.Array) -> jax.Array:
            return self.model.decoder(leaves).pooled(PoolInput.unpack(packed, key, self.model.kernel))

        pooled: jax.Array = _per_shard(self.model, run, (tuple(self.model.axes), ""), "")(leaves, packed)
        return pooled


def _lower(
    model: StepModel,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    outputs: Any,
    donated: tuple[int, ...] = (),
    *,
    overlaps: bool = False,
) -> jax.stages.Lowered:
    with model.matmul_precision:
        options = compiler_options(model.kernel, overlaps=overlaps)
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=outputs, compiler_options=options)
        return jitted.lower(*arguments)


def _shapes(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the shapes, dtypes and shardings of all arguments."""
    return [(each.shape, each.dtype.name, each.sharding.spec) for each in jax.tree.leaves(arguments)]


def _per_shard(model: StepModel, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Map the function over the shards' rows; the compiler alone would gather all logits."""
    specs = jax.tree.map(partition, (in_axes, out_axes))
    # check_vma=False: devices that hold the same rows compute the same values
    return jax.shard_map(function, mesh=model.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def token_ladder(limits: Limits) -> ShapeLadder:
    """Return the padded numbers of tokens, doubling up to the longest step."""
    longest = -(-max(limits.max_num_batched_tokens, limits.max_model_len) // MIN_POOL_TOKENS) * MIN_POOL_TOKENS
    return ShapeLadder.between(MIN_POOL_TOKENS, longest)
