"""The drafter's part of a step as a function over flat tuples of arrays, from which a program is compiled.

It runs after the step's sampling, first on all tokens of the step, rejected drafts included, whose keys and values
later tokens replace. Then on one token per sequence and guess, in a loop of as many rounds as a sequence wants; where a
sequence has no further guess, its token is written to the null block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from pagoda.backends.jax_tpu.drafters.decoders import JaxDraftDecoder, Target, make_draft_decoder
from pagoda.backends.jax_tpu.execution.step_input import StepInput
from pagoda.backends.jax_tpu.model.decoder import JaxDecoder
from pagoda.backends.jax_tpu.model.layers import Caches, without_rows
from pagoda.backends.jax_tpu.model.mixers.registry import MIXERS
from pagoda.backends.jax_tpu.model.model import (
    DraftInputs,
    Leaves,
    StepModel,
    check_scaled,
    draft_inputs_specs,
    module_arrays,
)
from pagoda.backends.jax_tpu.model.parameters import JaxBuildContext
from pagoda.backends.jax_tpu.model.slots import LANES
from pagoda.backends.jax_tpu.parallel import partition
from pagoda.backends.jax_tpu.weights.arrange import NO_FORMATS, MatrixFormat, Path
from pagoda.common.engine.steps.shapes import StepShape
from pagoda.common.errors import ModelError
from pagoda.common.models.drafters import DrafterSpec, FeatureDrafter, LanguageDrafter, captured_layers
from pagoda.common.models.supported import check_mixers


@dataclass(frozen=True, slots=True)
class JaxDrafter:
    """A drafter model on the mesh of its target."""

    spec: DrafterSpec
    target: StepModel
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes, dtypes and shardings of its own parameters
    paths: tuple[Path, ...]  # per leaf: its path in the module
    axes: tuple[str, ...]  # per leaf: its logical axes
    split: tuple[Any, Any]  # the module's graph definition and the tree of its state

    @property
    def mesh(self) -> Mesh:
        """The target's."""
        return self.target.mesh

    @property
    def formats(self) -> Mapping[Path, MatrixFormat]:
        """None: all matrices are dense."""
        return NO_FORMATS

    @property
    def captured(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads; (): what the head reads."""
        return captured_layers(self.spec)

    @property
    def source_width(self) -> int:
        """Return the channels of what it reads of the target."""
        return self.spec.source_width if isinstance(self.spec, FeatureDrafter) else self.target.spec.width

    def decoder(self, leaves: Leaves) -> JaxDraftDecoder:
        """Return the drafter over these arrays, while tracing."""
        graph, tree = self.split
        return cast(JaxDraftDecoder, nnx.merge(graph, jax.tree.unflatten(tree, leaves)))

    def draft(
        self,
        shape: StepShape,
        leaves: Leaves,
        own: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        inputs: DraftInputs[jax.Array],
        tokens: jax.Array,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        """Return the caches, the history with the new guesses of each row, and these int32 [S, K].

        `leaves`, `own`: arrays of the target and of the drafter. `packed`: the step as in `StepModel.forward`, after
        whose program and sampling it runs. `tokens` int32 [S * width]: sampled; -1 after a rejected draft.
        """
        target = self.target
        by_shard = partition("R.")
        cache_specs = tuple(partition(stack.axes) for stack in target.cache_index.stacks)
        of_target, of_own = (tuple(map(partition, axes)) for axes in (target.axes, self.axes))
        mapped = jax.shard_map(
            partial(self._draft, shape),
            mesh=target.mesh,
            in_specs=(
                *(of_target, of_own, cache_specs, PartitionSpec(), by_shard),
                *(draft_inputs_specs(), partition("R")),
            ),
            out_specs=(cache_specs, by_shard, partition("R")),
            check_vma=False,
        )
        caches, guesses, rows = mapped(leaves, own, caches, history, packed, inputs, tokens)
        first = history.shape[1] - 1 - shape.guesses
        columns = first + jnp.arange(shape.guesses)
        return caches, history.at[rows[:, None], columns[None]].set(guesses), guesses

    def _draft(
        self,
        shape: StepShape,
        leaves: Leaves,
        own: Leaves,
        caches: Caches,
        history: jax.Array,
        packed: jax.Array,
        inputs: DraftInputs[jax.Array],
        tokens: jax.Array,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        """Return the caches, the guesses int32 [S, K] and the history's row of each sequence, int32 [S]."""
        unpacked = StepInput.unpack(packed[0], shape, self.target.kernel)
        step = replace(unpacked, token_ids=inputs.token_ids, kv_len=inputs.kv_len)
        target: Target = None
        if not isinstance(self.spec, LanguageDrafter):
            target = cast(JaxDecoder, self.target.decoder(leaves))
        drafter = self.decoder(own)
        counts = step.guess_counts
        assert counts is not None, "the engine has a drafter"
        every = jnp.arange(shape.seqs)
        positions = step.positions
        accepted = jnp.maximum((tokens.reshape(-1, shape.width) >= 0).sum(1) - 1, 0)
        last = step.sampled.reshape(-1, shape.width)[every, accepted]
        newest = history[step.rows, positions[last] + 1]
        position = positions[last]
        batch = step
        if drafter.reads_next:
            batch = replace(step, token_ids=history[step.rows[step.seq_ids], positions + 1])
        # Token 0 in place of a row of media costs guesses, never answers.
        batch = replace(batch, token_ids=without_rows(batch.token_ids))
        states, caches = drafter.first(batch, inputs.features, target, caches)
        guesses = jnp.zeros((shape.seqs, shape.guesses), jnp.int32)
        most = counts.max()
        if states is None:
            begun = newest, jnp.zeros((shape.seqs, 0), jnp.int32)
        else:
            begun = _if_any(most, partial(drafter.begin, states[last], newest, target))
            guesses = guesses.at[:, 0].set(begun[0])

        def guess(number: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            token_ids, state, caches, guesses = carry
            single = single_tokens(
                step, token_ids, position + number + (0 if drafter.reads_next else 1), counts > number
            )
            token_ids, state, caches = drafter.next(number, state, single, target, caches)
            return token_ids, state, caches, guesses.at[:, number].set(token_ids)

        rounds = jax.lax.fori_loop(0 if states is None else 1, most, guess, (*begun, caches, guesses))
        return rounds[2], rounds[3], step.rows


def _if_any(count: jax.Array, begin: Any) -> tuple[jax.Array, jax.Array]:
    """Return what `begin` returns if the count is positive, else zeros."""
    shapes = jax.eval_shape(begin)
    begun: tuple[jax.Array, jax.Array] = jax.lax.cond(
        count > 0, begin, lambda: tuple(jnp.zeros(each.shape, each.dtype) for each in shapes)
    )
    return begun


def single_tokens(step: StepInput, token_ids: jax.Array, positions: jax.Array, active: jax.Array) -> StepInput:
    """Return a decode of one token of each sequence, all int32 [S]; those not `active` use the null block."""
    seqs = len(token_ids)
    real = step.counts[1]
    return replace(
        step,
        token_ids=token_ids,
        query_start=jnp.minimum(jnp.arange(seqs + 1, dtype=jnp.int32), real),
        kv_len=jnp.where(active, positions + 1, 1).astype(jnp.int32),
        counts=jnp.stack([real, real]),
        num_drafts=jnp.zeros(0, jnp.int32),
        page_tables=jnp.where(jnp.repeat(active, step.shape.pages), step.page_tables, 0),
        shape=replace(step.shape, tokens=seqs, decode_only=True, width=1, adapted=False),
        adapter_slots=None,
        adapter_mask=None,
    )


def build_drafter(spec: DrafterSpec, target: StepModel) -> JaxDrafter:
    """Build a drafter without weights or arrays.

    Raise ModelError for an unsupported kind of layer, ConfigError if heads or caches cannot be as the target's are.
    """
    kernel = target.kernel
    if isinstance(spec, LanguageDrafter | FeatureDrafter):
        check_mixers(spec.model, MIXERS, "jax_tpu")
        embedding = spec.model.embedding
        if isinstance(spec, FeatureDrafter) and (embedding.positions is not None or embedding.token_types):
            raise ModelError("jax_tpu: drafters over hidden states have no tables of positions or token types")
        if kernel.scaled:
            check_scaled(spec.model)
    build = JaxBuildContext(
        target.dtype, target.tensor, scaled_cache=kernel.scaled, lanes=LANES if kernel.use_kernel else 1
    )
    caches = target.cache_index.after(len(target.spec.caches))
    arrays = module_arrays(lambda: make_draft_decoder(spec, caches, target.max_len, build), target.mesh)
    return JaxDrafter(
        spec=spec, target=target, leaves=arrays.leaves, paths=arrays.paths, axes=arrays.axes, split=arrays.split
    )
