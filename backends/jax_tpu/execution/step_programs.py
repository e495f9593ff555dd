"""The programs of a generating engine that run the model's layers, or change its arrays of caches and adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.program_kind import ProgramKind, ProgramParts, StepContext, StepProgramKind
from pagoda.backends.jax_tpu.execution.step_input import PoolShape, packed_size
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.jax_tpu.model.model import DraftInputs, Model
from pagoda.backends.jax_tpu.model.roofline import (
    PROMPT,
    RooflineCost,
    full_prompts,
    full_step,
    head_cost,
    pool_cost,
    step_cost,
)
from pagoda.backends.jax_tpu.parallel import named_sharding, replicated
from pagoda.backends.jax_tpu.weights.adapters import slot_shapes, write_slot
from pagoda.common.engine.steps.shapes import StepShape

SCORE_TOKENS: Final = 64
"""Prompt tokens per call of the `ScorePrompt` program."""

FEW_COPIES: Final = 8


@dataclass(frozen=True, slots=True)
class LayersProgram(StepProgramKind):
    """A program that runs all layers on a step's tokens."""

    shape: StepShape

    @property
    def label(self) -> str:
        return _step_label(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape.tokens, self.shape.seqs, self.shape.pages, self.shape.width

    @property
    def data_trips(self) -> int:
        return self.shape.seqs

    def full_load(self, model: Model, num_blocks: int) -> BatchLoad:
        return full_step(self.shape, model.kernel.page_size, num_blocks)

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return step_cost(model, self.shape, load)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        packed = context.array((model.shards, packed_size(self.shape)), jnp.int32, "R.")
        rows = (context.media,) if context.media_rows else ()
        arguments = (model.leaves, model.caches(context.num_blocks), context.history, packed, *rows)
        drafts = context.shapes.width > 1
        captured = () if context.drafter is None else context.drafter.captured
        return ProgramParts(partial(model.forward, self.shape, drafts=drafts, captured=captured), arguments, (1,))

    def outputs(self, context: StepContext) -> Any:
        logits = named_sharding(context.model.mesh, "R.")
        by_shard = named_sharding(context.model.mesh, "R")
        left = () if context.drafter is None else (DraftInputs(by_shard, by_shard, logits),)
        return context.cache_shardings, logits, logits, *left

    def overlaps(self, context: StepContext) -> bool:
        return context.model.pieces(self.shape.tokens, adapted=self.shape.adapted) > 1


def _step_label(shape: StepShape) -> str:
    if shape.adapted:
        return f"{_step_label(replace(shape, adapted=False))}, adapters"
    if shape.decode_only:
        return f"decode {shape.seqs} rows, {shape.pages} pages"
    drafts = f", {shape.width - 1} drafts" if shape.width > 1 else ""
    return f"step {shape.tokens} tokens, {shape.seqs} rows, {shape.pages} pages{drafts}"


@dataclass(frozen=True, slots=True)
class Forward(LayersProgram):
    """(leaves, caches, history, packed step) -> (caches, hidden [T, D], logits [S * width, V]); donates the caches.

    Of an engine with media there is a fifth argument, the rows that token ids may name. With a drafter model there is a
    fourth result, its `DraftInputs`.
    """

    @property
    def variant(self) -> object:
        return type(self), self.shape.decode_only, self.shape.adapted

    def json_fields(self, page_size: int) -> dict[str, Any]:
        if self.shape.width > 1 or self.shape.adapted:
            return {}
        shape = {
            "tokens": self.shape.tokens,
            "seqs": self.shape.seqs,
            "context": self.shape.pages * page_size,
            "decode_only": self.shape.decode_only,
        }
        return {"shape": shape}


@dataclass(frozen=True, slots=True)
class WriteRows(StepProgramKind):
    """(rows [shards * R, D], values [shards * n, D], numbers [shards, n]) -> rows; donates them.

    Writes media items whose rows the host has. A number of R or more writes nothing.
    """

    count: int  # n

    @property
    def label(self) -> str:
        return f"write {self.count} rows of media"

    @property
    def variant(self) -> object:
        return type(self)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        values = context.array((model.shards * self.count, model.spec.hidden_width), model.dtype, "R.")
        numbers = context.array((model.shards, self.count), jnp.int32, "R.")
        return ProgramParts(model.write_rows, (context.media, values, numbers), (0,))

    def outputs(self, context: StepContext) -> Any:
        return context.media.sharding

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        size = self.count * model.spec.hidden_width * model.dtype.itemsize
        return RooflineCost(flops=0, bytes=2 * size)


@dataclass(frozen=True, slots=True)
class Draft(LayersProgram):
    """The drafter model after `Forward` and `Sample`; donates caches and history.

    (leaves, leaves of the drafter, caches, history, packed step, DraftInputs, tokens [S * width]) -> (caches, history,
    guesses [S, K]).
    """

    @property
    def label(self) -> str:
        return f"{_step_label(self.shape)}, drafter"

    def full_load(self, model: Model, num_blocks: int) -> BatchLoad:
        return BatchLoad(0, 0)

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        raise AssertionError("drafter models are not compiled ahead of time")

    def parts(self, context: StepContext) -> ProgramParts:
        drafter = context.drafter
        model = context.model
        shape = self.shape
        array = context.array
        assert drafter is not None, "the engine has one"
        packed = array((model.shards, packed_size(shape)), jnp.int32, "R.")
        inputs = DraftInputs(
            array((model.shards * shape.tokens,), jnp.int32, "R"),
            array((model.shards * shape.seqs,), jnp.int32, "R"),
            array((model.shards * shape.tokens, drafter.source_width), model.dtype, "R."),
        )
        tokens = array((model.shards * shape.seqs * shape.width,), jnp.int32)
        caches = model.caches(context.num_blocks)
        arguments = (model.leaves, drafter.leaves, caches, context.history, packed, inputs, tokens)
        return ProgramParts(partial(drafter.draft, shape), arguments, (2, 3))

    def outputs(self, context: StepContext) -> Any:
        everywhere = replicated(context.model.mesh)
        return context.cache_shardings, everywhere, everywhere

    def overlaps(self, context: StepContext) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ScorePrompt(StepProgramKind):
    """(leaves, hidden [T, D], token indices [SCORE_TOKENS]) -> logits [SCORE_TOKENS, V].

    `adapted`: with a fourth argument, the slots of the tokens' adapters [SCORE_TOKENS].
    """

    tokens: int
    adapted: bool = False

    @property
    def label(self) -> str:
        return f"score {self.tokens} tokens{', adapters' if self.adapted else ''}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.tokens,)

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return head_cost(model)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        hidden = context.array((model.shards * self.tokens, model.spec.width), model.dtype, "R.")
        numbers = (context.array((model.shards * SCORE_TOKENS,), jnp.int32, "R"),) * (2 if self.adapted else 1)
        return ProgramParts(model.score, (model.leaves, hidden, *numbers))

    def outputs(self, context: StepContext) -> Any:
        return named_sharding(context.model.mesh, "R.")


@dataclass(frozen=True, slots=True)
class WriteAdapter(StepProgramKind):
    """(adapter arrays, their parts of one slot, slot) -> adapter arrays; the arrays are donated."""

    @property
    def label(self) -> str:
        return "load adapter"

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(2 * model.adapter_bytes // max(model.lora.slots, 1) if model.lora else 0, 0)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        assert isinstance(model, Model), "no other has adapters"
        slot = context.array((), jnp.int32)
        return ProgramParts(partial(write_slot, model), (context.adapter_arrays, slot_shapes(model), slot), (0,))

    def outputs(self, context: StepContext) -> Any:
        return tuple(array.sharding for array in context.adapter_arrays)


@dataclass(frozen=True, slots=True)
class CopyStates(StepProgramKind):
    """(caches, pairs [shards, 2, count]) -> caches with blocks of recurrent state copied; the caches are donated.

    Pairs are sources and destinations; all sources are read before a destination is written. Compiled for each pool of
    recurrent state, for `FEW_COPIES` and for as many as a step may need.
    """

    pool: int
    count: int

    @property
    def label(self) -> str:
        return f"copy {self.count} states of pool {self.pool}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.count,)

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return RooflineCost(2 * self.count * model.block_bytes[self.pool], 0)

    def parts(self, context: StepContext) -> ProgramParts:
        model = context.model
        pairs = context.array((model.shards, 2, self.count), jnp.int32, "R..")
        arguments = (model.caches(context.num_blocks), pairs)
        return ProgramParts(partial(model.copy_states, self.pool), arguments, (0,))

    def outputs(self, context: StepContext) -> Any:
        return context.cache_shardings


@dataclass(frozen=True, slots=True)
class Pool(ProgramKind):
    """(leaves, packed batch) -> pooled outputs float32 [S or T, n] of a pooling model."""

    shape: PoolShape

    @property
    def label(self) -> str:
        outputs = "one output per token" if self.shape.of_tokens else f"{self.shape.seqs} prompts"
        return f"pool {self.shape.tokens} tokens, {outputs}"

    @property
    def variant(self) -> object:
        return type(self), self.shape.of_tokens

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.shape.tokens,)

    @property
    def data_trips(self) -> int:
        return self.shape.seqs

    def full_load(self, model: Model, num_blocks: int) -> BatchLoad:
        return full_prompts(self.shape.tokens, PROMPT)

    def cost(self, model: Model, load: BatchLoad) -> RooflineCost:
        return pool_cost(model, self.shape, load)
