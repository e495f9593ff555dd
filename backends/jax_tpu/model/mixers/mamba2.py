"""Mamba-2 over recurrent state: projections, the causal convolution, the recurrence's kernel, the norm of each group.

Heads are arranged in slots (`slots.HeadLayout`): a slot has the b and c of one group, and G of its heads. With more
devices than groups a group is copied to several slots, which divide its heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.model.layers import Caches, Rotations, local_part, reduced, scale_norm
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.convolution import convolve, taps_placements
from pagoda.backends.jax_tpu.model.mixers.ops import RecurrentModule, RecurrentOps
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import HeadLayout, Stack, StateStack, TailStack
from pagoda.backends.jax_tpu.parallel import MODEL
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement, arrange_columns
from pagoda.common.models.mixers import Mamba2
from pagoda.common.models.primitives import Norm
from pagoda.kernels_pallas.linear_recurrence import RecurrenceInputs, ScalarDecay, linear_recurrence
from pagoda.kernels_pallas.recurrent_state import Arrays


class JaxMamba2(RecurrentModule):
    """One layer's state space model. W: G heads of H channels.

    `inner` [K, n, D]: per slot v [W], b, c, the gate [W]; `steps` [K, G, D]; `taps` [K, W + b + c, taps];
    `decay_rate`, `step_offset`, `skip` [K, G]; `norm` [K, W]; `out` [D, K * W].
    """

    def __init__(self, spec: Mamba2, width: int, build: JaxBuildContext) -> None:
        layout = head_layout(spec, build.tensor)
        wide = build.float32()
        slots = layout.slots
        group = layout.group
        self.spec = spec
        self.layout = layout
        self.slots = slots // build.tensor
        self.values = group * spec.head_dim
        self.channels = self.values + 2 * spec.state_dim  # of a slot's convolution
        inner = self.channels + self.values
        self.inner = build.matrix("inner", "K.D", slots, inner, width)
        self.inner_bias = build.parameter("K.", slots, inner) if spec.bias else None
        self.steps = build.parameter("K.D", slots, group, width)
        self.steps_bias = build.parameter("K.", slots, group) if spec.bias else None
        self.taps = wide.parameter("K..", slots, self.channels, spec.taps)
        self.taps_bias = wide.parameter("K.", slots, self.channels) if spec.conv_bias else None
        self.decay_rate = wide.parameter("KG", slots, group)
        self.step_offset = wide.parameter("KG", slots, group)
        self.skip = wide.parameter("KG", slots, group)
        self.norm = build.parameter("K.", slots, self.values) if spec.norm is not None and spec.norm.scale else None
        self.out = build.matrix("out", "DK", width, slots * self.values)
        values = (slots, self.values)
        states = (slots, spec.state_dim)
        self.lora_in = matrix_lora(build, "D", width, "K.", values, states, states, values)
        self.steps_lora = matrix_lora(build, "D", width, "K.", (slots, group))
        self.lora_out = matrix_lora(build, "K", slots * self.values, "D", (width,))
        self.out_bias = build.parameter("D", width) if spec.bias else None

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked tails and states, this layer's int32 [2] (block table, layer) -> [T, D], the caches."""
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        inner = adapted(jax.lax.optimization_barrier(project(x, self.inner, step)), self.lora_in, x, step)
        if self.inner_bias is not None:
            inner = inner + self.inner_bias[...]
        vbc = inner[..., : self.channels].astype(jnp.float32)
        gate = inner[..., self.channels :].astype(jnp.float32)
        heads, caches = self.apply_rule((vbc, self._step_sizes(x, step)), caches, cache_index, step)
        mixed = self._gated(heads, jax.nn.silu(gate)).astype(x.dtype).reshape(len(x), -1)
        out = reduced(adapted(project(mixed, self.out, step), self.lora_out, mixed, step), step)
        return (out if self.out_bias is None else out + self.out_bias[...]), caches

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Convolve v, b, c [T, K, channels], apply the recurrence, with the step sizes [T, K, G], and add the part of v
        that skips it -> [T, K, W].
        """
        vbc, tails = convolve(inputs[0], self.taps[...], states[0], run)
        vbc = jax.nn.silu(vbc if self.taps_bias is None else vbc + self.taps_bias[...])
        tokens = self._inputs(vbc, inputs[1])
        heads, after = linear_recurrence(ScalarDecay(), tokens, states[1], run.layer, run.batch, **run.options)
        skip = jnp.repeat(self.skip[...], self.spec.head_dim, axis=1)
        return heads + skip * vbc[..., : self.values], (tails, after)

    def _step_sizes(self, x: jax.Array, step: AnyStep) -> jax.Array:
        """X [T, D] -> float32 [T, K, G]."""
        steps = adapted(project(x, self.steps[...]), self.steps_lora, x, step)
        if self.steps_bias is not None:
            steps = steps + self.steps_bias[...]
        return jnp.clip(jax.nn.softplus(steps.astype(jnp.float32) + self.step_offset[...]), *self.spec.step_limit)

    def _inputs(self, vbc: jax.Array, steps: jax.Array) -> RecurrenceInputs:
        """Vbc [T, K, channels] after the convolution, steps [T, K, G] -> the recurrence's inputs."""
        v, b, c = jnp.split(vbc, [self.values, self.values + self.spec.state_dim], axis=-1)
        values = v * jnp.repeat(steps, self.spec.head_dim, axis=2)
        return RecurrenceInputs((c, b), (values, -jnp.exp(self.decay_rate[...]) * steps))

    def _gated(self, heads: jax.Array, factor: jax.Array) -> jax.Array:
        """Heads and factors of the gate [T, K, W] -> [T, K, W], with the norm before or after the gate, or none."""
        spec = self.spec
        if spec.norm is None:
            return heads * factor
        if spec.norm_before_gate:
            return self._normalised(heads, spec.norm) * factor
        return self._normalised(heads * factor, spec.norm)

    def _normalised(self, heads: jax.Array, norm: Norm) -> jax.Array:
        """Normalise the channels of each group by itself, [T, K, W]. Empty head positions hold zeros."""
        sums = jnp.square(heads).sum(-1)  # [T, K]
        if self.layout.copies > 1:
            sums = jax.lax.all_gather(sums, MODEL, axis=1, tiled=True)
            same_group = (self.layout.kv_of[:, None] == self.layout.kv_of[None]).astype(np.float32)
            sums = jnp.matmul(sums, local_part(jnp.asarray(same_group), self.slots).T, precision="highest")
        mean = sums[..., None] / (self.spec.width // self.spec.groups)
        return scale_norm(heads, mean, norm, None if self.norm is None else self.norm[...])


def head_layout(spec: Mamba2, tensor: int) -> HeadLayout:
    """Return how the heads are arranged in slots."""
    return HeadLayout.of(heads=spec.heads, kv_heads=spec.groups, tensor=tensor, words=f"heads of {type(spec).__name__}")


class Mamba2Ops(RecurrentOps[Mamba2]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    def module(self, spec: Mamba2, width: int, build: JaxBuildContext) -> JaxMamba2:
        return JaxMamba2(spec, width, build)

    def placements(self, spec: Mamba2, tensor: int) -> Iterator[tuple[str, Placement]]:
        heads = head_layout(spec, tensor)
        size = spec.state_dim
        width = heads.group * spec.head_dim

        def values(rows: Array) -> Array:
            return heads.queries(rows, spec.head_dim).reshape(heads.slots, width, *rows.shape[1:])

        def keys(rows: Array) -> Array:
            return heads.keys(rows, size)

        def per_head(rows: Array) -> Array:
            return heads.queries(rows, 1).reshape(heads.slots, heads.group, *rows.shape[1:])

        parts = (("v", 0, values), ("b", width, keys), ("c", width + size, keys))
        for name, start, arrange in (*parts, ("gate", width + 2 * size, values)):
            for suffix in ("", "_bias"):
                yield f"{name}{suffix}", Placement((f"inner{suffix}",), (0, start), arrange)
        for suffix in ("", "_bias"):
            yield f"step{suffix}", Placement((f"steps{suffix}",), (), per_head)
        for name, start, arrange in parts:
            yield from taps_placements(f"{name}_conv", start, arrange)
        for name in ("decay_rate", "step_offset", "skip"):
            yield name, Placement((name,), (), per_head)
        yield "norm", Placement(("norm",), (), values)
        yield "o", Placement(("out",), (), lambda rows: arrange_columns(rows, values))
        yield "o_bias", Placement(("out_bias",))

    def rule_inputs(self, spec: Mamba2, tensor: int) -> tuple[int, int]:
        heads = head_layout(spec, tensor)
        return heads.slots, heads.group * spec.head_dim + 2 * spec.state_dim + heads.group

    def state_stacks(self, spec: Mamba2, tensor: int) -> tuple[Stack, ...]:
        heads = head_layout(spec, tensor)
        width = heads.group * spec.head_dim
        tail = TailStack(heads.slots, spec.taps - 1, width + 2 * spec.state_dim)
        return tail, StateStack(heads.slots, spec.state_dim, width)
