"""The gated delta rule with a decay per channel (KDA): projections, the causal convolution, the recurrence's kernel.

A slot is one head (`slots.HeadLayout`).
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.model.layers import Caches, JaxNorm, Rotations, reduced
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.convolution import convolve, l2_norm, taps_placements
from pagoda.backends.jax_tpu.model.mixers.ops import RecurrentModule, RecurrentOps
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import HeadLayout, Stack, StateStack, TailStack
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement, arrange_columns
from pagoda.common.models.mixers import KimiDelta
from pagoda.kernels_pallas.linear_recurrence import ChannelDelta, RecurrenceInputs, linear_recurrence
from pagoda.kernels_pallas.recurrent_state import Arrays


class JaxKimiDelta(RecurrentModule):
    """One layer's delta rule. H: channels of a head; R: those of the low-rank decay, and of the low-rank gate.

    `inner` [K, 3 H, D]: q, k, v; `beta` [K, D]; `low_rank` [2 R, D]: decay, gate, or None; `decay`, `gate` [K, H, R],
    [K, H, D] without ranks; `taps` [K, 3 H, taps]; `decay_rate` [K]; `decay_offset` [K, H]; `out` [D, K * H].
    """

    def __init__(self, spec: KimiDelta, width: int, build: JaxBuildContext) -> None:
        slots = head_layout(spec, build.tensor).slots
        dim = spec.head_dim
        wide = build.float32()
        self.spec = spec
        self.inner = build.matrix("inner", "K.D", slots, 3 * dim, width)
        self.beta = build.parameter("KD", slots, width)
        self.low_rank = None if spec.rank is None else build.parameter(".D", 2 * spec.rank, width)
        of_inputs = ("K.D", slots, dim, width) if spec.rank is None else ("K..", slots, dim, spec.rank)
        self.decay = build.parameter(*of_inputs)
        self.gate = build.parameter(*of_inputs)
        self.taps = wide.parameter("K..", slots, 3 * dim, spec.taps)
        self.decay_rate = wide.parameter("K", slots)
        self.decay_offset = wide.parameter("K.", slots, dim)
        self.norm = JaxNorm(spec.norm, dim, build)
        self.out = build.matrix("out", "DK", width, slots * dim)
        self.lora_in = matrix_lora(build, "D", width, "K.", *((slots, dim),) * 3)
        self.beta_lora = matrix_lora(build, "D", width, "K", (slots,))
        ranks = ((spec.rank,), (spec.rank,)) if spec.rank is not None else ()
        source = spec.rank or width
        self.low_rank_lora = matrix_lora(build, "D", width, ".", *ranks) if ranks else None
        axis = "D" if spec.rank is None else "."
        self.decay_lora, self.gate_lora = (matrix_lora(build, axis, source, "K.", (slots, dim)) for _ in range(2))
        self.lora_out = matrix_lora(build, "K", slots * dim, "D", (width,))

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked tails and states, this layer's int32 [2] (block table, layer) -> [T, D], the caches."""
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        qkv = jax.lax.optimization_barrier(project(x, self.inner, step))
        qkv = adapted(qkv, self.lora_in, x, step).astype(jnp.float32)
        low_rank = self._low_rank(x, step)
        log_decay = self._log_decay(adapted(project(low_rank[0], self.decay[...]), self.decay_lora, low_rank[0], step))
        beta = adapted(project(x, self.beta[...]), self.beta_lora, x, step)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))[..., None]
        heads, caches = self.apply_rule((qkv, log_decay, beta), caches, cache_index, step)
        gates = adapted(project(low_rank[1], self.gate[...]), self.gate_lora, low_rank[1], step)
        gates = jax.nn.sigmoid(gates.astype(jnp.float32))
        gated = (self.norm(heads) * gates).astype(x.dtype).reshape(len(x), -1)
        return reduced(adapted(project(gated, self.out, step), self.lora_out, gated, step), step), caches

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Convolve q, k, v [T, K, 3 H] and apply the rule, with log decay [T, K, H] and beta [T, K, 1] -> [T, K, H]."""
        qkv, log_decay, beta = inputs
        qkv, tails = convolve(qkv, self.taps[...], states[0], run)
        q, k, v = jnp.split(jax.nn.silu(qkv), 3, axis=-1)
        tokens = RecurrenceInputs((l2_norm(q) * self.spec.head_dim**-0.5, l2_norm(k), log_decay), (v, beta))
        heads, after = linear_recurrence(ChannelDelta(), tokens, states[1], run.layer, run.batch, **run.options)
        return heads, (tails, after)

    def _low_rank(self, x: jax.Array, step: AnyStep) -> tuple[jax.Array, jax.Array]:
        """X [T, D] -> what the decay and the gate are projected from, [T, R] each, or x."""
        if self.low_rank is None:
            return x, x
        decay, gate = jnp.split(adapted(project(x, self.low_rank[...]), self.low_rank_lora, x, step), 2, axis=-1)
        return decay, gate

    def _log_decay(self, decay: jax.Array) -> jax.Array:
        """Return the log decays of projected decays [T, K, H], in float32."""
        shifted = decay.astype(jnp.float32) + self.decay_offset[...]
        rate = jnp.exp(self.decay_rate[...])[:, None]
        if self.spec.decay_bound is None:
            return -rate * jax.nn.softplus(shifted)
        return self.spec.decay_bound * jax.nn.sigmoid(rate * shifted)


def head_layout(spec: KimiDelta, tensor: int) -> HeadLayout:
    """Return how the heads are arranged in slots."""
    return HeadLayout.of(heads=spec.heads, kv_heads=spec.heads, tensor=tensor, words=f"heads of {type(spec).__name__}")


class KimiDeltaOps(RecurrentOps[KimiDelta]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    def module(self, spec: KimiDelta, width: int, build: JaxBuildContext) -> JaxKimiDelta:
        return JaxKimiDelta(spec, width, build)

    def placements(self, spec: KimiDelta, tensor: int) -> Iterator[tuple[str, Placement]]:
        heads = head_layout(spec, tensor)
        dim = spec.head_dim

        def of_heads(rows: Array) -> Array:
            return heads.keys(rows, dim)

        def per_head(rows: Array) -> Array:
            return heads.keys(rows, 1)[:, 0]

        for index, name in enumerate("qkv"):
            yield name, Placement(("inner",), (0, index * dim), of_heads)
            yield from taps_placements(f"{name}_conv", index * dim, of_heads)
        yield "beta", Placement(("beta",), (), per_head)
        for index, name in enumerate(("decay", "gate")):
            if spec.rank is not None:
                yield f"{name}_a", Placement(("low_rank",), (index * spec.rank,))
            yield name if spec.rank is None else f"{name}_b", Placement((name,), (), of_heads)
        yield "decay_rate", Placement(("decay_rate",), (), per_head)
        yield "decay_offset", Placement(("decay_offset",), (), of_heads)
        yield "norm", Placement(("norm", "weight"))
        yield "norm_bias", Placement(("norm", "bias"))
        yield "o", Placement(("out",), (), lambda rows: arrange_columns(rows, of_heads))

    def rule_inputs(self, spec: KimiDelta, tensor: int) -> tuple[int, int]:
        return head_layout(spec, tensor).slots, 4 * spec.head_dim + 1

    def state_stacks(self, spec: KimiDelta, tensor: int) -> tuple[Stack, ...]:
        slots = head_layout(spec, tensor).slots
        dim = spec.head_dim
        return TailStack(slots, spec.taps - 1, 3 * dim), StateStack(slots, dim, dim)
