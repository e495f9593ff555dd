"""Every program an engine runs, by key, and how each is lowered: from shapes alone, so with or without weights.

The step's forward pass stands for itself; what follows it (edits, choice, logprobs) are small programs on its logits,
so that what few requests ask for does not multiply the large ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice, packed_size
from pagoda.backends.jax_tpu.model.layout import padded
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.parallel.sharding import DATA, partition, placed, whole
from pagoda.backends.jax_tpu.sampling import device
from pagoda.backends.jax_tpu.sampling.device import choose, logprobs
from pagoda.common.engine import logit_edits
from pagoda.common.engine.sampling import LogprobsMode
from pagoda.common.engine.sampling_state import KINDS, Kind
from pagoda.common.engine.shapes import StepShape, StepShapes

# What XLA is told beside a program: the same wherever it is compiled, to run here or ahead of time.

_VMEM: Final = "xla_tpu_scoped_vmem_limit_kib"


def compiler_options(kernel: KernelChoice) -> dict[str, str] | None:
    """Options of every program; None off the TPU.

    Half of VMEM, in KiB, is for the windows of one operation, where XLA takes an eighth to a quarter: larger tiles let
    the matrix units of a v6e work at 92 % of their peak instead of 65 to 80 %, and three quarters would leave too
    little for what XLA keeps in VMEM between operations (benchmarks/LOG.md). A limit in LIBTPU_INIT_ARGS stands.
    """
    if not kernel.use_kernel or kernel.interpret or _VMEM in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_VMEM: str(kernel.chip.vmem_bytes // 2 // 1024)}


SCORED: Final = 64
"""Prompt tokens per call of the program that scores prompts."""

Small = Literal["penalise", "adjust", "ban_words", "mask", "logprobs"]


@dataclass(frozen=True, slots=True)
class Forward:
    """(leaves, caches, history, packed step) -> (caches, hidden [T, D], logits [S, V]); the caches are donated."""

    shape: StepShape


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """Forward with one argument more: rows [T, D], those of tokens that are EMBEDDED. Only with --enable-prompt-embeds,
    and for shapes of which no sequence must have one token.
    """

    shape: StepShape


@dataclass(frozen=True, slots=True)
class Choose:
    """(logits [R, V], history, rules [7, R]) -> (tokens [R], history, logits drawn from); the history is donated.

    R counts `seqs` once per shard, here and below.
    """

    seqs: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class OnLogits:
    """One of the edits, or logprobs, of logits [R, V]."""

    name: Small
    seqs: int


@dataclass(frozen=True, slots=True)
class Score:
    """(leaves, hidden [T, D], wanted [SCORED]) -> logits [SCORED, V]."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Remember:
    """(history, row, tokens [length]) -> history with that row replaced; donated."""


Key = Forward | ForwardRows | Choose | OnLogits | Score | Remember


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The programs of one model with these shapes.

    `num_blocks`: of each shard's KV cache; `rows`: that requests can hold in each shard. `embeds`: steps may have
    embeddings in place of tokens.
    """

    model: Model
    shapes: StepShapes
    num_blocks: int
    rows: int
    mode: LogprobsMode = "raw_logprobs"
    embeds: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """What bundled programs depend on besides the model and the limits."""
        return {"logprobs_mode": self.mode, "num_blocks": self.num_blocks}

    @property
    def history(self) -> jax.ShapeDtypeStruct:
        """int32 [shards*rows+1, max_len+1]: tokens by position; the last row is for padding."""
        return self._array((self.model.shards * self.rows + 1, self.model.max_len + 1), jnp.int32)

    def __iter__(self) -> Iterator[Key]:
        """The key of every program, the largest first: they take longest to compile."""
        shapes = sorted(self.shapes, reverse=True)
        yield from map(Forward, shapes)
        yield from (ForwardRows(shape) for shape in shapes if self.embeds and not shape.decode_only)
        yield from map(Score, sorted({*self.shapes.tokens.sizes, *self.shapes.decode.sizes}))
        yield Remember()
        for seqs in self.shapes.seqs:
            yield from (Choose(seqs, kind) for kind in KINDS)
            yield from (OnLogits(name, seqs) for name in ("penalise", "adjust", "ban_words", "mask", "logprobs"))
        yield OnLogits("logprobs", SCORED)

    def lower(self, key: Key) -> jax.stages.Lowered:
        """The program, ready to be compiled. Call from one thread."""
        function, donated, arguments = self._program(key)
        with self.model.exact:
            options, results = compiler_options(self.model.kernel), self._results(key)
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=results, compiler_options=options)
            return jitted.lower(*arguments)

    def _results(self, key: Key) -> Any:
        """Where the results lie: logits and hidden states with their shard; what the host reads, everywhere."""
        logits, everywhere = placed(self.model.mesh, "R."), whole(self.model.mesh)
        match key:
            case Forward() | ForwardRows():
                return tuple(cache.sharding for cache in self.model.caches(self.num_blocks)), logits, logits
            case Choose():
                return everywhere, everywhere, logits
            case Remember() | OnLogits("logprobs", _):
                return everywhere
            case Score() | OnLogits():
                return logits

    def signature(self, key: Key) -> str:
        """Logprobs mode, kernel choice, and the shapes, types and places of everything that program takes."""
        arguments = jax.tree.leaves(self._program(key)[2])
        parts = ((each.shape, each.dtype.name, each.sharding.spec) for each in arguments)
        return repr([self.mode, self.model.kernel, *parts])

    def _program(self, key: Key) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """The function, which arguments it may overwrite, and the shapes of all."""
        model, array, history, shards = self.model, self._array, self.history, self.model.shards
        match key:
            case Forward(shape):
                packed = array((shards, packed_size(shape)), jnp.int32, "R.")
                arguments = (model.leaves, model.caches(self.num_blocks), history, packed)
                return partial(model.forward, shape), (1,), arguments
            case ForwardRows(shape):
                function, donated, arguments = self._program(Forward(shape))
                rows = array((shards * shape.tokens, model.spec.hidden_width), model.dtype, "R.")
                return function, donated, (*arguments, rows)
            case Score(tokens):
                hidden = array((shards * tokens, model.spec.width), model.dtype, "R.")
                return model.score, (), (model.leaves, hidden, array((shards * SCORED,), jnp.int32, "R"))
            case Remember():
                row = array(history.shape[1:], jnp.int32)
                return _remember, (0,), (history, array((), jnp.int32), row)
            case Choose(seqs, kind):
                rules = array((7, shards * seqs), jnp.int32)
                shown = self.mode.startswith("processed")
                function = partial(choose, kind, shown, model.kernel, model.mesh)
                return function, (1,), (self._logits(seqs), history, rules)
            case OnLogits(name, seqs):
                return self._on_logits(name, seqs)

    def _on_logits(self, name: Small, seqs: int) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        array, logits, history = self._array, self._logits(seqs), self.history
        rows = logits.shape[0]
        match name:
            case "penalise":
                function = self._by_shard(_penalise, ("R.", "", ""), "R.")
                return function, (), (logits, history, array((8, rows), jnp.int32))
            case "adjust":
                return device.adjust, (), (logits, array((3, logit_edits.ENTRIES), jnp.int32))
            case "ban_words":
                words, heads = array((2, logit_edits.WORDS), jnp.int32), array((4, logit_edits.HEADS), jnp.int32)
                return device.ban_words, (), (logits, history, words, heads)
            case "mask":
                return device.mask, (), (logits, array((rows, -(-logits.shape[1] // 32)), jnp.uint32))
            case "logprobs":
                function = self._by_shard(partial(logprobs, self.mode), ("R.", "R"), ("R.", "R.", "R"))
                return function, (), (logits, array((rows,), jnp.int32))

    def _by_shard(self, function: Callable[..., Any], takes: tuple[str, ...], gives: Any) -> Callable[..., Any]:
        """The function on each shard's rows: what the compiler would gather all logits for."""
        specs = jax.tree.map(partition, (takes, gives))
        # not checked: the devices of a shard all hold the same
        return jax.shard_map(function, mesh=self.model.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    def _logits(self, seqs: int) -> jax.ShapeDtypeStruct:
        rows = self.model.shards * seqs
        return self._array((rows, padded(self.model.spec.vocab, self.model.tensor)), jnp.float32, "R.")

    def _array(self, shape: tuple[int, ...], dtype: Any, axes: str = "") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=placed(self.model.mesh, axes))


def _penalise(logits: jax.Array, history: jax.Array, packed: jax.Array) -> jax.Array:
    """`device.penalise` of a shard's rows [S, V], with the columns of all shards."""
    rows = logits.shape[0]
    index = packed[0] - jax.lax.axis_index(DATA) * rows
    mine = (index >= 0) & (index < rows)
    return device.penalise(logits, history, packed.at[0].set(jnp.where(mine, index, rows)))


def _remember(history: jax.Array, row: jax.Array, tokens: jax.Array) -> jax.Array:
    return history.at[row].set(tokens)
