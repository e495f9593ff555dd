"""The short convolution between two gates, in plain XLA: of a sequence's state it moves a tail of a few inputs per
channel, little beside the layer's weights, so a kernel has nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.model.layers import Caches, Rotations, reduced
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.convolution import convolve, taps_placements
from pagoda.backends.jax_tpu.model.mixers.ops import RecurrentModule, RecurrentOps
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import Stack, TailStack, padded
from pagoda.backends.jax_tpu.weights.arrange import Placement, arrange_columns, in_slots
from pagoda.common.models.mixers import ShortConvolution
from pagoda.kernels_pallas.recurrent_state import Arrays


class JaxShortConvolution(RecurrentModule):
    """One layer's convolution, its channels in a slot per device: `inner` [K, 3 C, D] for b, c, v; `taps` [K, C, taps];
    `out` [D, K * C].
    """

    def __init__(self, spec: ShortConvolution, width: int, build: JaxBuildContext) -> None:
        slots = build.tensor
        wide = build.float32()
        channels = padded(spec.channels, slots) // slots
        self.inner = build.matrix("inner", "K.D", slots, 3 * channels, width)
        self.inner_bias = build.parameter("K.", slots, 3 * channels) if spec.bias else None
        self.taps = wide.parameter("K..", slots, channels, spec.taps)
        self.taps_bias = wide.parameter("K.", slots, channels) if spec.bias else None
        self.out = build.matrix("out", "DK", width, slots * channels)
        self.lora_in = matrix_lora(build, "D", width, "K.", *((slots, channels),) * 3)
        self.lora_out = matrix_lora(build, "K", slots * channels, "D", (width,))
        self.out_bias = build.parameter("D", width) if spec.bias else None

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked tails, this layer's int32 [2] (block table, layer) -> [T, D], the tails."""
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        inner = adapted(jax.lax.optimization_barrier(project(x, self.inner, step)), self.lora_in, x, step)
        if self.inner_bias is not None:
            inner = inner + self.inner_bias[...]
        b, c, v = jnp.split(inner, 3, axis=-1)
        mixed, caches = self.apply_rule(((b * v).astype(jnp.float32),), caches, cache_index, step)
        if self.taps_bias is not None:
            mixed = mixed + self.taps_bias[...]
        gated = (mixed * c).astype(x.dtype).reshape(len(x), -1)
        out = reduced(adapted(project(gated, self.out, step), self.lora_out, gated, step), step)
        return (out if self.out_bias is None else out + self.out_bias[...]), caches

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Convolve b v [T, K, C] -> [T, K, C]."""
        mixed, tails = convolve(inputs[0], self.taps[...], states[0], run)
        return mixed, (tails,)


class ShortConvolutionOps(RecurrentOps[ShortConvolution]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    def module(self, spec: ShortConvolution, width: int, build: JaxBuildContext) -> JaxShortConvolution:
        return JaxShortConvolution(spec, width, build)

    def placements(self, spec: ShortConvolution, tensor: int) -> Iterator[tuple[str, Placement]]:
        of_slots = partial(in_slots, tensor)
        channels = padded(spec.channels, tensor) // tensor
        for index, name in enumerate("bcv"):
            for suffix in ("", "_bias"):
                yield f"{name}{suffix}", Placement((f"inner{suffix}",), (0, index * channels), of_slots)
        yield from taps_placements("conv", 0, of_slots)
        yield "o", Placement(("out",), (), lambda rows: arrange_columns(rows, of_slots))
        yield "o_bias", Placement(("out_bias",))

    def rule_inputs(self, spec: ShortConvolution, tensor: int) -> tuple[int, int]:
        return tensor, padded(spec.channels, tensor) // tensor

    def state_stacks(self, spec: ShortConvolution, tensor: int) -> tuple[Stack, ...]:
        return (TailStack(tensor, spec.taps - 1, padded(spec.channels, tensor) // tensor),)
