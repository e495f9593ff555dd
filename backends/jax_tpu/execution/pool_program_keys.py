"""The programs of a pooling model: one per bucket of tokens, with outputs per prompt or per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.packed_input import MIN_TOKENS, PackedInput, PackedShape
from pagoda.backends.jax_tpu.execution.program_keys import compiler_options
from pagoda.backends.jax_tpu.model.model import Leaves, Model
from pagoda.backends.jax_tpu.parallel.sharding import partition, replicated
from pagoda.common.config.engine import Limits
from pagoda.common.engine.shapes import ShapeLadder


@dataclass(frozen=True, slots=True)
class PoolProgramSet:
    """Programs (leaves, packed batch) -> pooled outputs float32 [S or T, n], keyed by padded shape."""

    model: Model
    limits: Limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what bundled programs depend on besides model and limits. There is no persistent KV cache."""
        return {"num_blocks": 0}

    def __iter__(self) -> Iterator[PackedShape]:
        """Yield every shape, the largest first."""
        assert self.model.spec.pooler is not None, "the model pools"
        per_prompt = () if self.model.spec.pooler.kind == "all" else (False,)
        for tokens in reversed(token_ladder(self.limits).sizes):
            yield from (self.shape_for(tokens, of_tokens) for of_tokens in (True, *per_prompt))

    def shape_for(self, tokens: int, of_tokens: bool) -> PackedShape:
        """Return the smallest shape that fits `tokens`. `of_tokens`: one output per token instead of per prompt."""
        size = token_ladder(self.limits).bucket_for(tokens)
        pages = -(-min(self.limits.max_model_len, size) // self.limits.block_size)
        return PackedShape(size, min(self.limits.max_num_seqs, size), pages, of_tokens)

    def lower(self, key: PackedShape) -> jax.stages.Lowered:
        """Trace and lower a program. Not thread-safe."""
        with self.model.matmul_precision:
            options, outputs = compiler_options(self.model.kernel), replicated(self.model.mesh)
            jitted = jax.jit(partial(self._pool, key), out_shardings=outputs, compiler_options=options)
            return jitted.lower(self.model.leaves, self._packed(key))

    def signature(self, key: PackedShape) -> str:
        """Return the kernel choice and the shapes, dtypes and shardings of all arguments."""
        arguments = (*self.model.leaves, self._packed(key))
        return repr([self.model.kernel, *((each.shape, each.dtype.name, each.sharding.spec) for each in arguments)])

    def _packed(self, key: PackedShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((key.size,), jnp.dtype(jnp.int32), sharding=replicated(self.model.mesh))

    def _pool(self, key: PackedShape, leaves: Leaves, packed: jax.Array) -> jax.Array:
        def run(leaves: Leaves, packed: jax.Array) -> jax.Array:
            return self.model.decoder(leaves).pooled(PackedInput.unpack(packed, key, self.model.kernel))

        specs = tuple(map(partition, self.model.axes)), partition("")
        # check_vma=False: every device computes the same outputs
        mapped = jax.shard_map(run, mesh=self.model.mesh, in_specs=specs, out_specs=partition(""), check_vma=False)
        return mapped(leaves, packed)


def token_ladder(limits: Limits) -> ShapeLadder:
    """Return the padded numbers of tokens, doubling up to the longest step."""
    longest = -(-max(limits.max_num_batched_tokens, limits.max_model_len) // MIN_TOKENS) * MIN_TOKENS
    return ShapeLadder.between(MIN_TOKENS, longest)
