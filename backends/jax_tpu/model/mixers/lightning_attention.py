"""Linear attention with a constant decay per head: projections, the recurrence's kernel, the norm over all heads.

A slot is one head (`slots.HeadLayout`).
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pagoda.backends.jax_tpu.execution.replay import StateRun, States
from pagoda.backends.jax_tpu.model.layers import (
    Caches,
    Rotations,
    all_reduce,
    apply_norm,
    local_part,
    make_norm,
    reduced,
    scale_norm,
)
from pagoda.backends.jax_tpu.model.lora import adapted, matrix_lora
from pagoda.backends.jax_tpu.model.mixers.ops import RecurrentModule, RecurrentOps
from pagoda.backends.jax_tpu.model.parameters import AnyStep, JaxBuildContext, project
from pagoda.backends.jax_tpu.model.slots import HeadLayout, Stack, StateStack
from pagoda.backends.jax_tpu.weights.arrange import Array, Placement, arrange_columns
from pagoda.common.models.mixers import LightningAttention
from pagoda.kernels_pallas.linear_recurrence import RecurrenceInputs, ScalarDecay, linear_recurrence
from pagoda.kernels_pallas.recurrent_state import Arrays


class JaxLightningAttention(RecurrentModule):
    """One layer's linear attention: `inner` [K, 4 H, D] for q, k, v, gate; `norm` [K, H]; `out` [D, K * H]."""

    def __init__(self, spec: LightningAttention, width: int, build: JaxBuildContext) -> None:
        self.spec = spec
        self.layout = head_layout(spec, build.tensor)
        dim = spec.head_dim
        slots = self.layout.slots
        self.inner = build.matrix("inner", "K.D", slots, 4 * dim, width)
        self.norm = build.parameter("K.", slots, dim) if spec.norm.scale else None
        self.q_norm = make_norm(spec.qk_norm, dim, build)
        self.k_norm = make_norm(spec.qk_norm, dim, build)
        self.out = build.matrix("out", "DK", width, slots * dim)
        self.lora_in = matrix_lora(build, "D", width, "K.", *((slots, dim),) * 4)
        self.lora_out = matrix_lora(build, "K", slots * dim, "D", (width,))

    def __call__(
        self, x: jax.Array, caches: Caches, cache_index: jax.Array, rotations: Rotations, step: AnyStep
    ) -> tuple[jax.Array, Caches]:
        """X [T, D], the stacked states, this layer's int32 [2] (block table, layer) -> [T, D], the states."""
        spec = self.spec
        # The barrier keeps XLA from reshaping the product, for which it would copy the weight first.
        inner = adapted(jax.lax.optimization_barrier(project(x, self.inner, step)), self.lora_in, x, step)
        qkv = inner[..., : 3 * spec.head_dim]
        gate = inner[..., 3 * spec.head_dim :]
        q, k, v = jnp.split(jax.nn.silu(qkv) if spec.silu else qkv, 3, axis=-1)
        q = apply_norm(self.q_norm, q)
        k = apply_norm(self.k_norm, k)
        if spec.rope is not None:
            rotation = rotations[spec.rope]
            q = rotation(q)
            k = rotation(k)
        q = q.astype(jnp.float32) * spec.scale
        k = k.astype(jnp.float32)
        v = v.astype(jnp.float32)
        heads, caches = self.apply_rule((q, k, v), caches, cache_index, step)
        member = self._groups(heads.shape[1])
        sums = all_reduce(jnp.matmul(jnp.square(heads).sum(2), member, precision="highest"))  # [T, groups]
        mean = jnp.matmul(sums, member.T, precision="highest") * spec.groups / (spec.heads * spec.head_dim)
        weight = None if self.norm is None else self.norm[...]
        normed = scale_norm(heads, mean[:, :, None], spec.norm, weight).astype(x.dtype)
        gated = (normed * jax.nn.sigmoid(gate)).reshape(len(x), -1)
        return reduced(adapted(project(gated, self.out, step), self.lora_out, gated, step), step), caches

    def rule(self, inputs: Arrays, states: States, run: StateRun) -> tuple[jax.Array, States]:
        """Apply the rule to q, k, v [T, K, H] -> [T, K, H]."""
        q, k, v = inputs
        slopes = self.layout.keys(np.asarray(self.spec.slopes, np.float32), 1)
        decay = -local_part(jnp.asarray(slopes), q.shape[1])  # [K, 1]
        tokens = RecurrenceInputs((q, k), (v, jnp.broadcast_to(decay, (*q.shape[:2], 1))))
        heads, after = linear_recurrence(ScalarDecay(), tokens, states[0], run.layer, run.batch, **run.options)
        return heads, (after,)

    def _groups(self, slots: int) -> jax.Array:
        """Return float32 [slots, groups]: 1 for the group of each head of this device. Empty positions have none."""
        heads = self.layout.kv_of
        group = np.where(heads < 0, -1, heads * self.spec.groups // self.spec.heads)
        member = (group[:, None] == np.arange(self.spec.groups)).astype(np.float32)
        return local_part(jnp.asarray(member), slots)


def head_layout(spec: LightningAttention, tensor: int) -> HeadLayout:
    """Return how the heads are arranged in slots."""
    return HeadLayout.of(heads=spec.heads, kv_heads=spec.heads, tensor=tensor, words=f"heads of {type(spec).__name__}")


class LightningAttentionOps(RecurrentOps[LightningAttention]):
    """What the backend knows of this kind, see `JaxMixerOps`."""

    def module(self, spec: LightningAttention, width: int, build: JaxBuildContext) -> JaxLightningAttention:
        return JaxLightningAttention(spec, width, build)

    def placements(self, spec: LightningAttention, tensor: int) -> Iterator[tuple[str, Placement]]:
        heads = head_layout(spec, tensor)
        dim = spec.head_dim

        def of_heads(rows: Array) -> Array:
            return heads.keys(rows, dim)

        for index, name in enumerate(("q", "k", "v", "gate")):
            yield name, Placement(("inner",), (0, index * dim), of_heads)
        for name in ("q_norm", "k_norm"):
            yield name, Placement((name, "weight"))
        yield "norm", Placement(("norm",), (), of_heads)
        yield "o", Placement(("out",), (), lambda rows: arrange_columns(rows, of_heads))

    def rule_inputs(self, spec: LightningAttention, tensor: int) -> tuple[int, int]:
        return head_layout(spec, tensor).slots, 3 * spec.head_dim

    def state_stacks(self, spec: LightningAttention, tensor: int) -> tuple[Stack, ...]:
        return (StateStack(head_layout(spec, tensor).slots, spec.head_dim, spec.head_dim),)
