"""The gated delta rule over recurrent state: projections, the causal convolution with its tail, the rule's kernel.

Heads are arranged in slots (`slots.HeadLayout`): a slot is one key head with its G value heads, and its channels are
those of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.model.layers import Caches, JaxNorm, Rotations, reduced
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.convolution import convolve, l2_norm
from pagoda.backends.jax_tpu.model.mixers.ops import RecurrentModule, RecurrentOps
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import HeadLayout, Stack, StateStack, TailStack
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement, arrange_columns
from pagoda.common.models.mixers import GatedDelta
from pagoda.kernels_pallas.gated_delta import DeltaInputs, gated_delta
from pagoda.kernels_pallas.recurrent_state import Arrays


class JaxGatedDelta(RecurrentModule):
    """One layer's gated delta rule.

    `inner` [K, n, D]: per slot q, k, the values of its G heads, their output gates. `rates` [K, 2 G, D]: beta, decay.
    `taps` [K, channels, taps]; `decay_rate`, `decay_offset` [K, G]; `out` [D, K * G * V].
    """

    def __init__(self, spec: GatedDelta, width: int, build: JaxBuildContext) -> None:
        layout = head_layout(spec, build.tensor)
        wide = build.float32()
        slots = layout.slots
        group = layout.group
        self.spec = spec
        self.exact = build.dtype == jnp.float32
        self.group = group
        self.slots = slots // build.tensor
        self.channels = 2 * spec.key_dim + group * spec.value_dim  # of a slot's convolution
        self.inner = build.matrix("inner", "K.D", slots, self.channels + group * spec.value_dim, width)
        self.rates = build.parameter("K.D", slots, 2 * group, width)
        self.taps = wide.parameter("K..", slots, self.channels, spec.taps)
        self.decay_rate = wide.parameter("KG", slots, group)
        self.decay_offset = wide.parameter("KG", slots, group)
        self.norm = JaxNorm(spec.norm, spec.value_dim, build)
        self.out = build.matrix("out", "DK", width, slots * group * spec.value_dim)
        values = group * spec.value_dim
        parts = ((slots, spec.key_dim), (slots, spec.key_dim), (slots, values), (slots, values))
        self.lora_in = matrix_lora(build, "D", width, "K.", *parts)
        self.rates_lora = matrix_lora(build, "D", width, "K.", (slots, group), (slots, group))
        self.lora_out = matrix_lora(build, "K", slots * values, "D", (width,))

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked tails and states, this layer's int32 [2] (block table, layer) -> [T, D], the caches."""
        spec = self.spec
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        inner = adapted(jax.lax.optimization_barrier(project(x, self.inner, step)), self.lora_in, x, step)
        qkv = inner[..., : self.channels].astype(jnp.float32)
        gate = inner[..., self.channels :]
        rates = adapted(project(x, self.rates[...]), self.rates_lora, x, step).astype(jnp.float32)
        heads, caches = self.apply_rule((qkv, rates), caches, cache_index, step)
        gates = jax.nn.silu(gate.astype(jnp.float32)).reshape(len(x), -1, spec.value_dim)
        gated = (self.norm(heads.astype(x.dtype)) * gates).astype(x.dtype).reshape(len(x), -1)
        return reduced(adapted(project(gated, self.out, step), self.lora_out, gated, step), step), caches

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Convolve q, k, v [T, K, channels] and apply the rule, with the rates [T, K, 2 G] -> heads [T, N, V]."""
        qkv, rates = inputs
        qkv, tails = convolve(qkv, self.taps[...], states[0], run)
        delta = self._inputs(jax.nn.silu(qkv), rates)
        heads, after = gated_delta(delta, states[1], run.layer, run.batch, exact=self.exact, **run.options)
        return heads, (tails, after)

    def _inputs(self, qkv: jax.Array, rates: jax.Array) -> DeltaInputs:
        """Qkv [T, K, channels] after the convolution, rates [T, K, 2 G] -> the rule's inputs."""
        spec = self.spec
        tokens = len(qkv)
        q, k, v = jnp.split(qkv, [spec.key_dim, 2 * spec.key_dim], axis=-1)
        beta = rates[..., : self.group]
        decay = rates[..., self.group :]
        log_decay = -jnp.exp(self.decay_rate[...]) * jax.nn.softplus(decay + self.decay_offset[...])
        return DeltaInputs(
            l2_norm(q) * spec.key_dim**-0.5,
            l2_norm(k),
            v.reshape(tokens, -1, spec.value_dim),
            self._scaled(jax.nn.sigmoid(beta)).reshape(tokens, -1),
            log_decay.reshape(tokens, -1),
        )

    def _scaled(self, beta: jax.Array) -> jax.Array:
        return beta if self.spec.beta_scale == 1 else beta * self.spec.beta_scale


def head_layout(spec: GatedDelta, tensor: int) -> HeadLayout:
    """Return how the heads are arranged in slots."""
    return HeadLayout.of(
        heads=spec.value_heads, kv_heads=spec.key_heads, tensor=tensor, words=f"heads of {type(spec).__name__}"
    )


class GatedDeltaOps(RecurrentOps[GatedDelta]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    def module(self, spec: GatedDelta, width: int, build: JaxBuildContext) -> JaxGatedDelta:
        return JaxGatedDelta(spec, width, build)

    def placements(self, spec: GatedDelta, tensor: int) -> Iterator[tuple[str, Placement]]:
        heads = head_layout(spec, tensor)
        group = heads.group
        key = spec.key_dim
        value = spec.value_dim

        def keys(rows: Array) -> Array:
            return heads.keys(rows, key)

        def values(rows: Array, dim: int = value) -> Array:
            return heads.queries(rows, dim).reshape(heads.slots, group * dim, *rows.shape[1:])

        def per_head(rows: Array) -> Array:
            return values(rows, 1)

        yield "q", Placement(("inner",), (), keys)
        yield "k", Placement(("inner",), (0, key), keys)
        yield "v", Placement(("inner",), (0, 2 * key), values)
        yield "gate", Placement(("inner",), (0, 2 * key + group * value), values)
        yield "beta", Placement(("rates",), (), per_head)
        yield "decay", Placement(("rates",), (0, group), per_head)
        yield "q_conv", Placement(("taps",), (), lambda taps: keys(taps[:, 0]))
        yield "k_conv", Placement(("taps",), (0, key), lambda taps: keys(taps[:, 0]))
        yield "v_conv", Placement(("taps",), (0, 2 * key), lambda taps: values(taps[:, 0]))
        yield "decay_rate", Placement(("decay_rate",), (), per_head)
        yield "decay_offset", Placement(("decay_offset",), (), per_head)
        yield "norm", Placement(("norm", "weight"))
        yield "norm_bias", Placement(("norm", "bias"))
        yield "o", Placement(("out",), (), lambda rows: arrange_columns(rows, values))

    def rule_inputs(self, spec: GatedDelta, tensor: int) -> tuple[int, int]:
        heads = head_layout(spec, tensor)
        return heads.slots, 2 * spec.key_dim + heads.group * spec.value_dim + 2 * heads.group

    def state_stacks(self, spec: GatedDelta, tensor: int) -> tuple[Stack, ...]:
        heads = head_layout(spec, tensor)
        width = 2 * spec.key_dim + heads.group * spec.value_dim
        tail = TailStack(heads.slots, spec.taps - 1, width)
        return tail, StateStack(heads.slots * heads.group, spec.key_dim, spec.value_dim)
