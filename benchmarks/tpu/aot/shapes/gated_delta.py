"""Named static shapes of calls of gated_delta, for compile tests and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import ChipInfo
from pagoda.kernels_pallas.gated_delta import gated_delta
from pagoda.kernels_pallas.gated_delta.inputs import DeltaInputs
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch


@dataclass(frozen=True)
class GatedDeltaArgs:
    """One compiled shape: T tokens of S sequences, N value heads on K key heads of `dim`."""

    tokens: int
    seqs: int
    key_heads: int
    heads: int
    dim: int = 128
    layers: int = 4
    blocks: int = 512
    decode_only: bool = False
    exact: bool = False

    def function(self, chip: ChipInfo) -> Callable[..., Any]:
        """Return the call as a function of `arguments`, jitted with the states donated."""

        def apply(states: jax.Array, inputs: DeltaInputs, layer: jax.Array, batch: RecurrentBatch) -> Any:
            return gated_delta(inputs, states, layer, batch, decode_only=self.decode_only, exact=self.exact, chip=chip)

        return jax.jit(apply, donate_argnums=0)

    def arguments(self, sharding: Any = None) -> tuple[Any, ...]:
        """Return the ShapeDtypeStructs for `function`."""

        def array(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

        keys, values = ((self.tokens, heads, self.dim) for heads in (self.key_heads, self.heads))
        rates = array(self.tokens, self.heads)
        inputs = DeltaInputs(array(*keys), array(*keys), array(*values), rates, rates)
        states = array(self.layers, self.blocks, self.heads, self.dim, self.dim)
        return states, inputs, array(dtype=jnp.int32), RecurrentBatch.shapes(self.seqs, sharding)


SPECS: dict[str, GatedDeltaArgs] = {
    "decode-32": GatedDeltaArgs(64, 64, 16, 32, decode_only=True),
    "decode-4": GatedDeltaArgs(64, 64, 2, 4, decode_only=True),
    "mixed-4": GatedDeltaArgs(2048, 16, 2, 4),
    "mixed-32": GatedDeltaArgs(512, 8, 16, 32),
    "mixed-fp32": GatedDeltaArgs(512, 8, 2, 4, exact=True),
}
