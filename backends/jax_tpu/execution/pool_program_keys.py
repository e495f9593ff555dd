"""Every program of a pooling model, by its shape: a ladder of tokens, and an answer for each prompt or each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.packed_input import SMALLEST, PackedInput, PackedShape
from pagoda.backends.jax_tpu.execution.program_keys import compiler_options
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.parallel.sharding import partition, whole
from pagoda.common.config.engine import Limits
from pagoda.common.engine.shapes import ShapeLadder


@dataclass(frozen=True, slots=True)
class PoolCatalogue:
    """The programs (leaves, packed step) -> raw answers float32 [S or T, n] of one model within these limits."""

    model: Model
    limits: Limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """Nothing is cached."""
        return {"num_blocks": 0}

    def __iter__(self) -> Iterator[PackedShape]:
        """The largest first: they take longest to compile."""
        assert self.model.spec.pooler is not None, "the model pools"
        whole_prompts = () if self.model.spec.pooler.kind == "all" else (False,)
        for tokens in reversed(token_ladder(self.limits).sizes):
            yield from (self.shape_for(tokens, of_tokens) for of_tokens in (True, *whole_prompts))

    def shape_for(self, tokens: int, of_tokens: bool) -> PackedShape:
        """The smallest shape that holds such a step."""
        size = token_ladder(self.limits).bucket_for(tokens)
        pages = -(-min(self.limits.max_model_len, size) // self.limits.block_size)
        return PackedShape(size, min(self.limits.max_num_seqs, size), pages, of_tokens)

    def lower(self, key: PackedShape) -> jax.stages.Lowered:
        """The program of that shape, traced. Call from one thread."""
        with self.model.exact:
            options, everywhere = compiler_options(self.model.kernel), whole(self.model.mesh)
            jitted = jax.jit(partial(self._answers, key), out_shardings=everywhere, compiler_options=options)
            return jitted.lower(self.model.leaves, self._packed(key))

    def signature(self, key: PackedShape) -> str:
        """Kernel choice, and the shapes, types and places of everything that program takes."""
        arguments = (*self.model.leaves, self._packed(key))
        return repr([self.model.kernel, *((each.shape, each.dtype.name, each.sharding.spec) for each in arguments)])

    def _packed(self, key: PackedShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((key.size,), jnp.dtype(jnp.int32), sharding=whole(self.model.mesh))

    def _answers(self, key: PackedShape, leaves: Leaves, packed: jax.Array) -> jax.Array:
        def run(leaves: Leaves, packed: jax.Array) -> jax.Array:
            return self.model.decoder(leaves).pooled(PackedInput.unpack(packed, key, self.model.kernel))

        specs = tuple(map(partition, self.model.axes)), partition("")
        # not checked: the devices all hold the same answers
        mapped = jax.shard_map(run, mesh=self.model.mesh, in_specs=specs, out_specs=partition(""), check_vma=False)
        return mapped(leaves, packed)


def token_ladder(limits: Limits) -> ShapeLadder:
    """Return the padded numbers of tokens, doubled up to the longest step."""
    longest = -(-max(limits.max_num_batched_tokens, limits.max_model_len) // SMALLEST) * SMALLEST
    return ShapeLadder.between(SMALLEST, longest)
