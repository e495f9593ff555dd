"""The gated delta rule (linear attention with recurrent state) over a ragged batch, states updated in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagoda.kernels_pallas.chips import CHIPS, ChipInfo
from pagoda.kernels_pallas.gated_delta.inputs import DeltaInputs
from pagoda.kernels_pallas.gated_delta.kernel import gated_delta_kernel
from pagoda.kernels_pallas.gated_delta.reference import gated_delta_reference
from pagoda.kernels_pallas.recurrent_state import RecurrentBatch

__all__ = ["DeltaInputs", "gated_delta"]

LANES = 128


def gated_delta(
    inputs: DeltaInputs,
    states: jax.Array,
    layer: jax.Array | int,
    batch: RecurrentBatch,
    *,
    decode_only: bool = False,
    exact: bool = True,
    use_kernel: bool = True,
    interpret: Any = False,
    chip: ChipInfo = CHIPS["v6e"],
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to every sequence's tokens, from the state in its block; the block then holds the state after.

    states: float32 [L, P, N, key dim, value dim], updated in place if donated. layer: int32, which of the L to use.

    Static: decode_only (all sequences have one token: the mixed kernel is not built); exact (False: products over a
    chunk in the kernel have an error of about 1e-5, which is enough for inputs that were bfloat16); use_kernel (False:
    the jnp reference, also used where head dims are not multiples of 128, which the kernel needs); interpret (True or
    pltpu.InterpretParams); chip to compile for.

    Return (float32 [T, N, V], states). Padding tokens give zero, padding sequences change no state.
    Raise ValueError for invalid shapes.
    """
    tokens, heads, width = inputs.v.shape
    if states.shape[2:] != (heads, inputs.k.shape[2], width):
        raise ValueError(f"states have shape {states.shape}, heads {(heads, inputs.k.shape[2], width)}")
    if heads % inputs.k.shape[1] or inputs.beta.shape != (tokens, heads) or inputs.decay.shape != (tokens, heads):
        raise ValueError(f"{heads} value heads, {inputs.k.shape[1]} key heads, rates {inputs.beta.shape}")
    layer = jnp.asarray(layer, jnp.int32)
    aligned = inputs.k.shape[2] % LANES == 0 and width % LANES == 0
    if not use_kernel or not (aligned or interpret):
        return gated_delta_reference(inputs, states, layer, batch, decode_only=decode_only)
    return gated_delta_kernel(inputs, states, layer, batch, decode_only=decode_only, exact=exact, interpret=interpret)
